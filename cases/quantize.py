"""Cases of quantization: a group per dtype, format of the codes and what has a scale, real-model shapes, and edges.

A group fixes what a Triton kernel is specialised on. Regimes, layouts, the least amax and scale, and what N leaves when
divided by 16 are chosen; Hypothesis draws the rest: exact N, rows, seed.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    leading_dims,
    least_rows,
    residues,
    row_layouts,
    tensor_choices,
    widths_with,
)
from lastbit.cases._combinations import Combination, given, rows_of
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


_AXES: dict[str, tuple[Option, ...]] = {
    "x dtype": ("bf16", "fp16", "fp32"),
    "dtype": ("e4m3", "int8", "e5m2"),
    "scale dtype": (None, "fp32"),
    "group_size": (None, 128, 32, 256, 96),
    "ue8m0": (None, True),
    "least_amax": (None, DRAWN),
    "least_scale": (None, DRAWN),
}
_RANGES = ((65, 512), (17, 128), (33, 300))
"""Of N where a row has one scale, or all rows."""
_WIDEST = 768  # columns of x in groups, but
_MOST_GROUPS = 10
_OPTIONS: dict[str, tuple[Option, ...]] = {
    **dict.fromkeys(("dtype", "group_size", "ue8m0"), ()),
    "least_amax": (1e-10, 1e-5, 1e-4),
    "least_scale": (_LEAST,),
}


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("quantize", accepts, small=small)))
    yield from properties("quantize", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for row in rows_of(_AXES, goes_together, accepts, _RANGES, strength=3):
        row = row if row["group_size"] is None else _in_groups(row)
        choices = _choices(row, accepts, most // (row.wide * (row["group_size"] or 1)))
        yield Group(str(row), partial(_cases, row, most), choices=choices, combination=row.options)


def goes_together(row: Mapping[str, Any]) -> bool:
    """Tell whether a scale is either given or found, and a power of two is never found from a scale of zero."""
    if row["scale dtype"] is not None:
        return all(row[name] is None for name in ("group_size", "ue8m0", "least_amax", "least_scale"))
    return row["ue8m0"] is None or row["least_amax"] is not None or row["least_scale"] is not None


def _in_groups(row: Combination) -> Combination:
    """Return the row with numbers of groups in place of numbers of columns."""
    return replace(row, narrow=1, wide=min(_MOST_GROUPS, _WIDEST // row["group_size"]))


def _choices(row: Combination, accepts: frozenset[str], rows: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where x may have that many rows."""
    found: dict[str, tuple[Option, ...]] = tensor_choices("x", (row["x dtype"],), _ACTIVATIONS, row_layouts(rows))
    if row["group_size"] is None:
        found |= {"x columns % 16": residues(row.narrow, row.wide, 16)}
    if row["scale dtype"] is not None:
        found |= tensor_choices("scale", (row["scale dtype"],), _SCALES)
    return found | row.choices({name: values for name, values in _OPTIONS.items() if name in accepts})


@st.composite
def _cases(draw: st.DrawFn, row: Combination, most: int, chosen: Chosen) -> Case:
    if size := chosen.get("group_size"):
        width = size * draw(st.integers(row.narrow, row.wide))
    else:
        width = draw(widths_with(chosen["x columns % 16"], row.narrow, row.wide, 16))
    shape = (*draw(leading_dims(max(1, most // width), least_rows(chosen))), width)
    tensors = [chosen_tensor("x", chosen, shape)]
    if row["scale dtype"] is not None:
        tensors.append(chosen_tensor("scale", chosen, (1,)))
    return Case("quantize", tuple(tensors), given(chosen, _OPTIONS), draw(st.integers(0, 2**32 - 1)))


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
