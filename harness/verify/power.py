"""Power: the alternative contracts that a run told apart from a kernel's own, and those it could have."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from functools import cache
from itertools import islice
from types import MappingProxyType

import torch

from lastbit.case import Case, parse_case
from lastbit.devices import one_thread
from lastbit.dtypes import BY_NAME
from lastbit.errors import UsageError
from lastbit.inputs import build
from lastbit.inputs.given import is_given
from lastbit.judging.decided import decidable
from lastbit.judging.expected import Expected, Steps
from lastbit.judging.problem import Problem
from lastbit.numerics import Premises
from lastbit.ops import Contract, Op
from lastbit.result import BAD, CaseResult
from lastbit.run import LEAST_DECIDED, DeviceAgreement, Power, Run, Undecidable
from lastbit.timing import POWER, timed
from lastbit.verify.narrowing import resized
from lastbit.verify.project import Project

# Arbitrary: two contracts that differ in one of four drawn cases can be told apart; each costs two evaluations.
_PROBES = 4  # cases whose inputs are drawn anew to ask whether two contracts can be told apart at all
# As _FEW of judging/problem.py: evaluated about as fast as a row.
_PROBE_SIZE = 1 << 16
"""Elements of the first tensor of such a case; where its rows can be cut, more are cut off."""
_LARGEST_TENSOR = 1 << 18
"""Elements of its other tensors: attention over 1,000 keys took half a minute for one pair of contracts."""
_WORTH = 1 << 23
"""Elements of a case that is run for no more than to tell contracts apart: asking takes seconds for each pair of them.
Of a layer of 7,168 columns and 117 million weights it takes three minutes."""

# Arbitrary: kernels take a power of two, and of so few terms a rounding of each shows in one output of ten.
_FEW_COLUMNS = 64


@timed(POWER)
def power_of(results: Iterable[CaseResult], project: Project, separable: Separable | None = None) -> tuple[Power, ...]:
    """Make one entry per passing kernel, device, set of dtypes and alternative contract.

    Answers on separable contracts are looked up in `separable` and kept there.
    """
    results = list(results)
    bad = {(r.kernel, r.device) for r in results if r.verdict in BAD}
    judged = (r for r in results if r.counted and (r.kernel, r.device) not in bad)
    together: dict[tuple[str, str, str, str, str], list[CaseResult]] = defaultdict(list)
    for r in judged:
        for alternative in r.ruled_out:
            together[(r.kernel, r.device, r.dtypes, alternative, r.contract)].append(r)
    separable, found = separable or Separable(), []
    with one_thread():
        for (kernel, device, dtypes, alternative, contract), group in together.items():
            op, ruled_out = project.op(group[0].op), sum(r.ruled_out[alternative] for r in group)
            cases = (parse_case(r.case) for r in group)
            own, other, lacking = op.contract(contract), op.contract(alternative), _lacking(op, group)
            apart = ruled_out > 0 or separable.probe(op, own, other, lacking, cases) is not None
            found.append(Power(kernel, device, dtypes, alternative, len(group), ruled_out, apart))
    return tuple(found)


@timed(POWER)
def untold(
    results: Iterable[CaseResult], op: Op, separable: Separable, takes: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return cases that can tell a kernel's contract from another that no result did: one at most for each dtypes.

    The kernel `takes` them, and none is one of the results'. Over long rows the errors of sums may hide in a run what
    tells two contracts apart, and a kernel is not followed as fast: of each case, one with few columns is asked first.
    """
    takes, found = cache(takes), list[Case]()  # asked for each other contract anew
    together: dict[str, list[CaseResult]] = defaultdict(list)
    for r in results:
        together[r.dtypes].append(r)
    for alike in together.values():
        ruled_out = Counter[str]()
        for r in alike:
            ruled_out.update(r.ruled_out)
        own, cases = op.contract(alike[0].contract), [parse_case(r.case) for r in alike]
        lacking = _lacking(op, alike)
        if not (others := [op.contract(other) for other, count in ruled_out.items() if not count]):
            continue
        ran, long = set(map(str, cases)), _probes(cases, op)
        each = dict.fromkeys(probe for case in long for probe in (_with_few_columns(case, op), case))
        probes = [case for case in each if str(case) not in ran and case.numel <= _WORTH]
        pairs = ((other, case) for other in others for case in probes if case in long or takes(case))
        telling = (case for other, case in pairs if separable.apart(op, own, other, lacking, case) and takes(case))
        found += islice(telling, 1)
    return found


