"""Launches of the gated LayerNorm: their programs, the places of rows, and the stages that are stored.

A program takes a group of columns, which a block covers, for several rows where it is short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from described import Described
from layer_norm_gated_arguments import PER_GROUP, STAGES, STATISTICS
from row_layout import RowLayout, address, contiguous_like, layout_of
from torch import Tensor

# A block covers a group: its size → rows and warps of a program. A thread has 16 elements, or 32 of 8192, where
# 16 take a tenth longer on an H200, and of 32768, as there are at most 1024 threads.
TILES = {
    64: (8, 1),
    128: (4, 1),
    256: (2, 1),
    512: (1, 1),
    1024: (1, 2),
    2048: (1, 4),
    4096: (1, 8),
    8192: (1, 8),
    16384: (1, 32),
    32768: (1, 32),
}
LEADING_DIMS = 3
NO_ROWS = RowLayout(rows=0, sizes=(1, 1, 1), strides=((0, 0, 0),))


class GatedNormParameters(NamedTuple):
    """The parameters of a call, but eps, and whether it rounds after every step."""

    group_size: int | None
    norm_before_gate: bool
    is_rms_norm: bool
    activation: str
    stepwise: bool


def tile(group_size: int) -> tuple[int, int, int]:
    """Return (rows, lanes, warps) of a program."""
    block = next(size for size in TILES if size >= group_size)
    rows, warps = TILES[block]
    return rows, block, warps


def depth(n: int) -> int:
    """Return the greatest number of additions between a term and the sum of n of them over a group.

    A block covers the group, so there is one reduction over its lanes. Compiled, a thread holds t elements of a program
    and at most as many of a row, which take t - 1 additions, and threads are combined in a binary tree of height
    log2(block / t); fewer elements of a row make no more of them. Interpreted, the lanes are combined in a binary tree
    of height log2(block), or by numpy in runs of 128 with 8 accumulators (15 additions, 3 to combine them) and a tree
    over the runs of height log2(block / 128): no more than compiled.
    """
    if n > max(TILES):
        return n  # which no program takes
    rows, block, warps = tile(n)
    per_thread = min(block, rows * block // (32 * warps))
    return min(n, per_thread - 1 + (block // per_thread).bit_length() - 1)


def rows_of(tensor: Described | None) -> RowLayout:
    """Return where the rows of a tensor lie; NO_ROWS if there is no tensor."""
    return NO_ROWS if tensor is None else layout_of([tensor], dims=LEADING_DIMS)


def numbers_of(name: str, layout: RowLayout) -> dict[str, int]:
    """Return the parameters of a kernel, in its order, that say where the rows of a tensor lie."""
    sizes = {f"{name}_size_{i}": layout.sizes[i] for i in (1, 2)}
    return sizes | {f"{name}_stride_{i}": stride for i, stride in enumerate(layout.strides[0])}


def stages_to_store(stages: tuple[str, ...], *, gated: bool, norm_first: bool, is_rms_norm: bool) -> tuple[str, ...]:
    """Return the stages to store: all that the case has, or the statistics if no others are asked for, or none.

    The stages that are stored choose the variant, so that there are three of them and not one for each choice.
    """
    absent = {"mean"} if is_rms_norm else set()
    absent |= {"gate", "gated_input"} if not gated else {"gated_input"} if norm_first else set()
    wanted = STAGES if set(stages) - set(STATISTICS) else STATISTICS if stages else ()
    return tuple(name for name in wanted if name not in absent)


def stages_in_memory(stages: Collection[str], x: Tensor, groups: int) -> dict[str, Tensor]:
    """Allocate an fp32 tensor for each stage; those with one value per group lie as [groups, rows]."""
    rows = x.shape[:-1].numel()
    return {
        name: x.new_empty((groups, rows), dtype=torch.float32)
        if name in PER_GROUP
        else contiguous_like(x, dtype=torch.float32)
        for name in stages
    }


def returned_stages(x: Tensor, buffers: Mapping[str, Tensor], stages: Collection[str]) -> dict[str, Tensor]:
    """Return those of `stages` that are present; the ones with one value per group are seen as [..., groups]."""
    found = {name: buffers[name] for name in stages if name in buffers}
    return {n: t.t().view(*x.shape[:-1], len(t)) if n in PER_GROUP else t for n, t in found.items()}


@triton.jit
def load(ptr, offset, lanes, mask, ALIGNED: tl.constexpr):
    """Load in fp32 `lanes` elements from each offset on, zero outside of the mask."""
    return tl.load(address(ptr, offset, lanes, ALIGNED), mask=mask, other=0.0).to(tl.float32)
