"""Rows alone, in batches, at any place in them, in other orders, beside other rows: whether their bits change, and from
how many rows on.

Two things are done apart. *Searching* launches rows of the case until some have other bits than in the launch of all
rows: a change may show in one row of thousands, so that sizes whose launches cover all rows come before random ones.
*Explaining* then launches copies of such a row: one launch of n copies shows its bits at n rows and at each place.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from lastbit.inputs import Inputs
from lastbit.invariance.launches import (
    FOLLOWED,
    Launches,
    Numbers,
    RowsCall,
    causes_of,
    joined,
    picked,
    sizes_up_to,
)
from lastbit.invariance.property import Basis, Broken, Pairs, Property, difference
from lastbit.relations import Independent, Tensors, same

# Arbitrary: a bound on the time of `verify`; `lastbit invariance` has time for all rows.
_LAUNCHES = 2  # of one size, in `lastbit verify`
_MANY_LAUNCHES = 64  # they cover all of 4,096 rows from 64 rows on
_PLACES, _MANY_PLACES = 2, 16  # at which each row is
# Arbitrary: each row is room in a launch.
_KNOWN = 64  # rows with a change that are launched together at further sizes
# Arbitrary: a bound on the time for one number of a sentence.
_TO_COUNT = 64  # launches in which the changed rows are counted, in `lastbit verify`
# Arbitrary, as _TO_COUNT.
_MANY_TO_COUNT = 1024


def _rows(basis: Basis, pairs: Pairs) -> None:
    """Compare the rows of the case in launches of fewer rows, at other places and in other shapes."""
    launches = Launches(basis, pairs)
    search = RowSearch(launches, basis.random, _MANY_LAUNCHES if basis.thorough else _LAUNCHES)
    for size in reversed(sizes_up_to(launches.count, basis.device, few=not basis.thorough)):
        search.size(size)
    search.places()
    reshaped = search.shapes()
    if not search.sensitive:
        pairs.where = reshaped
        return
    sentence, counted = causes_of(launches, search.representatives())
    pairs.where = ", and ".join(filter(None, [sentence, reshaped]))
    if counted:
        _count(launches, counted, _MANY_TO_COUNT if basis.thorough else _TO_COUNT)


class RowSearch:
    """Looks for rows whose bits change.

    Attributes:
        sensitive: rows with a change → the size of the launch in which it was first seen.
    """

    def __init__(self, launches: Launches, random: Random, most: int) -> None:
        self._launches, self._random, self._most = launches, random, most
        self.sensitive: dict[int, int] = {}

    def size(self, size: int) -> None:
        """Launch `size` rows, all rows in turn if that takes few launches; then those that have changed elsewhere."""
        most = self._most if not self.sensitive else min(self._most, _LAUNCHES)
        needed, last = -(-self._launches.count // size), self._launches.count - size
        if needed <= most:
            starts = [min(place * size, last) for place in range(needed)]
        else:  # row 0, and one drawn from each part, so that launches of several sizes cover other rows
            parts = [place * last // (most - 1) for place in range(most)]
            starts = [0, *(self._random.randint(low, high) for low, high in pairwise(parts))]
        for start in dict.fromkeys(starts):
            self._seen(range(start, start + size), _in_words(start, size))
        if known := list(self.sensitive)[:_KNOWN]:
            rows = [known[place % len(known)] for place in range(size)]
            self._seen(rows, f"{size} rows that change with other numbers of rows, in a launch of their own")

    def places(self) -> None:
        """Launch all rows, each at another place.

        If places are special that only a few rows show, these rows get there: of 16 launches at equal distances, one
        has a given row among the special places if these are a sixteenth of all, one after the other.
        """
        count, parts = self._launches.count, _MANY_PLACES if self._launches.basis.thorough else _PLACES
        for step in sorted({1, *(part * count // parts for part in range(1, parts))} - {0}):
            rows = [(place + step) % count for place in range(count)]
            self._seen(rows, f"the same rows, {step} places further to the front")

    def shapes(self) -> str:
        """Launch all rows under other leading dimensions; return in words what changes.

        Not every kernel takes more than two dimensions: one that only looks at them is not asked for nothing.
        """
        launches = self._launches
        basis, count, own = launches.basis, launches.count, launches.leading
        if len(own) == 1 and not basis.thorough and ROWS.name not in basis.kernel.invariant:
            return ""
        shapes = [own] if len(own) > 1 else []
        shapes += [(2, count // 2) if count % 2 == 0 else (1, count)]
        changed = False
        for shape in shapes:
            what = f"the same rows as [{', '.join(map(str, shape))}, …]"
            try:
                launch = launches.launch(range(count), what, shape)
            except Exception as error:  # of the kernel: rows of other dimensions are nothing that every kernel takes
                launches.pairs.skip(what, f"{type(error).__name__}: {error}")
                continue
            changed |= launch is not None and bool(launches.compared(launch, range(count)))
        return "changes with the shape of the leading dimensions" if changed else ""

    def representatives(self) -> list[int]:
        """Choose a few changed rows, from launches of as many different sizes as possible."""
        by_size: dict[int, int] = {}
        for row, size in self.sensitive.items():
            by_size.setdefault(size, row)
        sizes = sorted(by_size)
        chosen = [by_size[size] for size in {sizes[0], sizes[len(sizes) // 2], sizes[-1]}]
        return list(dict.fromkeys([*chosen, *self.sensitive]))[:FOLLOWED]

    def _seen(self, rows: Numbers, what: str) -> None:
        for row in self._launches.compare(rows, what) or ():
            self.sensitive.setdefault(row, len(rows))


def _count(launches: Launches, size: int, most: int) -> None:
    """Count the changed rows in launches of the size that the explanation names, and show a pair of case lines."""
    last = launches.count - size
    parts: list[Tensors] = []
    starts = [min(start, last) for start in range(0, launches.count, size)][:most]
    for number, start in enumerate(starts):
        launch = launches.launch(range(start, start + size), _in_words(start, size))
        if launch is None:
            return
        if not start:
            launches.compared(launch, range(size), shown=True)
        counted = number * size - start  # the last launch begins with rows that the one before it had
        parts.append({name: tensor[counted:] for name, tensor in launch.rows.items()})
    covered = starts[-1] + size
    if covered < launches.count:
        launches.pairs.notes.append(f"counted in the first {covered:,} of {launches.count:,} rows")
    what = f"the same rows in launches of {size}"
    launches.pairs.count(launches.basis, what, launches.matched(joined(parts), range(covered)))


def _in_words(start: int, size: int) -> str:
    return f"row {start} alone" if size == 1 else f"rows {start} to {start + size - 1} in a launch of their own"


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
    to_aligned = -launches.count % _ALIGNED
    places = [(True, 1), (False, 1), *([(True, to_aligned)] if to_aligned > 1 else [])]  # after the rows; how many
    for after, further in places if basis.thorough else places[:1]:
        found: dict[str, tuple[RowsCall, bool]] = {}  # contents of the further rows → the launch, and if it changed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of arithmetic on infinities, which is done on purpose
            for what, padded in _padded(launches, further).items():
                if (launch := _with(launches, what, padded, after=after)) is not None:
                    found[what] = launch, bool(launches.compared(launch, range(launches.count)))
        broken = [what for what, (_, differs) in found.items() if differs]
        [first, *others] = [launch.rows for launch, _ in found.values()] or [{}]
        every = broken and len(broken) == len(found)
        if every and all(difference(same(first, other)) is None for other in others):
            changed.append("the number of rows")
        elif broken:
            changed.append(f"what further rows hold ({', '.join(broken)})")
        if "zeros" in found:
            # If results without rows are sums over rows, rows of zeros add nothing in exact arithmetic. A mean or count
            # may be meant, so this is no pair that must be equal.
            launch, _ = found["zeros"]
            compared = pairs.without_left_out(same(launches.basis.results, launch.results))
            for name, (own, other) in compared.items():
                if name not in launch.rows and own.shape == other.shape and difference({name: (own, other)}):
                    summed.add(name)
    pairs.where = f"changes with {', '.join(dict.fromkeys(changed))}" if changed else ""
    if summed:
        pairs.notes.append(f"{', '.join(sorted(summed))}: other bits with rows of zeros, which add nothing to a sum")


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


def _padded(launches: Launches, further: int) -> dict[str, Tensors]:
    """Map the contents of further rows, in words, to these rows of each input that has rows."""
    last = {name: picked(tensor, [launches.count - 1] * further) for name, tensor in launches.tensors.items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in last.items()}
    found: dict[str, Tensors] = {"zeros": zeros, "copies of the last one": last}
    floats = {name: tensor for name, tensor in zeros.items() if tensor.is_floating_point()}
    for what, value in (("NaN", math.nan), ("infinities", math.inf), ("the largest numbers", None)) if floats else ():
        found[what] = {**zeros, **{name: _filled(tensor, value) for name, tensor in floats.items()}}
    return found


def _filled(like: Tensor, value: float | None) -> Tensor:
    """Fill a tensor with one value; with the largest finite number if None, or where its dtype lacks infinity."""
    largest = torch.full_like(like.double(), torch.finfo(like.dtype).max).to(like.dtype)
    if value is None:
        return largest
    filled = torch.full_like(like.double(), value).to(like.dtype)
    return largest if math.isinf(value) and not filled.double().isinf().all() else filled


def of_independent(things: Independent) -> Property:
    """Make the property that each of these things has the same bits alone, in any batch and at any place in it.

    They are looked at as rows are.
    """

    def show(basis: Basis, pairs: Pairs) -> None:
        def of_things(results: Tensors) -> Tensors:
            return {name: tensor for name, tensor in results.items() if name in things.results}

        def call(inputs: Inputs) -> Tensors:
            return of_things(basis.call(inputs))

        def allows(inputs: Inputs, _: Tensors) -> bool:
            return basis.allows(inputs, basis.call(inputs))  # once more: the contract is one of all results

        def reworded(broken: Broken | None) -> Broken | None:
            return None if broken is None else replace(broken, second=worded(broken.second, things.name))

        op = replace(basis.op, rows=frozenset(things.inputs))
        _rows(replace(basis, op=op, results=of_things(basis.results), call=call, allows=allows), pairs)
        pairs.where = worded(pairs.where, things.name)
        pairs.untried[:] = [worded(said, things.name) for said in pairs.untried]
        pairs.first, pairs.most = reworded(pairs.first), reworded(pairs.most)

    return Property(things.name, things.promise, show)


def worded(text: str, name: str) -> str:
    """Rewrite a sentence about rows as one about these things; regimes and names in case lines stay."""
    one = name.removesuffix("s")
    return re.sub(r"(?<![\w:=])row(s?)(?![\w=\[(])", rf"{one}\1", text)


ROWS = Property("rows", "a row has the same bits alone, in any batch and at any place in it", _rows)
PERMUTATION = Property("permutation", "rows in another order have the same bits", _permutation)
PADDING = Property("padding", "further rows, whatever they hold, change no bit of the others", _padding)
