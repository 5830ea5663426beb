"""Triton kernels of the MoE-LoRA gradients that are no linear layer.

Tensors of pairs are [T, k, ·], in the order of tokens and slots. For a pair that is skipped nothing is read, and
exactly 0 is stored.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from moe_lora_routing import Routing
from row_layout import address, row_layout, vectors_allowed
from swiglu_limit import argument, limited, through_limit
from torch import Tensor

BLOCKS = (16, 128, 1024)  # few sizes, so that there are few compiled variants
ELEMENTS_PER_PROGRAM = 1024
PAIRS_PER_STEP = 32  # divides the order that the kernels declare
SMALLEST_TILE, LARGEST_TILE = 16, 64


def pair_depth(n: int) -> int:
    """Greatest number of roundings between a term and the sum of n of them over the pairs of an expert, ascending.

    The 32 pairs of a step are added in any order, and then to the sum of the steps before; compiled, by tensor cores.
    """
    return min(n, PAIRS_PER_STEP - 1 + triton.cdiv(n, PAIRS_PER_STEP))


def column_depth(n: int) -> int:
    """Greatest number of additions between a term and the sum of n of them over the columns of a row.

    Blocks of at most 1024 columns are added lane by lane. A thread then adds its lanes, 8 at most of 1024 over 128
    threads, and threads are combined in a tree; interpreted, all lanes are in a tree of height 10, or added by numpy in
    runs of 128 with 8 accumulators (15 additions, 3 to combine them) and a tree over the runs.
    """
    return min(n, triton.cdiv(n, BLOCKS[-1]) + 21)


@triton.jit
def row_start(pair, size, stride_0, stride_1):
    """Where the row of each pair starts, in elements."""
    return pair // size * stride_0 + pair % size * stride_1


@triton.jit
def pairs_of_program(experts_ptr, experts, pairs, ROWS: tl.constexpr):
    """The pairs of the program as a column, which of them there are, and which of these have an expert here."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = pair < pairs
    return pair, live, live & (tl.load(experts_ptr + pair, mask=live, other=experts) < experts)


