"""Cases of attention: sequences of few queries and keys, the heads of real models, and edges.

A group fixes what a kernel is compiled for: the dtype, sinks or not, and the power of two above the width of a head.
Few keys are not a matter of time alone: the more terms, the fewer outputs have one legal value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import Case, Choices, Chosen, Group, Option, TensorSpec, chosen_tensor, layouts_like, tensor_choices
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["attention"]
_QUERIES = ("normal", "outlier", "tiny", "zero_rows", "integers", "special")
_KEYS = ("normal", "outlier", "outlier_last", "integers", "signs")
_VALUES = ("normal", "rows", "lattice", "sparse", "outlier")
_SINKS = ("normal", "zeros", "outlier", "integers")
_CAPS = (None, 30.0, 5.0)
_LAYOUTS = ("contiguous", "packed_qkv", "columns_first", "every_second", "unaligned", "expanded")
_SCALES = (0.25, 0.17677669529663687, 1.0, 0.088)
_MOST_QUERIES, _MOST_KEYS = 10, 40


@dataclass(frozen=True)
class _AttentionOptions:
    """The fixed facts of a group: the dtype, whether there are sinks, and the range of the width of a head."""

    dtype: str
    sinks: bool
    narrow: int
    wide: int

    def __str__(self) -> str:
        return f"{self.dtype}{'-sinks' * self.sinks}-D{self.narrow}to{self.wide}"


_GROUPS = (
    _AttentionOptions("bf16", False, 17, 32),
    _AttentionOptions("fp16", True, 1, 16),
)


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts their sizes."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("attention", accepts, small=small)))
    yield from properties("attention", accepts, small=small)
    for options in _GROUPS:
        if not options.sinks or "sinks" in accepts:
            yield Group(str(options), partial(_cases, options), choices=_choices(options, accepts))


def _choices(options: _AttentionOptions, accepts: frozenset[str]) -> Choices:
    dtypes = (options.dtype,)
    found: dict[str, tuple[Option, ...]] = {}
    for name, regimes in (("q", _QUERIES), ("k", _KEYS), ("v", _VALUES)):
        found |= tensor_choices(name, dtypes, regimes, _LAYOUTS)
    if options.sinks:
        found |= tensor_choices("sinks", dtypes, _SINKS, layouts_like(4))
    found |= {"causal": (False, True)} if "causal" in accepts else {}
    found |= {"cap": _CAPS} if "cap" in accepts else {}
    return found | {"scale": _SCALES}


@st.composite
def _cases(draw: st.DrawFn, options: _AttentionOptions, chosen: Chosen) -> Case:
    batch, groups, shared = 2, 2, draw(st.sampled_from((1, 2)))
    queries, keys = draw(st.integers(2, _MOST_QUERIES)), draw(st.integers(2, _MOST_KEYS))
    width, value_width = (draw(st.integers(options.narrow, options.wide)) for _ in range(2))
    tensors = [
        chosen_tensor("q", chosen, (batch, queries, groups * shared, width)),
        chosen_tensor("k", chosen, (batch, keys, groups, width)),
        chosen_tensor("v", chosen, (batch, keys, groups, value_width)),
    ]
    if options.sinks:
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
