"""The rows of a case in launches of some of them, in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        self._leave_those_without_rows()
        if leads > 1:
            self._flatten()

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
        found = {n: _rows_of(results[n], own, count, shape) for n, own in self.results.items() if n in results}
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

    def _flatten(self) -> None:
        """Make the launch of all rows one with a single leading dimension, or ones before it."""
        rows, size = range(self.count), len(self.leading)
        for self._outer in ((), (1,) * (size - 1)):
            flat = self.launch(rows, f"the same rows as {[*self._outer, self.count]}")
            if flat is not None:
                line = line_of(flat.inputs, self.basis.device) or f"{self.basis.case}, as {flat.what}"
                self.basis = replace(self.basis, inputs=flat.inputs, results=flat.results, line=line)
                self.results = dict(flat.rows)
                return

    def _leave_those_without_rows(self) -> None:
        """Leave results such as sums over rows, whose shape may look as if it had rows: the number of rows tells."""
        size = next((n for n in (self.count - 1, self.count // 2) if 0 < n < self.count), 0)
        other = self.launch(range(size), f"the first {size} rows") if size and self.results else None
        if other is not None:
            kept = {n: t for n, t in self.results.items() if other.results[n].shape[:1] == (size,)}
            wrong = len(kept) < len(self.results) and not self.basis.allows(other.inputs, other.results)
            self.results = self.results if wrong else kept  # a kernel may return another number of rows than it must
        if not self.results:
            raise NotApplicable("no result has the rows of the inputs")


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


def _rows_of(result: Tensor, own: Tensor, count: int, leading: tuple[int, ...]) -> Tensor:
    """Reshape a result to [rows, …]; leave it as it is if its shape is wrong."""
    if tuple(result.shape) != (*leading, *own.shape[1:]):
        return result
    return result.reshape(count, *own.shape[1:])


def _wide(tensor: Tensor) -> Tensor:
    return tensor[:, None] if tensor.ndim == 1 else tensor
