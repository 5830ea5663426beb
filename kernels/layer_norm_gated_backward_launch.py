"""Launches of the gradient of the gated LayerNorm: the programs, and arguments that describe the tensors.

A program walks tiles of rows of one group of columns and sums a part of dw and db.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from described import VECTOR_BYTES, Described, PlannedLaunch
from layer_norm_gated_arguments import BACKWARD_STAGES
from row_layout import VECTOR_LANES, address, merged_dims

# Lanes of a block, which covers a group → rows of a tile, warps. A thread has 8 or 16 elements, what was faster on an
# H200; beyond 8192 columns, registers do not suffice.
TILES = {
    64: (8, 2),
    128: (4, 2),
    256: (2, 2),
    512: (2, 4),
    1024: (2, 4),
    2048: (1, 4),
    4096: (1, 16),
    8192: (1, 16),
    16384: (1, 32),
    32768: (1, 32),
}
MOST_IN_FLIGHT = 4
OTHER_SHARED_BYTES = 48 << 10  # what a program needs beside tiles: values that it lays out anew
MOST_PARTS = 256
LEVELS = (0, 4, 8)  # of a tree that adds parts
COLUMNS = 32  # of a program that adds parts
TILES_PER_PART = 4
LEADING_DIMS = 3
STATISTICS = ("rstd", "mean")


def tile(group_size: int) -> tuple[int, int, int]:
    """Return (rows, lanes, warps) of a program: a block of lanes covers a group, for several rows where it is short."""
    block = next((size for size in TILES if size >= group_size), max(TILES))
    rows, warps = TILES[block]
    return rows, block, warps


def in_flight(tile_bytes: int, device: torch.device) -> int:
    """Return the number of tiles of x, dy and z in flight: one in registers, the others on the way to shared memory."""
    if device.type != "cuda":
        return 1
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin - OTHER_SHARED_BYTES
    return max(1, min(MOST_IN_FLIGHT, 1 + shared // (3 * tile_bytes)))


def group_depth(n: int) -> int:
    """Return the greatest number of additions between a term and the sum of n of them over a group.

    A block covers the group, so there is one reduction over its lanes. Compiled, a thread holds t = 16 elements of a
    row at most (32 of a block of 32768), which take t - 1 additions, and threads are combined in a binary tree of
    height log2(block / t). Interpreted, the lanes are combined in a binary tree of height log2(block), or by numpy in
    runs of 128 with 8 accumulators (15 additions, 3 to combine them) and a tree over the runs of height
    log2(block / 128): no more than compiled with t = 16.
    """
    _, block, warps = tile(n)
    per_thread = max(16, block // (32 * warps))
    return min(n, per_thread - 1 + (block // per_thread).bit_length() - 1)


def parts_of(rows: int, rows_per_tile: int) -> tuple[int, int]:
    """Return (parts, tiles per part) of the sums over rows: a power of two of parts, equal on every device."""
    tiles = triton.cdiv(rows, rows_per_tile)
    parts = min(MOST_PARTS, triton.next_power_of_2(max(1, triton.cdiv(tiles, TILES_PER_PART))))
    return parts, triton.cdiv(tiles, parts)


def row_depth(n: int, *, atomic: bool) -> int:
    """Return the greatest number of additions between a term and the sum of n of them over rows.

    A part adds its tiles one by one, which takes one addition less than it has tiles, then the rows of a tile in any
    order, one addition less than it has rows. The parts are added in a binary tree, or atomically, one after the other.
    How many rows a tile has depends on the size of a group, so this is the most over all of them.
    """
    cuts = [(rows, *parts_of(n, rows)) for rows in sorted({rows for rows, _ in TILES.values()})]
    return max(rows + tiles - 2 + (parts if atomic else parts.bit_length() - 1) for rows, parts, tiles in cuts)


def depth(n: int) -> int:
    """Return the greatest number of additions between a term and the sum of n of them, over a group or over rows."""
    return min(n, max(group_depth(n), row_depth(n, atomic=False)))


def depth_atomic(n: int) -> int:
    """Return `depth` where the parts of a sum over rows are added atomically."""
    return min(n, max(group_depth(n), row_depth(n, atomic=True)))


def stages_of(given: Collection[str], *, norm_first: bool, recompute_output: bool) -> tuple[str, ...]:
    """Return the stages of a case with the tensors `given`."""
    gated = "z" in given
    present = {
        "gate": gated,
        "gated_input": not norm_first,
        "affine": recompute_output or (gated and norm_first),
        "daffine": gated and norm_first,
        "c2": "mean" in given,
        "dgated_input": not norm_first,
    }
    return tuple(name for name in BACKWARD_STAGES if present.get(name, True))


def leading_dims(name: str, tensor: Described) -> list[tuple[int, ...]] | None:
    """Return (size, stride) of the leading dimensions after merging; None for strides that the kernel does not take.

    It takes three leading dimensions of tensors whose columns follow each other, and one of statistics.
    """
    *sizes, columns = tensor.shape
    dims = merged_dims(tuple(sizes), tensor.strides[:-1])
    if name in STATISTICS:
        most, gaps = 1, False
    else:
        most, gaps = LEADING_DIMS, tensor.strides[-1] != 1 and columns > 1
    return None if gaps or len(dims) > most else [(1, 0)] * (most - len(dims)) + dims


def layout_of_rows(group_size: int, given: Mapping[str, Described]) -> dict[str, Any]:
    """Return the arguments that say where rows and statistics lie: sizes, strides, and promises about them.

    ALIGNED: every group of every row can be read or written in whole 16-byte vectors. FLAT: the rows of each tensor are
    one dimension, too; it is not promised without ALIGNED, so that there are few variants.
    """
    absent = [(1, 0)] * LEADING_DIMS
    rows = {name: leading_dims(name, given[name]) if name in given else absent for name in ("x", "dy", "z")}
    layout: dict[str, Any] = {}
    for name, dims in rows.items():
        layout |= {f"{name}_size_{i}": dims[i][0] for i in (1, 2)}
        layout |= {f"{name}_stride_{i}": stride for i, (_, stride) in enumerate(dims)}
    for name in STATISTICS:
        row, group = (leading_dims(name, given[name])[0][1], given[name].strides[-1]) if name in given else (0, 0)
        layout |= {f"{name}_row_stride": row, f"{name}_group_stride": group}
    steps = [stride * given[name].dtype.itemsize for name in rows if name in given for _, stride in rows[name]]
    starts = all(tensor.aligned for name, tensor in given.items() if name not in STATISTICS)
    aligned = starts and group_size % VECTOR_LANES == 0 and not any(step % VECTOR_BYTES for step in steps)
    return layout | {"ALIGNED": aligned, "FLAT": aligned and all(dims[:-1] == absent[:-1] for dims in rows.values())}


@triton.jit
def keep(ptr, offset, value, mask):
    """Store a stage, where it is asked for."""
    if ptr is not None:
        tl.store(ptr + offset, value, mask=mask)


@triton.jit
def store(ptr, offset, lanes, value, mask, ALIGNED: tl.constexpr):
    """Store a result, rounded to the dtype of its memory."""
    tl.store(address(ptr, offset, lanes, ALIGNED), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["parts", "columns"],
    do_not_specialize_on_alignment=["dw_parts_ptr", "db_parts_ptr", "dw_ptr", "db_ptr"],
)
def totals_kernel(
    dw_parts_ptr, db_parts_ptr, dw_ptr, db_ptr, parts, columns: tl.int64, LEVELS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Add parts of dw and db, [parts, columns] in fp32, and round once; there are at most 2**LEVELS parts."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    dw = tree_sum(dw_parts_ptr + column, parts, columns, inside, LEVELS)
    tl.store(dw_ptr + column, dw.to(dw_ptr.dtype.element_ty), mask=inside)
    if db_ptr is not None:
        db = tree_sum(db_parts_ptr + column, parts, columns, inside, LEVELS)
        tl.store(db_ptr + column, db.to(db_ptr.dtype.element_ty), mask=inside)


@triton.jit
def tree_sum(pointers, parts, columns, inside, LEVELS: tl.constexpr):
    """Add `parts` rows in a binary tree that adds the second half to the first."""
    PARTS: tl.constexpr = 2**LEVELS
    COLUMNS: tl.constexpr = pointers.shape[0]
    part = tl.arange(0, PARTS)[:, None]
    values = tl.load(pointers[None, :] + part * columns, mask=(part < parts) & inside[None, :], other=0.0)
    for level in tl.static_range(1, LEVELS + 1):
        values = tl.sum(tl.reshape(values, [2, PARTS >> level, COLUMNS]), axis=0)
    return tl.reshape(values, [COLUMNS])


def launch_of_totals(parts: int, columns: int) -> PlannedLaunch:
    """Prepare the launch that adds parts; it takes the parts of dw and db, then dw and db."""
    levels = next(levels for levels in LEVELS if 2**levels >= parts)
    parameters = {"parts": parts, "columns": columns, "LEVELS": levels, "COLUMNS": COLUMNS}
    return PlannedLaunch(totals_kernel, triton.cdiv(columns, COLUMNS), parameters, num_warps=8)
