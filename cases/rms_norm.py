"""Cases of RMSNorm: one group per combination of dtypes and options, real-model shapes, and edges.

A group fixes what a Triton kernel is specialised on (dtypes, options, the power of two above N). Regimes, layouts, eps
and what N leaves when divided by 64 are chosen, so that a run covers each of them with few compilations; Hypothesis
draws the rest: exact N, rows, seed.
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


@dataclass(frozen=True)
class _NormOptions:
    """The fixed facts of a group: dtypes of x and weight, residual or not, quantisation, and the range of N."""

    x: str
    weight: str | None
    residual: bool
    quant: str | None
    narrow: int
    wide: int

    def without(self, accepts: frozenset[str]) -> _NormOptions | None:
        """Reduce the options to those of a kernel with these parameters; None if it lacks a weight that they need."""
        if self.weight is not None and "weight" not in accepts:
            return None
        quant = self.quant if "quant" in accepts else None
        return _NormOptions(self.x, self.weight, self.residual and "residual" in accepts, quant, self.narrow, self.wide)

    def __str__(self) -> str:
        words = [self.x, f"weight_{self.weight}" if self.weight != self.x else "", "residual" if self.residual else ""]
        return "-".join(filter(None, [*words, self.quant, f"N{self.narrow}to{self.wide}"]))


_GROUPS = (
    _NormOptions("bf16", "bf16", False, None, 65, 128),
    _NormOptions("bf16", "bf16", True, None, 1025, 2048),
    _NormOptions("bf16", "bf16", True, "static", 1025, 2048),
    _NormOptions("bf16", "fp32", False, "dynamic", 129, 256),
    _NormOptions("bf16", None, True, None, 1, 16),
    _NormOptions("bf16", "bf16", False, None, 4097, 8192),
    _NormOptions("fp16", "fp16", False, None, 513, 1024),
    _NormOptions("fp16", "fp16", True, "static", 33, 64),
    _NormOptions("fp16", "fp16", True, "dynamic", 1025, 2048),
    _NormOptions("fp16", "fp16", True, None, 2049, 4096),
    _NormOptions("fp16", "fp32", False, None, 17, 32),
    _NormOptions("fp32", "fp32", True, None, 1025, 2048),
    _NormOptions("fp32", "fp32", False, "static", 17, 32),
    _NormOptions("fp32", "fp32", False, None, 8193, 16384),
)

_SMALL_ELEMENTS = 1 << 14  # of x where a CPU takes part: a few dozen Triton programs
_LARGE_ELEMENTS = 1 << 22


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("rms_norm", accepts, small=small)))
    yield from properties("rms_norm", accepts, small=small)
    fitted = dict.fromkeys(o for options in _GROUPS if (o := options.without(accepts)) is not None)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in fitted:
        strategy = partial(_cases, options, most)
        yield Group(str(options), strategy, choices=_choices(options, accepts, most // options.wide))


def _choices(options: _NormOptions, accepts: frozenset[str], rows: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where x may have that many rows."""
    layouts = row_layouts(rows)
    found: dict[str, tuple[Option, ...]] = tensor_choices("x", (options.x,), _ACTIVATIONS, layouts)
    if options.weight is not None:
        found |= tensor_choices("weight", (options.weight,), _WEIGHTS, layouts_like(64))
    if options.residual:
        found |= tensor_choices("residual", (options.x,), _ACTIVATIONS, layouts)
    if options.quant == "static":
        found |= tensor_choices("scale", ("fp32",), _SCALES)
    found |= {"x columns % 64": residues(options.narrow, options.wide), "eps": _EPS}
    if not options.residual and options.quant is None:
        found |= {"variance_size": (None, DRAWN)} if "variance_size" in accepts else {}
        offset = options.weight is not None and "weight_offset" in accepts
        found |= {"weight_offset": (None, 1.0, -1.0)} if offset else {}
    return found


@st.composite
def _cases(draw: st.DrawFn, options: _NormOptions, most: int, chosen: Chosen) -> Case:
    width = draw(widths_with(chosen["x columns % 64"], options.narrow, options.wide))
    shape = (*draw(leading_dims(max(1, most // width), least_rows(chosen))), width)
    tensors = [chosen_tensor("x", chosen, shape)]
    if options.weight is not None:
        tensors.append(chosen_tensor("weight", chosen, (width,)))
    if options.residual:
        tensors.append(chosen_tensor("residual", chosen, shape))
    params: dict[str, Any] = {"eps": chosen["eps"]}
    if options.quant is not None:
        params["quant"] = options.quant
    if options.quant == "static":
        tensors.append(chosen_tensor("scale", chosen, (1,)))
    if chosen.get("variance_size") == DRAWN and width > 1:
        params["variance_size"] = draw(st.integers(1, width - 1))
    if offset := chosen.get("weight_offset"):
        params["weight_offset"] = offset
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
