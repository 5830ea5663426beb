"""What the wrong elements of a stage have in common: their value, and their places along each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.inputs.poison import held_before
from lastbit.judging.observation import Observation
from lastbit.numerics import remembering
from lastbit.result import CaseResult

# Arbitrary: each one is a comparison with the elements, and later ones are seldom meant.
ALLOCATIONS = 32
"""Of a call, whose filling is looked for in elements that nothing wrote."""
SEVERAL = 3
"""Elements that have something in common; two have it too often."""

_DENSE = 0.75  # share of the indices of a pattern that have a wrong element: a right one among four is chance
# Arbitrary: a larger part is not worth a sentence, as the rest is as easy to name.
_PART = 0.9  # of an axis, the largest part that counts as one
# Up to two warps any period; larger ones are of tiles, which are powers of two.
_PERIODS = 65  # below, every period is tried, and from there on powers of two
_CHANCE = 1e-3  # that as many wrong elements, thrown at random, keep to a region as small, in one of _PATTERNS
# About how many patterns are tried of an axis, which makes chance likelier by that factor.
_PATTERNS = 100


@remembering()
def in_common(seen: Observation, result: CaseResult) -> tuple[str, ...]:
    """Say what the wrong elements of the first stage that fails have in common; nothing if only a formula fails."""
    failing = result.failing_stage
    if failing is None or failing.name not in seen.actual:
        return ()
    order, stage = list(seen.problem.trace.stages), failing.name
    earlier = order[: order.index(stage)] if failing.isolated.outside else []
    trace = seen.problem.evaluate({name: seen.actual[name] for name in earlier if name in seen.actual})
    expected = seen.as_given(stage, trace.stages[stage], result=stage in trace.results)
    mask = expected.outside(seen.actual[stage])
    return (*_held(seen.actual[stage], expected.value, mask), *places(mask)) if bool(mask.any()) else ()


def _held(stored: Tensor, value: Tensor, mask: Tensor) -> Iterator[str]:
    """Say what all wrong elements are: unwritten memory, NaN, zero, infinite, or one number."""
    at, count = stored[mask].to(torch.float64), int(mask.sum())
    several = count >= SEVERAL
    all_are = "The one wrong element is" if count == 1 else f"All {count:,} wrong elements are"
    if several and stored.element_size() > 1 and bool(held_before(stored, ALLOCATIONS)[mask].all()):
        yield f"{all_are} what memory was filled with before the kernel got it: they were never written."
    elif bool(torch.isnan(at).all()):
        yield f"{all_are} NaN."
    elif bool(torch.isnan(value[mask].to(torch.float64)).all()):
        yield f"{all_are} finite or infinite, and must be NaN."
    elif bool((at == 0).all()):
        yield f"{all_are} 0."
    elif several and bool((at == at[0]).all()):
        yield f"{all_are} the same number, {float(at[0]):.9g}."
    elif bool(torch.isinf(at).all()):
        yield f"{all_are} infinite."


@dataclass(frozen=True)
class Unit:
    """Name of an index in singular and plural, and words that follow the numbers."""

    one: str
    several: str
    of: str = ""


def places(mask: Tensor) -> Iterator[str]:
    """Describe where the wrong elements are along each axis, if that is no chance."""
    count = int(mask.sum())
    for axis, size in enumerate(mask.shape) if count >= SEVERAL else ():
        others = [other for other in range(mask.ndim) if other != axis]
        at = (mask.any(others) if others else mask).nonzero().reshape(-1).tolist()
        if len(at) == size or (pattern := pattern_of(at, size, _unit(mask, axis))) is None:
            continue
        inside = len(pattern[1]) * mask.numel() // size
        chance = count * math.log(inside / mask.numel()) + math.log(_PATTERNS)
        if count >= _DENSE * inside or chance < math.log(_CHANCE):
            share = f"all of {inside:,}" if count == inside else f"{count:,} of {inside:,}"
            yield f"{pattern[0]}, in {share} elements."


def _unit(mask: Tensor, axis: int) -> Unit:
    """Return the name of an index along an axis."""
    if mask.ndim == 1:
        return Unit("element", "elements")
    if axis == mask.ndim - 1:
        return Unit("column", "columns")
    return Unit("row", "rows") if mask.ndim == 2 else Unit("index", "indices", f" of dimension {axis}")


def pattern_of(at: Sequence[int], size: int, unit: Unit) -> tuple[str, Sequence[int]] | None:
    """Describe the pattern of the indices `at` among `size`, with all indices that fit it; None if there is none."""
    first, last = at[0], at[-1]
    if len(at) == 1:
        end = ", the last," if first == size - 1 else ", the first," if first == 0 else ""
        return f"Only {unit.one} {first}{unit.of or f' of {size}'}{end} is wrong", at
    span = range(first, last + 1)
    if len(at) >= _DENSE * len(span) and len(span) <= _PART * size:
        which = "last " if last == size - 1 else "first " if first == 0 else ""
        edge = last + 1 if which == "first " else first
        power = edge & -edge
        multiple = f"up to a multiple of {power}" if which == "first " else f"from a multiple of {power} on"
        to = f", {multiple}" if power >= 4 else ""
        many = f"the {which}{len(span)}" if which else f"{len(span)} of {size}"
        return f"Only {unit.several} {first} to {last}{unit.of} are wrong: {many}{to}", span
    powers = (1 << n for n in range(size.bit_length()))
    repeated = []
    for step in sorted({step for step in (*range(2, _PERIODS), *powers) if 1 < step <= size // 2}):
        start, stop = min(i % step for i in at), max(i % step for i in at) + 1
        if stop - start <= _DENSE * step:
            repeated.append(((stop - start) / step, step, start, stop))
    for _, step, start, stop in sorted(repeated) if len(at) > SEVERAL else ():
        indices = [i for i in range(size) if start <= i % step < stop]
        if len(at) >= _DENSE * len(indices):
            return f"Only {_repeats(step, start, stop, unit)} are wrong", indices
    listed = f"{', '.join(map(str, at[:-1]))} and {last}"
    return (f"Only {unit.several} {listed}{unit.of or f' of {size}'} are wrong", at) if len(at) <= SEVERAL else None


def _repeats(step: int, start: int, stop: int, unit: Unit) -> str:
    if stop - start == 1:
        return f"{unit.several} {start}, {start + step}, {start + 2 * step} and so on{unit.of}, every {_ordinal(step)},"
    where = f"the last {step - start}" if stop == step else f"the first {stop}" if start == 0 else f"{stop - start}"
    which = "" if start == 0 or stop == step else f", from its {_ordinal(start + 1)} on,"
    return f"{where} of every {step} {unit.several}{unit.of}{which}"


def _ordinal(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
