"""Tiles of a linear layer per expert, for Triton kernels: rows and weights are loaded, multiplied and added up.

A tile is BLOCK_M pairs of one expert by BLOCK_N columns. Terms go from first to last, BLOCK_K at a time, and one fp32
number holds the sum of all so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from quantized_weights import Codes, load_quantized


class TileVariant(NamedTuple):
    """A compiled variant of the grouped matmul.

    Attributes:
        second: the second sum of a tile: `columns`, of the next BLOCK_N columns of the result; `weight`, of another
            weight, with a result of its own; `none`.
        epilogue: the use of the sums: `store`, or `swiglu`.
        round_base, round_lora, round_swiglu: the steps that are rounded to the dtype of the rows.
        layout: of the weights: `k` and `n` are descriptors of tensors that are contiguous along this dimension; `any`.
        row_vectors, vectors, lora_vectors: rows, results and adapters consist of vectors of 16 bytes.
        lora_turned: the weights of adapters are [E, rank, N].
        codes: for both weights, what `NUMBERS` has for one without codes.
        block_m, block_n: pairs and columns of a sum.
        block_k, block_r: terms that are added at a time, of rows and of adapters.
        rank_steps: number of steps in which terms of adapters are added.
    """

    second: str
    epilogue: str
    round_base: bool
    round_lora: bool
    round_swiglu: bool
    layout: str
    row_vectors: bool
    vectors: bool
    lora_vectors: bool
    lora_turned: bool
    codes: tuple[Codes, Codes]
    block_m: int
    block_n: int
    block_k: int
    block_r: int
    rank_steps: int


class RowOperand(NamedTuple):
    """The left operand [R, K]; row pair // slots is that of a pair. Elements of a row have no gaps."""

    ptr: Any
    slots: Any
    stride: Any


class Weight(NamedTuple):
    """The right operand [E, N, K], or the codes of one, which then has scales [E, N, K / group].

    Attributes:
        data: a pointer; or a descriptor of the weight, or of [E, K, N] where n is its contiguous dimension.
        expert_stride, n_stride, k_stride: of what is pointed to; codes of a turned weight are [E, K, N].
    """

    data: Any
    expert_stride: Any
    n_stride: Any
    k_stride: Any
    scale_ptr: Any
    zero_ptr: Any
    scale_expert_stride: Any
    scale_n_stride: Any
    scale_group_stride: Any


class PairTable(NamedTuple):
    """The pairs in the order of their experts, and the blocks of it: see `Routing`."""

    order_ptr: Any
    offsets_ptr: Any
    block_experts_ptr: Any
    block_starts_ptr: Any
    experts: Any


class TilePairs(NamedTuple):
    """The pairs of a tile [BLOCK_M], which of them there are, and their expert; whether it is one of those here."""

    pair: Any
    live: Any
    expert: Any
    taken: Any


@triton.jit
def place(tile, blocks, columns, BLOCKS_PER_GROUP: tl.constexpr):
    """Return (block, column) of a tile: all columns of a group of blocks come first, for shared tiles in cache."""
    group = tile // (BLOCKS_PER_GROUP * columns)
    within = tile % (BLOCKS_PER_GROUP * columns)
    height = tl.minimum(blocks - group * BLOCKS_PER_GROUP, BLOCKS_PER_GROUP)
    return group * BLOCKS_PER_GROUP + within % height, within // height


@triton.jit
def pairs_of(table, block, expert, BLOCK_M: tl.constexpr):
    """Return the first BLOCK_M pairs of a block of this expert."""
    position = tl.load(table.block_starts_ptr + block) + tl.arange(0, BLOCK_M)
    live = position < tl.load(table.offsets_ptr + expert + 1)
    pair = tl.load(table.order_ptr + position, mask=live, other=0).to(tl.int32)
    return TilePairs(pair, live, expert, expert < table.experts)


@triton.jit
def load_rows(ptr, k, mask, ROW_VECTORS: tl.constexpr):
    """Load the elements k of rows that start at `ptr`, zero outside of the mask."""
    pointers = ptr + k
    if ROW_VECTORS:
        pointers = tl.multiple_of(pointers, (1, 16))
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_weight(
    weight, expert, first_n, first_k, n_size, k_size, A: tl.constexpr, WHICH: tl.constexpr, VARIANT: tl.constexpr
):
    """Load the tile [k, n] of an expert's weight from these indices on, of dtype A, zero outside of it.

    WHICH of the two weights it is says what codes it has.
    """
    BLOCK_N: tl.constexpr = VARIANT.block_n
    BLOCK_K: tl.constexpr = VARIANT.block_k
    SCHEME: tl.constexpr = VARIANT.codes[WHICH][0]
    GROUP: tl.constexpr = VARIANT.codes[WHICH][1]
    TURNED: tl.constexpr = VARIANT.codes[WHICH][2]
    UNIT: tl.constexpr = VARIANT.codes[WHICH][3]
    if VARIANT.layout == "k":
        value = weight.data.load([expert, first_n, first_k]).reshape(BLOCK_N, BLOCK_K).T
    elif VARIANT.layout == "n":
        value = weight.data.load([expert, first_k, first_n]).reshape(BLOCK_K, BLOCK_N)
    else:
        n, k = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
        ptr = weight.data + expert.to(tl.int64) * weight.expert_stride
        if SCHEME == "none":
            n, k = n[None, :], k[:, None]
            mask = (k < k_size) & (n < n_size)
            value = tl.load(ptr + n * weight.n_stride + k * weight.k_stride, mask=mask, other=0.0)
        else:
            row, column, rows, columns = n[:, None], k[None, :], n_size, k_size
            if TURNED:
                row, column, rows, columns = k[:, None], n[None, :], k_size, n_size
            value = load_quantized(
                ptr, weight.scale_ptr, weight.zero_ptr, row, column, weight.n_stride, weight.k_stride,
                expert.to(tl.int64) * weight.scale_expert_stride, weight.scale_n_stride, weight.scale_group_stride,
                (row < rows) & (column < columns), A, SCHEME, GROUP, UNIT,
            )  # fmt: skip
            if not TURNED:
                value = value.T
    return value


@triton.jit
def add_products(
    first, second, rows, weight, n, second_weight, second_n, pairs, n_size, k_size,
    WHICH: tl.constexpr, SECOND: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """Return first + rows · weightᵀ of columns from n on, and likewise `second` if there is one; rows are loaded once.

    WHICH of the two weights each one is says what codes it has. Where the pairs' expert is not here, nothing is read.
    """
    A: tl.constexpr = rows.ptr.dtype.element_ty
    BLOCK_K: tl.constexpr = VARIANT.block_k
    k_size = tl.where(pairs.taken, k_size, 0)
    if VARIANT.row_vectors:
        k_size = k_size // 8 * 8  # changes nothing, but shows the compiler that masks are uniform over a vector
    ptr = rows.ptr + ((pairs.pair // rows.slots).to(tl.int64) * rows.stride)[:, None]
    for start in range(0, k_size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = load_rows(ptr, k[None, :], pairs.live[:, None] & (k < k_size)[None, :], VARIANT.row_vectors)
        right = load_weight(weight, pairs.expert, n, start, n_size, k_size, A, WHICH, VARIANT)
        first = tl.dot(left, right, first, input_precision="ieee")
        if VARIANT.second != "none":
            right = load_weight(second_weight, pairs.expert, second_n, start, n_size, k_size, A, SECOND, VARIANT)
            second = tl.dot(left, right, second, input_precision="ieee")
    return first, second
