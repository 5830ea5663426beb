"""Sums of outer products over the pairs of each expert in Triton: the gradients of the adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from described import current
from moe_lora_routing import Routing
from moe_lora_rows import flat_rows, in_vectors, row_of
from row_layout import address
from torch import Tensor

PAIRS_PER_STEP = 64  # divides the order that the kernels declare
TILES = (16, 64)  # few sizes, so that there are few compiled variants
STAGES = 4  # of the pipeline of loads; those of rows wait for the numbers of the pairs


def pair_depth(n: int) -> int:
    """Return the most roundings between a term and the sum of n of them over the pairs of an expert, ascending.

    The 64 pairs of a step are added in any order, and then to the sum of the steps before; compiled, by tensor cores.
    """
    return min(n, PAIRS_PER_STEP - 1 + triton.cdiv(n, PAIRS_PER_STEP))


@triton.jit
def load_pairs(ptr, row, column, columns, live, stride, ALIGNED: tl.constexpr):
    """Load the elements `column` of rows, zero for rows that are not live: an operand of a dot."""
    return tl.load(address(ptr, row * stride, column, ALIGNED), mask=live & (column < columns), other=0.0)


@triton.jit
def store_sum(total, some, scaling, old_ptr, result_ptr, start, column, mask, ALIGNED: tl.constexpr):
    """Store old + scaling · total, rounded once; without any pair `old` as it is, or 0."""
    total = total * scaling
    unchanged = tl.zeros_like(total)
    if old_ptr is not None:
        unchanged = tl.load(address(old_ptr, start, column, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        total = unchanged + total
    total = tl.where(some, total, unchanged)  # to add nothing would turn -0 into 0
    tl.store(address(result_ptr, start, column, ALIGNED), total.to(result_ptr.dtype.element_ty), mask=mask)


# Sizes, strides and addresses are no part of a variant's key; switches say whether vectors are allowed.
@triton.jit(
    do_not_specialize=[
        "rows", "columns", "row_tiles", "column_tiles", "slots", "scaling",
        "left_0_stride", "left_1_stride", "right_stride",
    ],
    do_not_specialize_on_alignment=[
        "order_ptr", "offsets_ptr", "left_0_ptr", "left_1_ptr", "right_ptr", "old_0_ptr", "old_1_ptr",
        "result_0_ptr", "result_1_ptr",
    ],
)  # fmt: skip
def _grouped_outer_kernel(
    order_ptr, offsets_ptr, left_0_ptr, left_1_ptr, right_ptr, old_0_ptr, old_1_ptr, result_0_ptr, result_1_ptr,
    rows, columns, row_tiles, column_tiles, slots, scaling,
    left_0_stride: tl.int64, left_1_stride: tl.int64, right_stride: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    LEFT_ALIGNED: tl.constexpr, RIGHT_ALIGNED: tl.constexpr, RIGHT_PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one expert's [rows, columns]: STEP of its pairs at a time, in the order of the routing."""
    program = tl.program_id(0)
    column = program % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = program // column_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    expert = program // column_tiles // row_tiles
    if LEFT_ALIGNED:
        rows = rows // 16 * 16
    if RIGHT_ALIGNED:
        columns = columns // 16 * 16
    first = tl.load(offsets_ptr + expert).to(tl.int32)
    last = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    total_0 = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_1 = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(first, last, STEP, num_stages=STAGES):
        position = start + tl.arange(0, STEP)[:, None]
        live = position < last
        pair = tl.load(order_ptr + position, mask=live, other=0).to(tl.int32)
        right = load_pairs(
            right_ptr, row_of(pair, slots, RIGHT_PER_TOKEN), column, columns, live, right_stride, RIGHT_ALIGNED
        )
        own = row_of(pair, slots, False)
        left = load_pairs(left_0_ptr, own, row[None, :], rows, live, left_0_stride, LEFT_ALIGNED)
        total_0 = tl.dot(tl.trans(left), right, total_0, input_precision="ieee")
        if left_1_ptr is not None:
            left = load_pairs(left_1_ptr, own, row[None, :], rows, live, left_1_stride, LEFT_ALIGNED)
            total_1 = tl.dot(tl.trans(left), right, total_1, input_precision="ieee")
    begin = (expert.to(tl.int64) * rows + row[:, None]) * columns
    mask = (row[:, None] < rows) & (column < columns)
    some = last > first
    store_sum(total_0, some, scaling, old_0_ptr, result_0_ptr, begin, column, mask, RIGHT_ALIGNED)
    if left_1_ptr is not None:
        store_sum(total_1, some, scaling, old_1_ptr, result_1_ptr, begin, column, mask, RIGHT_ALIGNED)


def grouped_outer(
    lefts: Sequence[Tensor],
    right: Tensor,
    routing: Routing,
    *,
    scaling: float,
    olds: Sequence[Tensor | None] = (None, None),
    out_dtype: torch.dtype,
) -> list[Tensor]:
    """Return old[e] + scaling · Σ leftᵀ·right over the pairs of expert e, in fp32, rounded once; an FMA may add `old`.

    Args:
        lefts: one or two, [T, k, M]; a result for each.
        right: [T, k, N], or [T, N] for one row per token; all are bf16 or fp16.
        routing: the expert of each pair, and the order of the sum.
        olds: [E, M, N] for each result; None stands for 0. An expert without pairs gets just this.
        out_dtype: of the results [E, M, N].
    """
    rows, columns = lefts[0].shape[-1], right.shape[-1]
    shape = (routing.experts, rows, columns)
    results = [torch.empty(shape, dtype=out_dtype, device=right.device) for _ in lefts]
    flat_lefts, flat_right = [flat_rows(left) for left in lefts], flat_rows(right)
    olds = [None if old is None else old.contiguous() for old in olds]
    tiles = [tile_of(size) for size in (rows, columns)]
    row_tiles, column_tiles = triton.cdiv(rows, tiles[0]), triton.cdiv(columns, tiles[1])
    with current(right.device):
        _grouped_outer_kernel[(routing.experts * row_tiles * column_tiles,)](
            routing.order, routing.offsets, *_two(flat_lefts), flat_right, *_two(olds), *_two(results),
            rows, columns, row_tiles, column_tiles, routing.slots, float(scaling),
            *(left.stride(0) for left in (flat_lefts[0], flat_lefts[-1])), flat_right.stride(0),
            ROWS=tiles[0], COLUMNS=tiles[1], STEP=PAIRS_PER_STEP, STAGES=STAGES,
            LEFT_ALIGNED=all(map(in_vectors, flat_lefts)),
            RIGHT_ALIGNED=in_vectors(flat_right) and all(old is None or in_vectors(old) for old in olds),
            RIGHT_PER_TOKEN=right.dim() == 2, num_warps=4 if min(tiles) == TILES[-1] else 2,
        )  # fmt: skip
    return results


def tile_of(size: int) -> int:
    """Return the rows or columns of a tile of results that have so many."""
    return next((tile for tile in TILES if tile >= size), TILES[-1])


def _two(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """Return the first two, with None for one that is not there."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None
