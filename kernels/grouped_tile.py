"""Tiles of a linear layer per expert, for Triton kernels: what is loaded of rows and weights, and added up.

A tile is BLOCK_M pairs of one expert by BLOCK_N columns. Terms go from first to last, BLOCK_K at a time, and one fp32
number holds the sum of all so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from quantized_weights import load_quantized


class Rows(NamedTuple):
    """The left operand [R, K]; row pair // slots is that of a pair. Elements of a row have no gaps."""

    ptr: Any
    slots: Any
    stride: Any


class Weight(NamedTuple):
    """The right operand [E, N, K] of any strides, or the codes of one, which then has scales [E, N, K / group].

    Strides of codes are those of the weight as it is stored, which is [E, K, N] if it is turned.
    """

    ptr: Any
    expert_stride: Any
    n_stride: Any
    k_stride: Any
    scale_ptr: Any
    zero_ptr: Any
    scale_expert_stride: Any
    scale_n_stride: Any
    scale_group_stride: Any


class Pairs(NamedTuple):
    """The pairs of a tile [BLOCK_M], which of them there are, and their expert; `taken` if that is one of those here."""

    pair: Any
    live: Any
    expert: Any
    taken: Any


@triton.jit
def place(tile, blocks, columns, GROUP: tl.constexpr):
    """(block, column) of a tile: of GROUP blocks all columns come first, so that what they share is still in cache."""
    group = tile // (GROUP * columns)
    within = tile % (GROUP * columns)
    height = tl.minimum(blocks - group * GROUP, GROUP)
    return group * GROUP + within % height, within // height


@triton.jit
def pairs_of(block, expert, experts, order_ptr, offsets_ptr, block_starts_ptr, BLOCK_M: tl.constexpr):
    """The pairs of a block, which has an expert."""
    position = tl.load(block_starts_ptr + block) + tl.arange(0, BLOCK_M)
    live = position < tl.load(offsets_ptr + expert + 1)
    pair = tl.load(order_ptr + position, mask=live, other=0).to(tl.int32)
    return Pairs(pair, live, expert, expert < experts)


@triton.jit
def load_rows(ptr, k, mask, LAYOUT: tl.constexpr):
    """The elements k of rows that start at `ptr`, zero outside of the mask."""
    pointers = ptr + k
    if LAYOUT != "any":
        pointers = tl.multiple_of(pointers, (1, 16))
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_weight(weight, expert, n, k, n_size, k_size, A: tl.constexpr, LAYOUT: tl.constexpr, CODES: tl.constexpr):
    """The elements [k, n] of an expert's weight, of dtype A, zero outside of it; CODES are those of `code_arguments`."""
    SCHEME: tl.constexpr = CODES[0]
    GROUP: tl.constexpr = CODES[1]
    TURNED: tl.constexpr = CODES[2]
    mask = (k < k_size)[:, None] & (n < n_size)[None, :]
    ptr = weight.ptr + expert * weight.expert_stride
    n, k = n[None, :], k[:, None]
    if SCHEME != "none":
        row, column = n, k
        if TURNED:
            row, column = k, n
        value = load_quantized(
            ptr, weight.scale_ptr, weight.zero_ptr, row, column, weight.n_stride, weight.k_stride,
            expert * weight.scale_expert_stride, weight.scale_n_stride, weight.scale_group_stride,
            mask, A, SCHEME, GROUP,
        )  # fmt: skip
    else:
        if LAYOUT == "k":
            pointers = tl.multiple_of(ptr + n * weight.n_stride + k, (16, 1))
        elif LAYOUT == "n":
            pointers = tl.multiple_of(ptr + k * weight.k_stride + n, (1, 16))
        else:
            pointers = ptr + n * weight.n_stride + k * weight.k_stride
        value = tl.load(pointers, mask=mask, other=0.0)
    return value


@triton.jit
def add_products(
    first, second, rows, weight, n, second_weight, second_n, pairs, n_size, k_size,
    BLOCK_K: tl.constexpr, PAIRED: tl.constexpr, LAYOUT: tl.constexpr, CODES: tl.constexpr, SECOND_CODES: tl.constexpr,
):  # fmt: skip
    """first + rows · weightᵀ of columns n, and likewise `second` if PAIRED: rows are loaded once for both.

    Where the pairs' expert is not here, nothing is read.
    """
    A: tl.constexpr = rows.ptr.dtype.element_ty
    k_size = tl.where(pairs.taken, k_size, 0)
    if LAYOUT != "any":
        k_size = k_size // 8 * 8  # changes nothing, but shows the compiler that masks are uniform over a vector
    if LAYOUT == "n":
        n_size = n_size // 8 * 8
    ptr = rows.ptr + ((pairs.pair // rows.slots).to(tl.int64) * rows.stride)[:, None]
    for start in range(0, k_size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = load_rows(ptr, k[None, :], pairs.live[:, None] & (k < k_size)[None, :], LAYOUT)
        right = load_weight(weight, pairs.expert, n, k, n_size, k_size, A, LAYOUT, CODES)
        first = tl.dot(left, right, first, input_precision="ieee")
        if PAIRED:
            right = load_weight(second_weight, pairs.expert, second_n, k, n_size, k_size, A, LAYOUT, SECOND_CODES)
            second = tl.dot(left, right, second, input_precision="ieee")
    return first, second
