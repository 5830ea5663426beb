"""Cases of quantization: a group per dtype, format of the codes and what has a scale, real-model shapes, and edges.

A group fixes what a Triton kernel is specialised on. Regimes, layouts, the least amax and scale, and what N leaves when
divided by 16 are chosen; Hypothesis draws the rest: exact N, rows, seed.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    Case,
    Choices,
    Chosen,
    Group,
    Option,
    TensorSpec,
    chosen_tensor,
    cut_rows,
    leading_dims,
    least_rows,
    residues,
    row_layouts,
    tensor_choices,
    widths_with,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["quantize"]

_ACTIVATIONS = (
    *("normal", "rows", "tiniest", "outlier_last", "zero_rows", "constant", "subnormal", "largest", "special"),
    "sparse",
)
_SCALES = ("scale_pow2", "scale_amax", "scale_odd", "scale_random", "scale_overflow")
_LEAST = 1 / (448.0 * 512.0)

_SMALL_ELEMENTS = 1 << 12  # of x where a CPU takes part
_LARGE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class _QuantizeOptions:
    """The fixed facts of a group: dtypes of x and codes, and what shares a scale: a tensor, a row, or some columns."""

    x: str
    dtypes: tuple[str, ...]
    scale: str | int
    narrow: int
    wide: int

    @property
    def group(self) -> int:
        """The number of columns of x that are drawn at a time."""
        return self.scale if isinstance(self.scale, int) else 1

    @property
    def needs(self) -> frozenset[str]:
        """The tensors and parameters that its cases have in any case."""
        by_scale = {"tensor": {"scale"}, "row": set[str]()}.get(str(self.scale), {"group_size"})
        return frozenset({"x", "dtype"} | by_scale)

    def __str__(self) -> str:
        return f"{self.x}-{'_'.join(self.dtypes)}-{self.scale}-N{self.narrow}to{self.wide}"


_GROUPS = (
    _QuantizeOptions("bf16", ("e4m3",), "row", 65, 512),
    _QuantizeOptions("bf16", ("e4m3",), 128, 1, 6),
    _QuantizeOptions("fp16", ("e4m3", "int8"), "tensor", 17, 128),
    _QuantizeOptions("fp32", ("e5m2",), "row", 33, 300),
    _QuantizeOptions("fp16", ("int8",), 32, 1, 10),
)


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("quantize", accepts, small=small)))
    yield from properties("quantize", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in _GROUPS:
        if options.needs <= accepts:
            strategy = partial(_cases, options, most)
            yield Group(
                str(options), strategy, choices=_choices(options, accepts, most // (options.wide * options.group))
            )


def _choices(options: _QuantizeOptions, accepts: frozenset[str], rows: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where x may have that many rows."""
    found: dict[str, tuple[Option, ...]] = tensor_choices("x", (options.x,), _ACTIVATIONS, row_layouts(rows))
    found |= {"dtype": options.dtypes}
    if options.group == 1:
        found |= {"x columns % 16": residues(options.narrow, options.wide, 16)}
    if options.scale == "tensor":
        return found | tensor_choices("scale", ("fp32",), _SCALES)
    found |= {"ue8m0": (None, True)} if "ue8m0" in accepts else {}
    found |= {"least_amax": (None, 1e-10, 1e-5, 1e-4)} if "least_amax" in accepts else {}
    return found | ({"least_scale": (None, _LEAST)} if "least_scale" in accepts else {})


@st.composite
def _cases(draw: st.DrawFn, options: _QuantizeOptions, most: int, chosen: Chosen) -> Case:
    columns = st.integers(options.narrow, options.wide).map(lambda count: count * options.group)
    if options.group == 1:
        columns = widths_with(chosen["x columns % 16"], options.narrow, options.wide, 16)
    width = draw(columns)
    shape = (*draw(leading_dims(max(1, most // width), least_rows(chosen))), width)
    tensors = [chosen_tensor("x", chosen, shape)]
    params: dict[str, Any] = {"dtype": chosen["dtype"]}
    if options.scale == "tensor":
        tensors.append(chosen_tensor("scale", chosen, (1,)))
    if isinstance(options.scale, int):
        params["group_size"] = options.scale
    for name in ("ue8m0", "least_amax", "least_scale"):
        if chosen.get(name) is not None:
            params[name] = chosen[name]
    if "ue8m0" in params and "least_scale" not in params:
        params.setdefault("least_amax", 1e-10)
    return Case("quantize", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every shape of the table in bf16: groups of 128 columns, rows in int8, and one scale for all, in turn."""
    kinds: tuple[dict[str, Any], ...]
    kinds = ({"dtype": "e4m3", "group_size": 128, "least_amax": 1e-10}, {"dtype": "int8"}, {"dtype": "e4m3"})
    for seed, (shape, kind) in enumerate(zip(_SHAPES, itertools.cycle(kinds), strict=False)):
        width = shape["width"]
        rows = cut_rows(shape["rows"], width, 2 * _SMALL_ELEMENTS) if small else tuple(shape["rows"])
        strides = tuple(shape["strides"]) if "strides" in shape else None
        tensors = [TensorSpec("x", "bf16", (*rows, width), strides, regime="rows" if seed % 2 else "normal")]
        if kind == {"dtype": "e4m3"}:
            tensors.append(TensorSpec("scale", "fp32", (1,), regime="scale_random"))
        case = Case("quantize", tuple(tensors), {**kind}, seed)
        if case.names <= accepts:
            yield case
