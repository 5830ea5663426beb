"""The judge: from a kernel's values to a verdict and its sentences, without tolerances.

A kernel fails if an element lies outside the enclosure of its contract, seen from the inputs of the case or from the
kernel's own values of earlier stages, or if no single latent value explains a row. A case that decides no element and
explains no row is inconclusive.

Rows are judged in blocks. In most blocks of a large case all numbers lie within their enclosures, as is expected. There
each stage is compared as soon as the reference records it, and nothing of it is kept. The figures are asked for later,
so that the device compares one block while the host begins the next. A block with an element outside is judged in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import TypeVar

import torch
from torch import Tensor

from lastbit.errors import KernelError, UsageError, no_stage, wrong_kind
from lastbit.floating_point import default_floating_point
from lastbit.inputs import fingerprints_of
from lastbit.inputs.bits import numbers
from lastbit.judging.beyond_fp32 import (
    Beyond,
    explained_beyond_fp32,
    gives_codes,
    in_real_arithmetic,
    left_open,
    nearer,
    nearest,
    sums_in_real_arithmetic,
)
from lastbit.judging.compare import Begun, finished
from lastbit.judging.decided import constants
from lastbit.judging.expected import Expected, Numbers, RowSum, Steps, Trace
from lastbit.judging.latent import MOST_COLUMNS, check_rows, explain_rows, forgiven
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem, Tensors
from lastbit.numerics import Enclosure
from lastbit.ops import Contract
from lastbit.result import Comparison, Finding, Judgement, Need, Needs, RowCheck, StageResult, Verdict, told
from lastbit.timing import OTHERS, timed

# Blocks of rows that fit a cache: four fp64 tensors are 4 MiB. Smaller ones spend more on the start of operations.
_BLOCK = {"cpu": 1 << 17}  # elements of the main input evaluated at once; an enclosure holds four fp64 tensors of them
_BLOCK_ELSEWHERE = 1 << 22  # with fewer, a GPU takes less long for an operation than the host takes to start it
# Arbitrary: more rules out more alternatives, each of which takes an evaluation of the reference.
_OTHERS = 1 << 22  # elements in which the alternatives are tried


@default_floating_point()
def judge(problem: Problem, actual: Tensors, *, alternatives: bool = True, settled: Collection[str] = ()) -> Judgement:
    """Judge `actual`, a mapping from stages to tensors that holds at least every result that the op requires.

    Other contracts are tried only with `alternatives`, those that are `settled` only if the case fails. Without, all
    that is asked is whether it fails: constants are not counted, so that a case of these alone passes.

    Raises:
        UsageError: inputs of which each row belongs to a row of the others have different rows.
        KernelError: a result is missing or has the wrong shape, dtype or device.
    """
    for name in problem.op.rows & problem.tensors.keys():
        shape = tuple(problem.tensors[name].shape)
        if (own := shape if len(shape) == len(problem.leading) else shape[:-1]) != problem.leading:  # or one per row
            first = problem.op.inputs[0]
            raise UsageError(f"{name} has rows {own}, but {first} has {problem.leading}; they must agree")
    whole, others = Observation.of(problem, actual), OtherContracts(settled) if alternatives else None
    tally, steps, results = Tally(), Steps(), list[str]()
    most = _BLOCK.get(problem.main.device.type, _BLOCK_ELSEWHERE)
    under_way: Screened | None = None
    for number, (index, part) in enumerate(problem.blocks(most)):
        if not number:
            _check_actual(problem, part.trace, index, actual)
            steps, results = part.steps, part.trace.results
        seen = whole.block(index, part, steps.sums)
        begun = Screened.begin(seen) if number and not tally.failed else None
        if under_way is not None:
            tally += _screened(under_way, others)
        if begun is None:
            tally += _judged(seen, others)
        under_way = begun
    if under_way is not None:
        tally += _screened(under_way, others)
    if others is not None:
        for sample in whole.samples(_OTHERS, most, steps.sums):
            others.rule_out(_without(sample, explained_beyond_fp32(sample)) if tally.beyond else sample)
    if tally.sums:  # over rows, all of which have been seen now; single blocks explain nothing of them
        pairs = tally.sums, tally.isolated_sums
        cumulative, isolated = ({n: total.compare(whole.actual[n]) for n, total in each.items()} for each in pairs)
        sums = Tally(cumulative, isolated)
        if sums.failed:
            real = sums_in_real_arithmetic(whole, most)
            cumulative, isolated = (
                {n: nearer(total, real[n]).compare(whole.actual[n]) for n, total in each.items()} for each in pairs
            )
            again = Tally(cumulative, isolated)
            sums = sums if again.failed else again
        if others is not None and sums.failed:
            others.explain_nothing()
        tally += sums
    return _judgement(whole, steps, results, tally, others, most)


def _judgement(
    whole: Observation, steps: Steps, results: list[str], tally: Tally, asked: OtherContracts | None, most: int
) -> Judgement:
    """Return the verdict on everything that was counted."""
    others = asked or OtherContracts(())
    contract, rows = told(str(whole.problem.contract), steps.idle), tally.rows
    names = [name for name in steps.formats if name in tally.cumulative]
    fingerprints = fingerprints_of([whole.actual[name] for name in names], values=True)
    stages = tuple(
        StageResult(
            name,
            steps.formats[name].name,
            name in results,
            _with_exact(whole, name, tally.cumulative[name], isolated=False),
            _with_exact(whole, name, tally.isolated[name], isolated=True),
            fingerprint,
            tally.in_rows.get(name, 0),
            steps.roundoff(name),
        )
        for name, fingerprint in zip(names, fingerprints, strict=True)
    )
    findings = [describe_stage(s, contract) for s in stages if s.cumulative.outside or s.isolated.outside]
    if rows is not None and rows.unexplained:
        findings.append(describe_rows(rows, contract))
    notices = (describe_split(rows, contract),) if rows is not None and rows.split else ()
    if findings:
        findings += notices
        known = others.ruled_out, others.explained
        return Judgement(Verdict.FAILED, stages, tuple(findings), rows, *known, idle=steps.idle)
    if asked is not None and any(s.decided for s in stages):
        counts = constants(whole, most, steps.sums)
        stages = tuple(replace(s, constant=counts.get(s.name, 0)) for s in stages)
    if any(s.decided for s in stages) or not any(s.cumulative.numel for s in stages):
        return Judgement(Verdict.PASSED, stages, notices, rows, others.ruled_out, idle=steps.idle)
    if all(s.constant == s.cumulative.numel for s in stages):
        reason = "every element is a constant, in which no number of the inputs has a part"
    else:
        but = " but constants" if any(s.constant for s in stages) else ""
        reason = f"no element{but} has a single legal value and no row could be checked"
    return Judgement(Verdict.INCONCLUSIVE, stages, notices, rows, others.ruled_out, reason=reason, idle=steps.idle)


def _with_exact(whole: Observation, name: str, found: Comparison, *, isolated: bool) -> Comparison:
    """Keep the exact value of the worst element only where that is known; it is sought only if elements are outside."""
    if found.outside:
        return whole.with_exact(name, found, isolated=isolated)
    if found.worst is None or not whole.actual[name].is_floating_point():
        return found
    return replace(found, worst=replace(found.worst, exact=math.nan))


def _check_actual(problem: Problem, trace: Trace, index: tuple[slice, ...], actual: Tensors) -> None:
    """Raise `KernelError` unless `actual` holds all results that it must, and nothing but stages of the right shape.

    `trace` is that of the rows at `index`.
    """
    required = (name for name in trace.results if name not in problem.op.optional_results)
    given = ", ".join(map(repr, actual)) or "nothing"
    if missing := [name for name in required if name not in actual]:
        raise KernelError(f"the kernel returned {given}, but not the result {missing[0]!r}")
    if not any(name in actual for name in trace.results):
        results = ", ".join(map(repr, trace.results))
        raise KernelError(f"the kernel returned {given}, but none of the results {results}")
    for name, tensor in actual.items():
        if name not in trace.stages:
            raise no_stage(name, trace.stages)
        expected = trace.stages[name]
        shape = tuple(expected.shape)
        if not expected.of_all_rows:
            shape = (*problem.leading[: len(index)], *shape[len(index) :])
        wanted = {"shape": (tuple(tensor.shape), shape), "device": (tensor.device, problem.main.device)}
        if name in trace.results:
            wanted["dtype"] = (tensor.dtype, expected.format.dtype)
        for what, (own, right) in wanted.items():
            if own != right:
                raise wrong_kind(name, what, own, right)


def _screened(block: Screened, others: OtherContracts | None) -> Tally:
    """Finish a block whose comparisons are under way, and judge it in full if it fails."""
    tally = block.tally
    return _judged(block.seen, others) if tally.failed else tally


def _judged(seen: Observation, others: OtherContracts | None) -> Tally:
    """Judge a block and return its tally; if it fails, other contracts are asked whether they explain it.

    Rows that fail in fp32 may be explained beyond it.
    """
    found, unexplained = _tallied_rows(seen)
    if not found.failed:
        return found
    if explained := explained_beyond_fp32(seen, unexplained):
        seen = _without(seen, explained)  # the rows that fp32 must explain
        tallies = [_tallied_beyond(part) for part in explained]
        found = reduce(add, [_tallied(seen), *tallies] if seen.count else tallies)
    elif seen.whole and not seen.has_latent and not gives_codes(seen.problem):  # sums over rows, if not the rows
        real = seen.expected(in_real_arithmetic(seen)).values()
        sharp = not any(bool(left_open(expected).any()) for expected in real if isinstance(expected, Numbers))
        ways = (in_real_arithmetic, nearest) if sharp else (nearest,)
        found = next((tally for way in ways if not (tally := _tallied_beyond(Beyond(seen, way))).failed), found)
    if others is not None and found.failed:
        others.identify(seen)
    return found


def _tallied(seen: Observation) -> Tally:
    """Compare every stage, check the rows, and count."""
    return _tallied_rows(seen)[0]


def _tallied_rows(seen: Observation) -> tuple[Tally, Tensor | None]:
    """Compare every stage, check the rows, and count; return the indices of rows that nothing explains, too.

    They are None where the row check looked at the kernel's own stages, or where there is none.
    """
    trace, onward, latent = seen.problem.trace, seen.onward, seen.problem.op.latent
    cumulative, isolated = seen.compare(trace) * 2 if onward is trace else seen.compare(trace, onward)
    stray = onward is not trace and any(isolated[name].outside for name in seen.through)
    rows = explain_rows(seen, trace, onward if stray else None) if seen.has_latent else None
    if latent is not None and stray and rows is not None and rows.check.split:
        [isolated] = seen.compare(forgiven(onward, trace, latent, rows.split))
    check = None if rows is None else rows.check
    tally = Tally(
        cumulative=cumulative,
        isolated=isolated,
        sums={} if seen.whole else trace.sums,
        isolated_sums={} if seen.whole else onward.sums,
        rows=check,
        in_rows=seen.in_rows(check, seen.through),
    )
    return tally, None if rows is None or stray else rows.unexplained


def _tallied_beyond(part: Beyond) -> Tally:
    """Count in rows all of which arithmetic beyond fp32 explains, so that the row check is not repeated."""
    rows = part.rows
    if part.expected is None:
        return replace(_tallied(rows), beyond=rows.count)
    [found] = rows.compare(part.expected(rows))
    check = RowCheck(rows.latent_stages[0], rows.count, rows.count) if rows.has_latent else None
    sums = {} if rows.whole else rows.problem.trace.sums
    return Tally(found, found, sums, sums, check, rows.in_rows(check, rows.through), beyond=rows.count)


def _without(seen: Observation, explained: Iterable[Beyond]) -> Observation:
    """Return the rows of `seen` that are in none of the parts `explained`, which were taken from it."""
    numbers = torch.arange(seen.count, device=seen.problem.main.device) if seen.numbers is None else seen.numbers
    taken = [part.rows.numbers for part in explained if part.rows.numbers is not None]
    return seen.only((~torch.isin(numbers, torch.cat(taken))).nonzero()[:, 0]) if taken else seen


_Addend = TypeVar("_Addend", Comparison, RowSum, int)


@dataclass(frozen=True)
class Tally:
    """The counts over some rows; `+` adds those over other rows.

    Attributes:
        cumulative, isolated: stage → statistics, from the inputs and from the kernel's own earlier stages.
        sums, isolated_sums: stage → its sum over these rows, unless these are all rows.
        rows: the row check, None where there is none.
        in_rows: stage → elements in the rows that it tried.
        beyond: rows that count as explained by arithmetic beyond fp32.
    """

    cumulative: Mapping[str, Comparison] = field(default_factory=dict)
    isolated: Mapping[str, Comparison] = field(default_factory=dict)
    sums: Mapping[str, RowSum] = field(default_factory=dict)
    isolated_sums: Mapping[str, RowSum] = field(default_factory=dict)
    rows: RowCheck | None = None
    in_rows: Mapping[str, int] = field(default_factory=dict)
    beyond: int = 0

    @property
    def failed(self) -> bool:
        """Return whether an element lies outside, or a row is not explained."""
        outside = any(c.outside for c in (*self.cumulative.values(), *self.isolated.values()))
        return outside or (self.rows is not None and self.rows.unexplained > 0)

    def __add__(self, other: Tally) -> Tally:
        rows = [r for r in (self.rows, other.rows) if r is not None]
        return Tally(
            cumulative=_joined(self.cumulative, other.cumulative),
            isolated=_joined(self.isolated, other.isolated),
            sums=_joined(self.sums, other.sums),
            isolated_sums=_joined(self.isolated_sums, other.isolated_sums),
            rows=rows[0] + rows[1] if len(rows) == 2 else next(iter(rows), None),
            in_rows=_joined(self.in_rows, other.in_rows),
            beyond=self.beyond + other.beyond,
        )


def _joined(first: Mapping[str, _Addend], second: Mapping[str, _Addend]) -> dict[str, _Addend]:
    joined = dict(first)
    for name, value in second.items():
        joined[name] = joined[name] + value if name in joined else value
    return joined


@dataclass
class _Compared(Trace):
    """A trace that compares each recorded stage with the kernel's values.

    It keeps only sums over rows and the latent stages.
    """

    seen: Observation = field(kw_only=True)
    begun: dict[str, Begun | Comparison] = field(default_factory=dict)

    def record(self, name: str, expected: Expected) -> None:
        self.formats[name] = expected.format
        if isinstance(expected, RowSum) or name in self.seen.latent_stages:
            self.stages[name] = expected
        if not isinstance(expected, RowSum) and self.seen.says(name, expected):
            allowed = self.seen.as_given(name, expected, result=name in self.results)
            self.begun[name] = allowed.begin(self.seen.actual[name])


@dataclass(frozen=True, eq=False)
class Screened:
    """Some rows, but not all, that are being compared: from the inputs, and from the kernel's own earlier stages."""

    seen: Observation
    cumulative: _Compared
    isolated: _Compared

    @classmethod
    def begin(cls, seen: Observation) -> Screened:
        """Begin to compare; errors as of `Problem.evaluate`."""
        cumulative = isolated = _Compared(seen=seen)
        seen.problem.evaluate(trace=cumulative)
        if len(seen.actual) > 1:
            isolated = _Compared(seen=seen)
            seen.problem.evaluate(seen.actual, isolated)
        return cls(seen, cumulative, isolated)

    @property
    def tally(self) -> Tally:
        """The tally of these rows; the device is waited for. Rows are checked if no element lies outside."""
        traces = [self.cumulative, self.isolated]
        found = iter(finished([begun for trace in traces for begun in trace.begun.values()]))
        cumulative, isolated = ({name: self.seen.located(next(found)) for name in trace.begun} for trace in traces)
        tally = Tally(cumulative, isolated, self.cumulative.sums, self.isolated.sums)
        through = self.seen.through_latent(self.cumulative)
        if tally.failed or not any(self.seen.actual[name].numel() for name in through):
            return tally
        check = explain_rows(self.seen, self.cumulative).check
        return replace(tally, rows=check, in_rows=self.seen.in_rows(check, through))


