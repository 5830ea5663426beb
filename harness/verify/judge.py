"""From actual values to a verdict: no tolerance, no printing.

A kernel fails if an element lies outside the enclosure of its contract, seen from the inputs of the case or from the
kernel's own values of earlier stages, or if no single latent value explains a row. A case that decides no element and
explains no row is inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.errors import KernelError, UsageError
from harness.inputs import fingerprint, row_blocks
from harness.numerics import Format, Premises, Sum, using
from harness.numerics.formats import Integers
from harness.op import Contract, Op
from harness.result import Comparison, Finding, RowCheck, StageResult, Verdict
from harness.verify.compare import compare, compare_integers, outside_mask
from harness.verify.evaluate import Expected, Params, Tensors, Trace, evaluate, finished, same_computation
from harness.verify.explain import describe_rows, describe_stage
from harness.verify.latent import check_rows

_BLOCK = 1 << 22  # elements of the main input evaluated at once; an enclosure holds four fp64 tensors of that size
_ROW_CHECK = 1 << 24  # elements after which the row check, which evaluates the reference many times, stops


@dataclass(frozen=True)
class Judgement:
    """Verdict and everything it rests on; the fields are those of `CaseResult`, and one more.

    Attributes:
        decided: result → share of it that is decided, see `harness.verify.decided`; empty where nobody asked.
    """

    verdict: Verdict
    stages: tuple[StageResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    rows: RowCheck | None = None
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    explained_by: tuple[str, ...] = ()
    reason: str = ""
    decided: Mapping[str, float] = field(default_factory=dict)

    @property
    def not_ruled_out(self) -> tuple[str, ...]:
        """The alternative contracts that are another computation here, and allow every element all the same."""
        return tuple(contract for contract, forbidden in self.ruled_out.items() if not forbidden)


def judge(
    op: Op, contract: Contract, tensors: Tensors, params: Params, actual: Tensors, premises: Premises | None = None
) -> Judgement:
    """Judge `actual`, a mapping from stages to tensors that holds at least every result of the op.

    Raises:
        UsageError: inputs of which each row belongs to a row of the others have different rows.
        KernelError: a result is missing or has the wrong shape, dtype or device.
    """
    leading = tuple(tensors[op.inputs[0]].shape[:-1])
    for name in op.rows & tensors.keys():
        if (own := tuple(tensors[name].shape[:-1])) != leading:
            raise UsageError(f"{name} has rows {own}, but {op.inputs[0]} has {leading}; they must agree")
    blocks = _blocks(op, tensors)
    measured = _Measured(op, contract, params, leading, whole=len(blocks) == 1)
    with using(premises or Premises()):
        for index in blocks:
            block = {n: t[index] if n in op.rows and index else t for n, t in tensors.items()}
            measured.add(block, actual, index)
        measured.finish_sums(actual)
    return measured.judgement(actual)


def _blocks(op: Op, tensors: Tensors) -> list[tuple[slice, ...]]:
    """Indices of blocks of rows; one empty index, for everything, where rows are not independent or there is none."""
    main = tensors[op.inputs[0]]
    if not op.rows or main.ndim < 2:
        return [()]
    return list(row_blocks(tuple(main.shape[:-1]), main.shape[-1], _BLOCK)) or [()]


class _Measured:
    """Statistics gathered block by block."""

    def __init__(self, op: Op, contract: Contract, params: Params, leading: tuple[int, ...], *, whole: bool) -> None:
        self.op, self.contract, self.params, self.leading, self.whole = op, contract, params, leading, whole
        self.formats: dict[str, Format | Integers] = {}
        self.results: list[str] = []
        self.cumulative: dict[str, Comparison] = {}
        self.isolated: dict[str, Comparison] = {}
        self.sums: dict[str, Sum] = {}
        self.isolated_sums: dict[str, Sum] = {}
        self.rows: RowCheck | None = None
        self.ruled_out: dict[str, int] = {}
        self.candidates: list[Contract] | None = None
        self.seen = 0

    def add(self, tensors: Tensors, whole: Tensors, index: tuple[slice, ...]) -> None:
        """Judge one block of the inputs against the same rows of `whole`, the kernel's tensors."""
        trace = evaluate(self.op, self.contract, tensors, self.params)
        first = not self.formats
        if first:
            self._check_actual(trace, whole, index, tensors[self.op.inputs[0]].device)
            self.results, self.formats = trace.results, trace.formats
        actual = {name: t[index] if index and name in trace.expected else t for name, t in whole.items()}
        outside = self._compare(trace, actual, self.cumulative, index)
        _join(self.sums, trace.sums)
        if len(actual) > 1:
            local = evaluate(self.op, self.contract, tensors, self.params, actual)
            outside |= self._compare(local, actual, self.isolated, index)
            _join(self.isolated_sums, local.sums)
        outside |= self._explain_rows(trace, actual, tensors)
        if first:
            self._rule_out(trace, actual, tensors)
        if outside:
            self._identify(actual, tensors)
        self.seen += tensors[self.op.inputs[0]].numel()

    def finish_sums(self, actual: Tensors) -> None:
        """Judge the sums over rows, all of which have been seen."""
        for sums, into in ((self.sums, self.cumulative), (self.isolated_sums, self.isolated)):
            for name, total in sums.items():
                fmt = self.formats[name]
                assert isinstance(fmt, Format)
                into[name] = compare(actual[name], finished(name, total, self.contract, fmt), fmt)
                if into[name].outside and not self.whole:
                    self.candidates = []  # the blocks alone say nothing about it

    def _compare(self, trace: Trace, actual: Tensors, into: dict[str, Comparison], index: tuple[slice, ...]) -> bool:
        outside = False
        for name, expected in trace.expected.items():
            if name in actual:
                comparison = _located(_compared(actual[name], expected, trace.formats[name]), index)
                into[name] = into.get(name, Comparison()) + comparison
                outside |= comparison.outside > 0
        return outside

    def _explain_rows(self, trace: Trace, actual: Tensors, tensors: Tensors) -> bool:
        if self.seen > _ROW_CHECK or not self._has_latent(actual):
            return False
        rows = check_rows(self.op, self.contract, tensors, self.params, actual, trace)
        self.rows = rows if self.rows is None else self.rows + rows
        return rows.explained < rows.rows

    def _has_latent(self, actual: Tensors) -> bool:
        """Whether `actual` has elements of stages that a latent value must explain."""
        latent = self.op.latent
        return latent is not None and any(actual[s].numel() for s in latent.through if s in actual)

    def _rule_out(self, trace: Trace, actual: Tensors, tensors: Tensors) -> None:
        for other in self.op.alternatives(self.contract):
            if not same_computation(trace, self.op, self.contract, other, tensors):
                with suppress(UsageError):  # the alternative is not defined for these arguments
                    self.ruled_out[str(other)] = self._forbidden(other, actual, tensors)

    def _forbidden(self, contract: Contract, actual: Tensors, tensors: Tensors) -> int:
        """Elements of the results that `contract` forbids."""
        trace = evaluate(self.op, contract, tensors, self.params)
        expected = dict(trace.expected)
        if self.whole:
            totals = trace.sums.items()
            expected |= {n: finished(n, t, contract, f) for n, t in totals if isinstance(f := trace.formats[n], Format)}
        return sum(int(outside_mask(actual[n], expected[n]).sum()) for n in trace.results if n in expected)

    def _identify(self, actual: Tensors, tensors: Tensors) -> None:
        """Keep the contracts that allow every bit of every block that failed."""
        pool = self.op.candidates(self.contract) if self.candidates is None else self.candidates
        self.candidates = [c for c in pool if self._explains(c, actual, tensors)]

    def _explains(self, contract: Contract, actual: Tensors, tensors: Tensors) -> bool:
        try:
            if self._forbidden(contract, actual, tensors):
                return False
        except UsageError:
            return False
        results = {name: actual[name] for name in self.results}
        if not self._has_latent(results):
            return True
        trace = evaluate(self.op, contract, tensors, self.params)
        rows = check_rows(self.op, contract, tensors, self.params, results, trace)
        return rows.explained == rows.rows

    def _check_actual(self, trace: Trace, whole: Tensors, index: tuple[slice, ...], device: torch.device) -> None:
        """Raise `KernelError` unless `whole` holds all results, and nothing but stages of the right shape."""
        if missing := [name for name in trace.results if name not in whole]:
            raise KernelError(f"the kernel returned {_listed(whole)}, but not the result {missing[0]!r}")
        for name, tensor in whole.items():
            if name not in trace.formats:
                raise KernelError(f"the kernel returned {name!r}, which is no stage here: {_listed(trace.formats)}")
            shape = tuple((trace.expected if name in trace.expected else trace.sums)[name].shape)
            if index and name in trace.expected:
                shape = (*self.leading, *shape[len(index) :])
            _require(name, "shape", tuple(tensor.shape), shape)
            _require(name, "device", tensor.device, device)
            if name in trace.results:
                _require(name, "dtype", tensor.dtype, trace.formats[name].dtype)

    def judgement(self, actual: Tensors) -> Judgement:
        stages = tuple(
            StageResult(
                name,
                fmt.name,
                name in self.results,
                self.cumulative[name],
                self.isolated.get(name, self.cumulative[name]),
                fingerprint(_without_payloads(actual[name])),
            )
            for name, fmt in self.formats.items()
            if name in self.cumulative
        )
        findings = [describe_stage(s, self.contract) for s in stages if s.cumulative.outside or s.isolated.outside]
        if self.rows is not None and self.rows.explained < self.rows.rows:
            findings.append(describe_rows(self.rows, self.contract))
        if findings:
            explained = tuple(str(c) for c in self.candidates or () if c != self.contract)
            return Judgement(Verdict.FAILED, stages, tuple(findings), self.rows, self.ruled_out, explained)
        decided = sum(s.cumulative.decided + s.isolated.decided for s in stages)
        exact = all(isinstance(self.formats[name], Integers) for name in self.results)  # undecided only where empty
        if decided or exact or (self.rows is not None and self.rows.rows):
            return Judgement(Verdict.PASSED, stages, (), self.rows, self.ruled_out)
        reason = "no element has a single legal value and no row could be checked"
        return Judgement(Verdict.INCONCLUSIVE, stages, (), self.rows, self.ruled_out, reason=reason)


