"""Cases of SwiGLU and of its gradient: gate and up in one tensor or two, plain, limited, and as gpt-oss has it."""

from __future__ import annotations

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

SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["swiglu"]

_VALUES = (
    *("normal", "gates", "rows", "tiny", "outlier_last", "offset", "constant", "integers"),
    *("subnormal", "largest", "special", "saturated"),
)
_EXACT = ("saturated", "zeros", "special")
"""Gates that decide fp32: their sigmoid is 1, 1/2 or beside 0."""
_GRADIENTS = ("normal", "rows", "tiny", "integers", "largest", "special")

_FEW = 4  # layouts of fp32: a kernel that finds its elements in 16 bits finds them in 32
_PARAMETERS: dict[str, tuple[Option, ...]] = {
    "swiglu_limit": (None, 7.0, 0.5),
    "alpha": (None, 1.702, 0.0, -1.0),
    "up_offset": (None, 1.0, -0.25),
}


@dataclass(frozen=True)
class SwigluOptions:
    """The fixed facts of a group: dtype, how gate and up are held, the range of I, and parameters left out or not."""

    dtype: str
    form: str
    narrow: int
    wide: int
    plain: bool = True

    def __str__(self) -> str:
        limited = () if self.plain else ("limited",)
        return "-".join((self.dtype, self.form, *limited, f"N{self.narrow}to{self.wide}"))


_GROUPS = (
    SwigluOptions("bf16", "halves", 65, 128),
    SwigluOptions("bf16", "interleaved", 129, 256, plain=False),
    SwigluOptions("fp16", "two", 33, 64, plain=False),
    SwigluOptions("fp32", "two", 1, 16, plain=False),
)
_VECTOR = 16
_TAIL = f"x columns % {_VECTOR}"
"""No element depends on another: the tail of a row matters to vectors alone, and edges of a block are fixed cases."""
_SMALL_ELEMENTS = 1 << 11
_LARGE_ELEMENTS = 1 << 22


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield from groups_of("swiglu", accepts, small=small)


def groups_of(op: str, accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups of the forward pass, or of the gradient, whose cases have dy besides."""
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    yield Group("real-shapes", examples=tuple(_real_shapes(op, accepts, small=small)))
    yield Group("edges", examples=tuple(edges(op, accepts, small=small)))
    yield from properties(op, accepts, small=small)
    for options in _GROUPS:
        if _taken(options.form, accepts):
            yield Group(str(options), partial(_cases, op, options, most), choices=_choices(op, options, accepts, most))


def _taken(form: str, accepts: frozenset[str]) -> bool:
    """Check whether a kernel with these parameters may take the form; one that requires up gets no case without it."""
    return {"two": "up", "interleaved": "interleaved", "halves": "x"}[form] in accepts


def _choices(op: str, options: SwigluOptions, accepts: frozenset[str], most: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where a tensor may have about `most` elements."""
    exact = options.dtype == "fp32"
    layouts = row_layouts(most // options.wide)[: _FEW if exact else None]
    regimes: dict[str, tuple[str, ...]] = {"x": _EXACT if exact else _VALUES}
    regimes |= {"dy": _GRADIENTS} if op == "swiglu_backward" else {}
    regimes |= {"up": _GRADIENTS if exact else _VALUES} if options.form == "two" else {}
    found: dict[str, tuple[Option, ...]] = {}
    for name, values in regimes.items():
        found |= tensor_choices(name, (options.dtype,), values, layouts)
    held = 1 if options.form == "two" else 2
    columns = residues(options.narrow * held, options.wide * held, _VECTOR)
    found |= {_TAIL: tuple(residue for residue in columns if residue % held == 0)}
    if not options.plain:
        found |= {name: values for name, values in _PARAMETERS.items() if name in accepts}
    return found


@st.composite
def _cases(draw: st.DrawFn, op: str, options: SwigluOptions, most: int, chosen: Chosen) -> Case:
    held = 1 if options.form == "two" else 2
    narrow, wide = options.narrow * held, options.wide * held
    columns = draw(widths_with(chosen[_TAIL], narrow, wide, _VECTOR))
    rows = draw(leading_dims(max(1, most // columns), least_rows(chosen)))
    tensors = [chosen_tensor("x", chosen, (*rows, columns))]
    if op == "swiglu_backward":
        tensors.append(chosen_tensor("dy", chosen, (*rows, columns // held)))
    if held == 1:
        tensors.append(chosen_tensor("up", chosen, (*rows, columns)))
    params: dict[str, Any] = {name: chosen[name] for name in _PARAMETERS if chosen.get(name) is not None}
    if options.form == "interleaved":
        params = {"interleaved": True, **params}
    return Case(op, tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(op: str, accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every shape of the table once in bf16, as its model holds gate and up where the kernel can."""
    for seed, shape in enumerate(SHAPES):
        form = shape["form"] if _taken(shape["form"], accepts) else "two" if "up" in accepts else "halves"
        width = shape["width"]
        rows = cut_rows(shape["rows"], width, _SMALL_ELEMENTS) if small else tuple(shape["rows"])
        tensors = [TensorSpec("x", "bf16", (*rows, width if form == "two" else 2 * width))]
        if op == "swiglu_backward":
            tensors.append(TensorSpec("dy", "bf16", (*rows, width)))
        if form == "two":
            tensors.append(TensorSpec("up", "bf16", (*rows, width)))
        params: dict[str, Any] = {"interleaved": True} if form == "interleaved" else {}
        params |= {name: shape[name] for name in _PARAMETERS if name in shape and name in accepts}
        yield Case(op, tuple(tensors), params, seed)