class OtherContracts:
    """The findings about the other contracts of an op, block by block: some are ruled out, some explain a failure.

    Attributes:
        ruled_out: alternative that is not `settled` → elements outside: of the results, or where there are none, of
            any stage given the kernel's own earlier ones.
    """

    def __init__(self, settled: Collection[str]) -> None:
        self._settled = settled
        self.ruled_out: dict[str, int] = {}
        self._explaining: list[Contract] | None = None
        self._with_stages: list[Contract] | None = None

    @property
    def explained(self) -> tuple[str, ...]:
        """The contracts that allow every bit of the blocks that failed, the stages included if one of them does."""
        return tuple(map(str, self._with_stages or self._explaining or ()))

    def explain_nothing(self) -> None:
        """Take back every explanation."""
        self._explaining = self._with_stages = []

    @timed(OTHERS)
    def rule_out(self, seen: Observation) -> None:
        """Count the elements outside each alternative of another computation that no earlier block ruled out."""
        problem = seen.problem
        unknown = {
            name: other
            for other in problem.op.alternatives(problem.contract)
            if (name := str(other)) not in self._settled and not self.ruled_out.get(name)
        }
        if not unknown or not seen.count:
            return

        def outside_stages(other: Contract) -> Tensor:
            """Count the elements of all stages outside, given the earlier ones, and not outside the claimed contract.

            That excludes elements of a right kernel where lanes disagree: a saved statistic is that of one half.
            """
            none = torch.zeros((), dtype=torch.int64, device=problem.main.device)
            if len(seen.actual) == 1:
                return none  # there is no earlier stage
            own, theirs = seen.astray, seen.under(other).astray
            counts = [(mask & ~own[name] if name in own else mask).sum() for name, mask in theirs.items()]
            return torch.stack([none, *counts]).sum()

        results = _results(seen)
        asked = {name: other for name, other in unknown.items() if not _is_same(seen, other)}
        found = _counted(asked, lambda other: results.count_outside(problem.under(other).trace))
        left = {name: asked[name] for name, count in found.items() if not count}
        of_stages = _counted(left, outside_stages)
        for name, count in found.items():
            if count or name in of_stages:
                self.ruled_out[name] = count or of_stages[name]

    @timed(OTHERS)
    def identify(self, seen: Observation) -> None:
        """Keep the contracts that allow every bit of the results of this block too, and of its stages.

        One that knows nothing of the elements outside the claimed contract allows them, and explains nothing.
        """
        claimed = _results(seen)
        outside = claimed.outside(claimed.problem.trace)

        def explains(contract: Contract) -> bool:
            results = _results(seen).under(contract)
            try:
                trace = results.problem.trace
            except UsageError:  # it is not defined for these arguments
                return False
            if not seen.actual.keys() <= trace.stages.keys() or results.count_outside(trace):
                return False
            if not _knows_some(results.expected(trace), outside):
                return False
            return not results.has_latent or not check_rows(results).unexplained

        def allows_stages(contract: Contract) -> bool:
            with suppress(UsageError):  # it is not defined for what the kernel shows
                other = seen.under(contract)
                return not other.count_outside(other.onward)
            return False

        problem = seen.problem
        pool = problem.op.candidates(problem.contract) if self._explaining is None else self._explaining
        self._explaining = [c for c in pool if not _is_same(seen, c) and explains(c)]
        pool = self._explaining if self._with_stages is None else self._with_stages
        self._with_stages = [c for c in pool if c in self._explaining and allows_stages(c)]


