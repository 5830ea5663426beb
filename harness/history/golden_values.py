"""The tensors of a golden: whole where they are small, else a sample and the hash of every block.

The fingerprint of the whole depends on the position of every element, so that exchanged rows and flipped signs change
it. All NaN count as the same bits: their payloads and signs mean nothing, and differ between devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.dtypes import DTYPE_NAMES
from lastbit.inputs import fingerprint
from lastbit.inputs.bits import bits_of, bits_with_one_nan, distance
from lastbit.reports.golden import Change, Farthest, Index

# 4 KB of fp32 for each stage of a case; where a larger one changed, its hashes tell.
WHOLE = 1024
"""Elements up to which a tensor is stored whole."""

_RUNS, _RUN = 16, 32  # a sample: so many stretches of so many consecutive elements
# Arbitrary: about 1 KB of a file, by which a change is placed within a thirtieth of the tensor.
_BLOCKS = 32  # hashes of a tensor that is not stored whole


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as a golden holds it.

    Attributes:
        shape: of the tensor.
        fingerprint: of all its elements.
        blocks: fingerprints of its blocks, in order; none where it is whole.
        values: all elements, in its shape, or a sample, [elements]; on the CPU.
    """

    shape: tuple[int, ...]
    fingerprint: str
    blocks: tuple[str, ...]
    values: Tensor

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.values.dtype, str(self.values.dtype))
        return f"{name}[{','.join(map(str, self.shape))}]"


def store(tensor: Tensor) -> Stored:
    """Return a tensor, on any device and with any strides, in the form in which a golden keeps it."""
    bits = bits_with_one_nan(tensor)
    whole = tensor.numel() <= WHOLE
    blocks = () if whole else tuple(fingerprint(bits.flatten()[block]) for block in _blocks(tensor.numel()))
    kept = tensor
    if not whole:  # taken as bits: not every torch indexes 8-bit floats on every device
        kept = bits_of(tensor).flatten()[_sampled(tensor.numel()).to(tensor.device)].view(tensor.dtype)
    values = kept.detach().cpu().clone(memory_format=torch.contiguous_format)
    return Stored(tuple(tensor.shape), fingerprint(bits), blocks, values)


def same(before: Stored, after: Stored) -> bool:
    """Return whether dtype, shape and all bits are equal."""
    return str(before) == str(after) and before.fingerprint == after.fingerprint


def change(stage: str, before: Stored | None, after: Stored | None) -> Change:
    """Return how the tensors of a stage differ; None where there is no such stage."""
    shown = str(before or ""), str(after or "")
    if before is None or after is None or shown[0] != shown[1]:
        return Change(stage, *shown)
    differing = bits_with_one_nan(before.values) != bits_with_one_nan(after.values)
    far = torch.where(differing, distance(before.values, after.values), -1.0).flatten()
    farthest = None
    if differing.any():
        at = int(far.argmax())
        position = int(_sampled(math.prod(before.shape))[at]) if before.blocks else at
        values = (float(stored.values.flatten()[at]) for stored in (before, after))
        farthest = Farthest(_index(position, before.shape), *values)
    return Change(
        stage,
        *shown,
        changed=int(differing.sum()),
        compared=differing.numel(),
        max_ulp=max(float(far.max()), 0.0) if far.numel() else 0.0,
        farthest=farthest,
        blocks=(sum(a != b for a, b in zip(before.blocks, after.blocks, strict=True)), len(before.blocks)),
        spans=tuple(_spans(before, after)),
    )


def _spans(before: Stored, after: Stored) -> Iterator[tuple[Index, Index]]:
    """Return first and last index of each stretch of blocks that differ."""
    stretch: list[int] = []
    for block, old, new in zip(_blocks(math.prod(before.shape)), before.blocks, after.blocks, strict=False):
        if old != new:
            stretch += [block.start, block.stop - 1]
        elif stretch:
            yield _index(stretch[0], before.shape), _index(stretch[-1], before.shape)
            stretch = []
    if stretch:
        yield _index(stretch[0], before.shape), _index(stretch[-1], before.shape)


def _sampled(numel: int) -> Tensor:
    """Return the sampled positions of a tensor that is not stored whole: stretches from the first to the last."""
    starts = torch.arange(_RUNS) * (numel - _RUN) // (_RUNS - 1)
    return (starts[:, None] + torch.arange(_RUN)).flatten()


def _blocks(numel: int) -> list[slice]:
    """Return the slice of each block of a tensor that is not stored whole, in logical order."""
    size = math.ceil(numel / _BLOCKS) or 1
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def _index(position: int, shape: tuple[int, ...]) -> Index:
    """Return the index of the element at a position in logical order."""
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))
