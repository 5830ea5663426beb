"""A linear layer per expert with LoRA in Triton: every pair of a token and a slot is multiplied by its expert's weight.

Products are exact and added in fp32. Nothing is fused but the products of a dot into its sum, and no addition is
atomic, so that a pair's result does not depend on how many other pairs there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from moe_lora_routing import Routing
from quantized_weights import QuantizedWeight, code_arguments, load_quantized
from torch import Tensor

LARGEST_BLOCK_N = 128
LARGEST_BLOCK_K = 64  # and the order of all dots: terms go from first to last, in tiles that divide it
SMALLEST_BLOCK = 16  # of a dimension of a dot
VECTOR_BYTES = 16

Factors = tuple[Tensor, Tensor | QuantizedWeight]
"""Rows [T, K] or [T, k, K], and a weight [E, N, K]."""


def depth(n: int) -> int:
    """Greatest number of roundings between a product and the dot of n of them, two factors one after the other or one.

    Interpreted, a tile of 64 products is added in any order, and then to the sum; of two factors, each may end with a
    tile of its own. Compiled, tensor cores add, which do not round: what they cut off is a premise of the device.
    """
    return min(n, min(n, LARGEST_BLOCK_K) + triton.cdiv(n, LARGEST_BLOCK_K))


@triton.jit
def load_rows(ptr, row, k, row_stride, k_stride, mask, LAYOUT: tl.constexpr):
    """The elements k of each row, zero outside of the mask: the left operand of a dot."""
    if LAYOUT == "any":
        pointers = ptr + row * row_stride + k * k_stride
    else:
        pointers = tl.multiple_of(ptr + row * row_stride + k, (1, 16))
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_weight(
    ptr, n, k, n_stride, k_stride, mask, scale_ptr, zero_ptr, scale_start, scale_n_stride, scale_group_stride,
    A: tl.constexpr, LAYOUT: tl.constexpr, SCHEME: tl.constexpr, GROUP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The elements [k, n] of an expert's weight [N, K] from `ptr` on, zero outside of the mask: the right operand.

    All strides of codes are those of the weight as it is stored, which is [K, N] if TURNED.
    """
    if SCHEME != "none":
        row, column = n, k
        if TURNED:
            row, column = k, n
        weight = load_quantized(
            ptr, scale_ptr, zero_ptr, row, column, n_stride, k_stride, scale_start, scale_n_stride, scale_group_stride,
            mask, A, SCHEME, GROUP,
        )  # fmt: skip
    else:
        if LAYOUT == "k":
            pointers = tl.multiple_of(ptr + n * n_stride + k, (16, 1))
        elif LAYOUT == "n":
            pointers = tl.multiple_of(ptr + k * k_stride + n, (1, 16))
        else:
            pointers = ptr + n * n_stride + k * k_stride
        weight = tl.load(pointers, mask=mask, other=0.0)
    return weight


