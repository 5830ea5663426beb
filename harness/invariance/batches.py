"""The rows of a case in another order, and with further rows before or after them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lastbit.invariance.basis import Basis, difference
from lastbit.invariance.launches import Launches, RowsCall, joined, picked
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import Tensors, same

# Arbitrary: two orders exchange most pairs of rows; each one is a call more.
_ORDERS = 2  # drawn ones
_ALIGNED = 16  # rows: at this multiple, tiles of rows and vector loads are whole


def _permutation(basis: Basis, pairs: Pairs) -> None:
    launches, random = Launches(basis, pairs), basis.random
    rows = list(range(launches.count))
    launches.compare(rows[::-1], "the same rows from last to first")
    for number in range(1, _ORDERS + 1):
        launches.compare(random.sample(rows, len(rows)), f"the same rows in drawn order {number}")


def _padding(basis: Basis, pairs: Pairs) -> None:
    launches = Launches(basis, pairs, least=1)
    changed: list[str] = []
    summed: set[str] = set()
    places = list(_places(-launches.count % _ALIGNED))
    for after, further in places if basis.thorough else places[:1]:
        found = _found(launches, further, after=after)
        changed += _explained(found)
        if "zeros" in found:
            summed |= _changed_sums(launches, found["zeros"][0])
    pairs.where = f"changes with {', '.join(dict.fromkeys(changed))}" if changed else ""
    if summed:
        pairs.notes.append(f"{', '.join(sorted(summed))}: other bits with rows of zeros, which add nothing to a sum")


def _found(launches: Launches, further: int, *, after: bool) -> dict[str, tuple[RowsCall, bool]]:
    """Map the contents of the further rows to the launch with them, and to whether it changed the rows of the case."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of arithmetic on infinities, which is done on purpose
        for what, padded in _padded(launches, further):
            if (launch := _with(launches, what, padded, after=after)) is not None:
                found[what] = launch, bool(launches.compared(launch, range(launches.count)))
    return found


def _with(launches: Launches, what: str, padded: Tensors, *, after: bool) -> RowsCall | None:
    """Launch the rows of the case together with further rows, and keep only the rows of the case."""
    further, count = len(next(iter(padded.values()))), launches.count
    rows = joined([launches.tensors, padded] if after else [padded, launches.tensors])
    further_rows = "a row" if further == 1 else f"{further} rows"
    launch = launches.of(rows, f"{further_rows} of {what} {'after' if after else 'before'} the same rows")
    if launch is None:
        return None
    start = 0 if after else further
    return replace(launch, rows={name: tensor[start : start + count] for name, tensor in launch.rows.items()})


def _explained(found: Mapping[str, tuple[RowsCall, bool]]) -> list[str]:
    """Name the cause of changed bits, from launches of one size: the number of rows or the further rows' contents."""
    broken = [what for what, (_, changed) in found.items() if changed]
    launches = [launch for launch, _ in found.values()]
    if broken and len(broken) == len(found) and all(_same_rows(launches[0], other) for other in launches):
        return ["the number of rows"]
    return [f"what further rows hold ({', '.join(broken)})"] if broken else []


def _places(to_aligned: int) -> Iterator[tuple[bool, int]]:
    """Yield whether further rows come after the rows of the case, and how many."""
    yield from ((True, 1), (False, 1))
    if to_aligned > 1:
        yield True, to_aligned


def _padded(launches: Launches, further: int) -> Iterator[tuple[str, Tensors]]:
    """Yield the contents of further rows in words, and these rows of each input that has rows."""
    shapes = {name: picked(tensor, [0] * further) for name, tensor in launches.tensors.items()}
    yield "zeros", {name: torch.zeros_like(tensor) for name, tensor in shapes.items()}
    last = [launches.count - 1] * further
    yield "copies of the last one", {name: picked(tensor, last) for name, tensor in launches.tensors.items()}
    floats = {name: tensor for name, tensor in shapes.items() if tensor.is_floating_point()}
    for what in ("NaN", "infinities", "the largest numbers") if floats else ():
        filled = {name: _filled(tensor, what) for name, tensor in floats.items()}
        yield what, {**{name: torch.zeros_like(tensor) for name, tensor in shapes.items()}, **filled}


def _filled(like: Tensor, what: str) -> Tensor:
    """Fill a tensor with one value; with the largest finite number where its dtype lacks infinity."""
    largest = torch.finfo(like.dtype).max
    value = {"NaN": math.nan, "infinities": math.inf}.get(what, largest)
    filled = torch.full(like.shape, value, dtype=torch.float64, device=like.device).to(like.dtype)
    lacks = what == "infinities" and not filled.double().isinf().all()
    return torch.full_like(filled.double(), largest).to(like.dtype) if lacks else filled


def _same_rows(a: RowsCall, b: RowsCall) -> bool:
    return difference({name: (tensor, b.rows[name]) for name, tensor in a.rows.items()}) is None


def _changed_sums(launches: Launches, launch: RowsCall) -> set[str]:
    """Name the results without rows that rows of zeros changed.

    If they are sums over rows, such rows add nothing in exact arithmetic, but a mean or a count may be meant. So this
    is no pair that must be equal.
    """
    own, other = launches.pairs.without_left_out(same(launches.basis.results, launch.results)), launch.results
    without = {
        name: pair for name, pair in own.items() if name not in launch.rows and pair[0].shape == other[name].shape
    }
    return {name for name, pair in without.items() if difference({name: pair}) is not None}


PERMUTATION = Property("permutation", "rows in another order have the same bits", _permutation)
PADDING = Property("padding", "further rows, whatever they hold, change no bit of the others", _padding)
