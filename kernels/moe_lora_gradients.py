"""Element-wise Triton kernels of the MoE-LoRA gradients, and the gradient of the routing weights.

Tensors of pairs are [T, k, ·], in the order of tokens and slots. For a pair that is skipped nothing is read, and
exactly 0 is stored.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from described import current
from moe_lora_routing import Routing
from moe_lora_rows import flat_rows, in_vectors, row_arguments, row_of
from row_layout import address
from swiglu_limit import argument, limited, through_limit
from torch import Tensor

BLOCKS = (16, 128, 1024)  # few sizes, so that there are few compiled variants
ELEMENTS_PER_PROGRAM, ELEMENTS_OF_WHOLE_ROWS = 2048, 8192


def column_depth(n: int) -> int:
    """Return the greatest number of additions between a term and the sum of n of them over the columns of a row.

    Blocks of at most 1024 columns are added lane by lane. A thread then adds its lanes, 32 at most of 1024 over a warp,
    and threads are combined in a tree of height 5; interpreted, all lanes are in a tree of height 10, or added by numpy
    in runs of 128 with 8 accumulators (15 additions, 3 to combine them) and a tree over the runs.
    """
    return min(n, triton.cdiv(n, BLOCKS[-1]) + 36)


@triton.jit
def pairs_of_program(experts_ptr, experts, pairs, ROWS: tl.constexpr):
    """Return the pairs of the program as a column, a mask of existing ones, and of those that have an expert here."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = pair < pairs
    return pair, live, live & (tl.load(experts_ptr + pair, mask=live, other=experts) < experts)


