"""Launches of SwiGLU: their tiles, the places of gate and up in memory, and the steps of the activation."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import triton
import triton.language as tl
from arithmetic import rounded, sigmoid_of
from described import Described, contiguous
from row_layout import RowLayout, address, merged_dims, whole_vectors
from swiglu_arguments import SwigluParameters
from swiglu_limit import argument

# Few sizes, so that there are few compiled variants. A thread of 4 warps has 16 elements of a tile, in whole vectors.
BLOCKS = (64, 256, 1024)
ELEMENTS_PER_TILE = 2048
LEADING_DIMS = 3
WARPS = 4
OF_ELEMENTS = ("rows", "permutation", "padding", "layout", "run to run")
"""What holds of bits where every element is computed by itself."""


def as_given(tensors: Mapping[str, Described]) -> tuple[dict[str, Described], bool]:
    """Return tensors as a kernel takes them, in three merged leading dimensions, and whether they are to be copied."""
    sizes = next(iter(tensors.values())).shape[:-1]
    if len(merged_dims(tuple(sizes), *(t.strides[:-1] for t in tensors.values()))) <= LEADING_DIMS:
        return dict(tensors), False
    return {name: contiguous(tensor) for name, tensor in tensors.items()}, True


def launch_of(given: Mapping[str, Described], options: SwigluParameters) -> tuple[int, dict[str, Any]]:
    """Return the number of programs, and the kernel's arguments for the options and its tensors, all [..., I].

    PAIRS: gate and up alternate in memory without gaps, and are read together. ALIGNED: every row of every tensor can
    be read and written in whole 16-byte vectors. FLAT: the rows are one dimension; that is not promised without
    ALIGNED, so that there are few variants.
    """
    *sizes, n = given["gate"].shape
    outer = merged_dims(tuple(sizes), *(t.strides[:-1] for t in given.values()))
    padded = [(1,) + (0,) * len(given)] * (LEADING_DIMS - len(outer)) + outer
    size, *strides = zip(*padded, strict=True)
    rows, where = prod(sizes), dict(zip(given, strides, strict=True))
    steps = {name: tensor.strides[-1] if n > 1 else 1 for name, tensor in given.items()}
    pairs = options.interleaved and steps["gate"] == 2
    # Pairs are read from where gate starts; up has the same strides, and starts one element later.
    read = [name for name in given if not (pairs and name == "up")]
    dense = all(steps[name] == 1 or (pairs and name == "gate") for name in read)
    layout = RowLayout(rows, size, tuple(where[name] for name in read))
    aligned = dense and whole_vectors(n, [given[name] for name in read], layout)
    block = next((b for b in BLOCKS if b >= n), BLOCKS[-1])
    tile_rows = ELEMENTS_PER_TILE // block
    parameters = {
        "rows": rows, "n": n, "size_1": size[1], "size_2": size[2],
        **{f"{name}_stride_{i}": s for name, dims in where.items() for i, s in enumerate(dims)},
        **{f"{name}_step": step for name, step in steps.items()},
        "alpha": float(options.alpha), "up_offset": float(options.up_offset) or None,
        "limit": argument(options.swiglu_limit),
        "INTERLEAVED": options.interleaved, "PAIRS": pairs, "ROWS": tile_rows, "BLOCK": block,
        "FLAT": aligned and size[:-1] == (1, 1), "ALIGNED": aligned,
    }  # fmt: skip
    return triton.cdiv(rows, tile_rows) * triton.cdiv(n, block), parameters


@triton.jit
def tile(n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows of this program, and its first column; the tiles of a row follow each other."""
    blocks = tl.cdiv(n, BLOCK)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, program % blocks * BLOCK


@triton.jit
def load(ptr, row_offset, columns, step, mask, ALIGNED: tl.constexpr):
    """Load in fp32 some columns of each row, `step` elements apart; zero outside of the mask."""
    if ALIGNED:
        pointers = address(ptr, row_offset, columns, True)
    else:
        pointers = ptr + row_offset + columns * step
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_pairs(ptr, row_offset, first, live, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Load in fp32 gate and up of the columns from `first` on, where they alternate."""
    lanes = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
    both = tl.load(address(ptr, row_offset, lanes, ALIGNED), mask=live & (lanes < 2 * n), other=0.0)
    gate, up = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def activated(gate, alpha, X: tl.constexpr, SILU: tl.constexpr):
    """Return alpha · gate, its sigmoid s and gate · s, rounded to X as the option says."""
    STEPS: tl.constexpr = SILU == "rounded_sigmoid"
    scaled = rounded(gate * alpha, X, STEPS)
    s = rounded(sigmoid_of(scaled), X, STEPS)
    return scaled, s, rounded(gate * s, X, SILU != "fp32_silu")


@triton.jit
def shifted(up, up_offset, X: tl.constexpr, ROUND: tl.constexpr):
    """Return up + up_offset; up itself where there is none."""
    if up_offset is not None:
        up = rounded(up + up_offset, X, ROUND)
    return up
