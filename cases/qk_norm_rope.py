"""Cases of RMSNorm of heads with rotary embedding after it: groups in which every two dtypes meet, and edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    Case,
    Choices,
    Chosen,
    Group,
    TensorSpec,
    chosen_tensor,
    combinations,
    layouts_like,
    row_layouts,
    tensor_choices,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties
from lastbit.cases._rotary import HEADS, heads, real_heads, real_shapes, real_tables, rotary_choices

_SMALL_ELEMENTS = 1 << 10  # of x where a CPU takes part
_LARGE_ELEMENTS = 1 << 21
_NORMED = ("Llama", "Qwen3-32B", "GLM")  # heads as Qwen3-8B, Qwen3-32B and GLM-4.5 have them, with norms


@dataclass(frozen=True)
class _QkNormOptions:
    """The fixed facts of a group: dtypes of x, weight and tables, how pairs lie, and the range of R / 2."""

    x: str
    weight: str | None
    table: str
    interleaved: bool
    halves: tuple[int, int]
    row: Chosen = field(compare=False)

    def __str__(self) -> str:
        low, high = self.halves
        words = [self.x, f"weight_{self.weight}" if self.weight else "", f"table_{self.table}"]
        return "-".join(filter(None, [*words, "interleaved" * self.interleaved, f"R{2 * low}to{2 * high}"]))


_HEADS = {"bf16": HEADS, "fp16": HEADS, "fp32": ("normal", "outlier", "special")}
"""Regimes of x by its dtype: what a kernel computes with is fp32 whatever that is."""
_HALVES = ((33, 64), (17, 32), (17, 32), (1, 16))


def _rows(accepts: frozenset[str]) -> Iterator[_QkNormOptions]:
    """Yield rows of options in which every two meet that a kernel with these parameters takes."""
    found = combinations(
        {
            "x dtype": ("bf16", "fp16", "fp32"),
            "weight dtype": ("bf16", "fp16", "fp32", None),
            "cos dtype": ("fp32", "bf16", "fp16"),
            "sin dtype": ("fp32", "bf16", "fp16"),
            "interleaved": (None, True),
        },
        lambda row: row["cos dtype"] == row["sin dtype"],
        accepts=accepts,
    )
    for row, halves in zip(found, cycle(_HALVES), strict=False):
        x, weight, table = (row[f"{name} dtype"] for name in ("x", "weight", "cos"))
        given = None if weight is None else str(weight)
        yield _QkNormOptions(str(x), given, str(table), bool(row["interleaved"]), halves, row)


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the tokens."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("qk_norm_rope", accepts, small=small)))
    yield from properties("qk_norm_rope", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in _rows(accepts):
        choices = _choices(options, accepts, most // 64)
        yield Group(str(options), partial(_cases, options, most), choices=choices, combination=options.row)


def _choices(options: _QkNormOptions, accepts: frozenset[str], rows: int) -> Choices:
    found = tensor_choices(
        "x", (options.x,), _HEADS[options.x], row_layouts(rows)[: 3 if options.x == "fp32" else None]
    )
    if options.weight is not None:
        found |= tensor_choices("weight", (options.weight,), ("normal", "near_one", "signs"), layouts_like(64))
    offset = {"weight_offset": (None, 1.0)} if "weight_offset" in accepts else {}
    return found | rotary_choices(options.table, options.table, rows) | {"eps": (1e-6, 1e-5)} | offset


@st.composite
def _cases(draw: st.DrawFn, options: _QkNormOptions, most: int, chosen: Chosen) -> Case:
    drawn = draw(heads(chosen, *options.halves, most))
    tensors = [chosen_tensor("x", chosen, drawn.shape), *drawn.tables]
    if options.weight is not None:
        tensors.append(chosen_tensor("weight", chosen, drawn.shape[-1:]))
    params: dict[str, Any] = {"eps": chosen["eps"], "weight_offset": chosen.get("weight_offset")}
    params |= {"interleaved": True} if options.interleaved else {}
    return Case("qk_norm_rope", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield shapes of the rotary table whose models, or their siblings, have norms; q and k in turns."""
    normed = [pair for pair in real_shapes(_SMALL_ELEMENTS if small else None) if pair[0]["model"].startswith(_NORMED)]
    for seed, (shape, tokens) in enumerate(normed):
        if shape["interleaved"] and "interleaved" not in accepts:
            continue
        x = real_heads(shape, ("q", "k")[seed % 2], tokens, "bf16")
        x = TensorSpec("x", x.dtype, x.shape, x.strides, x.offset)
        weight = TensorSpec("weight", "bf16", (shape["width"],), regime="near_one")
        tables = real_tables(shape, tokens, ("bf16", "fp32")[seed % 2])
        params = {"eps": 1e-6} | ({"interleaved": True} if shape["interleaved"] else {})
        yield Case("qk_norm_rope", (x, *tables, weight), params, seed)
