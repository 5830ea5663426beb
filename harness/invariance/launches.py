"""The rows of a case in launches of some of them, in any order, and causes of changed bits: numbers of rows, found
exactly, places in a launch, and the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from lastbit.inputs import Inputs, bits_of
from lastbit.inputs.bits import bits_with_one_nan
from lastbit.invariance.property import Basis, Pairs, contiguous, difference, line_of
from lastbit.relations import Matched, NotApplicable, Related, Tensors

Numbers = range | Sequence[int]
"""Rows by their numbers in the case; a row may occur several times."""


@dataclass(frozen=True, eq=False)
class RowsCall:
    """A call on some rows.

    Attributes:
        what: the call in words.
        inputs, results: of the call.
        rows: result → its rows, [rows, …], of those results that have the rows of the inputs.
    """

    what: str
    inputs: Inputs
    results: Tensors
    rows: Tensors


class Launches:
    """Launches of some of the rows of a case.

    All launches are of contiguous tensors with one leading dimension, as far as the kernel takes that, and so is the
    one of all rows in order that others are compared with.

    Attributes:
        basis: that launch.
        pairs: what was found so far.
        leading: the dimensions that index the rows.
        count: how many rows there are.
        results: result → its rows, [rows, …].
    """

    def __init__(self, basis: Basis, pairs: Pairs, least: int = 2) -> None:
        tensors, names = basis.inputs.tensors, [n for n in basis.op.inputs if n in basis.op.rows]
        main = next((tensors[n] for n in names if n in tensors), None)
        if main is None:
            raise NotApplicable(f"{basis.op.name} has no inputs whose rows are independent")
        self.leading = tuple(main.shape[:-1])
        self.count = math.prod(self.leading)
        if self.count < least or not main.ndim > 1:
            raise NotApplicable(f"the case has {self.count if main.ndim > 1 else 'no'} rows; {least} are needed")
        self.pairs, self.basis = pairs, contiguous(basis)
        self._outer: tuple[int, ...] = ()
        leads, tensors = len(self.leading), self.basis.inputs.tensors
        self.tensors = {n: tensors[n].reshape(self.count, *tensors[n].shape[leads:]) for n in names if n in tensors}
        results = {n: t for n, t in self.basis.results.items() if t.shape[:leads] == self.leading}
        self.results = {n: t.reshape(self.count, *t.shape[leads:]) for n, t in results.items()}
        # Results such as sums over rows may have a shape as if they had rows: the number of rows tells.
        size = next((n for n in (self.count - 1, self.count // 2) if 0 < n < self.count), 0)
        other = self.launch(range(size), f"the first {size} rows") if size and self.results else None
        if other is not None:
            kept = {n: t for n, t in self.results.items() if other.results[n].shape[:1] == (size,)}
            wrong = len(kept) < len(self.results) and not self.basis.allows(other.inputs, other.results)
            self.results = self.results if wrong else kept  # a kernel may return another number of rows than it must
        if not self.results:
            raise NotApplicable("no result has the rows of the inputs")
        # The launch of all rows becomes one with a single leading dimension, or ones before it.
        for self._outer in ((), (1,) * (leads - 1)) if leads > 1 else ():
            flat = self.launch(range(self.count), f"the same rows as {[*self._outer, self.count]}")
            if flat is not None:
                line = line_of(flat.inputs, self.basis.device) or f"{self.basis.case}, as {flat.what}"
                self.basis = replace(self.basis, inputs=flat.inputs, results=flat.results, line=line)
                self.results = dict(flat.rows)
                break

    def launch(self, rows: Numbers, what: str, leading: tuple[int, ...] | None = None) -> RowsCall | None:
        """Call the kernel on these rows, in these leading dimensions; None, with a note, if it declines the call."""
        return self.of({name: picked(tensor, rows) for name, tensor in self.tensors.items()}, what, leading)

    def of(self, rows: Tensors, what: str, leading: tuple[int, ...] | None = None) -> RowsCall | None:
        """Call the kernel on any rows, also on rows that the case lacks: input name → tensor [rows, …]."""
        count = len(next(iter(rows.values())))
        shape = (*self._outer, count) if leading is None else leading
        shaped = {name: tensor.reshape(*shape, *tensor.shape[1:]) for name, tensor in rows.items()}
        inputs = self.basis.related(Related(what, {**self.basis.inputs.tensors, **shaped}))
        results = self.pairs.called(self.basis, inputs, what)
        if results is None:
            return None
        found = {}
        for name, result in ((name, results[name]) for name in self.results if name in results):
            own = self.results[name].shape[1:]
            fits = tuple(result.shape) == (*shape, *own)
            found[name] = result.reshape(count, *own) if fits else result
        return RowsCall(what, inputs, results, found)

    def compare(self, rows: Numbers, what: str, leading: tuple[int, ...] | None = None) -> list[int] | None:
        """Return the rows of the case with other bits in a launch of these rows; None if the kernel declines it."""
        launch = self.launch(rows, what, leading)
        return None if launch is None else self.compared(launch, rows)

    def compared(self, launch: RowsCall, rows: Numbers, *, shown: bool = False) -> list[int]:
        """Count a launch of these rows, and give those which have other bits than in the launch of all rows."""
        matched = self.matched(launch.rows, rows)
        second = launch.what
        found = difference(self.pairs.without_left_out(matched))
        if found is not None and self.pairs.asks(found, self.basis, shown=shown):
            second = line_of(launch.inputs, self.basis.device) or second
        shown = shown and second != launch.what
        if self.pairs.compare(self.basis, second, matched, launch.inputs, launch.results, shown=shown):
            return []
        return changed_rows(matched, rows)

    def matched(self, found: Tensors, rows: Numbers) -> Matched:
        """Pair the rows of the launch of all rows with those of another: [rows, …] or, of vectors, [rows, 1]."""
        return {name: (_wide(picked(self.results[name], rows)), _wide(own)) for name, own in found.items()}


def changed_rows(matched: Matched, rows: Numbers) -> list[int]:
    """Return the rows that differ in a result; all if shapes or dtypes differ."""
    found: set[int] = set()
    for a, b in matched.values():
        if a.shape != b.shape or a.dtype != b.dtype:
            return list(rows)
        changed = (bits_with_one_nan(a) != bits_with_one_nan(b)).flatten(1).any(-1)
        found |= set(changed.nonzero().flatten().tolist())
    return [rows[place] for place in sorted(found) if place < len(rows)]


def picked(tensor: Tensor, rows: Numbers) -> Tensor:
    """Select rows of a tensor [rows, …]; a view where they follow each other."""
    if isinstance(rows, range) and rows.step == 1:
        return tensor[rows.start : rows.stop]
    index = torch.tensor(list(rows), device=tensor.device)
    return bits_of(tensor)[index].view(tensor.dtype)  # not all dtypes can be indexed, their bits can


def joined(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate the rows of several launches."""
    first = parts[0]
    return {n: torch.cat([bits_of(part[n]) for part in parts]).view(tensor.dtype) for n, tensor in first.items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor[:, None] if tensor.ndim == 1 else tensor


# Causes of changed bits


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
FOLLOWED = 16
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


def causes_of(launches: Launches, rows: Sequence[int]) -> tuple[str, int]:
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

    causes = ["changes with what the other rows hold"] if not known[-1].own else []
    first = {one.size: bits for one in known if (bits := following(one.size))}
    counted = max((size for size in first if first[size] != first[max(first)]), default=0)
    if divisor := _divisor(first):
        causes.append(f"changes between multiples of {divisor} rows and other numbers of rows")
    else:
        edges = [(a, b) for a, b in pairwise(first) if first[a] != first[b]]
        chosen = edges if len(edges) <= _FOUND else [*edges[: _FOUND - 1], edges[-1]]
        if found := [low for a, b in chosen if (low := _halved(a, b, following))]:
            listed = ", ".join(f"{low} and {low + 1}" for low in found)
            more = f", and {len(edges) - len(found)} more times" if len(edges) > len(found) else ""
            causes.append(f"changes between {listed} rows{more}")
            counted = max(counted, found[-1])
    return ", and ".join([*causes, *placed[-1:]]), counted


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
