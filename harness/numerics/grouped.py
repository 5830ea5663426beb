"""Products of the rows of a matrix, each row with the matrix of the group that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.dots import Factor, dot_of
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.remembered import remembered

Matrices = Callable[[Tensor], Factor]
"""Numbers of G groups → their matrices, [G, …], as right factors."""

# 64 MiB of fp64: fewer groups at once cost launches, more memory beside that of the enclosures.
_BLOCK = 1 << 23  # elements of the operands of groups that are multiplied at once


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """The rows of G groups side by side, [G, most], the shorter groups filled up.

    Attributes:
        groups: the numbers of the groups.
        numbers: of all rows, one group after the other.
        places: where they are in G · most; None where nothing is filled up.
        gathered: the number of the row at each place, any where it is filled up.
        filling: whether a place is filled up, [G · most, 1]; None where none is.
        shape: G and most.
    """

    groups: Tensor
    numbers: Tensor
    places: Tensor | None
    gathered: Tensor
    filling: Tensor | None
    shape: tuple[int, int]

    @classmethod
    def of(cls, groups: Mapping[int, Tensor], device: torch.device) -> GroupedRows:
        """Make the rows of groups from the indices of each group's rows, on the host, for rows on a device."""
        padded = torch.nn.utils.rnn.pad_sequence([*groups.values()], batch_first=True, padding_value=-1)
        real, shape = padded.flatten() >= 0, (padded.shape[0], padded.shape[1])
        filled = not bool(real.all())
        made = [torch.tensor([*groups]), torch.cat([*groups.values()]), real.nonzero()[:, 0], padded.flatten()]
        own, numbers, places, gathered = (tensor.to(device, non_blocking=True) for tensor in made)
        if not filled:
            return cls(own, numbers, None, numbers, None, shape)
        return cls(own, numbers, places, gathered.clamp(min=0), (gathered < 0)[:, None], shape)

    def of_matrix(self, rows: Enclosure) -> Enclosure:
        """Gather these rows of a matrix: [G, most, K], zeros where a group is filled up."""
        parts = rows.parts.index_select(1, self.gathered)
        if self.filling is not None:
            parts.masked_fill_(self.filling, 0.0)
        return Enclosure(parts.unflatten(1, self.shape), rows.fp8)

    def put(self, rows: Tensor, into: Tensor) -> None:
        """Write rows [4, G, most, N] to where they belong in a matrix [4, R, N]."""
        rows = rows.flatten(1, 2)
        into.index_copy_(1, self.numbers, rows if self.places is None else rows.index_select(1, self.places))


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of rows of a matrix.

    Attributes:
        numbers: of the group of every row [R]; a row with another number than 0 to `count` - 1 is of no group.
        count: of the groups.
    """

    numbers: Tensor
    count: int

    @cached_property
    def rows(self) -> dict[int, Tensor]:
        """Group → numbers of its rows, in the memory of the host, for the groups that have any."""
        numbers = self.numbers.cpu()
        present = [g for g in torch.unique(numbers).tolist() if 0 <= g < self.count]
        return {g: (numbers == g).nonzero()[:, 0] for g in present}

    @cached_property
    def _together(self) -> dict[tuple[int, ...], GroupedRows]:
        return {}

    def together(self, groups: tuple[int, ...]) -> GroupedRows:
        """Return the rows of several groups, looked up once."""
        if groups not in self._together:
            self._together[groups] = GroupedRows.of({group: self.rows[group] for group in groups}, self.numbers.device)
        return self._together[groups]


@algebraic(rules.grouped_dot, of_enclosures=True)
@remembered
def grouped_dot(rows: Enclosure, groups: Groups, matrices: Matrices, width: int, pieces: int = 1) -> Enclosure:
    """Multiply each row of `rows` [R, K] by the matrix [K, width] of its group: [R, width]; zero for rows of no group.

    `pieces` as in `dot_of`.
    """
    products = rows.parts.new_zeros((4, rows.shape[0], width))
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for block in _blocks(groups.rows, width, rows.shape[1]):
        together = groups.together(block)
        right = matrices(together.groups)
        left = Factor.left(together.of_matrix(rows))
        for start in range(0, width, step):
            part = slice(start, start + step)
            product = dot_of(left, right.columns(part) if step < width else right, pieces)
            together.put(product.parts, products[..., part])
    return Enclosure(products)


@algebraic(rules.grouped_outer, of_enclosures=True)
@remembered
def grouped_outer(left: Enclosure, right: Enclosure, groups: Groups) -> Enclosure:
    """Sum the outer products of the rows of `left` [R, M] and `right` [R, N] in each group: [count, M, N].

    Zero for groups without rows. The terms of a sum are in ascending order of their rows.
    """
    sums = left.parts.new_zeros((4, groups.count, left.shape[1], right.shape[1]))
    for length in {len(numbers) for numbers in groups.rows.values()}:  # the bound of a sum depends on it
        alike = {group: numbers for group, numbers in groups.rows.items() if len(numbers) == length}
        for block in _blocks(alike, left.shape[1], right.shape[1]):
            together = groups.together(block)
            columns, rows = together.of_matrix(left).transposed, together.of_matrix(right)
            sums.index_copy_(1, together.groups, dot_of(Factor.left(columns), Factor.right(rows)).parts)
    return Enclosure(sums)


def _blocks(groups: Mapping[int, Tensor], m: int, n: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups, as many at a time as are multiplied at once."""
    block: tuple[int, ...] = ()
    most = 0
    for group, numbers in groups.items():
        longest = max(most, len(numbers))
        if block and (len(block) + 1) * (m * n + longest * (m + n)) > _BLOCK:
            yield block
            block, longest = (), len(numbers)
        block, most = (*block, group), longest
    if block:
        yield block
