"""Index tuples that cut a tensor into blocks of bounded size, whatever its strides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def block_budget(device: torch.device) -> int:
    """Return how many elements to process at a time: enough to keep a GPU busy, or to stay in the cache of a CPU core.

    On a CPU this is also the most that torch leaves to one thread; with more, threads wait for each other after every
    operation, which takes many times longer when other processes keep the cores busy.
    """
    return 1 << 15 if device.type == "cpu" else 1 << 22


def row_blocks(leading: tuple[int, ...], row_elements: int, budget: int) -> Iterator[tuple[slice, ...]]:
    """Yield index tuples over the leading dimensions that together select every row once, in logical order.

    A row is what one index into all leading dimensions selects: `row_elements` elements. Each block has at most
    `budget` elements, or one row where a row alone has more. `tensor[block]` is always a view. Without leading
    dimensions the tensor is one row, and the only block is `()`.
    """
    if 0 in leading:
        return
    split = len(leading)
    inside = max(row_elements, 1)
    while split and inside * leading[split - 1] <= budget:
        split -= 1
        inside *= leading[split]
    whole = tuple(slice(0, size) for size in leading[split:])
    if not split:
        yield whole
        return
    step = max(budget // inside, 1)
    size = leading[split - 1]
    single = ([slice(index, index + 1) for index in range(size)] for size in leading[: split - 1])
    for outer in itertools.product(*single):
        for start in range(0, size, step):
            yield (*outer, slice(start, min(start + step, size)), *whole)


def pieces(*tensors: Tensor, budget: int) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape into equal pieces: views of at most `budget` consecutive elements, in logical order."""
    for index in row_blocks(tuple(tensors[0].shape), 1, budget):
        yield tuple(tensor[index] for tensor in tensors)