def _counted(contracts: Mapping[str, Contract], count: Callable[[Contract], Tensor]) -> dict[str, int]:
    """Count for each contract that is defined for these arguments; the device is waited for once."""
    found = {}
    for name, contract in contracts.items():
        with suppress(UsageError):
            found[name] = count(contract)
    return dict(zip(found, numbers(list(found.values())), strict=True))


def _knows_some(expected: Mapping[str, Expected], masks: Mapping[str, Tensor]) -> bool:
    """Check whether a contract knows anything of some of the masked elements, or there are none."""
    found, known = False, False
    for name, mask in masks.items():
        allowed = expected[name].allowed
        unknown = allowed.unknown if isinstance(allowed, Enclosure) else None
        found = found or bool(mask.any())
        known = known or bool((mask if unknown is None else mask & ~unknown).any())
    return known or not found


def _is_same(seen: Observation, other: Contract) -> bool:
    return seen.problem.under(other).takes(seen.problem.steps)


def _results(seen: Observation) -> Observation:
    return seen.of_stages(name for name in seen.problem.trace.results if name in seen.actual)


def describe_stage(stage: StageResult, contract: str) -> Finding:
    """Return the finding for a stage that has elements outside its enclosure."""
    local = stage.isolated.outside > 0
    comparison = stage.isolated if local else stage.cumulative
    view = ""
    if local and not stage.cumulative.outside:
        view = " given the kernel's own earlier stages"
    elif not local:
        follows = "although each stage follows from the one before: a stage is missing or out of order"
        view = f" given the inputs, {follows}"
    special, worst = comparison.special == comparison.outside, comparison.worst
    percent = 100 * comparison.outside / comparison.numel
    cannot = "have a value that is not possible"
    if special:
        cannot = "are NaN or infinite where they must not be, or the reverse,"
    shown = "no element to show"
    if worst is not None:
        allowed = f"{worst.lo!r}" if worst.lo == worst.hi else f"from {worst.lo!r} to {worst.hi!r}"
        distance = f", {worst.ulp:g} ulp from the contract's value" if worst.ulp < float("inf") else ""
        exact = "" if math.isnan(worst.exact) else f", exact {worst.exact:.9g}"
        shown = f"worst at {list(worst.index)}: {worst.actual!r}, allowed {allowed}{exact}{distance}"
    share = f"{comparison.outside:,} of {comparison.numel:,} elements ({percent:.3g} %)"
    sentence = f"{share} {cannot} under {contract}{view}; {shown}."
    return Finding("special" if special else "outside", stage.name, sentence)


