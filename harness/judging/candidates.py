"""The search for latent values that explain a row: by candidates for one of them, by boxes for several at once.

An element above what a candidate allows asks for a larger value, one below for a smaller (or the reverse, by its own
sign). If one candidate is asked both ways, or every candidate is asked away, no value explains the elements.

A box is an interval for each of several values. An enclosure holds whatever a kernel may give. So where the reference
goes on from a box, it gives an enclosure of each element for all latent values within the box, and one element outside
refutes them all. A box that is not refuted is cut into smaller ones, down to single fp32 numbers, which are what a
kernel has; but a value other than the first, which is added, may be a product that is fused into that sum, and then is
no fp32 number, but rounds to one. Nothing is assumed about how elements depend on the values. Where to cut is a guess
that costs time if it is wrong, and changes no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lastbit.judging.problem import Given, Problem, Tensors
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import FP32, from_ordinals, ordinals
from lastbit.ops import Contract

Range = tuple[Tensor, Tensor]
"""The lowest and the highest of something."""

_AT_ONCE = {"cpu": 1 << 15}  # elements: below, the cost is in the number of operations, above, in their size
# With fewer, a GPU takes less long for an operation than the host takes to start it, as in verdict.py.
_AT_ONCE_ELSEWHERE = 1 << 22


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a problem: the reference after its latent stages, as a function of their values.

    Attributes:
        problem: the problem; those of its inputs that the op declares as rows are [rows, ...].
        seen: stages that the latent values must explain, [rows, groups, size].
        stage: the stage whose values are tried; the next three are [rows, groups].
        low, high: ordinals of the smallest and the largest fp32 number to try.
        tried: groups that have something to explain.
        given: other stages, whose values are known: [rows, ...].
        counted: elements of each group that must be explained, [rows, 1, size]; None for all.
        also: lowest and highest ordinals of other stages that are tried together with it. None where there is but one
        stage, and every element grows or falls with it.
        likely: ordinals that a kernel shows, for each of these stages in order; none if it does not show them all.
    """

    problem: Problem
    seen: Tensors
    stage: str
    low: Tensor
    high: Tensor
    tried: Tensor
    given: Tensors = field(default_factory=dict)
    counted: Tensor | None = None
    also: Mapping[str, Range] | None = None
    likely: Sequence[Tensor] = ()

    @property
    def elements(self) -> int:
        return max(1, *(t.numel() for t in self.seen.values()))

    @property
    def at_once(self) -> int:
        """Elements that are best evaluated together on this device."""
        device = next(iter(self.seen.values())).device.type
        return _AT_ONCE.get(device, _AT_ONCE_ELSEWHERE)

    @property
    def unrounded(self) -> Rows:
        """These rows under a contract that does not round the stages that are to be explained."""
        contract = self.problem.contract
        rounds = {name: target for name, target in contract.rounds.items() if name not in self.seen}
        return replace(self, problem=replace(self.problem, contract=Contract(contract.options, rounds), siblings=None))

    def rounding(self, stage: str) -> Range:
        """Return the ends of the interval that is rounded to each element of a stage: the middles between it and its
        neighbours in the format of the stage, or where that rounds otherwise than to nearest, these or itself.
        """
        seen, fmt = self.seen[stage], self.problem.format(stage)
        at = ordinals(seen.nan_to_num(0.0, fmt.max, -fmt.max), fmt)
        below, above = (from_ordinals(at + step, fmt) for step in (-1, 1))
        if fmt.direction == "either":
            return below, above
        if fmt.direction == "zero":
            return torch.where(seen > 0, seen, below), torch.where(seen < 0, seen, above)
        return (seen + below) / 2, (seen + above) / 2

    def only(self, rows: Tensor) -> Rows:
        """Keep only the rows of these indices, one of which may occur several times."""
        return replace(
            self,
            low=self.low[rows],
            high=self.high[rows],
            tried=self.tried[rows],
            problem=self._of_rows(lambda t: t[rows]),
            seen={n: t[rows] for n, t in self.seen.items()},
            given={n: t[rows] for n, t in self.given.items()},
            counted=None if self.counted is None else self.counted[rows],
            also=None if self.also is None else {n: (low[rows], high[rows]) for n, (low, high) in self.also.items()},
            likely=[t[rows] for t in self.likely],
        )

    def forward(self, values: Given) -> dict[str, Range]:
        """Evaluate the lowest and highest legal elements for latent values, or intervals of them, side by side.

        [candidates, rows, groups] → [candidates, rows, groups, size].
        """
        given = {n: t.unsqueeze(0) for n, t in self.given.items()}
        trace = self._of_rows(lambda t: t.unsqueeze(0)).evaluate({**given, **values})
        groups = (self.low.shape[-1], -1)
        ends = {name: trace.enclosure(name) for name in self.seen}
        return {name: (e.lo.unflatten(-1, groups), e.hi.unflatten(-1, groups)) for name, e in ends.items()}

    def _of_rows(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Apply a function to every input that is of rows."""
        rows, tensors = self.problem.op.rows, self.problem.tensors
        return self.problem.on({n: change(t) if n in rows else t for n, t in tensors.items()})


@dataclass(frozen=True, eq=False)
class Searched:
    """The answers of a search, each [rows, groups].

    Attributes:
        explained: groups that some values explain, or that were not `tried`.
        found: ordinal of the value of the first stage that explains the group.
        open: groups for which the search ended without an answer; they count as explained, too.
    """

    explained: Tensor
    found: Tensor
    open: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Searched:
        """Return the state before anything was searched."""
        return cls(~rows.tried, rows.low.clone(), torch.zeros_like(rows.tried))

    def add(self, rows: Tensor, fits: Tensor, at: Tensor) -> None:
        """Take note of groups that these ordinals explain, in the rows of these indices."""
        new = fits & ~self.explained[rows]
        self.found[rows] = torch.where(new, at, self.found[rows])
        self.explained[rows] |= new


# A bound on time: a box that does not get to a point by then is cut.
_MOST_STEPS = 16  # times that a box shrinks on the way to a point
# Arbitrary: cutting a box in two costs twice; one that loses a quarter is as small after three steps.
_STALLED = 0.75  # share of a side from which on it counts as not shrunk
# A bound on time: rows that end so count as not tried, and are said (docs/measurements/false_alarms_of_latents.md).
_MOST_ROUNDS = 64  # cuts of boxes of a row, after which its search ends without an answer
# Four units of 2⁻²⁴: some roundings of fp32 on the way to an element. More leaves boxes that hold nothing.
_DOUBT = 2.0**-22  # relative to the largest end of an element: how far it may be from a straight line


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Boxes for each row and group: ordinals of the smallest and largest latent values, [..., values, rows, groups]."""

    low: Tensor
    high: Tensor

    @classmethod
    def stack(cls, *boxes: _Boxes) -> _Boxes:
        """Put the boxes of each row beside each other, in a new first dimension."""
        return cls(torch.stack([b.low for b in boxes]), torch.stack([b.high for b in boxes]))

    def cut(self, axis: Tensor, low: Tensor, high: Tensor) -> _Boxes:
        """Replace the interval of one latent value, whose index is `axis` [rows, groups], by low to high."""
        here = torch.arange(len(self.low), device=axis.device).reshape(-1, 1, 1) == axis
        return _Boxes(torch.where(here, low, self.low), torch.where(here, high, self.high))

    def axis(self, number: int) -> Tensor:
        """Return the index of the value to cut next, [rows, groups]: values that are not yet known take turns."""
        count = len(self.low)
        return ((self.high > self.low).roll(-number, 0).to(torch.uint8).argmax(0) + number) % count

    def only(self, rows: Tensor) -> _Boxes:
        """Keep only the boxes of the rows of these indices."""
        return _Boxes(self.low[..., rows, :], self.high[..., rows, :])

    def along(self, axis: Tensor) -> Range:
        """Return the lowest and highest ordinal of the value `axis`."""
        return self.low.gather(0, axis[None])[0], self.high.gather(0, axis[None])[0]

    @property
    def middle(self) -> _Boxes:
        """The point in the middle of each box."""
        middle = _between(self.low, self.high)
        return _Boxes(middle, middle)


def explained_together(rows: Rows) -> Searched:
    """Search each group for values of all latent stages that explain it together.

    In fp32 a gradient of a norm has freedom everywhere, so that an element which is an ulp off, or halves of a row with
    another c1, lie within their enclosures: without this search such a case is INCONCLUSIVE, and not FAILED.

    Every row is tried at likely points. Of those that no such point explains, as many as are evaluated at once are
    searched to the end, spread evenly; the others stay open.
    """
    count, found, near = len(rows.low), Searched.of(rows), _whole(rows)
    if not count:
        return found
    together = max(1, rows.at_once * count // rows.elements)
    for at in torch.arange(count, device=rows.low.device).split(together):
        part, box = _descended(rows.only(at))
        found.explained[at], found.found[at] = part.explained, part.found
        near.low[:, at], near.high[:, at] = box.low, box.high
    left = (~found.explained).any(-1).nonzero().reshape(-1)
    some = left[:: max(1, -(-len(left) // together))]
    found.open[left] |= ~found.explained[left]
    for at in some.split(together) if len(some) else ():
        part = _searched(replace(rows.only(at), tried=~found.explained[at]), near.only(at))
        found.explained[at], found.found[at], found.open[at] = part.explained, part.found, part.open
    found.explained.logical_or_(found.open)
    return found


def _descended(rows: Rows) -> tuple[Searched, _Boxes]:
    """Try likely points: the values that the kernel shows, then the middles of boxes that shrink as the elements say.

    Return the answers, and the boxes at the end, of which no side shrank any more.
    """
    answer, box = Searched.of(rows), _whole(rows)
    left = torch.arange(len(rows.low), device=rows.low.device)
    points = [box.middle]
    if rows.likely:
        shown = torch.maximum(torch.minimum(torch.stack(list(rows.likely)), box.high), box.low)
        points.insert(0, _Boxes(shown, shown))
    for point in points:
        if not bool(answer.explained.all()):
            answer.add(left, _fits(rows, point), point.low[0])
    end, stalls = box, torch.zeros_like(rows.low)
    for number in range(_MOST_STEPS):
        rest = (~answer.explained[left] & (stalls < len(box.low))).any(-1).nonzero().reshape(-1)
        if not len(rest):
            break
        if len(rest) < len(left):
            rows, left, box, stalls = rows.only(rest), left[rest], box.only(rest), stalls[rest]
        axis = box.axis(number)
        low, high = box.along(axis)
        first, last = _admitted(rows, box, axis)
        stalled = _distance(first, last) > _STALLED * _distance(low, high)
        stalls = torch.where(stalled, stalls + 1, 0)
        box = box.cut(axis, first, last)
        end = _Boxes(end.low.index_copy(-2, left, box.low), end.high.index_copy(-2, left, box.high))
        answer.add(left, _fits(rows, box.middle), box.middle.low[0])
    return answer, end


def _searched(rows: Rows, near: _Boxes) -> Searched:
    """Search to the end: boxes, `near` first, are refuted or cut until none is left or a point explains the group."""
    answer = Searched.of(rows)
    stack, depth = _stacked(_whole(rows), near)
    left = torch.arange(len(rows.low), device=rows.low.device)
    for number in range(_MOST_ROUNDS):
        rest = (~answer.explained[left] & (depth > 0)).any(-1).nonzero().reshape(-1)
        if not len(rest):
            return answer
        if len(rest) < len(left):
            rows, left, depth, stack = rows.only(rest), left[rest], depth[rest], stack.only(rest)
        top = (depth - 1).clamp(min=0).expand(1, stack.low.shape[1], -1, -1)  # of each group; any where there is none
        box = _Boxes(stack.low.gather(0, top)[0], stack.high.gather(0, top)[0])
        fits, at, first, second, kept, halved = _round(rows, box, number)
        answer.add(left, fits & (depth > 0), at)
        stack = _pushed(_pushed(stack, depth - 1, first), depth, second)
        depth = (depth - 1 + kept.to(torch.int64) + halved.to(torch.int64)).clamp(min=0)
    answer.open[left] = ~answer.explained[left] & (depth > 0)
    return answer


def _stacked(whole: _Boxes, near: _Boxes) -> tuple[_Boxes, Tensor]:
    """Cut a box into `near`, which lies on top of the stack, and the boxes beside it; count them per group."""
    stack, depth = _Boxes.stack(whole), torch.zeros_like(whole.low[0])
    for number in range(len(whole.low)):
        axis = torch.full_like(depth, number)
        (low, high), (first, last) = whole.along(axis), near.along(axis)
        for start, end in ((low, first - 1), (last + 1, high)):
            stack = _pushed(stack, depth, whole.cut(axis, start, end))
            depth = depth + (start <= end)
        whole = whole.cut(axis, first, last)
    return _pushed(stack, depth, whole), depth + 1


def _round(rows: Rows, box: _Boxes, number: int) -> tuple[Tensor, Tensor, _Boxes, _Boxes, Tensor, Tensor]:
    """Shrink, refute or cut a box of each group.

    Return a mask of the groups that a point explains, and its ordinal; two boxes, and for each a mask of the groups in
    which it is left.
    """
    axis = box.axis(number)
    low, high = box.along(axis)
    first, last = _admitted(rows, box, axis)
    inner = box.cut(axis, first, last)
    left, right = (box.cut(axis, low, (first - 1).clamp(min=low)), box.cut(axis, (last + 1).clamp(max=high), high))
    out = _refuted(rows, _Boxes.stack(inner.middle, left, inner, right))
    there = torch.stack([first > low, torch.ones_like(first, dtype=torch.bool), last < high]) & ~out[1:]
    least = torch.where(there[0], low, torch.where(there[1], first, last + 1))
    most = torch.where(there[2], high, torch.where(there[1], last, first - 1))
    kept = there.any(0)
    least, most = torch.where(kept, least, low), torch.where(kept, most, low)
    halved = kept & (_distance(least, most) > 0.5 * _distance(low, high)) & (most > least)
    center = _between(least, most).clamp(max=most - 1)
    shrunk = box.cut(axis, least, torch.where(halved, center, most))
    other = box.cut(axis, torch.where(halved, center + 1, most), most)
    single = kept & ~halved & (shrunk.low == shrunk.high).all(0)
    at = torch.where(single, shrunk.low[0], inner.middle.low[0])
    return ~out[0] | single, at, shrunk, other, kept & ~single, halved


def _admitted(rows: Rows, box: _Boxes, axis: Tensor) -> Range:
    """Return the ordinals of one value between which every element may be explained, by a line between both faces."""
    low, high = box.along(axis)
    ends = _ends(rows.unrounded, _Boxes.stack(box.cut(axis, low, low), box.cut(axis, high, high)))
    shares = [_shares(rows, name, below, above) for name, (below, above) in ends.items()]
    least = torch.stack([least for least, _ in shares]).amax(0)
    most = torch.stack([most for _, most in shares]).amin(0)
    middle = (least + most) / 2  # where nothing is left between them, that is where to cut
    least, most = torch.minimum(least, middle), torch.maximum(most, middle)
    start, end = from_ordinals(low, FP32), from_ordinals(high, FP32)
    first, last = (_position(start + (end - start) * share.clamp(0.0, 1.0)) for share in (least, most))
    return torch.maximum(first - 1, low).clamp(max=high), torch.minimum(last + 1, high).clamp(min=low)


def _shares(rows: Rows, name: str, below: Tensor, above: Tensor) -> Range:
    """Return the least and the largest share of the way from one face to the other that all elements of a stage admit.

    `below` and `above` are the ends of the elements at both faces, before they are rounded.
    """
    start, end = rows.rounding(name)
    doubt = _DOUBT * torch.stack([*below.abs(), *above.abs()]).amax(0)
    least, most = torch.zeros(end.shape[:-1]).to(end), torch.ones(end.shape[:-1]).to(end)
    for line, room in ((below, end + doubt - below[0]), (-above, doubt - start + above[0])):
        slope = line[1] - line[0]
        share = room / slope  # the line reaches the element there
        known = torch.isfinite(share) if rows.counted is None else torch.isfinite(share) & rows.counted
        most = torch.minimum(most, torch.where(known & (slope > 0), share, 1.0).amin(-1))
        least = torch.maximum(least, torch.where(known & (slope < 0), share, 0.0).amax(-1))
    return least, most


def _ends(rows: Rows, boxes: _Boxes) -> dict[str, Range]:
    """Evaluate the lowest and highest legal elements within boxes, [boxes, rows, groups, size]."""
    assert rows.also is not None
    low, high = from_ordinals(boxes.low, FP32), from_ordinals(boxes.high, FP32)
    below, above = low.clone(), high.clone()
    below[:, 1:] = (low + from_ordinals(boxes.low - 1, FP32))[:, 1:] / 2
    above[:, 1:] = (high + from_ordinals(boxes.high + 1, FP32))[:, 1:] / 2
    parts = torch.stack([low, low, below, above])
    return rows.forward({name: Enclosure(parts[:, :, i]) for i, name in enumerate((rows.stage, *rows.also))})


def _refuted(rows: Rows, boxes: _Boxes) -> Tensor:
    """Return a mask of the boxes [boxes, rows, groups] that hold no values which explain all elements."""
    refuted = torch.zeros_like(boxes.low[:, 0], dtype=torch.bool)
    for name, (lo, hi) in _ends(rows, boxes).items():
        wrong = (rows.seen[name] < lo) | (rows.seen[name] > hi)
        refuted |= (wrong if rows.counted is None else wrong & rows.counted).any(-1)
    return refuted


def _fits(rows: Rows, point: _Boxes) -> Tensor:
    return ~_refuted(rows, _Boxes.stack(point))[0] & rows.tried


def _whole(rows: Rows) -> _Boxes:
    """Return the box of all latent values that each group may have."""
    assert rows.also is not None
    lows, highs = zip((rows.low, rows.high), *rows.also.values(), strict=True)
    return _Boxes(torch.stack(lows), torch.stack(highs))


def _pushed(stack: _Boxes, depth: Tensor, box: _Boxes) -> _Boxes:
    """Put a box at `depth` of each group's stack, over whatever was there."""
    if len(stack.low) <= int(depth.max()):
        stack = _Boxes(*(torch.cat([t, t[-1:]]) for t in (stack.low, stack.high)))
    at = depth.clamp(min=0).expand(1, stack.low.shape[1], -1, -1)
    return _Boxes(stack.low.scatter(0, at, box.low[None]), stack.high.scatter(0, at, box.high[None]))


def _between(low: Tensor, high: Tensor) -> Tensor:
    """Return the ordinal of the number halfway between two."""
    middle = _position((from_ordinals(low, FP32) + from_ordinals(high, FP32)) / 2)
    return torch.minimum(torch.maximum(middle, low), high)


def _distance(low: Tensor, high: Tensor) -> Tensor:
    return from_ordinals(high, FP32) - from_ordinals(low, FP32)


def _position(values: Tensor) -> Tensor:
    return ordinals(values.to(torch.float32).to(torch.float64), FP32)


# Arbitrary: more at once are fewer rounds, each with more elements; fewer, the other way round.
_MOST_CANDIDATES = 31


def explained_groups(rows: Rows) -> Searched:
    """Search each group for a candidate that explains it, or for several where there are several latent stages."""
    if rows.also is not None:
        return explained_together(rows)

    def forward(positions: Tensor) -> dict[str, Range]:
        return rows.forward({rows.stage: from_ordinals(positions, FP32)})

    # The value that a kernel shows, or the middle one, explains most groups of rounded results.
    found = rows.low + (rows.high - rows.low) // 2
    if rows.likely:
        found = torch.maximum(torch.minimum(rows.likely[0], rows.high), rows.low)
    explained = torch.ones_like(rows.tried)
    for name, (lo, hi) in forward(found[None]).items() if len(found) else ():
        wrong = (rows.seen[name] < lo[0]) | (rows.seen[name] > hi[0])
        explained &= ~(wrong if rows.counted is None else wrong & rows.counted).any(-1)
    explained |= ~rows.tried
    left = (~explained).any(-1).nonzero().reshape(-1)
    rows = replace(rows, tried=~explained).only(left)
    slopes: dict[str, list[Tensor]] = {}
    if len(left):
        # The sign of the change of both ends of each element as the value grows, 0 where nothing changes; an end that
        # depends on no value is one tensor for both.
        ends = forward(torch.stack([rows.low, rows.high]))
        for name, pair in ends.items():
            slopes[name] = [(end[-1] > end[0]).to(torch.int8) - (end[-1] < end[0]).to(torch.int8) for end in pair]
    while len(left):
        low, high = rows.low, rows.high
        count = max(1, min(_MOST_CANDIDATES, rows.at_once // rows.elements))
        steps = torch.arange(1, count + 1, device=low.device).reshape(-1, 1, 1)
        at = low + ((high - low) * steps) // (count + 1)
        # Which candidates, [candidates, rows, groups], some element asks to be larger, and smaller.
        up, down = torch.zeros_like(at, dtype=torch.bool), torch.zeros_like(at, dtype=torch.bool)
        for name, (lo, hi) in forward(at).items():
            y, (lo_slope, hi_slope) = rows.seen[name], slopes[name]
            # Where the end does not move, no candidate changes it: no group with such an element is explained.
            wrongs = (wrong if rows.counted is None else wrong & rows.counted for wrong in (y < lo, y > hi))
            too_low, too_high = wrongs
            up |= ((too_high & (hi_slope >= 0)) | (too_low & (lo_slope <= 0))).any(-1)
            down |= ((too_high & (hi_slope <= 0)) | (too_low & (lo_slope >= 0))).any(-1)
        fits = ~up & ~down
        fit = fits.any(0) & rows.tried
        explained[left] |= fit
        candidate = at.gather(0, fits.to(torch.uint8).argmax(0, keepdim=True))[0]
        found[left] = torch.where(fit, candidate, found[left])
        higher = torch.maximum(low, torch.where(up, at + 1, low).amax(0))
        lower = torch.minimum(high, torch.where(down, at - 1, high).amin(0))
        unsure = rows.tried & ~fit & ~(up & down).any(0) & (higher <= lower)
        rest = unsure.any(-1).nonzero().reshape(-1)
        low, high = torch.where(unsure, higher, low), torch.where(unsure, lower, high)
        rows, left = replace(rows, low=low, high=high, tried=unsure).only(rest), left[rest]
        slopes = {name: [end[rest] for end in pair] for name, pair in slopes.items()}
    return Searched(explained, found, torch.zeros_like(explained))
