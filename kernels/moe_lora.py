"""A mixture of SwiGLU experts with LoRA in Triton: y[t] = Σ_j w[t, j] · down(silu(gate(x[t])) · up(x[t])).

`fused` rounds only what is an operand of a dot or leaves the kernel; `eager` rounds after every operation, as modules
of PEFT do. Both sum in fp32 without atomic additions, and fuse no multiplication with an addition but those of a dot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

import torch
import triton
import triton.language as tl
from grouped_linear import LARGEST_BLOCK_K, depth, grouped_linear, rounded
from moe_lora_arguments import STAGES, check_forward, existing
from moe_lora_routing import Routing, route
from moe_lora_shards import merge, shard
from moe_lora_weights import LayerWeights
from swiglu_limit import argument, limited
from torch import Tensor

from harness.kernel import kernel

ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, saved_gate_ptr, saved_up_ptr, intermediate_ptr, size, limit,
    ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = intermediate_ptr.dtype.element_ty
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    gate = tl.load(gate_ptr + element, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + element, mask=mask, other=0.0).to(tl.float32)
    tl.store(saved_gate_ptr + element, gate.to(A), mask=mask)
    tl.store(saved_up_ptr + element, up.to(A), mask=mask)
    gate, up = limited(gate, up, limit)
    silu = rounded(gate * tl.sigmoid(gate), A, ROUND)
    tl.store(intermediate_ptr + element, (silu * up).to(A), mask=mask)


@triton.jit
def _combine_kernel(
    values_ptr, weights_ptr, local_experts_ptr, output_ptr, tokens, slots, columns, experts,
    weight_row_stride: tl.int64, weight_column_stride: tl.int64,
    ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of ROWS tokens per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in range(0, slots):
        pair = row * slots + j
        expert = tl.load(local_experts_ptr + pair, mask=row < tokens, other=experts)
        taken = expert < experts
        value = tl.load(values_ptr + pair * columns + column, mask=taken & inside, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            at = row * weight_row_stride + j * weight_column_stride
            value = value * tl.load(weights_ptr + at, mask=taken, other=0.0)
        total += rounded(value, values_ptr.dtype.element_ty, ROUND)
    mask = (row < tokens) & inside
    tl.store(output_ptr + row * columns + column, total.to(output_ptr.dtype.element_ty), mask=mask)


def swiglu(gate: Tensor, up: Tensor, dtype: torch.dtype, *, round_silu: bool, limit: float = inf) -> dict[str, Tensor]:
    """`intermediate` = silu(gate) · up of contiguous tensors, both limited, and copies `saved_gate` and `saved_up`."""
    names = ("saved_gate", "saved_up", "intermediate")
    results = {name: torch.empty_like(gate, dtype=dtype) for name in names}
    grid = (triton.cdiv(gate.numel(), ELEMENTS_PER_PROGRAM),)
    if gate.numel():
        with torch.accelerator.device_index(gate.device.index):
            _swiglu_kernel[grid](
                gate, up, *results.values(), gate.numel(), argument(limit),
                ROUND=round_silu, BLOCK=ELEMENTS_PER_PROGRAM, enable_fp_fusion=False,
            )  # fmt: skip
    return results


def combine(
    values: Tensor, weights: Tensor | None, routing: Routing, out_dtype: torch.dtype, *, round_weighted: bool = False
) -> Tensor:
    """Σ_j weights[t, j] · values[t, j] [T, N] over the pairs that are not skipped, j ascending, in fp32.

    Args:
        values: [T, k, N], contiguous.
        weights: [T, k], fp32; None stands for ones. Neither is read for a pair that is skipped.
        out_dtype: of the result, which is rounded once.
        round_weighted: round each product to the dtype of `values`.
    """
    tokens, slots, columns = values.shape
    output = torch.empty(tokens, columns, dtype=out_dtype, device=values.device)
    block = min(1024, triton.next_power_of_2(columns))
    rows = ELEMENTS_PER_PROGRAM // block
    if tokens:
        with torch.accelerator.device_index(values.device.index):
            _combine_kernel[(triton.cdiv(tokens, rows), triton.cdiv(columns, block))](
                values, weights, routing.local_experts, output, tokens, slots, columns, routing.experts,
                *((0, 0) if weights is None else weights.stride()),
                ROUND=round_weighted, ROWS=rows, BLOCK=block, enable_fp_fusion=False,
            )  # fmt: skip
    return output


def project(
    name: str,
    rows: Tensor,
    routing: Routing,
    parameters: Mapping[str, Tensor],
    *,
    scaling: float,
    eager: bool,
    store_base: bool = False,
) -> dict[str, Tensor]:
    """`value` [T, k, N] of a projection, `lora_mid` [T, k, r] of its adapter, and its fp32 `base` if that is stored.

    `name` is `gate`, `up` or `down`; rows are [T, K], or [T, k, K] in the order of pairs. The value is fp32, or with
    `eager` of the rows' dtype.
    """
    parts = ("proj", "lora_a", "lora_b") if f"{name}_lora_a" in parameters else ("proj",)
    weight, *adapter = (parameters[f"{name}_{part}"] for part in parts)
    found, lora = {}, ()
    if adapter:
        lora_a, lora_b = adapter
        found = {"lora_mid": grouped_linear(((rows, lora_a),), routing, out_dtype=rows.dtype)}
        lora = ((found["lora_mid"], lora_b),)
    if store_base:
        shape = (routing.tokens, routing.slots, weight.shape[1])
        found["base"] = torch.empty(shape, dtype=torch.float32, device=rows.device)
    found["value"] = grouped_linear(
        ((rows, weight),),
        routing,
        lora=lora,
        scaling=scaling,
        out_dtype=rows.dtype if eager else torch.float32,
        round_base=eager,
        round_lora=eager,
        base_out=found.get("base"),
    )
    return found


def forward_shard(
    x: Tensor,
    routing: Routing,
    routing_weights: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    scaling: float,
    eager: bool,
    swiglu_limit: float,
    partial: bool,
    stages: Sequence[str],
) -> dict[str, Tensor]:
    """Results and stages of one shard; with `partial` the output is left in fp32, to be added to others."""
    options = {"scaling": scaling, "eager": eager}
    gate, up = (
        project(name, x, routing, parameters, **options, store_base=f"{name}_base" in stages) for name in ("gate", "up")
    )
    found = swiglu(gate["value"], up["value"], x.dtype, round_silu=eager, limit=swiglu_limit)
    down = project("down", found["intermediate"], routing, parameters, **options)
    out_dtype = torch.float32 if partial else x.dtype
    found["output"] = combine(down["value"], routing_weights, routing, out_dtype, round_weighted=eager)
    for name, each in (("gate", gate), ("up", up), ("down", down)):
        value = "expert_output" if name == "down" else name
        named = {value if part == "value" else f"{name}_{part}": tensor for part, tensor in each.items()}
        found |= {stage: tensor for stage, tensor in named.items() if stage in stages}
    return found


def _declare(contract: str) -> Callable[..., dict[str, Tensor]]:
    """Register the kernel that keeps `contract`."""

    name = f"triton[moe_lora+{contract}]"

    @kernel("moe_lora", contract=contract, name=name, stages=STAGES, depth=depth, order=LARGEST_BLOCK_K)
    def moe_lora(
        x: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
        weights: LayerWeights,
        *,
        scaling: float = 1.0,
        first_expert: int = 0,
        shards: int = 1,
        swiglu_limit: float = inf,
        stages: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """y[t] = Σ_j w[t, j] · down(silu(gate(x[t])) · up(x[t])), each one W + scaling · B · A of the expert.

        Args:
            x: [T, H], bf16 or fp16; any strides, as the weights.
            expert_ids: [T, k], int64 or int32. Expert e has the id first_expert + e; a pair with another id counts for
                nothing. An id that occurs twice counts twice.
            routing_weights: [T, k], fp32, used as they are.
            weights: of x's dtype, or codes, with adapters or without.
            shards: parts of I that are computed one after the other from views of the weights; their outputs are
                added in fp32, then rounded.
            swiglu_limit: the most that is activated of the gate, and of up in magnitude; a number of x's dtype.
            stages: which of `STAGES` to return too, as far as the layer has them. With several shards `down_lora_mid`
                and `expert_output` are [T, k, n, shards].

        Returns:
            `output` [T, H], and for the backward pass `saved_gate`, `saved_up` (before the activation, LoRA included)
            and `intermediate`, [T, k, I]; rows of pairs that count for nothing are zero. All of x's dtype.

        Raises:
            ValueError, TypeError: arguments that do not fit together, or on different devices.
            UnsupportedCase: more than 64 slots or shards.
        """
        parameters = weights.operands(x)
        numbers = {"scaling": scaling, "first_expert": first_expert, "shards": shards, "swiglu_limit": swiglu_limit}
        check_forward(x, expert_ids, routing_weights, parameters, **numbers, stages=stages)
        routing = route(expert_ids, len(weights.gate_proj), first_expert)
        options = {"scaling": scaling, "swiglu_limit": swiglu_limit, "eager": contract == "eager"}
        options |= {"partial": shards > 1, "stages": existing(stages, parameters)}
        parts = [
            forward_shard(x, routing, routing_weights, shard(parameters, p, shards), **options) for p in range(shards)
        ]
        return merge(parts, {"output": x.dtype})

    return moe_lora


moe_lora = _declare("fused")
moe_lora_eager = _declare("eager")
