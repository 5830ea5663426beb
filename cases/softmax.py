"""Cases of softmax: one group per combination of dtypes and masks, attention and router rows of real models, and edges.

A group fixes what a kernel is specialised on: dtypes, which masks there are, and the block that covers a row. Regimes,
layouts, the scale and what N leaves when divided by 16 are chosen; Hypothesis draws the rest.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

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

_SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["softmax"]
_SCORES = (
    "normal",
    "rows",
    "tiny",
    "outlier_last",
    "offset",
    "zero_rows",
    "subnormal",
    "huge",
    "special",
    "gates",
)
_MASKS = ("masked", "normal", "special_columns")
_NUMBERS = ("normal", "special_columns")
"""Of a mask in another dtype than x: zeros and -inf are the same in both."""
_KEPT = ("spans", "normal")
_REGIMES = {"x": _SCORES, "mask": _MASKS, "keep": _KEPT}
_SCALES = (1.0, 0.125, 0.08838834764831845, 3.0, -3.0)  # of heads of 64 and 128 columns; one that sharpens, and its
# negative, under which the largest score is that of the smallest x


_AXES: dict[str, tuple[Option, ...]] = {
    "x dtype": ("bf16", "fp16", "fp32"),
    "mask dtype": (None, "bf16", "fp16", "fp32"),
    "keep dtype": (None, "bool"),
    "scale": (DRAWN, None),
    "fp32_output": (None, True),
}
_RANGES = ((65, 256), (1025, 4096), (257, 1024), (2, 64))  # of one column edges alone: no layout means anything

_SMALL_ELEMENTS = 1 << 12  # of x where a CPU takes part: a dozen Triton programs
_LARGE_ELEMENTS = 1 << 22


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("softmax", accepts, small=small)))
    yield from properties("softmax", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for row in rows_of(_AXES, lambda row: True, accepts, _RANGES, strength=3):
        choices = _choices(row, accepts, most // row.wide)
        yield Group(str(row), partial(_cases, row, most), choices=choices, combination=row.options)


def _choices(row: Combination, accepts: frozenset[str], rows: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where x may have that many rows."""
    layouts, found = row_layouts(rows), dict[str, tuple[Option, ...]]()
    for name, regimes in _REGIMES.items():
        if row[f"{name} dtype"] is not None:
            mixed = name == "mask" and row["mask dtype"] != row["x dtype"]
            found |= tensor_choices(name, (row[f"{name} dtype"],), _NUMBERS if mixed else regimes, layouts)
    found |= {"x columns % 16": residues(row.narrow, row.wide, 16)}
    options = {"scale": _SCALES, "fp32_output": (None,)}
    return found | row.choices({name: values for name, values in options.items() if name in accepts})


@st.composite
def _cases(draw: st.DrawFn, row: Combination, most: int, chosen: Chosen) -> Case:
    width = draw(widths_with(chosen["x columns % 16"], row.narrow, row.wide, 16))
    shape = (*draw(leading_dims(max(1, most // width), least_rows(chosen))), width)
    tensors = [chosen_tensor(name, chosen, shape) for name in _REGIMES if f"{name} dtype" in chosen]
    params = given(chosen, ("scale", "fp32_output"))
    return Case("softmax", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every shape of the table once, those of attention in turn with each mask and with none."""
    masks = itertools.cycle(("mask", "keep", ""))
    for seed, shape in enumerate(_SHAPES):
        width = shape["width"]
        if small and width > 2 * _SMALL_ELEMENTS:
            continue
        rows = cut_rows(shape["rows"], width, _SMALL_ELEMENTS) if small else tuple(shape["rows"])
        tensors = [TensorSpec("x", shape["dtype"], (*rows, width), regime="gates" if seed % 2 else "normal")]
        kind = next(masks) if "scale" in shape else ""
        if kind and kind in accepts:
            dtype, regime = (shape["dtype"], "masked") if kind == "mask" else ("bool", "spans")
            tensors.append(TensorSpec(kind, dtype, (*rows, width), regime=regime))
        params = {"scale": shape["scale"]} if "scale" in accepts and "scale" in shape else {}
        yield Case("softmax", tuple(tensors), params, seed)