def _lacking(op: Op, results: Iterable[CaseResult]) -> Set[str]:
    """Return the results that a kernel may leave out, and left out in all of these cases."""
    return op.optional_results.difference(stage.name for r in results for stage in r.stages)


Question = tuple[str, ...]
"""What `Separable` was asked: an op, two contracts, a case, and results that tell nothing."""


class Separable:
    """Cache of whether any input tells two contracts apart; kernels of one op share cases and so answers.

    Attributes:
        known: question → answer.
    """

    def __init__(self, known: Mapping[Question, bool] = MappingProxyType({})) -> None:
        self.known = dict(known)
        self._problems: OrderedDict[tuple[str, str], Problem] = OrderedDict()
        self._results: dict[tuple[str, str, str], tuple[Steps, Mapping[str, Expected]] | None] = {}

    def probe(
        self, op: Op, contract: Contract, other: Contract, lacking: Set[str], cases: Iterable[Case]
    ) -> Case | None:
        """Return a case that can tell two contracts apart: one of the largest, with other values; None if none can.

        Results that are `lacking` tell nothing.
        """
        probes = _probes(cases, op)
        return next((case for case in probes if self.apart(op, contract, other, lacking, case)), None)

    def apart(self, op: Op, contract: Contract, other: Contract, lacking: Set[str], case: Case) -> bool:
        """Return whether a case can tell two contracts apart, as `probe`."""
        question = (op.name, *sorted((str(contract), str(other))), str(case), *sorted(lacking))
        if question not in self.known:
            self.known[question] = self._apart(op, contract, other, lacking, case)
        return self.known[question]

    def _apart(self, op: Op, contract: Contract, other: Contract, lacking: Set[str], case: Case) -> bool:
        """Return whether an element of a result tells two contracts apart if every sum is correctly rounded.

        Errors of sums would hide the difference: over long rows they exceed what a rounding changes, and a run that
        could not tell the contracts apart would call them one. What is left is the error of primitives, which no input
        removes. No element does where one contract has the computation of the other. Of two that have one formula and
        the same roundings, and so the same residues, arithmetic in fp32 alone is another: there an order of sums in
        which nothing tells them apart is no rounding that a run must see.
        """
        key = op.name, str(case)
        if key not in self._problems:  # those of the last few cases are kept, with their results
            tensors, premises = build(case, torch.device("cpu")).tensors, Premises(exact_sums=True)
            self._problems[key] = Problem(op, op.contract(""), tensors, dict(case.params), premises, {})
            if len(self._problems) > 2 * _PROBES:  # as many as are asked about in turn for each other contract
                old, _ = self._problems.popitem(last=False)
                self._results = {one: found for one, found in self._results.items() if one[:2] != old}
        self._problems.move_to_end(key)
        problem = self._problems[key]

        def evaluated(contract: Contract) -> tuple[Steps, Mapping[str, Expected]] | None:
            """Return the computation and the results; None if it is not defined for what the case asks."""
            if (which := (*key, str(contract))) not in self._results:
                under = problem.under(contract)
                try:
                    results = {name: under.trace.stages[name] for name in under.trace.results}
                    self._results[which] = under.steps, results
                except UsageError:  # such as a parameter of another contract
                    self._results[which] = None
            return self._results[which]

        if (first := evaluated(contract)) is None or problem.under(other).takes(first[0]):
            return False
        if (second := evaluated(other)) is None:
            return False
        telling = [name for name, own in first[1].items() if name not in lacking and own.apart(second[1][name])]
        if not telling:
            return False
        if not _have_one_formula(problem.under(contract), problem.under(other), telling):
            return True
        loose = replace(problem, premises=Premises(), siblings={})
        one, another = (loose.under(each).trace.stages for each in (contract, other))
        return any(one[name].apart(another[name]) for name in telling)


def _have_one_formula(one: Problem, another: Problem, results: Iterable[str]) -> bool:
    """Return whether every element of these results follows from one formula and the same roundings, by residues."""
    own, theirs = one.residues, another.residues
    return all(name in own and name in theirs and bool(own[name].equal(theirs[name]).all()) for name in results)


