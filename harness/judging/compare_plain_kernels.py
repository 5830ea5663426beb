"""The Triton kernels of `fused_compare` that compare integers, and that only count the elements outside."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.judging.compare_kernels import SHAPE, as_fp64, is_outside, offsets, store_worst

INTEGER_SUMS = 8  # columns that a program of `integer_statistics` writes before the worst element


@triton.jit(do_not_specialize=SHAPE)
def integer_statistics(
    a_ptr, e_ptr, columns_ptr, numel: tl.int64, blocks: tl.int32,
    width: tl.int64, a_row: tl.int64, a_column: tl.int64, e_row: tl.int64, e_column: tl.int64,
    FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    wrongs = tl.zeros([BLOCK], tl.int32)
    beyond_0 = tl.zeros([BLOCK], tl.int32)
    beyond_1 = tl.zeros([BLOCK], tl.int32)
    beyond_2 = tl.zeros([BLOCK], tl.int32)
    beyond_4 = tl.zeros([BLOCK], tl.int32)
    beyond_16 = tl.zeros([BLOCK], tl.int32)
    squared_error = tl.zeros([BLOCK], tl.float64)
    squared_exact = tl.zeros([BLOCK], tl.float64)
    worst = tl.zeros([BLOCK], tl.float64)
    worst_block = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = block.to(tl.int64) * BLOCK
        there = start + lanes < numel
        a = tl.load(a_ptr + offsets(start, lanes, width, a_row, a_column, FLAT), there, other=0)
        e = tl.load(e_ptr + offsets(start, lanes, width, e_row, e_column, FLAT), there, other=0)
        wrong = a.to(tl.int64) != e.to(tl.int64)
        value = e.to(tl.float64)
        apart = tl.abs(a.to(tl.float64) - value)
        distance = tl.where(wrong, tl.where(apart < 1.0, 1.0, apart), 0.0)
        wrongs += wrong.to(tl.int32)
        beyond_0 += (distance > 0).to(tl.int32)
        beyond_1 += (distance > 1).to(tl.int32)
        beyond_2 += (distance > 2).to(tl.int32)
        beyond_4 += (distance > 4).to(tl.int32)
        beyond_16 += (distance > 16).to(tl.int32)
        squared_error += distance * distance
        squared_exact += value * value
        worst_block = tl.where(distance > worst, block, worst_block)
        worst = tl.where(distance > worst, distance, worst)
    into = columns_ptr + tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(into, tl.sum(wrongs, 0).to(tl.float64))
    tl.store(into + step, tl.sum(beyond_0, 0).to(tl.float64))
    tl.store(into + 2 * step, tl.sum(beyond_1, 0).to(tl.float64))
    tl.store(into + 3 * step, tl.sum(beyond_2, 0).to(tl.float64))
    tl.store(into + 4 * step, tl.sum(beyond_4, 0).to(tl.float64))
    tl.store(into + 5 * step, tl.sum(beyond_16, 0).to(tl.float64))
    tl.store(into + 6 * step, tl.sum(squared_error, 0))
    tl.store(into + 7 * step, tl.sum(squared_exact, 0))
    store_worst(into + 8 * step, step, worst, worst_block.to(tl.int64) * BLOCK + lanes)


@triton.jit(do_not_specialize=SHAPE)
def count_outside(
    a_ptr, e_ptr, count_ptr, contract: tl.int64, end: tl.int64, numel: tl.int64, blocks: tl.int32,
    width: tl.int64, a_row: tl.int64, a_column: tl.int64, e_row: tl.int64, e_column: tl.int64,
    PARTS: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the number of elements outside to a counter; PARTS is 0 for expected integers."""
    lanes = tl.arange(0, BLOCK)
    outsides = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = block.to(tl.int64) * BLOCK
        there = start + lanes < numel
        a = tl.load(a_ptr + offsets(start, lanes, width, a_row, a_column, FLAT), there)
        e_at = e_ptr + offsets(start, lanes, width, e_row, e_column, FLAT)
        if PARTS == 0:
            outside = a.to(tl.int64) != tl.load(e_at, there).to(tl.int64)
        else:
            lo = tl.load(e_at + contract + end, there)
            hi = lo
            if PARTS == 4:
                hi = tl.load(e_at + contract + end + end, there)
            outside = is_outside(as_fp64(a), lo, hi)
        outsides += (outside & there).to(tl.int32)
    tl.atomic_add(count_ptr, tl.sum(outsides, 0).to(tl.int64))
