"""Cases of all-reduce and RMSNorm: two to four ranks, with weight and residual or without, and edges with more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    Case,
    Choices,
    Chosen,
    Group,
    Option,
    chosen_tensor,
    combinations,
    layouts_like,
    leading_dims,
    least_rows,
    row_layouts,
    tensor_choices,
)
from lastbit.cases._combinations import OTHER
from lastbit.cases._edges import edges
from lastbit.cases._ranks import REGIMES, peers, rank_choices, rank_tensors

_SMALL_ELEMENTS = 1 << 11  # of x where a CPU takes part
_LARGE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class _AllReduceNormOptions:
    """The fixed facts of a group: dtypes of the ranks' tensors and of the weight, if any, and a residual or none.

    `offset` says whether the weight has one.
    """

    dtype: str
    ranks: int
    weight: str | None
    residual: bool
    offset: bool
    row: Chosen = field(compare=False)

    def __str__(self) -> str:
        words = [self.dtype, f"weight_{self.weight}" if self.weight else "", "residual" if self.residual else ""]
        words.append("weight_offset" if self.offset else "")
        return "-".join([*filter(None, words), f"ranks{self.ranks}"])


_REGIMES = {"bf16": REGIMES, "fp16": REGIMES, "fp32": ("normal", "outlier", "special")}
"""Regimes of the tensors by their dtype: what a kernel adds and normalizes is fp32 whatever that is."""


def _rows(accepts: frozenset[str]) -> Iterator[_AllReduceNormOptions]:
    """Yield rows of options in which every three meet that a kernel with these parameters takes."""
    axes: dict[str, Sequence[Option]] = {
        "dtype": ("bf16", "fp16", "fp32"),
        "ranks": (2, 4, 3),
        "weight": ("own", "other", None),
        "residual": (True, None),
        "weight_offset": (None, True),
    }

    def means(row: Mapping[str, Any]) -> dict[str, Any]:
        given = {"residual": row["residual"], "weight_offset": row["weight_offset"], peers(row["ranks"])[-1]: True}
        return {"x dtype": row["dtype"], "weight dtype": _weight(row), **given}

    def goes_together(row: Mapping[str, Any]) -> bool:
        return row["weight_offset"] is None or row["weight"] is not None

    for row in combinations(axes, goes_together, accepts=accepts, means=means, strength=3):
        residual, offset = bool(row["residual"]), bool(row["weight_offset"])
        yield _AllReduceNormOptions(row["dtype"], row["ranks"], _weight(row), residual, offset, row)


def _weight(row: Mapping[str, Any]) -> str | None:
    dtype = str(row["dtype"])
    return {"own": dtype, "other": OTHER[dtype]}.get(row["weight"])


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("edges", examples=tuple(edges("all_reduce_rms_norm", accepts, small=small)))
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in _rows(accepts):
        choices = _choices(options, most // 64)
        yield Group(str(options), partial(_cases, options, most), choices=choices, combination=options.row)


def _choices(options: _AllReduceNormOptions, rows: int) -> Choices:
    layouts = row_layouts(rows)[: 3 if options.dtype == "fp32" else None]
    found = rank_choices(options.dtype, layouts, _REGIMES[options.dtype])
    if options.weight is not None:
        found |= tensor_choices("weight", (options.weight,), ("normal", "near_one", "signs"), layouts_like(64))
    if options.residual:
        found |= tensor_choices("residual", (options.dtype,), ("normal", "rows", "outlier"), layouts)
    offsets = {"weight_offset": (1.0, -0.25)} if options.offset else {}
    return {**found, **offsets, "eps": (1e-6, 1e-5)}


@st.composite
def _cases(draw: st.DrawFn, options: _AllReduceNormOptions, most: int, chosen: Chosen) -> Case:
    width = draw(st.integers(1, most // 8))
    shape = (*draw(leading_dims(most // width, least_rows(chosen))), width)
    tensors = rank_tensors(options.ranks, chosen, shape)
    tensors += [chosen_tensor("weight", chosen, (width,))] if options.weight is not None else []
    tensors += [chosen_tensor("residual", chosen, shape)] if options.residual else []
    seed = draw(st.integers(0, 2**32 - 1))
    params = {name: chosen[name] for name in ("eps", "weight_offset") if name in chosen}
    return Case("all_reduce_rms_norm", tuple(tensors), params, seed)
