"""The judge: from a kernel's values to a verdict and its sentences, without tolerances.

A kernel fails if an element lies outside the enclosure of its contract, seen from the inputs of the case or from the
kernel's own values of earlier stages, or if no single latent value explains a row. A case that decides no element and
explains no row is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import reduce
from operator import add

import torch

from lastbit.errors import KernelError, UsageError, no_stage, wrong_kind
from lastbit.floating_point import default_floating_point
from lastbit.inputs import fingerprints_of
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
from lastbit.judging.decided import constants
from lastbit.judging.expected import Numbers, Steps, Trace
from lastbit.judging.latent import MOST_COLUMNS, explain_rows, forgiven
from lastbit.judging.observation import Observation
from lastbit.judging.other_contracts import OtherContracts
from lastbit.judging.problem import Problem, Tensors
from lastbit.judging.screen import Screened, Tally
from lastbit.result import Comparison, Finding, Judgement, StageResult, Verdict, told
from lastbit.row_check import Need, Needs, RowCheck


def describe_stage(stage: StageResult, contract: str) -> Finding:
    """Return the finding for a stage that has elements outside its enclosure."""
    local = stage.isolated.outside > 0
    comparison = stage.isolated if local else stage.cumulative
    view = "" if local and stage.cumulative.outside else _VIEWS[local]
    sentence = f"{_share(comparison)} {_cannot(comparison)} under {contract}{view}; {_worst(comparison)}."
    return Finding("special" if comparison.special == comparison.outside else "outside", stage.name, sentence)


_VIEWS = {
    True: " given the kernel's own earlier stages",
    False: " given the inputs, although each stage follows from the one before: a stage is missing or out of order",
}


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


def _share(comparison: Comparison) -> str:
    percent = 100 * comparison.outside / comparison.numel
    return f"{comparison.outside:,} of {comparison.numel:,} elements ({percent:.3g} %)"


def _cannot(comparison: Comparison) -> str:
    if comparison.special == comparison.outside:
        return "are NaN or infinite where they must not be, or the reverse,"
    return "have a value that is not possible"


def _worst(comparison: Comparison) -> str:
    worst = comparison.worst
    if worst is None:
        return "no element to show"
    allowed = f"{worst.lo!r}" if worst.lo == worst.hi else f"from {worst.lo!r} to {worst.hi!r}"
    distance = f", {worst.ulp:g} ulp from the contract's value" if worst.ulp < float("inf") else ""
    exact = "" if math.isnan(worst.exact) else f", exact {worst.exact:.9g}"
    return f"worst at {list(worst.index)}: {worst.actual!r}, allowed {allowed}{exact}{distance}"


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
    _check_rows_agree(problem)
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
    if tally.sums:
        tally = _finished(tally, whole, most, others)
    return _judgement(whole, steps, results, tally, others, most)


def _judged(seen: Observation, others: OtherContracts | None) -> Tally:
    """Judge a block and return its tally; if it fails, other contracts are asked whether they explain it."""
    found = _tallied(seen)
    if found.failed:
        seen, found = _beyond_fp32(seen, found)
    if others is not None and found.failed:
        others.identify(seen)
    return found


def _screened(block: Screened, others: OtherContracts | None) -> Tally:
    """Finish a block whose comparisons are under way, and judge it in full if it fails."""
    tally = block.tally
    return _judged(block.seen, others) if tally.failed else tally


def _tallied(seen: Observation) -> Tally:
    """Compare every stage, check the rows, and count."""
    trace, onward, latent = seen.problem.trace, seen.onward, seen.problem.op.latent
    cumulative, isolated = seen.compare(trace) * 2 if onward is trace else seen.compare(trace, onward)
    stray = onward is not trace and any(isolated[name].outside for name in seen.through)
    rows = explain_rows(seen, trace, onward if stray else None) if seen.has_latent else None
    if latent is not None and stray and rows is not None and rows.check.split:
        [isolated] = seen.compare(forgiven(onward, trace, latent, rows.split))
    check = None if rows is None else rows.check
    return Tally(
        cumulative=cumulative,
        isolated=isolated,
        sums={} if seen.whole else trace.sums,
        isolated_sums={} if seen.whole else onward.sums,
        rows=check,
        in_rows=seen.in_rows(check, seen.through),
    )


def _beyond_fp32(seen: Observation, found: Tally) -> tuple[Observation, Tally]:
    """Return the rows that fp32 must explain, and the tally of all, with the others explained beyond fp32."""
    if explained := explained_beyond_fp32(seen):
        rest = _without(seen, explained)
        tallies = [_tallied_beyond(part) for part in explained]
        return rest, reduce(add, [_tallied(rest), *tallies] if rest.count else tallies)
    if not seen.whole or seen.has_latent or gives_codes(seen.problem):
        return seen, found
    real = seen.expected(in_real_arithmetic(seen)).values()
    sharp = not any(bool(left_open(expected).any()) for expected in real if isinstance(expected, Numbers))
    whole = (_tallied_beyond(Beyond(seen, e)) for e in ((in_real_arithmetic, nearest) if sharp else (nearest,)))
    return seen, next((tally for tally in whole if not tally.failed), found)  # sums over rows, if not the rows


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


def _finished(tally: Tally, whole: Observation, most: int, others: OtherContracts | None) -> Tally:
    """Add the sums over rows to the tally when all rows have been seen; single blocks explain nothing of them."""
    actual, pairs = whole.actual, (tally.sums, tally.isolated_sums)
    cumulative, isolated = ({name: total.compare(actual[name]) for name, total in sums.items()} for sums in pairs)
    finished = Tally(cumulative, isolated)
    if finished.failed:
        real = sums_in_real_arithmetic(whole, most)
        cumulative, isolated = (
            {n: nearer(total, real[n]).compare(actual[n]) for n, total in sums.items()} for sums in pairs
        )
        again = Tally(cumulative, isolated)
        finished = finished if again.failed else again
    if others is not None and finished.failed:
        others.explain_nothing()
    return tally + finished


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


def _check_rows_agree(problem: Problem) -> None:
    for name in problem.op.rows & problem.tensors.keys():
        shape = tuple(problem.tensors[name].shape)
        if (own := shape if len(shape) == len(problem.leading) else shape[:-1]) != problem.leading:  # or one per row
            first = problem.op.inputs[0]
            raise UsageError(f"{name} has rows {own}, but {first} has {problem.leading}; they must agree")


def _check_actual(problem: Problem, trace: Trace, index: tuple[slice, ...], actual: Tensors) -> None:
    """Raise `KernelError` unless `actual` holds all results that it must, and nothing but stages of the right shape.

    `trace` is that of the rows at `index`.
    """
    required = (name for name in trace.results if name not in problem.op.optional_results)
    if missing := [name for name in required if name not in actual]:
        raise KernelError(f"the kernel returned {_listed(actual)}, but not the result {missing[0]!r}")
    if not any(name in actual for name in trace.results):
        raise KernelError(f"the kernel returned {_listed(actual)}, but none of the results {_listed(trace.results)}")
    for name, tensor in actual.items():
        if name not in trace.stages:
            raise no_stage(name, trace.stages)
        expected = trace.stages[name]
        shape = tuple(expected.shape)
        if not expected.of_all_rows:
            shape = (*problem.leading[: len(index)], *shape[len(index) :])
        _require(name, "shape", tuple(tensor.shape), shape)
        _require(name, "device", tensor.device, problem.main.device)
        if name in trace.results:
            _require(name, "dtype", tensor.dtype, expected.format.dtype)


def _require(name: str, what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise wrong_kind(name, what, actual, expected)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
