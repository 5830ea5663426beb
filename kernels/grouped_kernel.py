"""The grouped matmul in Triton: tiles of the pairs of an expert by columns of its weight, and their sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from arithmetic import rounded
from grouped_epilogue import Adapter, Outputs, adapted, store, store_swiglu
from grouped_tile import PairTable, RowOperand, Weight, add_products, pairs_of, place


class Work(NamedTuple):
    """The arguments that all tiles share: outputs, and two factors with adapters; the second may be missing."""

    table: Any
    rows_0: Any
    weight_0: Any
    adapter_0: Any
    rows_1: Any
    weight_1: Any
    adapter_1: Any
    n_size: Any
    k_size: Any
    outputs: Any
    limit: Any


# Sizes, strides and addresses are no part of a variant's key: VARIANT alone says what vectors there are.
@triton.jit(
    do_not_specialize=[
        "rows_0_slots", "rows_0_stride", "rows_1_slots", "rows_1_stride",
        "weight_0_expert_stride", "weight_0_n_stride", "weight_0_k_stride",
        "weight_1_expert_stride", "weight_1_n_stride", "weight_1_k_stride",
        "scale_0_expert_stride", "scale_0_n_stride", "scale_0_group_stride",
        "scale_1_expert_stride", "scale_1_n_stride", "scale_1_group_stride",
        "lora_0_expert_stride", "lora_1_expert_stride", "rank", "scaling",
        "blocks", "columns", "experts", "n_size", "k_size", "limit",
    ],
    do_not_specialize_on_alignment=[
        "rows_0_ptr", "rows_1_ptr", "weight_0", "weight_1", "scale_0_ptr", "zero_0_ptr", "scale_1_ptr", "zero_1_ptr",
        "middle_0_ptr", "lora_0_ptr", "middle_1_ptr", "lora_1_ptr",
        "order_ptr", "offsets_ptr", "block_experts_ptr", "block_starts_ptr",
    ],
)  # fmt: skip
def grouped_linear_kernel(
    rows_0_ptr, rows_0_slots, rows_0_stride: tl.int64, rows_1_ptr, rows_1_slots, rows_1_stride: tl.int64,
    weight_0, weight_0_expert_stride: tl.int64, weight_0_n_stride: tl.int64, weight_0_k_stride: tl.int64,
    weight_1, weight_1_expert_stride: tl.int64, weight_1_n_stride: tl.int64, weight_1_k_stride: tl.int64,
    scale_0_ptr, zero_0_ptr,
    scale_0_expert_stride: tl.int64, scale_0_n_stride: tl.int64, scale_0_group_stride: tl.int64,
    scale_1_ptr, zero_1_ptr,
    scale_1_expert_stride: tl.int64, scale_1_n_stride: tl.int64, scale_1_group_stride: tl.int64,
    middle_0_ptr, lora_0_ptr, lora_0_expert_stride: tl.int64,
    middle_1_ptr, lora_1_ptr, lora_1_expert_stride: tl.int64, rank, scaling,
    order_ptr, offsets_ptr, block_experts_ptr, block_starts_ptr, blocks, columns, experts, n_size, k_size,
    result_ptr, second_result_ptr, base_ptr, second_base_ptr, saved_gate_ptr, saved_up_ptr, intermediate_ptr, limit,
    BLOCKS_PER_GROUP: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """Compute tiles of the pairs of one expert by BLOCK_N columns, or by two such blocks."""
    BLOCK_M: tl.constexpr = VARIANT.block_m
    BLOCK_N: tl.constexpr = VARIANT.block_n
    rows_0, rows_1 = (
        RowOperand(rows_0_ptr, rows_0_slots, rows_0_stride),
        RowOperand(rows_1_ptr, rows_1_slots, rows_1_stride),
    )
    weight_0 = Weight(
        weight_0, weight_0_expert_stride, weight_0_n_stride, weight_0_k_stride,
        scale_0_ptr, zero_0_ptr, scale_0_expert_stride, scale_0_n_stride, scale_0_group_stride,
    )  # fmt: skip
    weight_1 = Weight(
        weight_1, weight_1_expert_stride, weight_1_n_stride, weight_1_k_stride,
        scale_1_ptr, zero_1_ptr, scale_1_expert_stride, scale_1_n_stride, scale_1_group_stride,
    )  # fmt: skip
    adapter_0 = Adapter(middle_0_ptr, lora_0_ptr, lora_0_expert_stride, rank, scaling)
    adapter_1 = Adapter(middle_1_ptr, lora_1_ptr, lora_1_expert_stride, rank, scaling)
    outputs = Outputs(
        result_ptr, second_result_ptr, base_ptr, second_base_ptr, saved_gate_ptr, saved_up_ptr, intermediate_ptr
    )
    table = PairTable(order_ptr, offsets_ptr, block_experts_ptr, block_starts_ptr, experts)
    work = Work(table, rows_0, weight_0, adapter_0, rows_1, weight_1, adapter_1, n_size, k_size, outputs, limit)
    # A program has one tile, so that this loop runs once: without it ptxas spills the sums (2 to 3 times the time).
    for turn in range(0, tl.cdiv(blocks * columns - tl.program_id(0), tl.num_programs(0))):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        block, column = place(tile, blocks, columns, BLOCKS_PER_GROUP)
        expert = tl.load(block_experts_ptr + block).to(tl.int32)
        if expert >= 0:
            first_n = column * BLOCK_N
            second_n = first_n
            if VARIANT.second == "columns":
                first_n = column * (2 * BLOCK_N)
                second_n = first_n + BLOCK_N
            first, second = sums(work, pairs_of(table, block, expert, BLOCK_M), first_n, second_n, VARIANT)
            # The pairs are loaded again, so that they take no registers during the sums.
            finish(work, first, second, pairs_of(table, block, expert, BLOCK_M), first_n, second_n, VARIANT)


@triton.jit
def sums(work, pairs, first_n, second_n, VARIANT: tl.constexpr):
    """Return rows · weightᵀ of a tile, summed over two factors unless the second weight has a sum of its own."""
    A: tl.constexpr = work.rows_0.ptr.dtype.element_ty
    BLOCK_M: tl.constexpr = VARIANT.block_m
    BLOCK_N: tl.constexpr = VARIANT.block_n
    ROUND: tl.constexpr = VARIANT.round_base
    n_size, k_size = work.n_size, work.k_size
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if VARIANT.second == "weight":
        first, second = add_products(
            zeros, zeros, work.rows_0, work.weight_0, first_n, work.weight_1, second_n, pairs, n_size, k_size,
            0, 1, VARIANT,
        )  # fmt: skip
    else:
        first, second = add_products(
            zeros, zeros, work.rows_0, work.weight_0, first_n, work.weight_0, second_n, pairs, n_size, k_size,
            0, 0, VARIANT,
        )  # fmt: skip
    first, second = rounded(first, A, ROUND), rounded(second, A, ROUND)
    if work.rows_1.ptr is not None:
        more, second_more = add_products(
            zeros if ROUND else first, zeros if ROUND else second,
            work.rows_1, work.weight_1, first_n, work.weight_1, second_n, pairs, n_size, k_size,
            1, 1, VARIANT,
        )  # fmt: skip
        first = first + rounded(more, A, True) if ROUND else more
        second = second + rounded(second_more, A, True) if ROUND else second_more
    return first, second


@triton.jit
def finish(work, first, second, pairs, first_n, second_n, VARIANT: tl.constexpr):
    """Add LoRA to the sums of a tile, and write the results of the epilogue."""
    BLOCK_N: tl.constexpr = VARIANT.block_n
    outputs, n_size = work.outputs, work.n_size
    n = first_n + tl.arange(0, BLOCK_N)
    value = adapted(first, work.adapter_0, pairs, n, n_size, VARIANT)
    if VARIANT.second != "weight":
        value = adapted(value, work.adapter_1, pairs, n, n_size, VARIANT)
    store(outputs.result, value, pairs, n, n_size, VARIANT.vectors)
    if VARIANT.second != "none":
        n = second_n + tl.arange(0, BLOCK_N)
        second_value = second
        if VARIANT.second == "columns":
            second_value = adapted(second_value, work.adapter_0, pairs, n, n_size, VARIANT)
        second_value = adapted(second_value, work.adapter_1, pairs, n, n_size, VARIANT)
        store(outputs.second_result, second_value, pairs, n, n_size, VARIANT.vectors)
        if VARIANT.epilogue == "swiglu":
            store_swiglu(outputs, value, second_value, work.limit, pairs, n, n_size, VARIANT)
        store(outputs.second_base, second, pairs, n, n_size, VARIANT.vectors)
    # Last: Triton 3.6 may move a conversion that the result needs too into this branch (triton #8257).
    store(outputs.base, first, pairs, first_n + tl.arange(0, BLOCK_N), n_size, VARIANT.vectors)