@triton.jit
def add_product(
    total, rows_ptr, row, live, row_stride, column_stride, weight_ptr, n, n_size, n_stride, k_stride, k_size,
    LAYOUT: tl.constexpr, BLOCK_K: tl.constexpr, scale_ptr, zero_ptr, scale_start, scale_n_stride, scale_group_stride,
    SCHEME: tl.constexpr, GROUP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """total + rows · weightᵀ over all k; where k_size is 0 nothing is read."""
    if LAYOUT != "any":
        k_size = k_size // 8 * 8  # changes nothing, but shows the compiler that masks are uniform over a vector
    if LAYOUT == "n":
        n_size = n_size // 8 * 8
    for start in range(0, k_size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left_mask = live[:, None] & (k < k_size)[None, :]
        left = load_rows(rows_ptr, row[:, None], k[None, :], row_stride, column_stride, left_mask, LAYOUT)
        right_mask = (k < k_size)[:, None] & (n < n_size)[None, :]
        right = load_weight(
            weight_ptr, n[None, :], k[:, None], n_stride, k_stride, right_mask,
            scale_ptr, zero_ptr, scale_start, scale_n_stride, scale_group_stride,
            rows_ptr.dtype.element_ty, LAYOUT, SCHEME, GROUP, TURNED,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def rounded(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    """The fp32 value, rounded to `dtype` if ROUND."""
    if ROUND:
        value = value.to(dtype).to(tl.float32)
    return value


# Sizes, strides and addresses are no part of a variant's key; LAYOUT and LORA_LAYOUT alone say what vectors there are.
@triton.jit(
    do_not_specialize=[
        "blocks", "experts", "n_size", "k_size", "rank", "scaling",
        "rows_0_slots", "rows_0_row_stride", "rows_0_column_stride",
        "rows_1_slots", "rows_1_row_stride", "rows_1_column_stride",
        "weight_0_expert_stride", "weight_0_n_stride", "weight_0_k_stride",
        "weight_1_expert_stride", "weight_1_n_stride", "weight_1_k_stride",
        "scale_0_expert_stride", "scale_0_n_stride", "scale_0_group_stride",
        "scale_1_expert_stride", "scale_1_n_stride", "scale_1_group_stride",
        "middle_0_slots", "middle_0_row_stride", "middle_0_column_stride",
        "middle_1_slots", "middle_1_row_stride", "middle_1_column_stride",
        "lora_0_expert_stride", "lora_0_n_stride", "lora_0_k_stride",
        "lora_1_expert_stride", "lora_1_n_stride", "lora_1_k_stride",
    ],
    do_not_specialize_on_alignment=[
        "rows_0_ptr", "rows_1_ptr", "weight_0_ptr", "weight_1_ptr", "middle_0_ptr", "middle_1_ptr", "lora_0_ptr",
        "lora_1_ptr", "result_ptr", "base_ptr", "order_ptr", "offsets_ptr", "block_experts_ptr", "block_starts_ptr",
        "scale_0_ptr", "zero_0_ptr", "scale_1_ptr", "zero_1_ptr",
    ],
)  # fmt: skip
def _grouped_linear_kernel(
    rows_0_ptr, weight_0_ptr, rows_1_ptr, weight_1_ptr, middle_0_ptr, lora_0_ptr, middle_1_ptr, lora_1_ptr,
    result_ptr, base_ptr, order_ptr, offsets_ptr, block_experts_ptr, block_starts_ptr,
    scale_0_ptr, zero_0_ptr, scale_1_ptr, zero_1_ptr,
    blocks, experts, n_size, k_size, rank, scaling,
    rows_0_slots, rows_0_row_stride: tl.int64, rows_0_column_stride: tl.int64,
    rows_1_slots, rows_1_row_stride: tl.int64, rows_1_column_stride: tl.int64,
    weight_0_expert_stride: tl.int64, weight_0_n_stride: tl.int64, weight_0_k_stride: tl.int64,
    weight_1_expert_stride: tl.int64, weight_1_n_stride: tl.int64, weight_1_k_stride: tl.int64,
    scale_0_expert_stride: tl.int64, scale_0_n_stride: tl.int64, scale_0_group_stride: tl.int64,
    scale_1_expert_stride: tl.int64, scale_1_n_stride: tl.int64, scale_1_group_stride: tl.int64,
    middle_0_slots, middle_0_row_stride: tl.int64, middle_0_column_stride: tl.int64,
    middle_1_slots, middle_1_row_stride: tl.int64, middle_1_column_stride: tl.int64,
    lora_0_expert_stride: tl.int64, lora_0_n_stride: tl.int64, lora_0_k_stride: tl.int64,
    lora_1_expert_stride: tl.int64, lora_1_n_stride: tl.int64, lora_1_k_stride: tl.int64,
    ROUND_BASE: tl.constexpr, ROUND_LORA: tl.constexpr, LAYOUT: tl.constexpr, LORA_LAYOUT: tl.constexpr,
    SCHEME_0: tl.constexpr, GROUP_0: tl.constexpr, TURNED_0: tl.constexpr,
    SCHEME_1: tl.constexpr, GROUP_1: tl.constexpr, TURNED_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one block of pairs per program; blocks of one expert and the same columns are neighbours."""
    A: tl.constexpr = rows_0_ptr.dtype.element_ty
    block = tl.program_id(0) % blocks
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    position = tl.load(block_starts_ptr + block) + tl.arange(0, BLOCK_M)
    live = position < tl.load(offsets_ptr + expert + 1)
    pair = tl.load(order_ptr + position, mask=live, other=0)
    n = tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    taken = expert < experts
    k_size = tl.where(taken, k_size, 0)
    rank = tl.where(taken, rank, 0)

    base = add_product(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
        rows_0_ptr, pair // rows_0_slots, live, rows_0_row_stride, rows_0_column_stride,
        weight_0_ptr + expert * weight_0_expert_stride, n, n_size, weight_0_n_stride, weight_0_k_stride, k_size,
        LAYOUT, BLOCK_K, scale_0_ptr, zero_0_ptr, expert * scale_0_expert_stride, scale_0_n_stride,
        scale_0_group_stride, SCHEME_0, GROUP_0, TURNED_0,
    )  # fmt: skip
    base = rounded(base, A, ROUND_BASE)
    if rows_1_ptr is not None:
        start = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) if ROUND_BASE else base
        second = add_product(
            start, rows_1_ptr, pair // rows_1_slots, live, rows_1_row_stride, rows_1_column_stride,
            weight_1_ptr + expert * weight_1_expert_stride, n, n_size, weight_1_n_stride, weight_1_k_stride, k_size,
            LAYOUT, BLOCK_K, scale_1_ptr, zero_1_ptr, expert * scale_1_expert_stride, scale_1_n_stride,
            scale_1_group_stride, SCHEME_1, GROUP_1, TURNED_1,
        )  # fmt: skip
        base = base + rounded(second, A, True) if ROUND_BASE else second

    value = base
    if middle_0_ptr is not None:
        product = add_product(
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
            middle_0_ptr, pair // middle_0_slots, live, middle_0_row_stride, middle_0_column_stride,
            lora_0_ptr + expert * lora_0_expert_stride, n, n_size, lora_0_n_stride, lora_0_k_stride, rank,
            LORA_LAYOUT, BLOCK_R, None, None, 0, 0, 0, "none", 1, False,
        )  # fmt: skip
        value = value + rounded(rounded(product, A, ROUND_LORA) * scaling, A, ROUND_LORA)
    if middle_1_ptr is not None:
        product = add_product(
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
            middle_1_ptr, pair // middle_1_slots, live, middle_1_row_stride, middle_1_column_stride,
            lora_1_ptr + expert * lora_1_expert_stride, n, n_size, lora_1_n_stride, lora_1_k_stride, rank,
            LORA_LAYOUT, BLOCK_R, None, None, 0, 0, 0, "none", 1, False,
        )  # fmt: skip
        value = value + rounded(rounded(product, A, ROUND_LORA) * scaling, A, ROUND_LORA)
    value = tl.where(taken, value, 0.0)  # a scaling that is infinite in fp32 would give NaN

    element = pair[:, None] * n_size + n[None, :]
    inside = live[:, None] & (n < n_size)[None, :]
    tl.store(result_ptr + element, value.to(result_ptr.dtype.element_ty), mask=inside)
    # Last: Triton 3.6 may move a conversion that the result needs too into this branch (triton #8257).
    if base_ptr is not None:
        tl.store(base_ptr + element, base.to(base_ptr.dtype.element_ty), mask=inside)


def grouped_linear(
    operands: tuple[Factors, ...],
    routing: Routing,
    *,
    lora: tuple[Factors, ...] = (),
    scaling: float = 1.0,
    out_dtype: torch.dtype,
    round_base: bool = False,
    round_lora: bool = False,
    base_out: Tensor | None = None,
) -> Tensor:
    """Σ rows · weightᵀ + Σ scaling · (middle · lora_bᵀ) [T, k, N] for each pair, with the weights of its expert.

    Args:
        operands: one or two (rows, weight); rows are [T, K] in the order of tokens, or [T, k, K] in that of pairs, bf16
            or fp16; weights [E, N, K] with any strides, so that a transposed view or a slice serves as one, or in
            codes. All have the same N and K. Without `round_base` they share one fp32 sum.
        routing: the expert of each pair; rows of pairs that are skipped are zero, and nothing is read for them.
        lora: none, one or two (middle, lora_b), [T, k, r] and [E, N, r] with any strides, each with a sum of its own.
        out_dtype: of the result, which is rounded once; fp32 or the dtype of the rows.
        round_base: round the product of each operand to the dtype of the rows before anything is added.
        round_lora: round the product of each LoRA, and again its scaled value.
        base_out: [T, k, N], contiguous; receives the sum over the operands.
    """
    rows, (_, n, k) = operands[0][0], operands[0][1].shape
    result = torch.empty(routing.tokens, routing.slots, n, dtype=out_dtype, device=rows.device)
    if not result.numel():
        return result
    rank = lora[0][0].shape[-1] if lora else 1
    block_n, blocks = _block(n, LARGEST_BLOCK_N), len(routing.block_experts)
    with torch.accelerator.device_index(rows.device.index):
        _grouped_linear_kernel[(blocks * triton.cdiv(n, block_n),)](
            **_factor_arguments("rows", "weight", operands, routing.slots),
            **_factor_arguments("middle", "lora", lora, routing.slots),
            **code_arguments([weight for _, weight in operands]),
            result_ptr=result, base_ptr=base_out, order_ptr=routing.order, offsets_ptr=routing.offsets,
            block_experts_ptr=routing.block_experts, block_starts_ptr=routing.block_starts,
            blocks=blocks, experts=routing.experts, n_size=n, k_size=k, rank=rank, scaling=float(scaling),
            ROUND_BASE=round_base, ROUND_LORA=round_lora, LAYOUT=_layout(operands), LORA_LAYOUT=_layout(lora),
            BLOCK_M=routing.block_rows, BLOCK_N=block_n, BLOCK_K=_block(k, LARGEST_BLOCK_K),
            BLOCK_R=_block(rank, LARGEST_BLOCK_K),
            num_warps=8 if routing.block_rows * block_n > 64 * 64 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return result


def _block(size: int, largest: int) -> int:
    return min(largest, max(SMALLEST_BLOCK, triton.next_power_of_2(size)))


def _factor_arguments(left: str, right: str, factors: tuple[Factors, ...], slots: int) -> dict[str, Any]:
    """What the kernel has to know of up to two factors, of which it calls the rows `left` and the weight `right`."""
    arguments: dict[str, Any] = {}
    for i in (0, 1):
        rows, weight = factors[i] if i < len(factors) else (None, None)
        flat = None if rows is None else rows.reshape(-1, rows.shape[-1])
        weight = weight.codes if isinstance(weight, QuantizedWeight) else weight
        arguments |= {f"{left}_{i}_ptr": flat, f"{right}_{i}_ptr": weight}
        arguments[f"{left}_{i}_slots"] = slots if rows is not None and rows.dim() == 2 else 1
        strides = (0,) * 5 if flat is None else (*flat.stride(), *weight.stride())
        names = (f"{left}_{i}_row", f"{left}_{i}_column", *(f"{right}_{i}_{dim}" for dim in ("expert", "n", "k")))
        arguments |= {f"{name}_stride": stride for name, stride in zip(names, strides, strict=True)}
    return arguments


def _layout(factors: tuple[Factors, ...]) -> str:
    """`k` or `n`: rows lie in 16-byte vectors along k, and weights along this dimension; `any`: they do not.

    Weights in codes are read one by one in any case.
    """
    rows, weights = [rows for rows, _ in factors], [w for _, w in factors if isinstance(w, Tensor)]
    for layout, seen in (("k", weights), ("n", [w.transpose(1, 2) for w in weights])):
        if all(_in_vectors(t) for t in (*rows, *seen)):
            return layout
    return "any"


def _in_vectors(tensor: Tensor) -> bool:
    """Whether the last dimension is contiguous and starts and ends on 16-byte boundaries everywhere."""
    *steps, last = (stride * tensor.element_size() for stride in tensor.stride())
    starts = (tensor.data_ptr(), tensor.shape[-1] * tensor.element_size(), *steps)
    return last == tensor.element_size() and all(start % VECTOR_BYTES == 0 for start in starts)
