"""Cases of attention: sequences of few queries and keys, the heads of real models, and edges.

A group fixes what a kernel is compiled for: dtypes, sinks, mask and cap or not, and the power of two above the width
of a head. Every two of these meet in some group.
Few keys are not a matter of time alone: the more terms, the fewer outputs have one legal value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    DRAWN,
    Accepted,
    Case,
    Choices,
    Chosen,
    Group,
    Option,
    TensorSpec,
    chosen_tensor,
    combinations,
    layouts_like,
    tensor_choices,
)
from lastbit.cases._combinations import OTHER
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["attention"]
_WIDE: Mapping[str, tuple[str, ...]] = {
    "q": ("normal", "outlier", "tiny", "zero_rows", "integers", "special"),
    "k": ("normal", "outlier", "outlier_last", "integers", "signs"),
    "v": ("normal", "rows", "lattice", "sparse", "outlier"),
}
_NARROW: Mapping[str, tuple[str, ...]] = {
    "q": ("normal", "integers", "special"),
    "k": ("normal", "outlier", "signs"),
    "v": ("normal", "rows", "sparse"),
}
_REGIMES = {"bf16": _WIDE, "fp16": _WIDE, "fp32": _NARROW}
"""Regimes of queries, keys and values by their dtype: what a kernel computes with is fp32 whatever that is."""
_SINKS = ("normal", "outlier", "zeros", "integers")
_CAPS = (30.0, 5.0)
_PLACED = ("contiguous", "packed_qkv", "columns_first", "every_second", "unaligned", "expanded")
_LAYOUTS = {"bf16": _PLACED, "fp16": _PLACED, "fp32": _PLACED[:3]}
_SCALES = (0.25, 0.17677669529663687, 1.0, 0.088)
_MOST_QUERIES, _MOST_KEYS = 10, 40


@dataclass(frozen=True)
class _AttentionOptions:
    """The fixed facts of a group: dtypes of q and of any sinks, parameters, and the range of the width of a head.

    Of the range, `sizes` has the widths of queries and those of values that are drawn.
    """

    dtype: str
    sinks: str | None
    causal: bool
    capped: bool
    widths: tuple[int, int]
    sizes: tuple[Sequence[int], ...] = field(compare=False)
    row: Chosen = field(compare=False)

    def __str__(self) -> str:
        low, high = self.widths
        words = [self.dtype, f"sinks_{self.sinks}" if self.sinks else "", "causal" * self.causal, "cap" * self.capped]
        return "-".join(filter(None, [*words, f"D{low}to{high}"]))


_WIDTHS = ((17, 32), (1, 16))


def _rows(accepts: frozenset[str]) -> Iterator[_AttentionOptions]:
    """Yield rows of options in which every two meet that a kernel with these parameters takes."""
    found = combinations(
        {
            "q dtype": ("bf16", "fp16", "fp32"),
            "sinks dtype": (None, "bf16", "fp16", "fp32"),
            "causal": (None, True),
            "cap": (None, DRAWN),
        },
        lambda row: row["sinks dtype"] in (None, row["q dtype"], OTHER[row["q dtype"]]),
        accepts=accepts,
    )
    taken = accepts if isinstance(accepts, Accepted) else Accepted(accepts)
    for row, widths in zip(found, cycle(taken.ranges("q columns", _WIDTHS)), strict=False):
        sinks = None if row["sinks dtype"] is None else str(row["sinks dtype"])
        sizes = tuple(taken.sizes(f"{name} columns", *widths) for name in ("q", "v"))
        yield _AttentionOptions(str(row["q dtype"]), sinks, bool(row["causal"]), bool(row["cap"]), widths, sizes, row)


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts their sizes."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("attention", accepts, small=small)))
    yield from properties("attention", accepts, small=small)
    for options in _rows(accepts):
        yield Group(str(options), partial(_cases, options), choices=_choices(options), combination=options.row)


def _choices(options: _AttentionOptions) -> Choices:
    found: dict[str, tuple[Option, ...]] = {}
    for name, regimes in _REGIMES[options.dtype].items():
        found |= tensor_choices(name, (options.dtype,), regimes, _LAYOUTS[options.dtype])
    if options.sinks is not None:
        own = _SINKS if options.sinks == options.dtype else _SINKS[:2]
        found |= tensor_choices("sinks", (options.sinks,), own, layouts_like(4))
    found |= {"causal": (True,)} if options.causal else {}
    found |= {"cap": _CAPS} if options.capped else {}
    return found | {"scale": _SCALES}


@st.composite
def _cases(draw: st.DrawFn, options: _AttentionOptions, chosen: Chosen) -> Case:
    batch, groups, shared = 2, 2, draw(st.sampled_from((1, 2)))
    queries, keys = draw(st.integers(2, _MOST_QUERIES)), draw(st.integers(2, _MOST_KEYS))
    width, value_width = (draw(st.sampled_from(sizes)) for sizes in options.sizes)
    tensors = [
        chosen_tensor("q", chosen, (batch, queries, groups * shared, width)),
        chosen_tensor("k", chosen, (batch, keys, groups, width)),
        chosen_tensor("v", chosen, (batch, keys, groups, value_width)),
    ]
    if options.sinks is not None:
        tensors.append(chosen_tensor("sinks", chosen, (groups * shared,)))
    params: dict[str, Any] = {name: chosen[name] for name in ("scale", "causal", "cap") if chosen.get(name) is not None}
    return Case("attention", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield the heads of every model of the table, with the last queries of a sequence."""
    for seed, shape in enumerate(_SHAPES):
        heads, groups = shape["heads"], shape["key_heads"]
        if small:
            heads, groups = min(2, heads // groups), 1
        queries, keys = (shape["queries"], shape["keys"]) if not small else (4, 40)
        width, value_width = shape["width"], shape.get("value_width", shape["width"])
        tensors = [
            TensorSpec("q", "bf16", (1, queries, heads, width)),
            TensorSpec("k", "bf16", (1, keys, groups, width)),
            TensorSpec("v", "bf16", (1, keys, groups, value_width)),
        ]
        if shape.get("sinks"):
            tensors.append(TensorSpec("sinks", "bf16", (heads,)))
        params: dict[str, Any] = {"scale": shape["scale"], "causal": True}
        params |= {"cap": shape["cap"]} if "cap" in shape else {}
        case = Case("attention", tuple(tensors), params, seed)
        if case.names <= accepts:
            yield case