def _join(sums: dict[str, Sum], more: Mapping[str, Sum]) -> None:
    for name, total in more.items():
        sums[name] = sums[name] + total if name in sums else total


def _compared(actual: Tensor, expected: Expected, fmt: Format | Integers) -> Comparison:
    if isinstance(expected, Tensor):
        return compare_integers(actual, expected)
    assert isinstance(fmt, Format)
    return compare(actual, expected, fmt)


def _without_payloads(x: Tensor) -> Tensor:
    """The same values with one kind of NaN: payloads and signs of NaN mean nothing, and differ between devices."""
    values = x if x.dtype is torch.float64 or not x.is_floating_point() else x.to(torch.float32)
    return torch.where(torch.isnan(values), torch.nan, values) if x.is_floating_point() else values


def _located(comparison: Comparison, index: tuple[slice, ...]) -> Comparison:
    """The same statistics with the worst element's index counted from the start of the whole tensor."""
    worst = comparison.worst
    if worst is None or not index:
        return comparison
    starts = [s.start or 0 for s in index] + [0] * (len(worst.index) - len(index))
    moved = tuple(i + s for i, s in zip(worst.index, starts, strict=True))
    return replace(comparison, worst=replace(worst, index=moved))


def _require(name: str, what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise KernelError(f"result {name!r} has {what} {actual}, but the op requires {expected}")


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
