"""Cases of SwiGLU and of its gradient: gate and up in one tensor or two, plain, limited, and as gpt-oss has it.

There is a group per combination of dtype, form and parameters; every two options that go together meet in one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
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
    cut_rows,
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

SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["swiglu"]

_VALUES = (
    *("normal", "gates", "rows", "tiny", "outlier_last", "offset", "constant", "integers"),
    *("subnormal", "largest", "special", "saturated"),
)
_EXACT = ("saturated", "zeros", "special")
"""Gates that decide fp32: their sigmoid is 1, 1/2 or beside 0."""
_BOTH = ("normal", "special")
"""Of gate and up in one tensor of fp32: those that decide it make up a number of few bits."""
_UPS = ("normal", "rows", "tiny", "integers", "subnormal", "largest", "special")
"""Of what is multiplied once, whatever the gate."""
_GRADIENTS = ("normal", "rows", "tiny", "integers", "largest", "special")

_FEW = 4  # layouts of fp32: a kernel that finds its elements in 16 bits finds them in 32
_PARAMETERS: dict[str, tuple[Option, ...]] = {
    "swiglu_limit": (7.0, 0.5),
    "alpha": (1.702, 0.0, -1.0),
    "up_offset": (1.0, -0.25),
}


_AXES: dict[str, tuple[Option, ...]] = {
    "x dtype": ("bf16", "fp16", "fp32"),
    "up": (None, AS_X),
    "interleaved": (None, True),
    **dict.fromkeys(_PARAMETERS, (None, DRAWN)),
}
_RANGES = ((65, 128), (129, 256), (33, 64), (2, 16))  # of one column edges alone: no layout means anything
"""Of I: what gate and up have each."""

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
    for row in rows_of(_AXES, _together, accepts, _RANGES, strength=3):
        choices = _choices(op, row, accepts, most)
        yield Group(str(row), partial(_cases, op, row, most), choices=choices, combination=row.options)


def _together(row: Mapping[str, Any]) -> bool:
    """Tell whether there is one tensor that can be interleaved."""
    return not (row["up"] and row["interleaved"])


def _held(row: Combination) -> int:
    """Return how many tensors x holds: the gate alone, or gate and up."""
    return 2 if row["up"] is None else 1


def _choices(op: str, row: Combination, accepts: frozenset[str], most: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where a tensor may have about `most` elements."""
    dtype, held = row["x dtype"], _held(row)
    exact = dtype == "fp32"
    layouts = row_layouts(most // row.wide)[: _FEW if exact else None]
    regimes: dict[str, tuple[str, ...]] = {"x": (_EXACT if held == 1 else _BOTH) if exact else _VALUES}
    regimes |= {"dy": _GRADIENTS} if op == "swiglu_backward" else {}
    regimes |= {"up": _GRADIENTS if exact else _UPS} if held == 1 else {}
    found: dict[str, tuple[Option, ...]] = {}
    for name, values in regimes.items():
        found |= tensor_choices(name, (dtype,), values, layouts)
    columns = residues(row.narrow * held, row.wide * held, _VECTOR)
    found |= {_TAIL: tuple(residue for residue in columns if residue % held == 0)}
    options = {"interleaved": (None, True), **_PARAMETERS}
    return found | row.choices({name: values for name, values in options.items() if name in accepts})


@st.composite
def _cases(draw: st.DrawFn, op: str, row: Combination, most: int, chosen: Chosen) -> Case:
    held = _held(row)
    columns = draw(widths_with(chosen[_TAIL], row.narrow * held, row.wide * held, _VECTOR))
    rows = draw(leading_dims(max(1, most // columns), least_rows(chosen)))
    tensors = [chosen_tensor("x", chosen, (*rows, columns))]
    if op == "swiglu_backward":
        tensors.append(chosen_tensor("dy", chosen, (*rows, columns // held)))
    if held == 1:
        tensors.append(chosen_tensor("up", chosen, (*rows, columns)))
    return Case(op, tuple(tensors), given(chosen, ("interleaved", *_PARAMETERS)), draw(st.integers(0, 2**32 - 1)))


def _real_shapes(op: str, accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every shape of the table once in bf16, as its model holds gate and up: of one tensor, a kernel that needs
    two gets views.
    """
    needed = accepts.requires if isinstance(accepts, Accepted) else ()
    for seed, shape in enumerate(SHAPES):
        needs = {"two": "up", "interleaved": "interleaved", "halves": "x"}[shape["form"]]
        form = shape["form"] if needs in accepts and "up" not in needed else "two" if "up" in accepts else "halves"
        width = shape["width"]
        rows = cut_rows(shape["rows"], width, _SMALL_ELEMENTS) if small else tuple(shape["rows"])
        if form == "two":
            x, *up = _gate_and_up((*rows, width), shape["form"])
        else:
            x, up = TensorSpec("x", "bf16", (*rows, 2 * width)), []
        dy = [TensorSpec("dy", "bf16", (*rows, width))] if op == "swiglu_backward" else []
        params: dict[str, Any] = {"interleaved": True} if form == "interleaved" else {}
        params |= {name: shape[name] for name in _PARAMETERS if name in shape and name in accepts}
        yield Case(op, (x, *dy, *up), params, seed)


def _gate_and_up(shape: tuple[int, ...], form: str) -> tuple[TensorSpec, TensorSpec]:
    """Make gate and up: views of one tensor if the `form` is halves or interleaved."""
    if form == "two":
        return TensorSpec("x", "bf16", shape), TensorSpec("up", "bf16", shape)
    step, begin = (2, 1) if form == "interleaved" else (1, shape[-1])
    both = TensorSpec("x", "bf16", (*shape[:-1], 2 * shape[-1])).element_strides
    strides = (*both[:-1], step)
    return TensorSpec("x", "bf16", shape, strides), TensorSpec("up", "bf16", shape, strides, begin, memory="x")
