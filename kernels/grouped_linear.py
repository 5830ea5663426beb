"""A linear layer per expert with LoRA in Triton: every pair of a token and a slot is multiplied by its expert's weight.

Products are exact and added in fp32. Nothing is fused but the products of a dot into its sum, and no addition is
atomic, so that a pair's result does not depend on how many other pairs there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from grouped_epilogue import Adapter, Outputs, adapted, rounded, store, store_dot, store_swiglu
from grouped_tile import Rows, Table, Variant, Weight, add_products, pairs_of, place
from moe_lora_routing import BLOCK_ROWS, Routing
from quantized_weights import NUMBERS, QuantizedWeight, codes_of, scale_arguments
from swiglu_limit import argument
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LARGEST_BLOCK_N = 128
LARGEST_BLOCK_K = 64  # and the order of all dots: terms go from first to last, in tiles that divide it
SMALLEST_BLOCK = 16  # of a dimension of a dot
BLOCKS_PER_GROUP = 8  # of pairs, whose columns are computed next to each other
VECTOR_BYTES = 16
TAIL_ROWS = 64  # of a tile that has what is left of an expert's pairs

Factors = tuple[Tensor, Tensor | QuantizedWeight]
"""Rows [T, K] or [T, k, K], and a weight [E, N, K]."""


def depth(n: int) -> int:
    """Greatest number of roundings between a product and the dot of n of them, two factors one after the other or one.

    Interpreted, a tile of 64 products is added in any order, and then to the sum; of two factors, each may end with a
    tile of its own. Compiled, tensor cores add, which do not round: what they cut off is a premise of the device.
    """
    return min(n, min(n, LARGEST_BLOCK_K) + triton.cdiv(n, LARGEST_BLOCK_K))


class Work(NamedTuple):
    """What all tiles share: two factors with adapters, of which only the first must be there, and what they give."""

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
    other: Any
    pair_count: Any


# Sizes, strides and addresses are no part of a variant's key: VARIANT alone says what vectors there are.
@triton.jit(
    do_not_specialize=[
        "rows_0_slots", "rows_0_stride", "rows_1_slots", "rows_1_stride",
        "weight_0_expert_stride", "weight_0_n_stride", "weight_0_k_stride",
        "weight_1_expert_stride", "weight_1_n_stride", "weight_1_k_stride",
        "scale_0_expert_stride", "scale_0_n_stride", "scale_0_group_stride",
        "scale_1_expert_stride", "scale_1_n_stride", "scale_1_group_stride",
        "rank", "scaling", "blocks", "columns", "experts", "n_size", "k_size", "limit",
        "other_slots", "other_stride", "pair_count",
    ],
    do_not_specialize_on_alignment=[
        "rows_0_ptr", "rows_1_ptr", "weight_0", "weight_1", "scale_0_ptr", "zero_0_ptr", "scale_1_ptr", "zero_1_ptr",
        "middle_0_ptr", "lora_0_ptr", "middle_1_ptr", "lora_1_ptr", "other_ptr",
    ],
)  # fmt: skip
def _grouped_linear_kernel(
    rows_0_ptr, rows_0_slots, rows_0_stride: tl.int64, rows_1_ptr, rows_1_slots, rows_1_stride: tl.int64,
    weight_0, weight_0_expert_stride: tl.int64, weight_0_n_stride: tl.int64, weight_0_k_stride: tl.int64,
    weight_1, weight_1_expert_stride: tl.int64, weight_1_n_stride: tl.int64, weight_1_k_stride: tl.int64,
    scale_0_ptr, zero_0_ptr,
    scale_0_expert_stride: tl.int64, scale_0_n_stride: tl.int64, scale_0_group_stride: tl.int64,
    scale_1_ptr, zero_1_ptr,
    scale_1_expert_stride: tl.int64, scale_1_n_stride: tl.int64, scale_1_group_stride: tl.int64,
    middle_0_ptr, lora_0_ptr, middle_1_ptr, lora_1_ptr, rank, scaling,
    order_ptr, offsets_ptr, block_experts_ptr, block_starts_ptr, blocks, columns, experts, n_size, k_size,
    result_ptr, second_result_ptr, base_ptr, second_base_ptr, saved_gate_ptr, saved_up_ptr, intermediate_ptr, limit,
    dots_ptr, other_ptr, other_slots, other_stride: tl.int64, pair_count,
    BLOCKS_PER_GROUP: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """Tiles of the pairs of one expert by BLOCK_N columns, or by two such."""
    BLOCK_M: tl.constexpr = VARIANT.block_m
    TAIL_M: tl.constexpr = VARIANT.tail_m
    rows_0, rows_1 = Rows(rows_0_ptr, rows_0_slots, rows_0_stride), Rows(rows_1_ptr, rows_1_slots, rows_1_stride)
    weight_0 = Weight(
        weight_0, weight_0_expert_stride, weight_0_n_stride, weight_0_k_stride,
        scale_0_ptr, zero_0_ptr, scale_0_expert_stride, scale_0_n_stride, scale_0_group_stride,
    )  # fmt: skip
    weight_1 = Weight(
        weight_1, weight_1_expert_stride, weight_1_n_stride, weight_1_k_stride,
        scale_1_ptr, zero_1_ptr, scale_1_expert_stride, scale_1_n_stride, scale_1_group_stride,
    )  # fmt: skip
    adapter_0 = Adapter(middle_0_ptr, lora_0_ptr, rank, scaling)
    adapter_1 = Adapter(middle_1_ptr, lora_1_ptr, rank, scaling)
    outputs = Outputs(
        result_ptr, second_result_ptr, base_ptr, second_base_ptr, saved_gate_ptr, saved_up_ptr, intermediate_ptr, dots_ptr
    )  # fmt: skip
    table = Table(order_ptr, offsets_ptr, block_experts_ptr, block_starts_ptr, experts)
    other = Rows(other_ptr, other_slots, other_stride)
    work = Work(
        table, rows_0, weight_0, adapter_0, rows_1, weight_1, adapter_1, n_size, k_size, outputs, limit, other, pair_count
    )  # fmt: skip
    # One tile per program; sums stay in registers where ptxas sees a loop over tiles.
    for tile in range(tl.program_id(0), blocks * columns, tl.num_programs(0)):
        block, column = place(tile, blocks, columns, BLOCKS_PER_GROUP)
        expert = tl.load(block_experts_ptr + block).to(tl.int32)
        if expert >= 0:
            if TAIL_M == BLOCK_M:
                compute_tile(work, block, expert, column, BLOCK_M, VARIANT)
            else:
                left = tl.load(offsets_ptr + expert + 1) - tl.load(block_starts_ptr + block)
                if left > TAIL_M:
                    compute_tile(work, block, expert, column, BLOCK_M, VARIANT)
                else:
                    compute_tile(work, block, expert, column, TAIL_M, VARIANT)


@triton.jit
def compute_tile(work, block, expert, column, BLOCK_M: tl.constexpr, VARIANT: tl.constexpr):
    """Up to BLOCK_M pairs of a block by one column of tiles."""
    A: tl.constexpr = work.rows_0.ptr.dtype.element_ty
    BLOCK_N: tl.constexpr = VARIANT.block_n
    n_size, k_size = work.n_size, work.k_size
    ROUND: tl.constexpr = VARIANT.round_base
    pairs = pairs_of(work.table, block, expert, BLOCK_M)
    first_n = column * BLOCK_N
    second_n = first_n
    if VARIANT.second == "columns":
        first_n = column * (2 * BLOCK_N)
        second_n = first_n + BLOCK_N
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if VARIANT.second == "weight":
        first, second = add_products(
            zeros, zeros, work.rows_0, work.weight_0, first_n, work.weight_1, first_n, pairs, n_size, k_size,
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

    pairs = pairs_of(work.table, block, expert, BLOCK_M)  # again, so that it takes no registers during the sums
    n = first_n + tl.arange(0, BLOCK_N)
    value = adapted(first, work.adapter_0, pairs, n, n_size, VARIANT)
    if VARIANT.second != "weight":
        value = adapted(value, work.adapter_1, pairs, n, n_size, VARIANT)
    store(work.outputs.result, value, pairs, n, n_size, VARIANT.vectors)
    if VARIANT.epilogue == "dot":
        number = column * 2 if VARIANT.second == "columns" else column
        store_dot(
            work.outputs.dots, value, work.other, number, work.pair_count, pairs, n, n_size, ROUND, VARIANT.other_vectors
        )  # fmt: skip
    if VARIANT.second != "none":
        n = second_n + tl.arange(0, BLOCK_N)
        second_value = second
        if VARIANT.second == "columns":
            second_value = adapted(second_value, work.adapter_0, pairs, n, n_size, VARIANT)
        second_value = adapted(second_value, work.adapter_1, pairs, n, n_size, VARIANT)
        store(work.outputs.second_result, second_value, pairs, n, n_size, VARIANT.vectors)
        if VARIANT.epilogue == "dot":
            store_dot(
                work.outputs.dots, second_value, work.other, number + 1, work.pair_count, pairs, n, n_size,
                ROUND, VARIANT.other_vectors,
            )  # fmt: skip
        if VARIANT.epilogue == "swiglu":
            store_swiglu(work.outputs, value, second_value, work.limit, pairs, n, n_size, ROUND, VARIANT.vectors)
        store(work.outputs.second_base, second, pairs, n, n_size, VARIANT.vectors)
    # Last: Triton 3.6 may move a conversion that the result needs too into this branch (triton #8257).
    store(work.outputs.base, first, pairs, first_n + tl.arange(0, BLOCK_N), n_size, VARIANT.vectors)


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
    """What the second sum of a tile of one weight is for: more of its n columns, where blocks are large."""
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
    """Launch the kernel on one or two factors; `Variant` says what the options are, `outputs` has tensors by name.

    The epilogue `dot` multiplies by the rows of `other` [T, N].
    """
    _, n, k = weights[0].shape
    if not (routing.tokens * routing.slots and n):
        return
    rank = lora[0][0].shape[-1] if lora else 1
    b, turned = _adapters([b for _, b in lora])
    flat, other = [_flat(r) for r in rows], None if other is None else _flat(other)
    block_m, block_n, block_r = routing.block_rows, _block(n, LARGEST_BLOCK_N), _block(rank, LARGEST_BLOCK_K)
    vectors, layout = n % 8 == 0, _layout(weights)
    variant = Variant(
        second, epilogue, round_base, round_lora, layout, all(map(_in_vectors, flat)),
        vectors, vectors and rank % 8 == 0, turned, codes_of(weights),
        block_m, TAIL_ROWS if block_m > TAIL_ROWS else block_m, block_n, _block(k, LARGEST_BLOCK_K),
        block_r, triton.cdiv(rank, block_r), other is not None and _in_vectors(other),
    )  # fmt: skip
    blocks, columns = len(routing.block_experts), triton.cdiv(n, 2 * block_n if second == "columns" else block_n)
    with torch.accelerator.device_index(routing.order.device.index):
        _grouped_linear_kernel[(blocks * columns,)](
            **_row_arguments(flat, rows, routing.slots), **_weight_arguments(weights, variant),
            **scale_arguments(weights),
            **_pointers(("middle_0", "middle_1"), [middle.contiguous() for middle, _ in lora]),
            **_pointers(("lora_0", "lora_1"), b), rank=rank, scaling=float(scaling),
            order_ptr=routing.order, offsets_ptr=routing.offsets, block_experts_ptr=routing.block_experts,
            block_starts_ptr=routing.block_starts, blocks=blocks, columns=columns, experts=routing.experts,
            n_size=n, k_size=k, **{f"{name}_ptr": outputs.get(name) for name in Outputs._fields},
            limit=argument(limit), other_ptr=other, other_slots=routing.slots,
            other_stride=0 if other is None else other.stride(0), pair_count=routing.tokens * routing.slots, BLOCKS_PER_GROUP=BLOCKS_PER_GROUP, VARIANT=variant,
            num_warps=8 if block_m == BLOCK_ROWS[-1] else 4, num_stages=2 if variant.codes[0] != NUMBERS else 4, enable_fp_fusion=False,
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


def _weight_arguments(weights: Sequence[Tensor | QuantizedWeight], variant: Variant) -> dict[str, Any]:
    """What the kernel has to know of the weights, or of their codes."""
    arguments: dict[str, Any] = {}
    for i in (0, 1):
        weight = weights[i] if i < len(weights) else None
        tensor = weight.codes if isinstance(weight, QuantizedWeight) else weight
        strides = (0, 0, 0) if tensor is None else tensor.stride()
        arguments[f"weight_{i}"] = tensor if tensor is None or variant.layout == "any" else _described(tensor, variant)
        arguments |= {f"weight_{i}_{d}_stride": s for d, s in zip(("expert", "n", "k"), strides, strict=True)}
    return arguments


def _described(weight: Tensor, variant: Variant) -> TensorDescriptor:
    """A descriptor of the tiles of a weight that has a layout."""
    block = [1, variant.block_n, variant.block_k]
    if variant.layout == "n":
        weight, block = weight.transpose(1, 2), [1, variant.block_k, variant.block_n]
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)


def _adapters(weights: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """The weights [E, N, r] of adapters without gaps, and whether they lie as [E, r, N]; a copy of others."""
    if all(weight.transpose(1, 2).is_contiguous() for weight in weights):
        return list(weights), bool(weights)
    return [weight.contiguous() for weight in weights], False


def _layout(weights: Sequence[Tensor | QuantizedWeight]) -> str:
    """The dimension along which descriptors can be made of all the weights; `any` if there is none."""
    numbers = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(numbers) == len(weights):
        for layout, seen in (("k", numbers), ("n", [weight.transpose(1, 2) for weight in numbers])):
            if all(_can_be_described(weight) for weight in seen):
                return layout
    return "any"


def _can_be_described(weight: Tensor) -> bool:
    """Whether each dimension lies, without overlap and in whole vectors, inside of the one before."""
    experts, rows, _ = weight.stride()
    nested = rows >= weight.shape[2] and experts >= rows * weight.shape[1] and experts % rows == 0
    return _in_vectors(weight) and nested


def _in_vectors(tensor: Tensor) -> bool:
    """Whether the last dimension is contiguous and starts and ends on 16-byte boundaries everywhere."""
    *steps, last = (stride * tensor.element_size() for stride in tensor.stride())
    starts = (tensor.data_ptr(), tensor.shape[-1] * tensor.element_size(), *steps)
    return last == tensor.element_size() and all(start % VECTOR_BYTES == 0 for start in starts)
