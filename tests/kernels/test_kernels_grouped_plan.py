"""The plans of the grouped matmul: what follows from shapes and strides, and that cases reach every kind of tile."""

from __future__ import annotations

from inspect import unwrap
from itertools import product

import pytest
import torch
from torch import Tensor

from lastbit.case import Case, TensorSpec
from tests.faults import hunt
from tests.moe_lora_formula import TRITON
from tests.rms_norm_contract import BF16

LINEAR = unwrap(TRITON.call).__globals__["grouped_linear"].__globals__
ROUTING = unwrap(TRITON.call).__globals__["route"].__globals__
GROUPS = ("real-layers", "edges")
Tile = tuple[int, str, str]


def tile_of(*weights: Tensor, block_m: int = 64, paired: bool = False) -> Tile:
    """Rows of a tile, of what it has a second sum, and the layout of weights that are multiplied by rows in vectors."""
    rows = torch.empty(8, weights[0].shape[2], dtype=BF16, device="meta")
    described = LINEAR["described"]
    found = LINEAR["plan"]((described(rows),), tuple(map(described, weights)), (), block_m, paired=paired).variant
    return found.block_m, found.second, found.layout


def empty(*shape: int, strides: tuple[int, ...] | None = None) -> Tensor:
    made = torch.empty(shape, dtype=BF16, device="meta")
    return made if strides is None else made.as_strided(shape, strides)


@pytest.mark.parametrize(
    ("weight", "layout"),
    [
        (empty(3, 40, 24), "k"),
        (empty(3, 24, 40).transpose(1, 2), "n"),
        (empty(3, 40, 48)[:, :, 24:], "k"),
        (empty(3, 80, 24)[:, 40:], "k"),
        (empty(3, 40, 23), "any"),
        (empty(3, 23, 40).transpose(1, 2), "n"),
        (empty(3, 24, 41).transpose(1, 2), "any"),
        (empty(3, 40, 28)[:, :, :24], "any"),
        (empty(3, 40, 48)[:, :, ::2], "any"),
        (empty(1, 40, 24).expand(3, -1, -1), "any"),
        (empty(3, 40, 24, strides=(1000, 24, 1)), "any"),
    ],
)
def test_layouts(weight, layout):
    assert tile_of(weight) == (64, "none", layout)


def test_large_tiles_have_two_sums():
    wide, narrow = empty(2, 136, 64), empty(2, 128, 64)
    assert tile_of(wide, block_m=128)[1] == "columns"
    assert tile_of(narrow, block_m=128)[1] == tile_of(wide, block_m=64)[1] == "none"
    assert tile_of(narrow, narrow, block_m=16, paired=True)[1] == "weight"


def tiles_of(case: Case) -> set[Tile]:
    """Those of the base weights and of A, forward and on the way back."""
    specs = {spec.name: spec for spec in case.tensors}
    tokens, slots = specs["expert_ids"].shape
    if not tokens or "gate_scale" in specs:
        return set()

    def of(name: str) -> Tensor:
        spec: TensorSpec = specs[name]
        return empty(*spec.shape, strides=spec.strides)

    block_m = ROUTING["rows_per_block"](tokens * slots, specs["gate_proj"].shape[0])
    back = [of(f"{name}_proj").transpose(1, 2) for name in ("gate", "up", "down")]
    parts = ("proj", "lora_a") if "gate_lora_a" in specs else ("proj",)
    pairs = [(of(f"gate_{part}"), of(f"up_{part}")) for part in parts]
    single = [*((of(f"down_{part}"),) for part in parts), tuple(back[:2]), tuple(back[2:])]
    return {
        tile_of(*weights, block_m=block_m, paired=paired)
        for paired, groups in ((True, pairs), (False, single))
        for weights in groups
    }


def test_cases_reach_every_tile():
    seen = {tile for group in GROUPS for case in hunt.cases_of("moe_lora+fused", group, 60) for tile in tiles_of(case)}
    largest = ROUTING["BLOCK_ROWS"][-1]
    expected = set(product(ROUTING["BLOCK_ROWS"], ("none", "weight"), ("k", "n", "any")))
    assert seen == expected | set(product((largest,), ("columns",), ("k", "n", "any")))