# Sizes, strides and addresses are no part of a variant's key; switches say whether vectors are allowed.
@triton.jit(
    do_not_specialize=["pairs", "experts", "columns", "slots", "grad_stride"],
    do_not_specialize_on_alignment=["experts_ptr", "weight_ptr", "grad_ptr", "result_ptr"],
)
def _weigh_kernel(
    experts_ptr, weight_ptr, grad_ptr, result_ptr, pairs, experts, columns, slots, grad_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    pair, live, routed = pairs_of_program(experts_ptr, experts, pairs, ROWS)
    if ALIGNED:
        columns = columns // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    start = row_of(pair, slots, True) * grad_stride
    grad = tl.load(address(grad_ptr, start, column, ALIGNED), mask=routed & inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + pair, mask=routed, other=0.0)
    product = (weight * grad).to(result_ptr.dtype.element_ty)
    tl.store(address(result_ptr, pair.to(tl.int64) * columns, column, ALIGNED), product, mask=live & inside)


@triton.jit(
    do_not_specialize=["pairs", "experts", "columns", "grad_stride", "gate_stride", "up_stride"],
    do_not_specialize_on_alignment=[
        "experts_ptr", "grad_ptr", "gate_ptr", "up_ptr", "grad_gate_ptr", "grad_up_ptr",
    ],
)  # fmt: skip
def _swiglu_backward_kernel(
    experts_ptr, grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, limit, pairs, experts, columns,
    grad_stride: tl.int64, gate_stride: tl.int64, up_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    pair, live, routed = pairs_of_program(experts_ptr, experts, pairs, ROWS)
    if ALIGNED:
        columns = columns // 16 * 16
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    mask = routed & inside
    row = pair.to(tl.int64)
    grad = tl.load(address(grad_ptr, row * grad_stride, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(address(gate_ptr, row * gate_stride, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    up = tl.load(address(up_ptr, row * up_stride, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    saved_gate, saved_up = gate, up
    gate, up = limited(gate, up, limit)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_gate = (grad * up * slope).to(grad_gate_ptr.dtype.element_ty)
    grad_up = (grad * (gate * sigmoid)).to(grad_up_ptr.dtype.element_ty)
    grad_gate, grad_up = through_limit(grad_gate, grad_up, saved_gate, saved_up, limit)
    tl.store(address(grad_gate_ptr, row * columns, column, ALIGNED), grad_gate, mask=live & inside)
    tl.store(address(grad_up_ptr, row * columns, column, ALIGNED), grad_up, mask=live & inside)


@triton.jit(
    do_not_specialize=["pairs", "experts", "columns", "slots", "grad_stride", "value_stride"],
    do_not_specialize_on_alignment=["experts_ptr", "grad_ptr", "value_ptr", "result_ptr"],
)
def _pair_dot_kernel(
    experts_ptr, grad_ptr, value_ptr, result_ptr, pairs, experts, columns, slots,
    grad_stride: tl.int64, value_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add lane by lane over blocks of columns, then over the lanes."""
    pair, live, routed = pairs_of_program(experts_ptr, experts, pairs, ROWS)
    if ALIGNED:
        columns = columns // 16 * 16
    grad_start, value_start = row_of(pair, slots, True) * grad_stride, row_of(pair, slots, False) * value_stride
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = routed & (column < columns)
        grad = tl.load(address(grad_ptr, grad_start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        value = tl.load(address(value_ptr, value_start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        total += grad * value
    tl.store(result_ptr + pair, tl.sum(total, axis=1, keep_dims=True), mask=live)


def weigh(grad_output: Tensor, routing_weights: Tensor, routing: Routing) -> Tensor:
    """Return routing_weights[t, j] · grad_output[t] [T, k, H], rounded once to the dtype of grad_output [T, H]."""
    columns = grad_output.shape[-1]
    result = grad_output.new_empty(routing.tokens, routing.slots, columns)
    others = {"weight_ptr": routing_weights.contiguous(), "result_ptr": result, "slots": routing.slots}
    _for_all_pairs(_weigh_kernel, routing, columns, others, grad=grad_output)
    return result


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, routing: Routing, *, limit: float = inf
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up for `grad` of gate · sigmoid(gate) · up; each rounded once to gate's dtype.

    All are [T, k, I]; grad is fp32 or of the dtype of gate and up, which are not limited yet.
    """
    grad_gate, grad_up = (gate.new_empty(gate.shape) for _ in range(2))
    others = {"grad_gate_ptr": grad_gate, "grad_up_ptr": grad_up, "limit": argument(limit)}
    _for_all_pairs(_swiglu_backward_kernel, routing, gate.shape[-1], others, grad=grad, gate=gate, up=up)
    return grad_gate, grad_up


def pair_dot(grad_output: Tensor, expert_output: Tensor, routing: Routing) -> Tensor:
    """Return Σ_h grad_output[t, h] · expert_output[t, j, h] in fp32, [T, k]."""
    result = torch.empty(expert_output.shape[:2], dtype=torch.float32, device=expert_output.device)
    others = {"result_ptr": result, "slots": routing.slots}
    rows = {"grad": grad_output, "value": expert_output}
    _for_all_pairs(_pair_dot_kernel, routing, expert_output.shape[-1], others, **rows, whole_rows=True)
    return result


def block_of(columns: int) -> int:
    """Return the number of columns of a program, for a row of so many."""
    return next((size for size in BLOCKS if size >= columns), BLOCKS[-1])


def _for_all_pairs(
    kernel: Any,
    routing: Routing,
    columns: int,
    others: dict[str, Any],
    *,
    whole_rows: bool = False,
    **rows: Tensor,
) -> None:
    """Launch a kernel over all pairs, and over blocks of columns unless a program takes whole rows."""
    pairs = routing.tokens * routing.slots
    if not pairs:
        return
    flat = {name: flat_rows(tensor) for name, tensor in rows.items()}
    block = block_of(columns)
    height = (ELEMENTS_OF_WHOLE_ROWS if whole_rows else ELEMENTS_PER_PROGRAM) // block
    grid = (triton.cdiv(pairs, height), 1 if whole_rows else triton.cdiv(columns, block))
    with current(routing.order.device):
        kernel[grid](
            **row_arguments(**flat), **others,
            experts_ptr=routing.local_experts, pairs=pairs, experts=routing.experts, columns=columns,
            ROWS=height, BLOCK=block, ALIGNED=all(in_vectors(tensor) for tensor in flat.values()),
            enable_fp_fusion=False,
        )  # fmt: skip
