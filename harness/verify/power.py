"""Power: which alternative contracts a run could have told from a kernel's own, and did not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from harness.case import Case, parse_case
from harness.inputs import build
from harness.numerics import Enclosure, Premises, using
from harness.op import Contract, Op
from harness.result import BAD, CaseResult
from harness.run import Agreement, Power
from harness.timing import POWER, timed
from harness.verify.evaluate import Expected, evaluate
from harness.verify.project import Project
from harness.verify.roundings import expectations

_PROBES = 4  # cases whose inputs are drawn anew to ask whether two contracts can be told apart at all
_PROBE_SIZE = 1 << 16


@timed(POWER)
def power_of(results: Iterable[CaseResult], project: Project) -> tuple[Power, ...]:
    """One entry per kernel that did not fail, device, set of dtypes and alternative contract."""
    results = list(results)
    bad = {(r.kernel, r.device) for r in results if r.verdict in BAD}
    judged = (r for r in results if r.counted and (r.kernel, r.device) not in bad)
    together: dict[tuple[str, ...], list[CaseResult]] = defaultdict(list)
    for r in judged:
        for alternative in r.ruled_out:
            together[(r.kernel, r.device, r.dtypes, alternative, r.contract)].append(r)
    known: dict[tuple[str, ...], bool] = {}
    return tuple(_power(project, key, group, known) for key, group in together.items())


def _power(
    project: Project, key: tuple[str, ...], group: list[CaseResult], known: dict[tuple[str, ...], bool]
) -> Power:
    """`known` says whether two contracts are separable on a case: kernels of one op have many cases in common."""
    kernel, device, dtypes, alternative, contract = key
    ruled_out = sum(r.ruled_out[alternative] for r in group)
    op = project.op(group[0].op)

    def separable(case: Case) -> bool:
        question = (op.name, *sorted((contract, alternative)), str(case))
        if question not in known:
            known[question] = _separable(op, op.contract(contract), op.contract(alternative), case)
        return known[question]

    apart = ruled_out > 0 or any(map(separable, _probes(group, op)))
    return Power(kernel, device, dtypes, alternative, len(group), ruled_out, apart)


def _probes(group: list[CaseResult], op: Op) -> Iterator[Case]:
    """The largest cases, with ordinary values and no more rows than are needed."""
    cases = [parse_case(r.case) for r in group]
    for case in sorted(cases, key=lambda c: -c.tensors[0].numel)[:_PROBES]:
        yield _cut(case.gathered(), op).with_regime("normal")


def _cut(case: Case, op: Op) -> Case:
    """The same problem with the rows of a matrix of manageable size, contiguous."""
    width = case.tensors[0].shape[-1] if case.tensors[0].shape else 1
    rows = max(1, min(_PROBE_SIZE, case.tensors[0].numel) // max(width, 1))
    specs = [
        replace(t, shape=(rows, t.shape[-1]), strides=None, offset=0) if t.name in op.rows and len(t.shape) > 1 else t
        for t in case.tensors
    ]
    return replace(case, tensors=tuple(specs))


def _separable(op: Op, own: Contract, other: Contract, case: Case) -> bool:
    """Whether some element of a result can only be one or the other contract's, if every sum is correctly rounded.

    Errors of sums would hide the difference: over long rows they exceed what a rounding changes, and a run that could
    not tell the contracts apart would call them one. What is left is the error of primitives, which no input removes.
    """
    tensors = build(case, torch.device("cpu")).tensors
    with using(Premises(exact_sums=True)):
        traces = [evaluate(op, contract, tensors, dict(case.params)) for contract in (own, other)]
        a, b = (expectations(trace, contract) for trace, contract in zip(traces, (own, other), strict=True))
    return any(_disjoint(a[name], b[name]) for name in traces[0].results)


def _disjoint(x: Expected, y: Expected) -> bool:
    if isinstance(x, Enclosure) and isinstance(y, Enclosure):
        return bool(((x.lo > y.hi) | (x.hi < y.lo)).any())
    assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor), "a stage is of integers in one contract only"
    return not torch.equal(x, y)


def agreement_of(results: Iterable[CaseResult]) -> tuple[Agreement, ...]:
    """How often two devices gave equal bits for the same case and input bits."""
    bits: dict[tuple[str, str, str, str], dict[str, str]] = defaultdict(dict)
    for r in results:
        for stage in r.stages:
            bits[(r.kernel, stage.name, r.case, r.fingerprint)][r.device] = stage.fingerprint
    pairs: dict[tuple[str, str, tuple[str, str]], list[bool]] = defaultdict(list)
    for (kernel, stage_name, _, _), by_device in bits.items():
        first, *others = sorted(by_device.items())
        for other in others:
            pairs[(kernel, stage_name, (first[0], other[0]))].append(first[1] == other[1])
    return tuple(Agreement(k, s, devices, len(equal), sum(equal)) for (k, s, devices), equal in pairs.items())
