"""Gated LayerNorm: how a launch is cut into programs, and what the kernel and that of the gradient read and write.

A program takes the same group of columns of one or several rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from layer_norm_gated_arguments import PER_GROUP
from row_layout import RowLayout, address, contiguous_like, row_layout, vectors_allowed
from torch import Tensor

# Few sizes, so that there are few compiled variants. A block covers a group.
BLOCKS = (128, 512, 2048, 8192, 16384, 32768)
ELEMENTS_PER_PROGRAM = 1024
ELEMENTS_PER_THREAD = 16
MOST_WARPS = 32
LEADING_DIMS = 3
ABSENT = RowLayout(rows=0, sizes=(1, 1, 1), strides=((0, 0, 0),))


def tile(group_size: int, *, elements_per_thread: int = ELEMENTS_PER_THREAD) -> tuple[int, int, int]:
    """(rows, lanes, warps) of a program: a block of lanes that covers a group, for several rows where it is short.

    A thread holds `elements_per_thread` elements at most, but 32 of the largest block.
    """
    block = next((size for size in BLOCKS if size >= group_size), BLOCKS[-1])
    rows = max(1, ELEMENTS_PER_PROGRAM // block)
    return rows, block, min(MOST_WARPS, max(4, rows * block // (32 * elements_per_thread)))


def group_depth(n: int) -> int:
    """Greatest number of additions between a term and the sum of n of them over a group, compiled or interpreted.

    A block covers the group, so there is one reduction over its lanes. Compiled, a thread holds t = 16 elements at most
    (32 of a block of 32768, as there are at most 1024 threads), which take t - 1 additions, and threads are combined in
    a binary tree of height log2(block / t). Interpreted, the lanes are combined in a binary tree of height log2(block),
    or by numpy in runs of 128 with 8 accumulators (15 additions, 3 to combine them) and a tree over the runs of height
    log2(block / 128): no more than compiled.
    """
    _, block, warps = tile(n)
    per_thread = max(ELEMENTS_PER_THREAD, block // (32 * warps))
    return min(n, per_thread - 1 + (block // per_thread).bit_length() - 1)


def strided_arguments(
    group_size: int, strided: Mapping[str, Tensor | None], flat: Collection[Tensor | None]
) -> dict[str, Any]:
    """What a kernel has to know of tensors with strided rows, and whether it may read all tensors in whole vectors.

    The rows of `flat` follow each other without a gap.
    """
    arguments: dict[str, Any] = {"ALIGNED": True}
    present = [t for t in flat if t is not None]
    for name, tensor in strided.items():
        tensors, layout = ([], ABSENT) if tensor is None else row_layout([tensor], dims=LEADING_DIMS)
        arguments[f"{name}_ptr"] = next(iter(tensors), None)
        arguments |= {f"{name}_size_{i}": layout.sizes[i] for i in (1, 2)}
        arguments |= {f"{name}_stride_{i}": stride for i, stride in enumerate(layout.strides[0])}
        if tensors and not vectors_allowed(group_size, tensors, layout, present):
            arguments["ALIGNED"] = False
    return arguments


def stage_buffers(x: Tensor, present: Collection[str], stored: Collection[str], groups: int) -> dict[str, Tensor]:
    """An fp32 buffer for each stage that is present and stored, one empty one for those that are only present.

    Stages with one value per group lie as [groups, rows]. One dtype for all of them keeps compiled variants few.
    """
    rows, options = x.shape[:-1].numel(), {"dtype": torch.float32, "device": x.device}
    buffers = dict.fromkeys(present, torch.empty(0, **options))
    for name in filter(set(stored).__contains__, present):
        per_group = name in PER_GROUP
        buffers[name] = torch.empty(groups, rows, **options) if per_group else contiguous_like(x, dtype=torch.float32)
    return buffers


def returned_stages(x: Tensor, buffers: Mapping[str, Tensor], stages: Collection[str]) -> dict[str, Tensor]:
    """Those of `stages` that are present; the ones with one value per group seen as [..., groups]."""
    found = {name: buffers[name] for name in stages if name in buffers}
    return {n: t.t().view(*x.shape[:-1], len(t)) if n in PER_GROUP else t for n, t in found.items()}


@triton.jit
def row_offset(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Where each row starts, in elements, from the sizes of the two inner leading dimensions and all three strides."""
    return row // size_2 // size_1 * stride_0 + row // size_2 % size_1 * stride_1 + row % size_2 * stride_2


@triton.jit
def load(ptr, offset, lanes, mask, ALIGNED: tl.constexpr):
    """In fp32: `lanes` elements from each offset on, zero outside of the mask."""
    return tl.load(address(ptr, offset, lanes, ALIGNED), mask=mask, other=0.0).to(tl.float32)
