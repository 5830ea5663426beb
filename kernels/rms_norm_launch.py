"""Launches of RMSNorm: their programs, and the memory that they write to."""

from __future__ import annotations

import math

import torch
from rms_norm_arguments import STAGES
from row_layout import contiguous_like
from torch import Tensor

# Few sizes, so that there are few compiled variants. A block covers a row where it can; a loop covers longer rows.
BLOCKS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ELEMENTS_PER_PROGRAM = 2048
ELEMENTS_PER_THREAD = 32
FEW_ELEMENTS_PER_THREAD = 16  # of blocks of 2048 and 4096 that are not quantized: 3 % faster on an H200
NO_STAGES = dict.fromkeys(STAGES)


def summation_depth(n: int) -> int:
    """Return the greatest number of additions between a square and the sum of n of them, compiled or interpreted.

    Blocks of at most 16384 columns are first added lane by lane, ⌈n / 16384⌉ additions at most, then the lanes of one
    block are reduced. Compiled, a thread holds 32 elements at most (31 additions), and 512 threads at most are combined
    in a binary tree (9): 40. Interpreted, the lanes are combined in a binary tree (14), or by numpy in runs of 128 with
    8 accumulators (15 additions, 3 to combine them) and a tree over the runs (7): 25. The length of the row chooses the
    block, and n may be a part of it (`variance_size`), so the bound is that of the largest block.
    """
    return min(n, math.ceil(n / BLOCKS[-1]) + 40)


def tile(n: int, *, quantized: bool) -> tuple[int, int, int]:
    """Return rows and columns of a program, and its warps: bits do not depend on the number of rows."""
    block = next((size for size in BLOCKS if size >= n), BLOCKS[-1])
    rows = max(1, ELEMENTS_PER_PROGRAM // block)
    per_thread = FEW_ELEMENTS_PER_THREAD if block in (2048, 4096) and not quantized else ELEMENTS_PER_THREAD
    return rows, block, rows * block // (32 * per_thread)


def allocate_results(x: Tensor, has_residual: bool, quant: str | None) -> dict[str, Tensor]:
    results = {"output" if quant is None else "quantized": contiguous_like(x, dtype=quant and torch.float8_e4m3fn)}
    if quant == "dynamic":
        results["scale"] = contiguous_like(x, columns=1, dtype=torch.float32)
    if has_residual:
        results["residual_sum"] = contiguous_like(x)
    return results


def allocate_stages(x: Tensor) -> dict[str, Tensor]:
    """Allocate fp32 buffers for all stages.

    They show what was computed: a narrower value is held exactly, and one that should be narrower and is not shows. One
    dtype for all of them keeps the number of compiled variants small.
    """
    columns = {"variance": 1, "inv_rms": 1}  # one value per row
    return {name: contiguous_like(x, columns=columns.get(name), dtype=torch.float32) for name in STAGES}
