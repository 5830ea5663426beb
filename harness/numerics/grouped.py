"""Products of the rows of a matrix, each row with the matrix of the group that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from harness.numerics.accumulation import dot
from harness.numerics.enclosure import Enclosure

Groups = Mapping[int, Tensor]
"""Group → numbers of its rows, for the groups that have any."""

Matrices = Callable[[list[int]], Enclosure]
"""G groups → their matrices, [G, …]."""

_BLOCK = 1 << 23  # elements of the operands of groups that are multiplied at once


def groups_of(numbers: Tensor, count: int) -> dict[int, Tensor]:
    """The rows of each group from the group number of every row [R]; numbers outside [0, count) are of no group."""
    present = [g for g in torch.unique(numbers).tolist() if 0 <= g < count]
    return {g: (numbers == g).nonzero()[:, 0] for g in present}


def grouped_dot(rows: Enclosure, groups: Groups, matrices: Matrices, width: int) -> Enclosure:
    """Each row [K] of `rows` [R, K] times the matrix [K, width] of its group: [R, width]; zero for rows of no group."""
    products = rows.parts.new_zeros((4, rows.shape[0], width))
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for numbers, index in _blocks(groups, width, rows.shape[1]):
        left, right, real = _gathered(rows, index), matrices(numbers), index >= 0
        for start in range(0, width, step):
            part = slice(start, start + step)
            products[:, index[real], part] = dot(left, right[..., part]).full[:, real]
    return Enclosure(products)


def grouped_outer(left: Enclosure, right: Enclosure, groups: Groups, count: int) -> Enclosure:
    """Sum over the rows of each group of the outer products of `left` [R, M] and `right` [R, N]: [count, M, N].

    Zero for groups without rows.
    """
    sums = left.parts.new_zeros((4, count, left.shape[1], right.shape[1]))
    for length in {len(index) for index in groups.values()}:  # the bound of a sum depends on it
        alike = {group: index for group, index in groups.items() if len(index) == length}
        for numbers, index in _blocks(alike, left.shape[1], right.shape[1]):
            sums[:, numbers] = dot(_gathered(left, index).transposed, _gathered(right, index)).full
    return Enclosure(sums)


def _blocks(groups: Groups, m: int, n: int) -> Iterator[tuple[list[int], Tensor]]:
    """Groups that are multiplied at once, and their rows: [G, most rows], -1 where a group has fewer."""
    numbers: list[int] = []
    most = 0
    for group, index in groups.items():
        longest = max(most, len(index))
        if numbers and (len(numbers) + 1) * (m * n + longest * (m + n)) > _BLOCK:
            yield numbers, _padded([groups[g] for g in numbers])
            numbers, longest = [], len(index)
        numbers, most = [*numbers, group], longest
    if numbers:
        yield numbers, _padded([groups[g] for g in numbers])


def _padded(indices: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(indices, batch_first=True, padding_value=-1)


def _gathered(rows: Enclosure, index: Tensor) -> Enclosure:
    """The rows [G, most, K] with these numbers; zeros for -1."""
    return Enclosure(rows.parts[:, index]).zero_where((index < 0)[..., None])