def describe_rows(rows: RowCheck, contract: str) -> Finding:
    """Return the finding for rows that no latent value within the enclosure explains."""
    needs = rows.needs
    said = f"{rows.unexplained:,} of {rows.rows:,} rows cannot come from one fp32 {rows.stages} under {contract}"
    said += ": " if needs.rows else ""
    searched = "" if needs.rows == rows.unexplained else f" of {needs.rows:,} that were searched"
    if needs.found:
        some = f"{needs.found:,}" if needs.found < needs.rows else "each"
        said += f"{some}{searched} would come from another one, {_needed(needs)}"
    if needs.found < needs.rows:
        said += "; in the others, s" if needs.found else "s"
        said += "ome elements of a row need a larger one, others a smaller"
    return Finding("rows", rows.stage, f"{said}.")


# Arbitrary: below the factor 2 of two binades of bf16, above what a row's own roundings allow.
_ALIKE = 1.25  # what differs by less than this factor is alike: a row in bf16 leaves its latent value some room


def _needed(needs: Needs) -> str:
    """Tell the latent values that rows need beside those of the contract, and the cause that their ratio hints at."""
    least, most = needs.least, needs.most
    assert least is not None and most is not None
    if needs.found == 1:
        return _beside(most)
    nearer, farther = sorted((least, most), key=_deviation)
    growth = abs(farther.expected / nearer.expected) if nearer.expected else math.inf
    if _deviation(farther) <= _ALIKE * _deviation(nearer) and (least.ratio > 1) == (most.ratio > 1):
        eps = ", or a wrong eps, as these rows are alike" if 1 / _ALIKE < growth < _ALIKE else ""
        return f"in every row about {_beside(most)}, which hints at a wrong count of elements{eps}"
    cause = "eps" if least.ratio > 1 or most.ratio < 1 else "cancellation, as in a variance in one pass"
    hint = f"; the larger the contract's value, the farther is the ratio from 1, which hints at {cause}"
    return f"from {_beside(least)} to {_beside(most)}{hint if growth > _ALIKE else ''}"


def _deviation(need: Need) -> float:
    """Return the distance of the ratio from 1 on either side: |log ratio|."""
    return abs(math.log(need.ratio)) if 0 < need.ratio < math.inf else math.inf


def _beside(need: Need) -> str:
    return f"{need.ratio:.6g} times the contract's ({need.value:.9g} where that is {need.expected:.9g})"


def describe_split(rows: RowCheck, contract: str) -> Finding:
    """Return the notice for rows that come from two latent values, one in each half of the columns."""
    sentence = (
        f"{rows.split:,} of {rows.rows:,} rows come from two values of fp32 {rows.stages}, one in each half of the "
        f"columns, both possible under {contract}: lanes of a warp add in two ways, as Triton's default fusing makes "
        f"them in rows of at most {MOST_COLUMNS} columns; a statistic that is saved is that of one half."
    )
    return Finding("lanes", rows.stage, sentence, notice=True)
