"""A linear layer per expert with LoRA in Triton: every pair of a token and a slot is multiplied by its expert's weight.

Products are exact and added in fp32. Nothing is fused but the products of a dot into its sum, and no addition is
atomic, so that a pair's result does not depend on how many other pairs there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from grouped_epilogue import Adapter, adapted, rounded, store, store_dot, store_swiglu
from grouped_tile import Rows, Weight, add_products, pairs_of, place
from moe_lora_routing import BLOCK_ROWS, Routing
from quantized_weights import QuantizedWeight, code_arguments
from swiglu_limit import argument
from torch import Tensor

LARGEST_BLOCK_N = 128
LARGEST_BLOCK_K = 64  # and the order of all dots: terms go from first to last, in tiles that divide it
SMALLEST_BLOCK = 16  # of a dimension of a dot
BLOCKS_PER_GROUP = 8  # of pairs, whose columns are computed next to each other
VECTOR_BYTES = 16
OUTPUTS = ("result", "second_result", "base", "second_base", "saved_gate", "saved_up", "intermediate", "dots")

Factors = tuple[Tensor, Tensor | QuantizedWeight]
"""Rows [T, K] or [T, k, K], and a weight [E, N, K]."""


def depth(n: int) -> int:
    """Greatest number of roundings between a product and the dot of n of them, two factors one after the other or one.

    Interpreted, a tile of 64 products is added in any order, and then to the sum; of two factors, each may end with a
    tile of its own. Compiled, tensor cores add, which do not round: what they cut off is a premise of the device.
    """
    return min(n, min(n, LARGEST_BLOCK_K) + triton.cdiv(n, LARGEST_BLOCK_K))


# Sizes, strides and addresses are no part of a variant's key; the capitals alone say what vectors there are.
@triton.jit(
    do_not_specialize=[
        "blocks", "columns", "experts", "n_size", "k_size", "rank", "scaling", "limit",
        "rows_0_slots", "rows_0_stride", "rows_1_slots", "rows_1_stride", "other_slots", "other_stride", "pair_count",
        "weight_0_expert_stride", "weight_0_n_stride", "weight_0_k_stride",
        "weight_1_expert_stride", "weight_1_n_stride", "weight_1_k_stride",
        "scale_0_expert_stride", "scale_0_n_stride", "scale_0_group_stride",
        "scale_1_expert_stride", "scale_1_n_stride", "scale_1_group_stride",
    ],
    do_not_specialize_on_alignment=[
        "rows_0_ptr", "rows_1_ptr", "weight_0_ptr", "weight_1_ptr", "middle_0_ptr", "middle_1_ptr", "lora_0_ptr",
        "lora_1_ptr", "scale_0_ptr", "zero_0_ptr", "scale_1_ptr", "zero_1_ptr", "other_ptr",
    ],
)  # fmt: skip
def _grouped_linear_kernel(
    rows_0_ptr, rows_0_slots, rows_0_stride: tl.int64, rows_1_ptr, rows_1_slots, rows_1_stride: tl.int64,
    weight_0_ptr, weight_0_expert_stride: tl.int64, weight_0_n_stride: tl.int64, weight_0_k_stride: tl.int64,
    weight_1_ptr, weight_1_expert_stride: tl.int64, weight_1_n_stride: tl.int64, weight_1_k_stride: tl.int64,
    scale_0_ptr, zero_0_ptr, scale_0_expert_stride: tl.int64, scale_0_n_stride: tl.int64, scale_0_group_stride: tl.int64,
    scale_1_ptr, zero_1_ptr, scale_1_expert_stride: tl.int64, scale_1_n_stride: tl.int64, scale_1_group_stride: tl.int64,
    middle_0_ptr, lora_0_ptr, middle_1_ptr, lora_1_ptr, rank, scaling,
    order_ptr, offsets_ptr, block_experts_ptr, block_starts_ptr, blocks, columns, experts, n_size, k_size,
    result_ptr, second_result_ptr, base_ptr, second_base_ptr, saved_gate_ptr, saved_up_ptr, intermediate_ptr, limit,
    dots_ptr, other_ptr, other_slots, other_stride: tl.int64, pair_count,
    SECOND: tl.constexpr, EPILOGUE: tl.constexpr, ROUND_BASE: tl.constexpr, ROUND_LORA: tl.constexpr,
    LAYOUT: tl.constexpr, VECTORS: tl.constexpr, OTHER_VECTORS: tl.constexpr, LORA_VECTORS: tl.constexpr, LORA_TURNED: tl.constexpr,
    CODES_0: tl.constexpr, CODES_1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STEPS: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M pairs of one expert by BLOCK_N columns, or by two such: SECOND says of what.

    `columns`: the next BLOCK_N of the same results; `weight`: those of another weight, with results of their own;
    `none`: there are no second ones.
    """
    A: tl.constexpr = rows_0_ptr.dtype.element_ty
    PAIRED: tl.constexpr = SECOND != "none"
    rows_0, rows_1 = Rows(rows_0_ptr, rows_0_slots, rows_0_stride), Rows(rows_1_ptr, rows_1_slots, rows_1_stride)
    weight_0 = Weight(
        weight_0_ptr, weight_0_expert_stride, weight_0_n_stride, weight_0_k_stride,
        scale_0_ptr, zero_0_ptr, scale_0_expert_stride, scale_0_n_stride, scale_0_group_stride,
    )  # fmt: skip
    weight_1 = Weight(
        weight_1_ptr, weight_1_expert_stride, weight_1_n_stride, weight_1_k_stride,
        scale_1_ptr, zero_1_ptr, scale_1_expert_stride, scale_1_n_stride, scale_1_group_stride,
    )  # fmt: skip
    adapter_0 = Adapter(middle_0_ptr, lora_0_ptr, rank, scaling)
    adapter_1 = Adapter(middle_1_ptr, lora_1_ptr, rank, scaling)
    # Accumulators of a tile stay in registers where ptxas sees a loop over tiles.
    for tile in range(tl.program_id(0), blocks * columns, tl.num_programs(0)):
        block, column = place(tile, blocks, columns, BLOCKS_PER_GROUP)
        expert = tl.load(block_experts_ptr + block)
        if expert >= 0:
            pairs = pairs_of(block, expert, experts, order_ptr, offsets_ptr, block_starts_ptr, BLOCK_M)
            n = column * BLOCK_N + tl.arange(0, BLOCK_N)
            second_n = n
            if SECOND == "columns":
                n = n + column * BLOCK_N
                second_n = n + BLOCK_N
            zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if SECOND == "weight":
                first, second = add_products(
                    zeros, zeros, rows_0, weight_0, n, weight_1, n, pairs, n_size, k_size,
                    BLOCK_K, PAIRED, LAYOUT, CODES_0, CODES_1,
                )  # fmt: skip
            else:
                first, second = add_products(
                    zeros, zeros, rows_0, weight_0, n, weight_0, second_n, pairs, n_size, k_size,
                    BLOCK_K, PAIRED, LAYOUT, CODES_0, CODES_0,
                )  # fmt: skip
            first, second = rounded(first, A, ROUND_BASE), rounded(second, A, ROUND_BASE)
            if rows_1_ptr is not None:
                more, second_more = add_products(
                    zeros if ROUND_BASE else first, zeros if ROUND_BASE else second,
                    rows_1, weight_1, n, weight_1, second_n, pairs, n_size, k_size,
                    BLOCK_K, PAIRED, LAYOUT, CODES_1, CODES_1,
                )  # fmt: skip
                first = first + rounded(more, A, True) if ROUND_BASE else more
                second = second + rounded(second_more, A, True) if ROUND_BASE else second_more

            # Loaded again: what a tile needs last does not take registers while it is added up.
            pairs = pairs_of(block, expert, experts, order_ptr, offsets_ptr, block_starts_ptr, BLOCK_M)
            value = adapted(first, adapter_0, pairs, n, n_size, ROUND_LORA, BLOCK_R, STEPS, LORA_TURNED, LORA_VECTORS)
            if SECOND != "weight":
                value = adapted(
                    value, adapter_1, pairs, n, n_size, ROUND_LORA, BLOCK_R, STEPS, LORA_TURNED, LORA_VECTORS
                )
            store(result_ptr, value, pairs, n, n_size, VECTORS)
            if EPILOGUE == "dot":
                other = Rows(other_ptr, other_slots, other_stride)
                number = column * 2 if PAIRED else column
                store_dot(dots_ptr, value, other, number, pairs, pair_count, n, n_size, ROUND_BASE, OTHER_VECTORS)
            if PAIRED:
                second_value = second
                if SECOND != "weight":
                    second_value = adapted(
                        second, adapter_0, pairs, second_n, n_size,
                        ROUND_LORA, BLOCK_R, STEPS, LORA_TURNED, LORA_VECTORS,
                    )  # fmt: skip
                second_value = adapted(
                    second_value, adapter_1, pairs, second_n, n_size,
                    ROUND_LORA, BLOCK_R, STEPS, LORA_TURNED, LORA_VECTORS,
                )  # fmt: skip
                store(second_result_ptr, second_value, pairs, second_n, n_size, VECTORS)
                if EPILOGUE == "dot":
                    store_dot(
                        dots_ptr, second_value, other, number + 1, pairs, pair_count, second_n, n_size,
                        ROUND_BASE, OTHER_VECTORS,
                    )  # fmt: skip
                if EPILOGUE == "swiglu":
                    store_swiglu(
                        saved_gate_ptr, saved_up_ptr, intermediate_ptr, value, second_value, limit,
                        pairs, n, n_size, ROUND_BASE, VECTORS,
                    )  # fmt: skip
            # Last: Triton 3.6 may move a conversion that the result needs too into this branch (triton #8257).
            store(base_ptr, first, pairs, n, n_size, VECTORS)
            if PAIRED:
                store(second_base_ptr, second, pairs, second_n, n_size, VECTORS)


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
        lora: none, one or two (middle, lora_b), [T, k, r] and [E, N, r], each with a sum of its own.
        out_dtype: of the result, which is rounded once; fp32 or the dtype of the rows.
        round_base: round the product of each operand to the dtype of the rows before anything is added.
        round_lora: round the product of each LoRA, and again its scaled value.
        base_out: [T, k, N], contiguous; receives the sum over the operands.
    """
    n = operands[0][1].shape[1]
    result = new_rows(routing, n, out_dtype)
    second = paired_columns(routing, n)
    outputs = {"result": result, "second_result": result, "base": base_out, "second_base": base_out}
    launch(
        [rows for rows, _ in operands], [weight for _, weight in operands], lora, routing, outputs,
        second=second, scaling=scaling, round_base=round_base, round_lora=round_lora,
    )  # fmt: skip
    return result


def grouped_pair(rows: Tensor, weights: tuple[Tensor, Tensor], routing: Routing) -> list[Tensor]:
    """rows · weightᵀ [T, k, N] of two weights, in the dtype of the rows, which are read once for both."""
    results = [new_rows(routing, weights[0].shape[1], rows.dtype) for _ in weights]
    launch([rows], weights, (), routing, dict(zip(("result", "second_result"), results, strict=True)), second="weight")
    return results


def paired_columns(routing: Routing, n: int) -> str:
    """What the second accumulator of a tile of one weight is for: more of its n columns, where blocks are large."""
    return "columns" if routing.block_rows == BLOCK_ROWS[-1] and n > LARGEST_BLOCK_N else "none"


def new_rows(routing: Routing, columns: int, dtype: torch.dtype) -> Tensor:
    """[T, k, columns], not initialized."""
    return torch.empty(routing.tokens, routing.slots, columns, dtype=dtype, device=routing.order.device)


def launch(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor | QuantizedWeight],
    lora: Sequence[Factors],
    routing: Routing,
    outputs: Mapping[str, Tensor | None],
    *,
    second: str,
    epilogue: str = "store",
    other: Tensor | None = None,
    scaling: float = 1.0,
    limit: float = inf,
    round_base: bool = False,
    round_lora: bool = False,
) -> None:
    """Launch the kernel on one or two factors; it says what `second` is, and `outputs` are its tensors by name.

    `epilogue` is `store`; `swiglu`, which activates the first sum, limited to `limit`, and multiplies by the second; or
    `dot`, which multiplies by the rows of `other` [T, N] and adds the columns of a tile.
    """
    _, n, k = weights[0].shape
    if not (routing.tokens * routing.slots and n):
        return
    rank = lora[0][0].shape[-1] if lora else 1
    b, turned = _adapters([b for _, b in lora])
    other = None if other is None else _flat(other)
    flat = [_flat(r) for r in rows]
    layout, vectors = _layout(flat, weights), n % 8 == 0
    block_m, block_n, block_r = routing.block_rows, _block(n, LARGEST_BLOCK_N), _block(rank, LARGEST_BLOCK_K)
    blocks, columns = len(routing.block_experts), triton.cdiv(n, 2 * block_n if second == "columns" else block_n)
    grid = (blocks * columns,)
    with torch.accelerator.device_index(routing.order.device.index):
        _grouped_linear_kernel[grid](
            **_row_arguments(flat, rows, routing.slots), **_weight_arguments(weights), **code_arguments(list(weights)),
            **_pointers(("middle_0", "middle_1"), [middle.contiguous() for middle, _ in lora]),
            **_pointers(("lora_0", "lora_1"), b), rank=rank, scaling=float(scaling),
            order_ptr=routing.order, offsets_ptr=routing.offsets, block_experts_ptr=routing.block_experts,
            block_starts_ptr=routing.block_starts, blocks=blocks, columns=columns, experts=routing.experts,
            n_size=n, k_size=k, **{f"{name}_ptr": outputs.get(name) for name in OUTPUTS}, limit=argument(limit),
            other_ptr=other, other_slots=routing.slots, other_stride=0 if other is None else other.stride(0),
            pair_count=routing.tokens * routing.slots,
            SECOND=second, EPILOGUE=epilogue, ROUND_BASE=round_base, ROUND_LORA=round_lora,
            LAYOUT=layout, VECTORS=vectors, OTHER_VECTORS=other is not None and _in_vectors(other), LORA_VECTORS=vectors and rank % 8 == 0, LORA_TURNED=turned,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_block(k, LARGEST_BLOCK_K),
            BLOCK_R=block_r, STEPS=triton.cdiv(rank, block_r), BLOCKS_PER_GROUP=BLOCKS_PER_GROUP,
            num_warps=8 if block_m * block_n > 64 * 128 else 4, num_stages=4, enable_fp_fusion=False,
        )  # fmt: skip


def _block(size: int, largest: int) -> int:
    return min(largest, max(SMALLEST_BLOCK, triton.next_power_of_2(size)))


def _pointers(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"{name}_ptr": tensors[i] if i < len(tensors) else None for i, name in enumerate(names)}


def _flat(rows: Tensor) -> Tensor:
    """Rows [·, K], each of which has no gaps."""
    flat = rows.reshape(-1, rows.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _row_arguments(flat: Sequence[Tensor], rows: Sequence[Tensor], slots: int) -> dict[str, Any]:
    """What the kernel has to know of the rows, which are those of tokens or of pairs."""
    arguments: dict[str, Any] = {}
    for i in (0, 1):
        given = i < len(rows)
        arguments[f"rows_{i}_ptr"] = flat[i] if given else None
        arguments[f"rows_{i}_slots"] = slots if given and rows[i].dim() == 2 else 1
        arguments[f"rows_{i}_stride"] = flat[i].stride(0) if given else 0
    return arguments


def _weight_arguments(weights: Sequence[Tensor | QuantizedWeight]) -> dict[str, Any]:
    """What the kernel has to know of the weights, or of their codes."""
    arguments: dict[str, Any] = {}
    for i in (0, 1):
        weight = weights[i] if i < len(weights) else None
        tensor = weight.codes if isinstance(weight, QuantizedWeight) else weight
        strides = (0, 0, 0) if tensor is None else tensor.stride()
        arguments[f"weight_{i}_ptr"] = tensor
        arguments |= {f"weight_{i}_{d}_stride": s for d, s in zip(("expert", "n", "k"), strides, strict=True)}
    return arguments


def _adapters(weights: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """The weights [E, N, r] of adapters without gaps, and whether they lie as [E, r, N]; a copy where they do neither."""
    if all(weight.transpose(1, 2).is_contiguous() for weight in weights):
        return list(weights), bool(weights)
    return [weight.contiguous() for weight in weights], False


def _layout(rows: Sequence[Tensor], weights: Sequence[Tensor | QuantizedWeight]) -> str:
    """`k` or `n`: rows lie in 16-byte vectors along k, and weights along this dimension; `any`: they do not.

    Weights in codes are read one by one in any case.
    """
    seen = [w for w in weights if isinstance(w, Tensor)]
    for layout, right in (("k", seen), ("n", [w.transpose(1, 2) for w in seen])):
        if all(_in_vectors(t) for t in (*rows, *right)):
            return layout
    return "any"


def _in_vectors(tensor: Tensor) -> bool:
    """Whether the last dimension is contiguous and starts and ends on 16-byte boundaries everywhere."""
    *steps, last = (stride * tensor.element_size() for stride in tensor.stride())
    starts = (tensor.data_ptr(), tensor.shape[-1] * tensor.element_size(), *steps)
    return last == tensor.element_size() and all(start % VECTOR_BYTES == 0 for start in starts)
