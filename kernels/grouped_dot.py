"""The dot of each pair's row of a linear layer per expert with a row of another tensor: the rows are never stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from grouped_linear import Factors, launch
from grouped_plan import LARGEST_BLOCK_N
from moe_lora_routing import Routing
from torch import Tensor

PAIRS_PER_PROGRAM = 128


def column_depth(n: int) -> int:
    """Greatest number of additions between a term and the sum of n of them over the columns of a row.

    A thread adds 32 at most of the 128 columns of a tile, and four threads are combined in a tree; interpreted, numpy
    adds them with 8 accumulators (15 additions, 3 to combine them). Tiles are added one after the other.
    """
    return min(n, 33 + triton.cdiv(n, LARGEST_BLOCK_N))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _add_tiles_kernel(dots_ptr, result_ptr, pairs, tiles, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(tiles):
        total += tl.load(dots_ptr + tile.to(tl.int64) * pairs + pair, mask=pair < pairs, other=0.0)
    tl.store(result_ptr + pair, total, mask=pair < pairs)


def grouped_dot(
    operand: Factors,
    other: Tensor,
    routing: Routing,
    *,
    lora: Sequence[Factors] = (),
    scaling: float = 1.0,
    rounded: bool = False,
) -> Tensor:
    """Σ_n value[t, j, n] · other[t, n] in fp32 [T, k], for the value rows · weightᵀ + scaling · (middle · lora_bᵀ).

    Args:
        operand, lora, scaling: as `grouped_linear` takes them.
        other: [T, N], of the dtype of the rows.
        rounded: round the product, that of LoRA, its scaled value, and the value to the dtype of the rows.
    """
    rows, weight = operand
    result = torch.empty(routing.tokens, routing.slots, dtype=torch.float32, device=rows.device)
    tiles = triton.cdiv(weight.shape[1], LARGEST_BLOCK_N)
    dots = result.new_empty(tiles + tiles % 2, *result.shape)
    launch(
        [rows], [weight], lora, routing, {"dots": dots}, epilogue="dot", other=other, scaling=scaling,
        round_base=rounded, round_lora=rounded,
    )  # fmt: skip
    if result.numel():
        with torch.accelerator.device_index(rows.device.index):
            grid = (triton.cdiv(result.numel(), PAIRS_PER_PROGRAM),)
            _add_tiles_kernel[grid](dots, result, result.numel(), tiles, BLOCK=PAIRS_PER_PROGRAM)
    return result
