"""Causes of changed bits in a row: numbers of rows, found exactly, places in a launch, and the other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from lastbit.inputs.bits import bits_with_one_nan
from lastbit.invariance.launches import Launches


def sizes_up_to(count: int, device: torch.device, *, few: bool = False) -> list[int]:
    """List numbers of rows below `count`, in order: 2^k and its neighbours, and multiples of the multiprocessors.

    A few are the powers, 3, all rows but one, and the number of processors with the next one.
    """
    powers = [1 << k for k in range(count.bit_length())]
    multiples = [factor * own for factor in (1, 2, 4, 8)] if (own := processors(device)) else []
    if few:
        near = {*powers, 3, count - 1, *(size + step for size in multiples[:1] for step in (0, 1))}
    else:
        near = {size + step for size in [*powers, *multiples, count] for step in (-1, 0, 1)}
    return sorted(size for size in near if 0 < size < count)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


# Where two ways of summing agree in half of all rows, all sixteen agree one time in 65,536.
ROWS = 16
"""Rows whose bits are followed from size to size: one row may have the same bits in two ways of summing."""

_COPIED = 4  # of these, rows that are launched as copies
# Arbitrary: each takes as many launches as the rows have bits.
_FOUND = 4  # thresholds that are found by halving
# Block sizes of kernels: powers of two up to the rows of the largest tile.
_DIVISORS = (2, 4, 8, 16, 32, 64, 128, 256)

Bits = tuple[bytes, ...]
"""The bits of a few rows."""


@dataclass(frozen=True)
class Profile:
    """Copies of a few rows in launches of one size: one launch for each of the rows.

    Attributes:
        size: how many copies.
        first: the bits at the first place, for each row.
        other: places at which some row has other bits than at most places, in order.
        own: copies, as many as the case has rows, have the bits that the row has among all rows.
    """

    size: int
    first: Bits
    other: tuple[int, ...]
    own: bool = True


Following = Callable[[int], Bits | None]
"""Number of rows → the bits of a few rows in a launch of so many; None if the kernel does not take it."""


def of(launches: Launches, rows: Sequence[int]) -> tuple[str, int]:
    """Find the causes of changed bits in rows that are known to change: numbers of rows, places, other rows.

    Returns them in words that follow a comma or a colon, empty if nothing was found, and the largest number of rows
    known in whose launches rows have other bits than in that of all; 0 if none.
    """
    sizes = [*sizes_up_to(launches.count, launches.basis.device), launches.count]
    profile = cache(partial(_profile, launches, rows[:_COPIED]))
    known = [one for size in sizes if (one := profile(size)) is not None]
    if not known:
        return "", 0
    placed = [_places(one, launches.count) for one in known if one.other]
    alone = known[-1].own and not placed  # rows do without each other: several can be followed in a launch

    @cache
    def following(size: int) -> Bits | None:
        if alone:
            return _together(launches, rows, size)
        one = profile(size)
        return None if one is None else one.first

    by_size, counted = _by_size({one.size: bits for one in known if (bits := following(one.size))}, following)
    others = ["changes with what the other rows hold"] if not known[-1].own else []
    return ", and ".join([*others, *by_size, *placed[-1:]]), counted


def _by_size(first: dict[int, Bits], following: Following) -> tuple[list[str], int]:
    """Describe how bits change with the size of a launch; return also the last size before that of all rows."""
    counted = max((size for size in first if first[size] != first[max(first)]), default=0)
    if divisor := _divisor(first):
        return [f"changes between multiples of {divisor} rows and other numbers of rows"], counted
    edges = [(a, b) for a, b in pairwise(first) if first[a] != first[b]]
    chosen = edges if len(edges) <= _FOUND else [*edges[: _FOUND - 1], edges[-1]]
    found = [low for a, b in chosen if (low := _halved(a, b, following))]
    if not found:
        return [], counted
    listed = ", ".join(f"{low} and {low + 1}" for low in found)
    more = f", and {len(edges) - len(found)} more times" if len(edges) > len(found) else ""
    return [f"changes between {listed} rows{more}"], max(counted, found[-1])


def _profile(launches: Launches, rows: Sequence[int], size: int) -> Profile | None:
    first, other, own = list[bytes](), set[int](), True
    for row in rows:
        copies = [row] * size
        launch = launches.launch(copies, f"{size} copies of row {row}")
        if launch is None:
            return None
        compared = launches.pairs.without_left_out(launches.matched(launch.rows, copies)).values()
        first.append(_bytes([b[0] for _, b in compared]))
        other |= {place for _, b in compared for place in _unlike_most(bits_with_one_nan(b).flatten(1))}
        if size == launches.count:
            own = own and all(torch.equal(bits_with_one_nan(a)[row], bits_with_one_nan(b)[row]) for a, b in compared)
    return Profile(size, tuple(first), tuple(sorted(other)), own)


def _together(launches: Launches, rows: Sequence[int], size: int) -> Bits | None:
    """Return the bits of rows in launches of `size` rows, each filled with as many of them as fit, repeated evenly."""
    found: list[bytes] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        filled = [part[place % len(part)] for place in range(size)]
        launch = launches.launch(filled, f"{size} rows that change")
        if launch is None:
            return None
        compared = launches.pairs.without_left_out(launches.matched(launch.rows, filled)).values()
        found += [_bytes([b[place] for _, b in compared]) for place in range(len(part))]
    return tuple(found)


def _bytes(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(bits_with_one_nan(tensor).cpu().contiguous().numpy().tobytes() for tensor in tensors)


def _unlike_most(rows: Tensor) -> list[int]:
    """Find places whose bits differ from those of most places, if at most two kinds of bits are common."""
    changed = (rows != rows[len(rows) // 2]).any(-1)
    if 2 * int(changed.sum()) > len(rows):  # the place in the middle is one of a few
        changed = (rows != rows[int(changed.int().argmax())]).any(-1)
    places: list[int] = changed.nonzero().flatten().tolist()
    return places


def _halved(low: int, high: int, following: Following) -> int:
    """Bisect to a number of rows with the bits of `low` whose successor has others; 0 if launches are refused."""
    start = following(low)
    while high - low > 1:
        middle = (low + high) // 2
        if (found := following(middle)) is None:
            return 0
        low, high = (middle, high) if found == start else (low, middle)
    return low


def _divisor(first: dict[int, Bits]) -> int:
    """Find a divisor whose multiples share some bits while all other numbers of rows share others; 0 if none."""
    for divisor in _DIVISORS:
        multiples = [b for size, b in first.items() if size % divisor == 0]
        others = [b for size, b in first.items() if size % divisor]
        classes = {frozenset(multiples), frozenset(others)}
        if min(len(multiples), len(others)) > 1 and len(classes) == 2 and all(len(c) == 1 for c in classes):
            return divisor
    return 0


def _places(profile: Profile, count: int) -> str:
    """Describe the places of a launch at which rows have other bits than at most places."""
    other, size = profile.other, profile.size
    launch = "" if size == count else f" of {size}"
    if other == tuple(range(len(other))):
        which = "the first row" if len(other) == 1 else f"the first {len(other)} rows"
    elif other == tuple(range(size - len(other), size)):
        which = "the last row" if len(other) == 1 else f"the last {len(other)} rows"
    else:
        which = f"{len(other)} of the rows"
    return f"changes with the place of a row in its launch{launch}: {which}"
