"""Rows alone and in batches: from how many rows on the bits of a row change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.invariance.basis import Basis, difference
from harness.invariance.property import Pairs, Property
from harness.relation import Matched, NotApplicable, Related, Tensors

_LAUNCHES = 4
"""Launches of one size that are compared: at the first rows, and at others."""

_MANY_LAUNCHES = 64
_MOST_CHANGES = 4  # thresholds that are found by bisection


def show(basis: Basis, pairs: Pairs) -> None:
    """Compare the rows of the case in launches of fewer rows with those of one launch of all of them."""
    rows = Rows(basis)
    sizes = sizes_up_to(rows.count, processors(basis.device))
    changed = {size: rows.differs(size, pairs) for size in sizes}
    again = [size for size in sizes if not changed[size]] if rows.sensitive else []
    changed |= {size: rows.differs(size, pairs) for size in again}  # now at rows of which others have shown a change
    changed[rows.count] = False
    edges = [(a, b) for a, b in zip(changed, list(changed)[1:], strict=False) if changed[a] != changed[b]]
    found = [rows.threshold(a, b, changed[a], pairs) for a, b in edges[:_MOST_CHANGES]]
    if found:
        listed = ", ".join(f"{low} and {low + 1}" for low in found)
        more = f", and {len(edges) - len(found)} more times" if len(edges) > len(found) else ""
        pairs.where = f"changes between {listed} rows{more}"


def sizes_up_to(count: int, processors: int) -> list[int]:
    """Numbers of rows below `count`, in order: 2^k and its neighbours, and multiples of the number of processors."""
    powers = [1 << k for k in range(count.bit_length())]
    near = {size + step for size in powers for step in (-1, 0, 1)}
    near |= {factor * processors + step for factor in (1, 2, 4, 8) for step in (-1, 0, 1)} if processors else set()
    return sorted(size for size in near if 0 < size < count)


def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 0 for what is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


class Rows:
    """The rows of a case, in launches of some of them.

    Attributes:
        count: how many there are.
        sensitive: rows of which some launch gave other bits.
    """

    def __init__(self, basis: Basis) -> None:
        self._basis, self.sensitive = basis, list[int]()
        tensors, rows = basis.inputs.tensors, basis.op.rows
        if not rows:
            raise NotApplicable(f"{basis.op.name} declares no inputs whose rows are independent")
        main = tensors[basis.op.inputs[0]]
        self._leading = tuple(main.shape[:-1])
        self.count = math.prod(self._leading)
        if self.count < 2:
            raise NotApplicable(f"the case has {self.count} rows; two are needed")
        self._tensors = {
            n: t.reshape(self.count, *t.shape[main.ndim - 1 :]) if n in rows else t for n, t in tensors.items()
        }
        self._results = {n: own for n, t in basis.results.items() if (own := self._flat(t)) is not None}
        if not self._results:
            raise NotApplicable("no result has the rows of the inputs")

    def differs(self, size: int, pairs: Pairs) -> bool:
        """Whether launches of `size` rows give other bits than all rows at once."""
        equal = [self._equal(start, size, pairs) for start in self._starts(size)]
        return not all(equal)

    def threshold(self, low: int, high: int, differs: bool, pairs: Pairs) -> int:
        """The number of rows between two sizes up to which launches are as those of `low`, found by halving."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.differs(middle, pairs) == differs else (low, middle)
        return low

    def _starts(self, size: int) -> list[int]:
        most = _MANY_LAUNCHES if self._basis.thorough else _LAUNCHES
        known = [min(max(row - size // 2, 0), self.count - size) for row in self.sensitive]
        spread = [place * (self.count - size) // max(most - 1, 1) for place in range(most)]
        return list(dict.fromkeys([*known, *spread]))[:most]

    def _equal(self, start: int, size: int, pairs: Pairs) -> bool:
        related = self._launch(start, size)
        inputs = self._basis.related(related)
        results = self._basis.call(inputs)
        matched = related.matched(self._basis.results, results)
        equal = pairs.compare(self._basis, related.what, matched, inputs, results)
        if not equal and (found := difference(matched)) is not None:
            self.sensitive = list(dict.fromkeys([*self.sensitive, *(start + row for row in found.rows if row < size)]))
        return equal

    def _launch(self, start: int, size: int) -> Related:
        end = start + size
        tensors = {n: t[start:end] if n in self._basis.op.rows else t for n, t in self._tensors.items()}

        def matched(first: Tensors, second: Tensors) -> Matched:
            return {
                n: (t[start : start + size], second[n].reshape(size, *t.shape[1:])) for n, t in self._results.items()
            }

        what = f"row {start} alone" if size == 1 else f"rows {start} to {start + size - 1} in a launch of their own"
        return Related(what, tensors, matched)

    def _flat(self, result: Tensor) -> Tensor | None:
        """A result as [rows, …], if it has the rows of the inputs."""
        if tuple(result.shape[: len(self._leading)]) != self._leading or result.ndim > len(self._leading) + 1:
            return None
        return result.reshape(self.count, *result.shape[len(self._leading) :])


ROWS = Property("rows", "a row has the same bits alone, in any batch and at any place in it", show)