# What is part of a variant's key is said in layer_norm_gated.py.
@triton.jit(
    do_not_specialize=["pairs", "experts", "columns", "grad_size", "grad_stride_0", "grad_stride_1"],
    do_not_specialize_on_alignment=["experts_ptr", "weight_ptr", "grad_ptr", "result_ptr"],
)
def _weigh_kernel(
    experts_ptr, weight_ptr, grad_ptr, result_ptr, pairs: tl.int64, experts, columns,
    grad_size: tl.int64, grad_stride_0: tl.int64, grad_stride_1: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    pair, live, routed = pairs_of_program(experts_ptr, experts, pairs, ROWS)
    if ALIGNED:
        columns = columns // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    start = row_start(pair, grad_size, grad_stride_0, grad_stride_1)
    grad = tl.load(address(grad_ptr, start, column, ALIGNED), mask=routed & inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + pair, mask=routed, other=0.0)
    product = (weight * grad).to(result_ptr.dtype.element_ty)
    tl.store(address(result_ptr, pair * columns, column, ALIGNED), product, mask=live & inside)


@triton.jit(
    do_not_specialize=[
        "pairs", "experts", "columns", "grad_size", "grad_stride_0", "grad_stride_1",
        "gate_size", "gate_stride_0", "gate_stride_1", "up_size", "up_stride_0", "up_stride_1",
    ],
    do_not_specialize_on_alignment=[
        "experts_ptr", "grad_ptr", "gate_ptr", "up_ptr", "grad_gate_ptr", "grad_up_ptr",
    ],
)  # fmt: skip
def _swiglu_backward_kernel(
    experts_ptr, grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, limit, pairs: tl.int64, experts, columns,
    grad_size: tl.int64, grad_stride_0: tl.int64, grad_stride_1: tl.int64,
    gate_size: tl.int64, gate_stride_0: tl.int64, gate_stride_1: tl.int64,
    up_size: tl.int64, up_stride_0: tl.int64, up_stride_1: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    pair, live, routed = pairs_of_program(experts_ptr, experts, pairs, ROWS)
    if ALIGNED:
        columns = columns // 16 * 16
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    mask = routed & inside
    grad_start = row_start(pair, grad_size, grad_stride_0, grad_stride_1)
    gate_start = row_start(pair, gate_size, gate_stride_0, gate_stride_1)
    up_start = row_start(pair, up_size, up_stride_0, up_stride_1)
    grad = tl.load(address(grad_ptr, grad_start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(address(gate_ptr, gate_start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    up = tl.load(address(up_ptr, up_start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
    saved_gate, saved_up = gate, up
    gate, up = limited(gate, up, limit)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_gate = (grad * up * slope).to(grad_gate_ptr.dtype.element_ty)
    grad_up = (grad * (gate * sigmoid)).to(grad_up_ptr.dtype.element_ty)
    grad_gate, grad_up = through_limit(grad_gate, grad_up, saved_gate, saved_up, limit)
    tl.store(address(grad_gate_ptr, pair * columns, column, ALIGNED), grad_gate, mask=live & inside)
    tl.store(address(grad_up_ptr, pair * columns, column, ALIGNED), grad_up, mask=live & inside)


@triton.jit(
    do_not_specialize=[
        "pairs", "experts", "columns", "grad_size", "grad_stride_0", "grad_stride_1",
        "value_size", "value_stride_0", "value_stride_1",
    ],
    do_not_specialize_on_alignment=["experts_ptr", "grad_ptr", "value_ptr", "result_ptr"],
)  # fmt: skip
def _pair_dot_kernel(
    experts_ptr, grad_ptr, value_ptr, result_ptr, pairs: tl.int64, experts, columns,
    grad_size: tl.int64, grad_stride_0: tl.int64, grad_stride_1: tl.int64,
    value_size: tl.int64, value_stride_0: tl.int64, value_stride_1: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Lane by lane over blocks of columns, then over the lanes."""
    pair, live, routed = pairs_of_program(experts_ptr, experts, pairs, ROWS)
    if ALIGNED:
        columns = columns // 16 * 16
    grad_start = row_start(pair, grad_size, grad_stride_0, grad_stride_1)
    value_start = row_start(pair, value_size, value_stride_0, value_stride_1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = routed & (column < columns)
        grad = tl.load(address(grad_ptr, grad_start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        value = tl.load(address(value_ptr, value_start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        total += grad * value
    tl.store(result_ptr + pair, tl.sum(total, axis=1, keep_dims=True), mask=live)


@triton.jit(
    do_not_specialize=[
        "rows", "columns", "row_tiles", "column_tiles", "scaling", "left_size", "left_stride_0", "left_stride_1",
        "right_size", "right_stride_0", "right_stride_1", "old_size", "old_stride_0", "old_stride_1",
    ],
    do_not_specialize_on_alignment=["order_ptr", "offsets_ptr", "left_ptr", "right_ptr", "old_ptr", "result_ptr"],
)  # fmt: skip
def _grouped_outer_kernel(
    order_ptr, offsets_ptr, left_ptr, right_ptr, old_ptr, result_ptr, rows, columns, row_tiles, column_tiles, scaling,
    left_size: tl.int64, left_stride_0: tl.int64, left_stride_1: tl.int64,
    right_size: tl.int64, right_stride_0: tl.int64, right_stride_1: tl.int64,
    old_size: tl.int64, old_stride_0: tl.int64, old_stride_1: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    LEFT_ALIGNED: tl.constexpr, RIGHT_ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's [rows, columns]: STEP of its pairs at a time, in the order of the routing."""
    program = tl.program_id(0)
    column = program % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = program // column_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    expert = (program // column_tiles // row_tiles).to(tl.int64)
    if LEFT_ALIGNED:
        rows = rows // 16 * 16
    if RIGHT_ALIGNED:
        columns = columns // 16 * 16
    first, last = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, STEP):
        position = start + tl.arange(0, STEP)[:, None]
        live = position < last
        pair = tl.load(order_ptr + position, mask=live, other=0)
        left_start = row_start(pair, left_size, left_stride_0, left_stride_1)
        right_start = row_start(pair, right_size, right_stride_0, right_stride_1)
        left_mask = live & (row[None, :] < rows)
        left = tl.load(address(left_ptr, left_start, row[None, :], LEFT_ALIGNED), mask=left_mask, other=0.0)
        right_mask = live & (column < columns)
        right = tl.load(address(right_ptr, right_start, column, RIGHT_ALIGNED), mask=right_mask, other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
    total = total * scaling
    result_row = expert * rows + row[:, None]
    mask = (row[:, None] < rows) & (column < columns)
    unchanged = tl.zeros([ROWS, COLUMNS], tl.float32)
    if old_ptr is not None:
        old_start = row_start(result_row, old_size, old_stride_0, old_stride_1)
        unchanged = tl.load(old_ptr + old_start + column, mask=mask, other=0.0).to(tl.float32)
        total = unchanged + total
    total = tl.where(last > first, total, unchanged)  # to add nothing would turn -0 into 0
    tl.store(result_ptr + result_row * columns + column, total.to(result_ptr.dtype.element_ty), mask=mask)


def weigh(grad_output: Tensor, routing_weights: Tensor, routing: Routing) -> Tensor:
    """routing_weights[t, j] · grad_output[t] [T, k, H], rounded once to the dtype of grad_output [T, H]."""
    columns = grad_output.shape[-1]
    result = grad_output.new_empty(routing.tokens, routing.slots, columns)
    others = {"weight_ptr": routing_weights.contiguous(), "result_ptr": result}
    _for_all_pairs(_weigh_kernel, routing, columns, others, grad=_per_pair(grad_output, routing))
    return result


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, routing: Routing, *, limit: float = inf
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up for `grad`, that of gate · sigmoid(gate) · up; each rounded once to gate's dtype.

    All are [T, k, I]; grad is fp32 or of the dtype of gate and up, which are not limited yet.
    """
    grad_gate, grad_up = (gate.new_empty(gate.shape) for _ in range(2))
    others = {"grad_gate_ptr": grad_gate, "grad_up_ptr": grad_up, "limit": argument(limit)}
    _for_all_pairs(_swiglu_backward_kernel, routing, gate.shape[-1], others, grad=grad, gate=gate, up=up)
    return grad_gate, grad_up


def pair_dot(grad_output: Tensor, expert_output: Tensor, routing: Routing) -> Tensor:
    """Σ_h grad_output[t, h] · expert_output[t, j, h] in fp32, [T, k]."""
    result = torch.empty(expert_output.shape[:2], dtype=torch.float32, device=expert_output.device)
    rows = {"grad": _per_pair(grad_output, routing), "value": expert_output}
    _for_all_pairs(_pair_dot_kernel, routing, expert_output.shape[-1], {"result_ptr": result}, **rows, whole_rows=True)
    return result


def grouped_outer(
    left: Tensor,
    right: Tensor,
    routing: Routing,
    *,
    scaling: float,
    old: Tensor | None = None,
    out_dtype: torch.dtype,
) -> Tensor:
    """old[e] + scaling · Σ leftᵀ·right over the pairs of each expert e, in fp32, rounded once; an FMA may add `old`.

    Args:
        left, right: [T, k, M] and [T, k, N], or [T, N] for one row per token; one of bf16 and fp16.
        routing: the expert of each pair, and the order of the sum.
        old: [E, M, N]; none stands for 0. An expert without pairs gets just this.
        out_dtype: of the result [E, M, N].
    """
    rows, columns = left.shape[-1], right.shape[-1]
    result = torch.empty(routing.experts, rows, columns, dtype=out_dtype, device=left.device)
    tiles = [min(LARGEST_TILE, max(SMALLEST_TILE, triton.next_power_of_2(size))) for size in (rows, columns)]
    row_tiles, column_tiles = triton.cdiv(rows, tiles[0]), triton.cdiv(columns, tiles[1])
    left_rows, left_aligned = _rows("left", _per_pair(left, routing))
    right_rows, right_aligned = _rows("right", _per_pair(right, routing))
    old_rows, _ = _rows("old", result if old is None else old)
    with torch.accelerator.device_index(left.device.index):
        _grouped_outer_kernel[(routing.experts * row_tiles * column_tiles,)](
            **left_rows, **right_rows, **(old_rows | ({"old_ptr": None} if old is None else {})),
            order_ptr=routing.order, offsets_ptr=routing.offsets, result_ptr=result,
            rows=rows, columns=columns, row_tiles=row_tiles, column_tiles=column_tiles, scaling=float(scaling),
            ROWS=tiles[0], COLUMNS=tiles[1], STEP=PAIRS_PER_STEP,
            LEFT_ALIGNED=left_aligned, RIGHT_ALIGNED=right_aligned,
        )  # fmt: skip
    return result


def _per_pair(tensor: Tensor, routing: Routing) -> Tensor:
    """[T, k, ·] as it is, and [T, ·] as if each slot had a copy."""
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(1).expand(-1, routing.slots, -1)


def _rows(name: str, tensor: Tensor) -> tuple[dict[str, Any], bool]:
    """What a kernel has to know of a tensor [·, ·, C], and whether its rows can be read in whole vectors."""
    (tensor,), layout = row_layout([tensor], dims=2)
    strides = {f"{name}_stride_{i}": stride for i, stride in enumerate(layout.strides[0])}
    arguments = {f"{name}_ptr": tensor, f"{name}_size": layout.sizes[1], **strides}
    return arguments, vectors_allowed(tensor.shape[-1], [tensor], layout, [])


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
    found = [_rows(name, tensor) for name, tensor in rows.items()]
    block = next((size for size in BLOCKS if size >= columns), BLOCKS[-1])
    height = ELEMENTS_PER_PROGRAM // block
    grid = (triton.cdiv(pairs, height), 1 if whole_rows else triton.cdiv(columns, block))
    with torch.accelerator.device_index(routing.order.device.index):
        kernel[grid](
            **{name: value for arguments, _ in found for name, value in arguments.items()}, **others,
            experts_ptr=routing.local_experts, pairs=pairs, experts=routing.experts, columns=columns,
            ROWS=height, BLOCK=block, ALIGNED=all(aligned for _, aligned in found), enable_fp_fusion=False,
        )  # fmt: skip
