"""Rows alone, in batches, and at any place in them: whether their bits change, and from how many rows on.

Two things are done apart. *Searching* launches rows of the case until some have other bits than in the launch of all
rows: a change may show in one row of thousands, so that sizes whose launches cover all rows come before random ones.
*Explaining* then launches copies of such a row: one launch of n copies shows its bits at n rows and at each place.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from lastbit.invariance import thresholds
from lastbit.invariance.basis import Basis
from lastbit.invariance.launches import Launches, Numbers, joined
from lastbit.invariance.property import Pairs, Property
from lastbit.invariance.thresholds import BitChanges, sizes_up_to
from lastbit.relations import Tensors

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


def show(basis: Basis, pairs: Pairs) -> None:
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
    changes = thresholds.of(launches, search.representatives())
    pairs.where = ", and ".join(filter(None, [changes.sentence, reshaped]))
    if changes.counted:
        _count(launches, changes, _MANY_TO_COUNT if basis.thorough else _TO_COUNT)


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
        for start in _starts(self._launches.count, size, most, self._random):
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
        changed = [shape for shape in shapes if self._reshaped(shape)]
        return "changes with the shape of the leading dimensions" if changed else ""

    def representatives(self) -> list[int]:
        """Choose a few changed rows, from launches of as many different sizes as possible."""
        by_size: dict[int, int] = {}
        for row, size in self.sensitive.items():
            by_size.setdefault(size, row)
        sizes = sorted(by_size)
        chosen = [by_size[size] for size in {sizes[0], sizes[len(sizes) // 2], sizes[-1]}]
        return list(dict.fromkeys([*chosen, *self.sensitive]))[: thresholds.ROWS]

    def _seen(self, rows: Numbers, what: str) -> None:
        for row in self._launches.compare(rows, what) or ():
            self.sensitive.setdefault(row, len(rows))

    def _reshaped(self, shape: tuple[int, ...]) -> bool:
        rows, what = range(self._launches.count), f"the same rows as [{', '.join(map(str, shape))}, …]"
        try:
            launch = self._launches.launch(rows, what, shape)
        except Exception as error:  # of the kernel: rows of other dimensions are nothing that every kernel takes
            self._launches.pairs.skip(what, f"{type(error).__name__}: {error}")
            return False
        return launch is not None and bool(self._launches.compared(launch, rows))


def _starts(count: int, size: int, most: int, random: Random) -> list[int]:
    """Choose the first rows of launches that cover all rows, or of `most` launches: row 0, and drawn ones.

    Each is drawn from a part of its own, so that launches of several sizes cover other rows.
    """
    needed, last = -(-count // size), count - size
    if needed <= most:
        return [min(place * size, last) for place in range(needed)]
    parts = [place * last // (most - 1) for place in range(most)]
    drawn = (random.randint(low, high) for low, high in pairwise(parts))
    return list(dict.fromkeys([0, *drawn]))


def _count(launches: Launches, changes: BitChanges, most: int) -> None:
    """Count the changed rows in launches of the size that the explanation names, and show a pair of case lines."""
    size, last = changes.counted, launches.count - changes.counted
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


ROWS = Property("rows", "a row has the same bits alone, in any batch and at any place in it", show)