def _probes(cases: Iterable[Case], op: Op) -> list[Case]:
    """Return the largest cases of manageable size, or else the smallest, with ordinary values and few rows.

    Those whose line lists integers are left out: of other shapes they are no cases.
    """
    free = [c for c in cases if not any(is_given(t.regime) and not BY_NAME[t.dtype].floating for t in c.tensors)]
    cut = [_cut(case.gathered(), op) for case in sorted(free, key=lambda c: -c.tensors[0].numel)]
    few = [c for c in cut if c.tensors[0].numel <= _PROBE_SIZE and all(t.numel <= _LARGEST_TENSOR for t in c.tensors)]
    return [case.with_regime("normal") for case in few[:_PROBES] or cut[-1:]]


def _with_few_columns(case: Case, op: Op) -> Case:
    """Return a case with few columns of the first tensor, and of those that have as many, and with rows to match.

    Parameters that divide its width, such as a group's size, divide the new one.
    """
    first, numel = case.tensors[0], _FEW_COLUMNS**2
    width = first.shape[-1] if first.shape else 1
    whole = math.lcm(*(n for n in case.params.values() if type(n) is int and n > 0 and width % n == 0))
    if (few := whole * max(1, _FEW_COLUMNS // whole)) < width:
        return _cut(resized(case, (width,), (few,)), op, numel)
    return _cut(case, op, min(numel, first.numel))


def _cut(case: Case, op: Op, numel: int | None = None) -> Case:
    """Cut a case to rows of manageable size, and make its tensors contiguous: gaps may be gigabytes.

    The first tensor has `numel` elements then, or those that it has.
    """
    first, leading = case.tensors[0], max(0, len(case.tensors[0].shape) - 1)
    rows = max(1, min(_PROBE_SIZE, numel or first.numel) // max(first.shape[-1] if first.shape else 1, 1))
    contiguous = [replace(t, strides=None, offset=0) for t in case.apart().tensors]
    cut = (replace(t, shape=(rows, *t.shape[leading:])) if leading and t.name in op.rows else t for t in contiguous)
    return replace(case, tensors=tuple(cut))


def undecidable_of(results: Iterable[CaseResult], project: Project) -> tuple[Undecidable, ...]:
    """Return the results of which too little was decided, and of which no order of sums would let a run decide more."""
    run = Run(tuple(results))
    known: dict[tuple[str, ...], dict[str, tuple[int, int]]] = {}
    found = []
    for d in (d for subject in run.subjects() for d in run.decided(*subject) if d.few):
        group = [
            r for r in run.of(d.kernel, d.device) if any((s.name, s.dtype) == (d.stage, d.dtype) for s in r.stages)
        ]
        op, contract = project.op(group[0].op), group[0].contract
        counts = []
        for case in _probes(map(parse_case, (r.case for r in group)), op):
            key = op.name, contract, str(case)
            if key not in known:
                tensors = build(case, torch.device("cpu")).tensors
                exact = Premises(exact_sums=True)
                known[key] = decidable(Problem(op, op.contract(contract), tensors, dict(case.params), exact))
            counts.append(known[key].get(d.stage, (0, 0)))
        if sum(sharp for sharp, _ in counts) < LEAST_DECIDED * sum(numel for _, numel in counts):
            found.append(Undecidable(d.kernel, d.device, d.stage, d.dtype))
    return tuple(found)


def agreement_of(results: Iterable[CaseResult]) -> tuple[DeviceAgreement, ...]:
    """Count how often two devices gave equal bits for the same case and input bits."""
    bits: dict[tuple[str, str, str, str], dict[str, str]] = defaultdict(dict)
    for r in results:
        for stage in r.stages:
            bits[(r.kernel, stage.name, r.case, r.fingerprint)][r.device] = stage.fingerprint
    pairs: dict[tuple[str, str, tuple[str, str]], list[bool]] = defaultdict(list)
    for (kernel, stage_name, _, _), by_device in bits.items():
        first, *others = sorted(by_device.items())
        for other in others:
            pairs[(kernel, stage_name, (first[0], other[0]))].append(first[1] == other[1])
    return tuple(DeviceAgreement(k, s, devices, len(equal), sum(equal)) for (k, s, devices), equal in pairs.items())
