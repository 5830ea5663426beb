"""From actual values to a verdict: no tolerance, no printing.

A kernel fails if an element lies outside the enclosure of its contract, seen from the inputs of the case or from the
kernel's own values of earlier stages, or if no single latent value explains a row. A case that decides no element and
explains no row is inconclusive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.errors import KernelError, UsageError
from harness.inputs import fingerprint, row_blocks
from harness.numerics import Format, Premises, using
from harness.numerics.formats import Integers
from harness.op import Contract, Op
from harness.result import Comparison, Finding, StageResult, Verdict
from harness.row_check import RowCheck
from harness.verify.block import Block, Tally
from harness.verify.compare import compare, compare_integers
from harness.verify.evaluate import Expected, Params, Tensors, Trace, evaluate, finished
from harness.verify.explain import describe_rows, describe_split, describe_stage
from harness.verify.lanes import forgiven
from harness.verify.latent import ExplainedRows, explain_rows, has_latent
from harness.verify.other_contracts import OtherContracts
from harness.verify.wide import explained_by_more_range, more_range

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
    op: Op,
    contract: Contract,
    tensors: Tensors,
    params: Params,
    actual: Tensors,
    premises: Premises | None = None,
    *,
    alternatives: bool = True,
    settled: Collection[str] = (),
) -> Judgement:
    """Judge `actual`, a mapping from stages to tensors that holds at least every result of the op.

    Other contracts are tried only with `alternatives`, those that are `settled` only if the case fails; the verdict is
    the same without.

    Raises:
        UsageError: inputs of which each row belongs to a row of the others have different rows.
        KernelError: a result is missing or has the wrong shape, dtype or device.
    """
    leading = tuple(tensors[op.inputs[0]].shape[:-1])
    for name in op.rows & tensors.keys():
        if (own := tuple(tensors[name].shape[:-1])) != leading:
            raise UsageError(f"{name} has rows {own}, but {op.inputs[0]} has {leading}; they must agree")
    blocks = _blocks(op, tensors)
    measured = _Measured(
        op, contract, params, leading, whole=len(blocks) == 1, alternatives=alternatives, settled=settled
    )
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

    def __init__(
        self,
        op: Op,
        contract: Contract,
        params: Params,
        leading: tuple[int, ...],
        *,
        whole: bool,
        alternatives: bool,
        settled: Collection[str],
    ) -> None:
        self.op, self.contract, self.params, self.leading, self.whole = op, contract, params, leading, whole
        self.others = OtherContracts(op, contract, params, settled) if alternatives else None
        self.formats: dict[str, Format | Integers] = {}
        self.results: list[str] = []
        self.tally = Tally()
        self.seen = 0

    def add(self, tensors: Tensors, whole: Tensors, index: tuple[slice, ...]) -> None:
        """Judge one block of the inputs against the same rows of `whole`, the kernel's tensors."""
        trace = evaluate(self.op, self.contract, tensors, self.params)
        first = not self.formats
        if first:
            self._check_actual(trace, whole, index, tensors[self.op.inputs[0]].device)
            self.results, self.formats = trace.results, trace.formats
        actual = {name: t[index] if index and name in trace.expected else t for name, t in whole.items()}
        leading = tuple(tensors[self.op.inputs[0]].shape[:-1])
        block = Block(tensors, actual, frozenset(trace.sums), index, leading)
        tally = self._tallied(block, trace)
        if tally.failed:
            block, tally = self._with_more_range(block, tally)
        self.tally += tally
        if self.others is not None and first and block.count:
            self.others.rule_out(trace, block, whole=self.whole)
        if self.others is not None and tally.failed:
            self.others.identify(trace, block, whole=self.whole)
        self.seen += tensors[self.op.inputs[0]].numel()

    def _tallied(self, block: Block, trace: Trace) -> Tally:
        """What there is to count in a block."""
        local = None
        if len(block.actual) > 1:
            local = evaluate(self.op, self.contract, block.tensors, self.params, block.actual)
        isolated = {} if local is None else self._compare(local, block)
        latent = self.op.latent
        stray = latent is not None and any(isolated[s].outside for s in latent.through if s in isolated)
        rows = self._explain_rows(trace, block, local if stray else None)
        if latent and local and stray and rows is not None and rows.check.split:
            isolated = self._compare(forgiven(local, trace, latent, rows.split), block)
        check = None if rows is None else rows.check
        return Tally(
            cumulative=self._compare(trace, block),
            isolated=isolated,
            sums=trace.sums,
            isolated_sums={} if local is None else local.sums,
            rows=check,
            in_rows=self._in_rows(check, block),
        )

    def _in_rows(self, rows: RowCheck | None, block: Block) -> dict[str, int]:
        """Elements of the rows that one latent value had to explain, per stage."""
        if rows is None or self.op.latent is None:
            return {}
        return {n: rows.rows * block.actual[n].shape[-1] for n in self.op.latent.through if n in block.actual}

    def _with_more_range(self, block: Block, tally: Tally) -> tuple[Block, Tally]:
        """The rows that fp32 must answer for, and the tally with the others as more range than fp32 gives them."""
        explained = explained_by_more_range(self.op, self.contract, self.params, block)
        if not bool(explained.any()):
            return block, tally
        self.whole = False  # a sum over rows is of both kinds
        wide, rest = (block.only(self.op, mask.nonzero()[:, 0]) for mask in (explained, ~explained))
        with more_range():
            tally = self._tallied(wide, evaluate(self.op, self.contract, wide.tensors, self.params))
        if rest.count:
            tally += self._tallied(rest, evaluate(self.op, self.contract, rest.tensors, self.params))
        return rest, tally

    def finish_sums(self, actual: Tensors) -> None:
        """Judge the sums over rows, all of which have been seen."""
        tally = self.tally
        for sums, into in ((tally.sums, tally.cumulative), (tally.isolated_sums, tally.isolated)):
            for name, total in sums.items():
                fmt = self.formats[name]
                assert isinstance(fmt, Format)
                into[name] = compare(actual[name], finished(name, total, self.contract, fmt), fmt)
                if self.others is not None and into[name].outside and not self.whole:
                    self.others.explain_nothing()  # the blocks alone say nothing about it

    def _compare(self, trace: Trace, block: Block) -> dict[str, Comparison]:
        return {
            name: block.located(_compared(block.actual[name], expected, trace.formats[name]))
            for name, expected in trace.expected.items()
            if name in block.actual
        }

    def _explain_rows(self, trace: Trace, block: Block, own: Trace | None) -> ExplainedRows | None:
        """The row check of a block; after enough elements only where some do not follow from the kernel's `own`."""
        if not has_latent(self.op, block.actual) or (self.seen > _ROW_CHECK and own is None):
            return None
        return explain_rows(self.op, self.contract, block.tensors, self.params, block.actual, trace, own)

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
                self.tally.cumulative[name],
                self.tally.isolated.get(name, self.tally.cumulative[name]),
                fingerprint(_without_payloads(actual[name])),
                self.tally.in_rows.get(name, 0),
            )
            for name, fmt in self.formats.items()
            if name in self.tally.cumulative
        )
        findings = [describe_stage(s, self.contract) for s in stages if s.cumulative.outside or s.isolated.outside]
        rows, others = self.tally.rows, self.others
        ruled_out, explained = (others.ruled_out, others.explained) if others is not None else ({}, ())
        if rows is not None and rows.unexplained:
            findings.append(describe_rows(rows, self.contract))
        notices = (describe_split(rows, self.contract),) if rows is not None and rows.split else ()
        if findings:
            return Judgement(Verdict.FAILED, stages, (*findings, *notices), rows, ruled_out, explained)
        if any(s.decided for s in stages) or not any(s.cumulative.numel for s in stages):
            return Judgement(Verdict.PASSED, stages, notices, rows, ruled_out)
        reason = "no element has a single legal value and no row could be checked"
        return Judgement(Verdict.INCONCLUSIVE, stages, notices, rows, ruled_out, reason=reason)


def _compared(actual: Tensor, expected: Expected, fmt: Format | Integers) -> Comparison:
    if isinstance(expected, Tensor):
        return compare_integers(actual, expected)
    assert isinstance(fmt, Format)
    return compare(actual, expected, fmt)


def _without_payloads(x: Tensor) -> Tensor:
    """The same values with one kind of NaN: payloads and signs of NaN mean nothing, and differ between devices."""
    values = x if x.dtype is torch.float64 or not x.is_floating_point() else x.to(torch.float32)
    return torch.where(torch.isnan(values), torch.nan, values) if x.is_floating_point() else values


def _require(name: str, what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise KernelError(f"result {name!r} has {what} {actual}, but the op requires {expected}")


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
