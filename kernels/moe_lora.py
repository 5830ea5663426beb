"""A mixture of SwiGLU experts with LoRA in Triton: y[t] = Σ_j w[t, j] · down(silu(gate(x[t])) · up(x[t])).

`fused` rounds only operands of dots and results of kernels; `eager` rounds after every operation, as modules
of PEFT do. Both sum in fp32 without atomic additions, and fuse no multiplication with an addition but those of a dot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

import torch
import triton
import triton.language as tl
from arithmetic import rounded
from described import current
from grouped_linear import INVARIANT, LARGEST_BLOCK_K, depth, grouped_linear, grouped_pair, launch, new_rows
from moe_lora_arguments import STAGES, check_forward, existing
from moe_lora_routing import Routing, route
from moe_lora_shards import merge, shard
from moe_lora_weights import LayerWeights
from torch import Tensor

from lastbit import kernel

ELEMENTS_PER_PROGRAM = 2048
RESULTS = ("saved_gate", "saved_up", "intermediate")
GATE_AND_UP = {
    **{"result": "gate", "second_result": "up", "base": "gate_base", "second_base": "up_base"},
    **dict(zip(RESULTS, RESULTS, strict=True)),
}
"""Output of the kernel of grouped_linear.py → what it is of gate and up."""


@triton.jit(
    do_not_specialize=["tokens", "slots", "experts", "weight_row_stride", "weight_column_stride"],
    do_not_specialize_on_alignment=["weights_ptr", "local_experts_ptr"],
)  # of `columns` it is: rows in whole vectors are another variant
def _combine_kernel(
    values_ptr, weights_ptr, local_experts_ptr, output_ptr, tokens, slots, columns, experts,
    weight_row_stride: tl.int64, weight_column_stride: tl.int64,
    ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine BLOCK columns of ROWS tokens per program."""
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


def combine(
    values: Tensor, weights: Tensor | None, routing: Routing, out_dtype: torch.dtype, *, round_weighted: bool = False
) -> Tensor:
    """Return Σ_j weights[t, j] · values[t, j] [T, N] over the pairs that are not skipped, j ascending, in fp32.

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
        with current(values.device):
            _combine_kernel[(triton.cdiv(tokens, rows), triton.cdiv(columns, block))](
                values, weights, routing.local_experts, output, tokens, slots, columns, routing.experts,
                *((0, 0) if weights is None else weights.stride()),
                ROUND=round_weighted, ROWS=rows, BLOCK=block, enable_fp_fusion=False,
            )  # fmt: skip
    return output


def gate_and_up(
    x: Tensor,
    routing: Routing,
    parameters: Mapping[str, Tensor],
    *,
    scaling: float,
    eager: bool,
    swiglu_limit: float,
    stages: Collection[str],
) -> dict[str, Tensor]:
    """Return `saved_gate`, `saved_up` and `intermediate` [T, k, I], and the requested stages of gate and up."""
    weights, lora_a, lora_b = (_both(parameters, part) for part in ("proj", "lora_a", "lora_b"))
    middles = grouped_pair(x, lora_a, routing) if lora_a else []
    fp32_or_x = x.dtype if eager else torch.float32
    dtypes = {
        **{"gate_base": torch.float32, "up_base": torch.float32, "gate": fp32_or_x, "up": fp32_or_x},
        **dict.fromkeys(("saved_gate", "saved_up", "intermediate"), x.dtype),
    }
    found = {
        name: new_rows(routing, weights[0].shape[1], dtype)
        for name, dtype in dtypes.items()
        if name in stages or name in RESULTS
    }
    launch(
        [x], weights, tuple(zip(middles, lora_b, strict=True)), routing,
        {output: found.get(name) for output, name in GATE_AND_UP.items()},
        scaling=scaling, limit=swiglu_limit, paired=True, epilogue="swiglu",
        round_base=eager, round_lora=eager, round_swiglu=eager,
    )  # fmt: skip
    return found | dict(zip(("gate_lora_mid", "up_lora_mid"), middles, strict=False))


def _both(parameters: Mapping[str, Tensor], part: str) -> tuple[Tensor, ...]:
    """Return that part of gate and up, or nothing where there is no such part."""
    found = [parameters.get(f"{name}_{part}") for name in ("gate", "up")]
    return tuple(tensor for tensor in found if tensor is not None)


def down(
    intermediate: Tensor, routing: Routing, parameters: Mapping[str, Tensor], *, scaling: float, eager: bool
) -> dict[str, Tensor]:
    """Return `expert_output` [T, k, H], fp32 or if `eager` of the rows' dtype; with LoRA `down_lora_mid` [T, k, r]."""
    weight, lora_a, lora_b = (parameters.get(f"down_{part}") for part in ("proj", "lora_a", "lora_b"))
    found, dtype = {}, intermediate.dtype
    if lora_a is not None:
        found["down_lora_mid"] = grouped_linear(((intermediate, lora_a),), routing, out_dtype=dtype)
    found["expert_output"] = grouped_linear(
        ((intermediate, weight),),
        routing,
        lora=() if lora_b is None else ((found["down_lora_mid"], lora_b),),
        scaling=scaling,
        out_dtype=dtype if eager else torch.float32,
        round_base=eager,
        round_lora=eager,
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
    """Return results and stages of one shard; with `partial` the output is left in fp32, to be added to others."""
    options = {"scaling": scaling, "eager": eager}
    found = gate_and_up(x, routing, parameters, **options, swiglu_limit=swiglu_limit, stages=stages)
    found |= down(found["intermediate"], routing, parameters, **options)
    out_dtype = torch.float32 if partial else x.dtype
    output = combine(found["expert_output"], routing_weights, routing, out_dtype, round_weighted=eager)
    return {"output": output, **{name: found[name] for name in (*RESULTS, *stages)}}


def _declare(contract: str) -> Callable[..., dict[str, Tensor]]:
    """Register the kernel that keeps `contract`."""
    name = f"triton[moe_lora+{contract}]"

    @kernel(
        "moe_lora", contract=contract, name=name, stages=STAGES, depth=depth, order=LARGEST_BLOCK_K,
        invariant=(*INVARIANT, "fp fusion"),
    )  # fmt: skip
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
        """Compute y[t] = Σ_j w[t, j] · down(silu(gate(x[t])) · up(x[t])), each W + scaling · B · A of the expert.

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
