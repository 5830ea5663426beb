"""Results that are nearer to real arithmetic than fp32: of more range, where fp32 overflows, or of more precision.

Such rows are as legal as those that fp32 gives. The rows that fail in fp32 are judged once more:

* with more range in all stages, or where fp32 overflows, up to some stage, as of a mean in fp64 before a variance in
  fp32. A row counts by one of these only where it is explained completely: nothing in between is legal.
* against the contract in real arithmetic, which rounds where the contract does and nowhere else. A row is right each of
  whose elements is that, rounded, if fp64 knows it to a number or two, or, as where it cancels, far more closely than
  fp32. Where no latent value binds a row together, an element is also right that is nearer to it than every number that
  fp32 allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from lastbit.judging.expected import Expected, Numbers, RowSum, Trace
from lastbit.judging.latent import explain_rows
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure, Format, round_to
from lastbit.numerics.formats import from_ordinals, ordinals

# Arbitrary: fp64's bounds are 2^-28 of fp32's, and what errs as fp32 may comes so close once in 2^20 times.
_CLOSELY = 2.0**-20
"""The largest share of what fp32 leaves open of an element that a kernel in fp64 may leave open, too."""


@dataclass(frozen=True, eq=False)
class Beyond:
    """Rows, with the arithmetic beyond fp32 that is to explain them.

    Attributes:
        rows: the rows, under a problem with more range where that is to explain them.
        expected: function that gives the values their stages may have; None for those that follow from their problem.
    """

    rows: Observation
    expected: Callable[[Observation], Trace] | None = None

    @property
    def explained(self) -> Tensor:
        """The indices of the explained rows; real arithmetic explains none in which it leaves an element open."""
        if self.expected is not None:
            trace = self.expected(self.rows)
            lost = _outside(self.rows, trace)
            if self.expected is not nearest:
                lost |= _with_an_element(self.rows, trace, lambda name, real: _known_no_better(self.rows, name, real))
            return (~lost).nonzero()[:, 0]
        possible = (~_outside(self.rows, self.rows.problem.trace, self.rows.onward)).nonzero()[:, 0]
        if not self.rows.has_latent:
            return possible
        # One latent value must explain each row.
        some = self.rows.only(possible)
        kept = torch.ones_like(possible, dtype=torch.bool)
        kept[explain_rows(some, some.problem.trace, needs=False).unexplained] = False
        return possible[kept]


def _known_no_better(rows: Observation, name: str, real: Expected) -> Tensor:
    """Return the elements of a stage that real arithmetic leaves open, and hardly knows better than fp32."""
    if not isinstance(real, Numbers):
        return torch.zeros(real.shape, dtype=torch.bool, device=real.value.device)
    found = left_open(real)
    if found.any() and isinstance(own := rows.expected(rows.problem.trace).get(name), Numbers):
        least, most = real.enclosure.hi - real.enclosure.lo, own.enclosure.hi - own.enclosure.lo
        found &= ~((least <= _CLOSELY * most) & torch.isfinite(most))
    return found


def explained_beyond_fp32(seen: Observation, unexplained: Tensor | None = None) -> list[Beyond]:
    """Find the rows that fail in fp32, by an element or by the row check, and that something beyond it explains.

    What may explain them is tried one after the other, the strictest first. `unexplained` are the indices of the rows
    that fail by the row check, where that was done before.
    """
    if not seen.count or not seen.problem.op.rows or not seen.has_rows:
        return []
    problem, outside = seen.problem, _outside(seen, seen.problem.trace, seen.onward)
    failed = outside.clone()
    if seen.has_latent:
        if unexplained is None:
            unexplained = explain_rows(seen, problem.trace, needs=False).unexplained
        failed[unexplained] = True
    left, rows, found = failed.nonzero()[:, 0], seen, list[Beyond]()

    def attempts() -> Iterator[Callable[[Observation], Trace] | str]:
        """Yield what gives the values that rows may have, or the stage up to which they have more range, "" for all."""
        real = not gives_codes(problem)
        floats = [number for number in problem.params.values() if isinstance(number, float)]
        if real:
            yield in_real_arithmetic
        if real and any(float(torch.tensor(number)) != number for number in floats):
            yield as_written
        yield ""
        if real and problem.op.latent is None:
            yield nearest
        enclosures = [(n, e.enclosure) for n, e in problem.trace.stages.items() if isinstance(e, Numbers)]
        if any(bool((torch.isfinite(e.exact) & ~torch.isfinite(e.full).all(0)).any()) for _, e in enclosures):
            yield from (name for name, _ in enclosures[:-1])

    for attempt in attempts():
        if attempt == "":
            left = left[outside[left]]  # of rows whose elements all are possible in fp32, more range explains no more
        if not len(left):
            break
        rows = rows if rows.count == len(left) else seen.only(left)
        if isinstance(attempt, str):
            tried = Beyond(replace(rows, problem=rows.problem.with_more_range(attempt)))
        else:
            tried = Beyond(rows, attempt)
        if len(explained := tried.explained):
            found.append(replace(tried, rows=tried.rows.only(explained)))
            left = left[~torch.isin(torch.arange(len(left), device=left.device), explained)]
    return found


def gives_codes(problem: Problem) -> bool:
    """Check whether a result is of fp8 or integers: how fp32 divides by a scale is part of its contract."""
    return any(problem.trace.formats[name].dtype.itemsize == 1 for name in problem.trace.results)


def in_real_arithmetic(seen: Observation, *, written: bool = False) -> Trace:
    """Return the stages that the kernel gave in real arithmetic, each rounded to its own format."""
    real = seen.real_as_written if written else seen.real
    return replace(real, stages={name: _rounded(e) if seen.says(name, e) else e for name, e in real.stages.items()})


def as_written(seen: Observation) -> Trace:
    """Return those stages of a kernel that computes with 1e-05 as fp64 has it, where the contract's is of fp32."""
    return in_real_arithmetic(seen, written=True)


