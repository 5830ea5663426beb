"""Rows of logits: how a launch is cut into programs, and logits as the softmax sees them."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from described import Described
from row_layout import VECTOR_BYTES, VECTOR_LANES
from triton.language.extra import libdevice

# Few sizes, so that there are few compiled variants. A block covers a row where it can; a loop covers longer rows.
BLOCKS = (64, 256, 1024, 4096)
ELEMENTS_PER_PROGRAM = 1024
ELEMENTS_PER_THREAD = 16


def summation_depth(n: int) -> int:
    """Return the greatest number of additions between a term and the sum of n of them, compiled or interpreted.

    Sums over classes add blocks of at most 4096 columns, each reduced first: ⌈n / 4096⌉ additions. Compiled, a thread
    holds 16 elements (15 additions), and 256 threads are combined in a binary tree (8). Interpreted, the lanes of a
    block are combined in a binary tree (12), or by numpy in runs of 128 with 8 accumulators (15 additions, 3 to combine
    them) and a tree over the runs (5). Sums over rows add lane by lane in blocks of 1024, ⌈n / 1024⌉ additions, and
    reduce these likewise.
    """
    return min(n, math.ceil(n / 1024) + 24)


class Cut(NamedTuple):
    """Rows and columns of a program, its warps, and whether every row starts on a 16-byte boundary."""

    rows: int
    block: int
    num_warps: int
    aligned: bool


def tile(logits: Described) -> Cut:
    """Choose the tile of a program; bits do not depend on the number of rows."""
    n, size = logits.shape[1], logits.dtype.itemsize
    block = next((size for size in BLOCKS if size >= n), BLOCKS[-1])
    rows = max(1, ELEMENTS_PER_PROGRAM // block)
    contiguous = logits.strides[1] == 1 and logits.strides[0] * size % VECTOR_BYTES == 0
    aligned = n % VECTOR_LANES == 0 and contiguous and logits.aligned
    return Cut(rows, block, max(1, rows * block // (32 * ELEMENTS_PER_THREAD)), aligned)


@triton.jit
def columns_of(row_ptr, columns, stride, ALIGNED: tl.constexpr):
    """Return pointers to columns of rows; ALIGNED promises a stride of 1 and rows that start on 16-byte boundaries."""
    if ALIGNED:
        pointers = tl.multiple_of(row_ptr + columns, (1, 16))
    else:
        pointers = row_ptr + columns * stride
    return pointers


@triton.jit
def logits_at(pointers, mask, logit_scale, softcap):
    """Return logits in fp32 as the softmax sees them, and their tanh, which has no meaning without a cap."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * logit_scale
    squashed = x
    if softcap is not None:
        squashed = libdevice.tanh(x / softcap)
        x = softcap * squashed
    return x, squashed
