"""Cases of RMSNorm and quantization: a scale for each row, for groups of columns, and one for the tensor; and edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    Case,
    Choices,
    Chosen,
    Group,
    chosen_tensor,
    layouts_like,
    leading_dims,
    least_rows,
    row_layouts,
    tensor_choices,
)
from lastbit.cases._edges import edges

_REGIMES = ("normal", "rows", "outlier", "zero_rows", "constant", "special")
_LEAST_SCALE = 1 / (448.0 * 512.0)
_SMALL_ELEMENTS = 1 << 11  # of x where a CPU takes part
_LARGE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class _NormQuantizeOptions:
    """The fixed facts of a group: dtypes of x and weight, residual or not, and the extent of a scale."""

    x: str
    weight: str
    residual: bool
    scale: str | int

    @property
    def params(self) -> dict[str, Any]:
        if isinstance(self.scale, int):
            return {"dtype": "e4m3", "group_size": self.scale, "ue8m0": True, "least_amax": 1e-10}
        return {"dtype": "e4m3"} | ({"least_scale": _LEAST_SCALE} if self.scale == "row" else {})

    @property
    def names(self) -> frozenset[str]:
        tensors = [
            "x",
            "weight",
            *(["residual"] if self.residual else []),
            *(["scale"] if self.scale == "tensor" else []),
        ]
        return frozenset([*tensors, *self.params])

    def __str__(self) -> str:
        return f"{self.x}-weight_{self.weight}{'-residual' * self.residual}-{self.scale}"


_GROUPS = (
    _NormQuantizeOptions("bf16", "bf16", True, "row"),
    _NormQuantizeOptions("bf16", "fp32", True, 64),
    _NormQuantizeOptions("fp16", "fp16", False, "tensor"),
)


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("edges", examples=tuple(edges("rms_norm_quantize", accepts, small=small)))
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in _GROUPS:
        if options.names <= accepts:
            yield Group(str(options), partial(_cases, options, most), choices=_choices(options, most // 64))


def _choices(options: _NormQuantizeOptions, rows: int) -> Choices:
    found = tensor_choices("x", (options.x,), _REGIMES, row_layouts(rows))
    found |= tensor_choices("weight", (options.weight,), ("normal", "near_one", "signs"), layouts_like(64))
    if options.residual:
        found |= tensor_choices("residual", (options.x,), ("normal", "rows", "outlier"), row_layouts(rows))
    if options.scale == "tensor":
        found |= tensor_choices("scale", ("fp32",), ("scale_pow2", "scale_amax", "scale_random"))
    return {**found, "eps": (1e-6, 1e-5)}


@st.composite
def _cases(draw: st.DrawFn, options: _NormQuantizeOptions, most: int, chosen: Chosen) -> Case:
    group = options.scale if isinstance(options.scale, int) else 1
    width = group * draw(st.integers(1, most // 8 // group))
    shape = (*draw(leading_dims(most // width, least_rows(chosen))), width)
    shapes = {"x": shape, "weight": (width,), "residual": shape, "scale": (1,)}
    tensors = [chosen_tensor(name, chosen, shapes[name]) for name in shapes if name in options.names]
    params = {"eps": chosen["eps"], **options.params}
    return Case("rms_norm_quantize", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))
