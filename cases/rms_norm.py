"""Cases of RMSNorm: one group per combination of dtypes and options, real-model shapes, and edges.

A group fixes what a Triton kernel is specialised on (dtypes, options, the power of two above N). Regimes, layouts, eps
and what N leaves when divided by 64 are chosen, so that a run covers each of them with few compilations; Hypothesis
draws the rest: exact N, rows, seed.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    DRAWN,
    Case,
    Choices,
    Chosen,
    Group,
    Option,
    TensorSpec,
    chosen_tensor,
    cut_rows,
    layouts_like,
    leading_dims,
    least_rows,
    residues,
    row_layouts,
    tensor_choices,
    widths_with,
)
from lastbit.cases._combinations import AS_X, Combination, given, rows_of
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())

_ACTIVATIONS = (
    "normal",
    "rows",
    "tiny",
    "tiniest",
    "outlier",
    "outlier_last",
    "offset",
    "lattice",
    "zero_rows",
    "constant",
    "pow2",
    "subnormal",
    "huge",
    "largest",
    "special",
    "sparse",
)
_WEIGHTS = ("normal", "near_one", "ones", "zeros", "signs", "small", "special_columns")
_SCALES = ("scale_pow2", "scale_amax", "scale_odd", "scale_random", "scale_overflow")
_EPS = (1e-6, 1e-5, 1e-12, 1e-3)


_OFFSETS = (1.0, -1.0)

_AXES: dict[str, tuple[Option, ...]] = {
    "x dtype": ("bf16", "fp16", "fp32"),
    "weight dtype": ("bf16", "fp16", "fp32", None),
    "residual": (None, AS_X),
    "scale dtype": (None, "fp32"),
    "quant": (None, "static", "dynamic"),
    "variance_size": (None, DRAWN),
    "weight_offset": (None, DRAWN),
}
_RANGES = (
    *((65, 128), (1025, 2048), (129, 256), (1, 16), (4097, 8192)),
    *((513, 1024), (33, 64), (2049, 4096), (17, 32), (8193, 16384)),
)

_SMALL_ELEMENTS = 1 << 14  # of x where a CPU takes part: a few dozen Triton programs
_LARGE_ELEMENTS = 1 << 22


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("rms_norm", accepts, small=small)))
    yield from properties("rms_norm", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for row in rows_of(_AXES, _together, accepts, _RANGES, strength=3):
        choices = _choices(row, accepts, most // row.wide)
        yield Group(str(row), partial(_cases, row, most), choices=choices, combination=row.options)


def _together(row: Mapping[str, Any]) -> bool:
    """Tell whether a static scale is given where it is asked for, and an offset where there is a weight."""
    offset = row["weight_offset"] is None or row["weight dtype"] is not None
    return offset and (row["quant"] == "static") is (row["scale dtype"] is not None)


def _choices(row: Combination, accepts: frozenset[str], rows: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where x may have that many rows."""
    x, layouts = row["x dtype"], row_layouts(rows)
    found: dict[str, tuple[Option, ...]] = tensor_choices("x", (x,), _ACTIVATIONS, layouts)
    if row["weight dtype"] is not None:
        found |= tensor_choices("weight", (row["weight dtype"],), _WEIGHTS, layouts_like(64))
    if row["residual"] is not None:
        found |= tensor_choices("residual", (x,), _ACTIVATIONS, layouts)
    if row["scale dtype"] is not None:
        found |= tensor_choices("scale", (row["scale dtype"],), _SCALES)
    found |= {"x columns % 64": residues(row.narrow, row.wide), "eps": _EPS}
    options = {"quant": (None,), "variance_size": (DRAWN,), "weight_offset": _OFFSETS}
    return found | row.choices({name: values for name, values in options.items() if name in accepts})


@st.composite
def _cases(draw: st.DrawFn, row: Combination, most: int, chosen: Chosen) -> Case:
    width = draw(widths_with(chosen["x columns % 64"], row.narrow, row.wide))
    shape = (*draw(leading_dims(max(1, most // width), least_rows(chosen))), width)
    shapes = {"x": shape, "weight": (width,), "residual": shape, "scale": (1,)}
    tensors = [chosen_tensor(name, chosen, shapes[name]) for name in shapes if f"{name} dtype" in chosen]
    params = given(chosen, ("eps", "quant", "variance_size", "weight_offset"))
    if "variance_size" in params:
        params["variance_size"] = draw(st.integers(1, width))
    return Case("rms_norm", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every shape of the table once in bf16, every second one with a residual."""
    for seed, (shape, residual) in enumerate(zip(_SHAPES["rms_norm"], itertools.cycle((False, True)), strict=False)):
        dtype, width = "bf16", shape["width"]
        rows = cut_rows(shape["rows"], width, _SMALL_ELEMENTS) if small else tuple(shape["rows"])
        strides = tuple(shape["strides"]) if "strides" in shape else None
        regime = "rows" if seed % 2 else "normal"
        tensors = [TensorSpec("x", dtype, (*rows, width), strides, shape.get("offset", 0), regime)]
        if "weight" in accepts:
            tensors.append(TensorSpec("weight", dtype, (width,)))
        if residual and "residual" in accepts:
            tensors.append(TensorSpec("residual", dtype, (*rows, width)))
        params = {"eps": shape["eps"]}
        if "weight_offset" in accepts and "weight_offset" in shape:
            params["weight_offset"] = shape["weight_offset"]
        yield Case("rms_norm", tuple(tensors), params, seed)
