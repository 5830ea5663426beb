"""Cases of RMSNorm and quantization: a scale for each row, for groups of columns, and one for the tensor; and edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    DRAWN,
    Case,
    Choices,
    Chosen,
    Group,
    Option,
    chosen_tensor,
    layouts_like,
    leading_dims,
    least_rows,
    row_layouts,
    tensor_choices,
)
from lastbit.cases._combinations import AS_X, Combination, given, rows_of
from lastbit.cases._edges import edges
from lastbit.cases.quantize import goes_together

_REGIMES = ("normal", "rows", "outlier", "zero_rows", "constant", "special")
_LEAST_SCALE = 1 / (448.0 * 512.0)
_FEW = 4  # layouts of other dtypes than bf16: both parts of the chain have cases of all
_SMALL_ELEMENTS = 1 << 11  # of x where a CPU takes part
_LARGE_ELEMENTS = 1 << 21


_AXES: dict[str, tuple[Option, ...]] = {
    "x dtype": ("bf16", "fp16", "fp32"),
    "weight dtype": ("bf16", "fp16", "fp32", None),
    "residual": (AS_X, None),
    "dtype": ("e4m3", "int8", "e5m2"),
    "scale dtype": (None, "fp32"),
    "group_size": (None, 64, 96),
    "ue8m0": (None, True),
    "least_amax": (None, 1e-10, 64.0),  # the last one is above most rows, as that of the scale
    "least_scale": (None, _LEAST_SCALE, 0.3),  # no power of two, which rounding up would not change
    "weight_offset": (None, DRAWN),
}
_OPTIONS: dict[str, tuple[Option, ...]] = {
    **dict.fromkeys(("dtype", "group_size", "ue8m0", "least_amax", "least_scale"), ()),
    "weight_offset": (1.0,),
}


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("edges", examples=tuple(edges("rms_norm_quantize", accepts, small=small)))
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for row in rows_of(_AXES, _together, accepts, ((1, most // 8),)):
        choices = _choices(row, accepts, most // 64)
        yield Group(str(row), partial(_cases, row, most), choices=choices, combination=row.options)


def _together(row: Mapping[str, Any]) -> bool:
    """Tell whether the options have a meaning together in both parts of the chain."""
    return goes_together(row) and (row["weight_offset"] is None or row["weight dtype"] is not None)


def _choices(row: Combination, accepts: frozenset[str], rows: int) -> Choices:
    x = row["x dtype"]
    layouts = row_layouts(rows)[: None if x == "bf16" else _FEW]
    found: dict[str, tuple[Option, ...]] = tensor_choices("x", (x,), _REGIMES, layouts)
    if row["weight dtype"] is not None:
        found |= tensor_choices("weight", (row["weight dtype"],), ("normal", "near_one", "signs"), layouts_like(64))
    if row["residual"] is not None:
        found |= tensor_choices("residual", (x,), ("normal", "rows", "outlier"), layouts)
    if row["scale dtype"] is not None:
        found |= tensor_choices("scale", (row["scale dtype"],), ("scale_pow2", "scale_amax", "scale_random"))
    return (
        found
        | {"eps": (1e-6, 1e-5)}
        | row.choices({name: values for name, values in _OPTIONS.items() if name in accepts})
    )


@st.composite
def _cases(draw: st.DrawFn, row: Combination, most: int, chosen: Chosen) -> Case:
    group = chosen.get("group_size") or 1
    width = group * draw(st.integers(1, most // 8 // group))
    shape = (*draw(leading_dims(most // width, least_rows(chosen))), width)
    shapes = {"x": shape, "weight": (width,), "residual": shape, "scale": (1,)}
    tensors = [chosen_tensor(name, chosen, shapes[name]) for name in shapes if f"{name} dtype" in chosen]
    params = given(chosen, ("eps", *_OPTIONS))
    return Case("rms_norm_quantize", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))