def nearest(seen: Observation) -> Trace:
    """Return a trace whose stages allow the numbers of fp32, and those that are nearer to real arithmetic."""
    own, real = seen.onward, seen.real
    stages = {n: nearer(e, real.stages[n]) if seen.says(n, e) else e for n, e in own.stages.items()}
    return replace(own, stages=stages)


def sums_in_real_arithmetic(whole: Observation, most: int) -> dict[str, RowSum]:
    """Return the sums over all rows in real arithmetic, evaluated in blocks of at most `most` elements."""
    totals: dict[str, RowSum] = {}
    for _, part in whole.problem.in_real_arithmetic.blocks(most):
        for name, total in part.trace.sums.items():
            totals[name] = reduce(add, [totals[name], total] if name in totals else [total])
    return totals


def _rounded(expected: Expected) -> Expected:
    expected = expected.finished
    if not isinstance(expected, Numbers):
        return expected
    return replace(expected, enclosure=expected.enclosure.rounded(expected.format))


def nearer(own: Expected, real: Expected) -> Expected:
    """Return the numbers that are possible in fp32, and those that are nearer to `real`, which is not rounded.

    They are on both sides of it, as what errs less than fp32 may err either way. Where fp64 knows `real` no better than
    by its ends, a number counts that lies between them, or is nearer to both of them than the numbers of fp32 are.
    Nothing is between an infinity and what real arithmetic has in its place. To nearest, what fp32 has is never farther
    than the other neighbour; in other directions it may be, so that there `real` is rounded, too.
    """
    own, real = own.finished, real.finished
    if isinstance(own.format, Format) and own.format.direction != "nearest":
        real = _rounded(real)
    if not isinstance(own, Numbers) or not isinstance(real, Numbers):
        return own
    (_, value, lo, hi), (exact, _, least, most) = own.enclosure.full, real.enclosure.full
    below = (most < lo) & torch.isfinite(lo) & torch.isfinite(least)
    above = (least > hi) & torch.isfinite(hi) & torch.isfinite(most)
    least, most = least.minimum((2 * most - lo).nextafter(lo)), most.maximum((2 * least - hi).nextafter(hi))
    least, most = _next(least, own.format, up=True), _next(most, own.format, up=False)
    ends = torch.where(below, least, lo), torch.where(above, most, hi)
    return replace(own, enclosure=Enclosure(torch.stack([exact, value, *ends])))


def _next(x: Tensor, fmt: Format, up: bool) -> Tensor:
    """Return the nearest number of a format that is not below x with `up`, and not above it without."""
    x = torch.where(torch.isfinite(x), x, 0.0)
    rounded = round_to(x, fmt.nearest)
    past = rounded < x if up else rounded > x
    return torch.where(past, from_ordinals(ordinals(rounded, fmt) + (1 if up else -1), fmt), rounded)


def left_open(expected: Numbers) -> Tensor:
    """Return the elements of which real arithmetic, as fp64 knows it, leaves more than two neighbouring numbers, or
    three where each may be rounded to either neighbour.

    Where fp64 overflows it leaves any number, and NaN: such an enclosure explains nothing.
    """
    lo, hi = expected.enclosure.lo, expected.enclosure.hi
    finite = torch.isfinite(lo) & torch.isfinite(hi)
    low, high = (ordinals(torch.where(finite, end, 0.0), expected.format) for end in (lo, hi))
    most = 2 if expected.format.direction == "either" else 1
    return ~((lo == hi) | torch.isnan(lo) | (finite & (high - low <= most)))


def _outside(seen: Observation, *traces: Trace) -> Tensor:
    """Return a mask of the rows with an element that one of the traces does not allow."""
    masks = [_with_an_element(seen, trace, lambda name, e: e.outside(seen.actual[name])) for trace in traces]
    return reduce(torch.logical_or, masks)


def _with_an_element(seen: Observation, trace: Trace, mask: Callable[[str, Expected], Tensor]) -> Tensor:
    """Return a mask of the rows in which `mask` holds for an element of a stage; sums over rows are left out."""
    masks = [
        mask(name, expected).reshape(seen.count, -1).any(-1)
        for name, expected in seen.expected(trace).items()
        if name not in seen.problem.steps.sums
    ]
    return reduce(torch.logical_or, masks, torch.zeros(seen.count, dtype=torch.bool, device=seen.problem.main.device))
