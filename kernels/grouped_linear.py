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
from described import Described, current, described
from grouped_epilogue import Outputs
from grouped_kernel import grouped_linear_kernel
from grouped_plan import LARGEST_BLOCK_K, Coded, WeightTiles, gapless, plan
from moe_lora_routing import Routing
from moe_lora_rows import flat_rows
from quantized_weights import QuantizedWeight, scale_arguments
from swiglu_limit import argument
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Of layers of experts that consist of such linear layers. Not `tokens`, `padding`, `capacity` and `shards`: the height
# of a tile follows from the numbers of pairs and experts, and with it the instruction (see grouped_plan.py). An H200
# gives the same bits with either.
INVARIANT = ("permutation", "other tokens", "relabelling", "zero adapter", "scaling", "run to run")
BLOCKS_PER_GROUP = 8  # of pairs, whose columns are computed next to each other

Factors = tuple[Tensor, Tensor | QuantizedWeight]
"""Rows [T, K] or [T, k, K], and a weight [E, N, K]."""


def depth(n: int) -> int:
    """Return the greatest number of roundings between a product and the dot of n of them, of one or two factors.

    Rounded additions may come in any order within a tile of 64 products, whose sum is then added to that so far; of two
    factors, each may end with a tile of its own. Interpreted, a tile is rounded once. Compiled, tensor cores add, which
    do not round: what they cut off is a premise of the device.
    """
    return min(n, min(n, LARGEST_BLOCK_K) + triton.cdiv(n, LARGEST_BLOCK_K))


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
    """Compute Σ rows · weightᵀ + Σ scaling · (middle · lora_bᵀ) [T, k, N] for each pair, with its expert's weights.

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
    outputs = {"result": result, "second_result": result, "base": base_out, "second_base": base_out}
    launch(
        [rows for rows, _ in operands], [weight for _, weight in operands], lora, routing, outputs,
        scaling=scaling, round_base=round_base, round_lora=round_lora,
    )  # fmt: skip
    return result


def grouped_pair(rows: Tensor, weights: tuple[Tensor, Tensor], routing: Routing) -> list[Tensor]:
    """Compute rows · weightᵀ [T, k, N] of two weights, in the dtype of the rows, which are read once for both."""
    results = [new_rows(routing, weights[0].shape[1], rows.dtype) for _ in weights]
    launch([rows], weights, (), routing, dict(zip(("result", "second_result"), results, strict=True)), paired=True)
    return results


def new_rows(routing: Routing, columns: int, dtype: torch.dtype) -> Tensor:
    """Allocate rows [T, k, columns], not initialized."""
    return torch.empty(routing.tokens, routing.slots, columns, dtype=dtype, device=routing.order.device)


def launch(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor | QuantizedWeight],
    lora: Sequence[Factors],
    routing: Routing,
    outputs: Mapping[str, Tensor | None],
    *,
    scaling: float = 1.0,
    limit: float = inf,
    **options: Any,
) -> None:
    """Launch the kernel on one or two factors; options are those of `plan`, and `outputs` are its tensors by name."""
    n = weights[0].shape[1]
    if not (routing.tokens * routing.slots and n):
        return
    flat = [flat_rows(r) for r in rows]
    b = _without_gaps([b for _, b in lora])
    found = plan(
        tuple(map(described, flat)), tuple(map(_described, weights)), tuple(map(described, b)), routing.block_rows,
        **options,
    )  # fmt: skip
    blocks = len(routing.block_experts)
    with current(routing.order.device):
        grouped_linear_kernel[(blocks * found.columns,)](
            **_row_arguments(flat, rows, routing.slots), **_weight_arguments(weights, found.blocks),
            **scale_arguments(weights), **_adapter_arguments([middle for middle, _ in lora], b),
            scaling=float(scaling),
            order_ptr=routing.order, offsets_ptr=routing.offsets, block_experts_ptr=routing.block_experts,
            block_starts_ptr=routing.block_starts, blocks=blocks, columns=found.columns, experts=routing.experts,
            n_size=n, k_size=weights[0].shape[2],
            **{f"{name}_ptr": outputs.get(name) for name in Outputs._fields}, limit=argument(limit),
            BLOCKS_PER_GROUP=BLOCKS_PER_GROUP, VARIANT=found.variant,
            num_warps=found.warps, num_stages=found.stages, enable_fp_fusion=False,
        )  # fmt: skip


def _described(weight: Tensor | QuantizedWeight) -> Described | Coded:
    """Describe a weight by all that a plan depends on."""
    if isinstance(weight, QuantizedWeight):
        return Coded(weight.shape, described(weight.codes), weight.scheme, weight.group, weight.turned)
    return described(weight)


def _without_gaps(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return weights [E, N, r] of adapters, copied unless experts have no gaps and all the same order of strides."""
    if any(all(gapless(described(w), turned=turned) for w in weights) for turned in (False, True)):
        return list(weights)
    return [weight.contiguous() for weight in weights]


def _row_arguments(flat: Sequence[Tensor], rows: Sequence[Tensor], slots: int) -> dict[str, Any]:
    """Return the arguments of the kernel that describe the rows, one per token or one per pair."""
    arguments: dict[str, Any] = {}
    for i in (0, 1):
        given = i < len(rows)
        arguments[f"rows_{i}_ptr"] = flat[i] if given else None
        arguments[f"rows_{i}_slots"] = slots if given and rows[i].dim() == 2 else 1
        arguments[f"rows_{i}_stride"] = flat[i].stride(0) if given else 0
    return arguments


def _weight_arguments(weights: Sequence[Tensor | QuantizedWeight], blocks: WeightTiles | None) -> dict[str, Any]:
    """Return the arguments of the kernel that describe the weights, or their codes."""
    arguments: dict[str, Any] = {}
    for i in (0, 1):
        weight = weights[i] if i < len(weights) else None
        tensor = weight.codes if isinstance(weight, QuantizedWeight) else weight
        expert, n, k = (0, 0, 0) if tensor is None else tensor.stride()
        arguments[f"weight_{i}"] = tensor if tensor is None or blocks is None else _descriptor(tensor, blocks)
        arguments[f"weight_{i}_expert_stride"] = expert
        arguments |= {f"weight_{i}_n_stride": n, f"weight_{i}_k_stride": k}
    return arguments


def _descriptor(weight: Tensor, blocks: WeightTiles) -> TensorDescriptor:
    """Return the tensor descriptor of a weight, which is seen so that its last dimension has no gaps."""
    seen = weight.transpose(1, 2) if blocks.turned else weight
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), list(blocks.shape))


def _adapter_arguments(middles: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, Any]:
    """Return the arguments of the kernel that describe the adapters."""
    arguments: dict[str, Any] = {"rank": middles[0].shape[-1] if middles else 1}
    for i in (0, 1):
        given = i < len(b)
        arguments[f"middle_{i}_ptr"] = middles[i].contiguous() if given else None
        arguments[f"lora_{i}_ptr"] = b[i] if given else None
        arguments[f"lora_{i}_expert_stride"] = b[i].stride(0) if given else 0
    return arguments
