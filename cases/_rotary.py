"""Shared parts of cases of rotary embeddings: tables and positions, and the shapes of real models."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    Chosen,
    Option,
    TensorSpec,
    chosen_tensor,
    layouts_like,
    leading_dims,
    least_rows,
    row_layouts,
    tensor_choices,
)

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["rotary"]
_MOST_POSITIONS = 40
_TABLES = ("uniform", "normal", "near_one", "signs", "zeros", "sparse", "special_columns")
HEADS = ("normal", "rows", "tiny", "outlier", "lattice", "pow2", "subnormal", "largest", "special", "zero_rows")
"""Regimes of q and k."""


def rotary_choices(cos: str, sin: str, rows: int) -> dict[str, tuple[Option, ...]]:
    """Map the tables, of these dtypes, and the positions of tokens to their options."""
    found: dict[str, tuple[Option, ...]] = {}
    for name, dtype in (("cos", cos), ("sin", sin)):
        found |= tensor_choices(name, (dtype,), _TABLES, row_layouts(2))
    return found | tensor_choices("positions", ("int64", "int32"), ("below_N", "counting", "zeros"), layouts_like(64))


@dataclass(frozen=True)
class Heads:
    """The tensors of a case of rotary embeddings: shapes of q, and tables with positions."""

    shape: tuple[int, ...]
    tables: list[TensorSpec]


@st.composite
def heads(draw: st.DrawFn, chosen: Chosen, narrow: int, wide: int, most: int) -> Heads:
    """Draw heads with 2 · `narrow` to 2 · `wide` columns that are rotated, and some, often none, that are not."""
    half = draw(st.integers(narrow, wide))
    rest = draw(st.one_of(st.just(0), st.integers(1, 2 * half + 1)))
    width = 2 * half + rest
    least = least_rows(chosen)
    leading = draw(leading_dims(max(most // width, 1), least if len(least) > 1 else 2 * least))
    leading = leading if len(leading) > 1 else (*leading, 1)
    rows = draw(st.integers(leading[-2], max(leading[-2], _MOST_POSITIONS)))
    tables = [chosen_tensor(name, chosen, (rows, half)) for name in ("cos", "sin")]
    return Heads((*leading, width), [*tables, chosen_tensor("positions", chosen, leading[:-1], rows)])


def real_shapes(most: int | None) -> list[tuple[Mapping[str, Any], int]]:
    """List every shape of the table, with as many of its tokens as have `most` elements of q, or all of them."""
    counts = (shape["tokens"] if most is None else most // (shape["heads"] * shape["width"]) for shape in _SHAPES)
    return [(shape, max(2, min(count, shape["tokens"]))) for shape, count in zip(_SHAPES, counts, strict=True)]


def real_heads(shape: Mapping[str, Any], name: str, tokens: int, dtype: str) -> TensorSpec:
    """Make q or k of a real model, with the strides that it has there; k in the storage of q if rows hold both."""
    count = shape["heads"] if name == "q" else shape["kv_heads"]
    strides = tuple(shape[f"{name}_strides"]) if f"{name}_strides" in shape else None
    packed = name == "k" and strides is not None and shape["k_strides"] == shape.get("q_strides")
    offset = shape.get(f"{name}_offset", 0)
    return TensorSpec(name, dtype, (tokens, count, shape["width"]), strides, offset, memory="q" if packed else "")


def real_tables(shape: Mapping[str, Any], tokens: int, dtype: str) -> list[TensorSpec]:
    """Place cosines and sines side by side, as one tensor of caches holds them, and add positions."""
    half, rows = shape["rotary_dim"] // 2, 2 * tokens + 3
    cos = TensorSpec("cos", dtype, (rows, half), (2 * half, 1), 0, "uniform")
    sin = TensorSpec("sin", dtype, (rows, half), (2 * half, 1), half, "uniform", memory="cos")
    return [cos, sin, TensorSpec("positions", "int64", (tokens,), regime=f"below_{rows}")]
