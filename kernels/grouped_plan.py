"""Plans of the grouped matmul: the variant and the grid of a launch, as they follow from shapes, strides and dtypes.

Terms are added in the same order whatever the tile, so that the rows of a tile change no bit of a sum but where they
change the instruction: 16 rows are multiplied by `mma`, more on a Hopper GPU by `wgmma`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from described import VECTOR_BYTES, Described
from grouped_tile import TileVariant
from moe_lora_routing import BLOCK_ROWS
from quantized_weights import NUMBERS, Codes

LARGEST_BLOCK_N = 128
LARGEST_BLOCK_K = 64  # and the order of all dots: terms go from first to last, in tiles that divide it
SMALLEST_BLOCK = 16  # of a dimension of a dot


class Coded(NamedTuple):
    """The description of a weight in codes: its shape, theirs, and how they are read."""

    shape: torch.Size
    words: Described
    scheme: str
    group: int
    turned: bool


class WeightTiles(NamedTuple):
    """The tiles of weights that have descriptors; turned ones are seen as [E, K, N]."""

    shape: tuple[int, int, int]
    turned: bool


class TilePlan(NamedTuple):
    """The plan of one launch.

    Attributes:
        variant: the compiled variant.
        blocks: of the weights; None if they are read by pointers.
        columns: tiles side by side.
        warps, stages: of a program, and of its pipeline.
    """

    variant: TileVariant
    blocks: WeightTiles | None
    columns: int
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def plan(
    rows: tuple[Described, ...],
    weights: tuple[Described | Coded, ...],
    lora: tuple[Described, ...],
    block_m: int,
    *,
    paired: bool = False,
    epilogue: str = "store",
    round_base: bool = False,
    round_lora: bool = False,
    round_swiglu: bool = False,
) -> TilePlan:
    """Plan a launch for rows [R, K], weights [E, N, K], and weights [E, N, r] of adapters, which are without gaps.

    With `paired` the rows are multiplied by both weights, otherwise the products of two factors are added.
    """
    _, n, k = weights[0].shape
    rank = lora[0].shape[2] if lora else 1
    numbers = all(isinstance(weight, Described) for weight in weights)
    large = block_m == BLOCK_ROWS[-1]
    second = "weight" if paired else "columns" if large and numbers and n > LARGEST_BLOCK_N else "none"
    block_n = _block(n, LARGEST_BLOCK_N)
    block_k, block_r = _block(k, LARGEST_BLOCK_K), _block(rank, LARGEST_BLOCK_K)
    layout = _layout(weights)
    turned = bool(lora) and not all(gapless(b, turned=False) for b in lora)
    vectors = n % 8 == 0
    variant = TileVariant(
        second=second, epilogue=epilogue,
        round_base=round_base, round_lora=round_lora, round_swiglu=round_swiglu,
        layout=layout, row_vectors=all(_in_vectors(r.shape, r.strides, r) for r in rows), vectors=vectors,
        lora_vectors=vectors and all(_in_vectors((*b.shape[:1], 8, rank), (b.strides[0], 8, 1), b) for b in lora),
        lora_turned=turned, codes=_codes(weights),
        block_m=block_m, block_n=block_n, block_k=block_k,
        block_r=block_r, rank_steps=-(-rank // block_r),
    )  # fmt: skip
    blocks = {"k": WeightTiles((1, block_n, block_k), False), "n": WeightTiles((1, block_k, block_n), True)}.get(layout)
    sums = 1 if second == "none" else 2
    columns = -(-n // (2 * block_n if second == "columns" else block_n))
    bytes_per_stage = 2 * block_k * (block_m + sums * block_n)
    stages = _stages(rows[0].device, bytes_per_stage) if numbers else 2
    return TilePlan(variant, blocks, columns, 8 if large else 4, stages)


def gapless(weight: Described, *, turned: bool) -> bool:
    """Check whether the numbers of an expert follow each other without a gap, [N, r], or [r, N] if it is turned."""
    _, n, rank = weight.shape
    steps = weight.strides[1:]
    return steps == ((1, n) if turned else (rank, 1))


def _block(size: int, largest: int) -> int:
    return min(largest, max(SMALLEST_BLOCK, 1 << (size - 1).bit_length()))


def _codes(weights: tuple[Described | Coded, ...]) -> tuple[Codes, Codes]:
    first, second = (*(_coded(w) if isinstance(w, Coded) else NUMBERS for w in weights), NUMBERS)[:2]
    return first, second


def _coded(weight: Coded) -> Codes:
    words = weight.words
    in_vectors = weight.scheme == "int8" and _in_vectors(words.shape, words.strides, words)
    return weight.scheme, weight.group, weight.turned, in_vectors


def _layout(weights: tuple[Described | Coded, ...]) -> str:
    """Return the dimension, `k` or `n`, along which all weights can have descriptors; `any` if there is none."""
    for layout, order in (("k", (0, 1, 2)), ("n", (0, 2, 1))):
        if all(isinstance(weight, Described) and _can_be_described(weight, order) for weight in weights):
            return layout
    return "any"


def _can_be_described(weight: Described, order: tuple[int, ...]) -> bool:
    """Check whether each dimension, in this order, lies in whole vectors and without overlap inside the one before."""
    shape, strides = (tuple(values[dim] for dim in order) for values in (weight.shape, weight.strides))
    nested = strides[1] >= shape[2] and strides[0] >= strides[1] * shape[1] and strides[0] % strides[1] == 0
    return nested and _in_vectors(shape, strides, weight)


def _in_vectors(shape: tuple[int, ...], strides: tuple[int, ...], tensor: Described) -> bool:
    """Check whether the last dimension is contiguous and starts and ends on 16-byte boundaries everywhere."""
    vector = VECTOR_BYTES // tensor.dtype.itemsize
    return strides[-1] == 1 and tensor.aligned and not any(step % vector for step in (shape[-1], *strides[:-1]))


def _stages(device: torch.device, bytes_per_stage: int) -> int:
    """Return the number of stages of a pipeline that the shared memory of a device holds, up to 4."""
    if device.type != "cuda":
        return 4
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return max(1, min(4, (shared - 1024) // bytes_per_stage))
