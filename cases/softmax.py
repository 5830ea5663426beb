"""Cases of softmax: one group per combination of dtypes and masks, attention and router rows of real models, and edges.

A group fixes what a kernel is specialised on: dtypes, which masks there are, and the block that covers a row. Regimes,
layouts, the scale and what N leaves when divided by 16 are chosen; Hypothesis draws the rest.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
_KEPT = ("spans", "normal")
_SCALES = (1.0, 0.125, 0.08838834764831845, 3.0)  # of heads of 64 and 128 columns; and one that sharpens


@dataclass(frozen=True)
class _SoftmaxOptions:
    """The fixed facts of a group: the dtype of x and of the mask, masks or not, and the range of N."""

    x: str
    mask: bool
    keep: bool
    narrow: int
    wide: int

    def fits(self, accepts: frozenset[str]) -> bool:
        """Check whether a kernel with these parameters takes the options."""
        return ("mask" in accepts or not self.mask) and ("keep" in accepts or not self.keep)

    def __str__(self) -> str:
        words = [self.x, "mask" if self.mask else "", "keep" if self.keep else ""]
        return "-".join(filter(None, [*words, f"N{self.narrow}to{self.wide}"]))


_GROUPS = (
    _SoftmaxOptions("bf16", False, False, 65, 256),
    _SoftmaxOptions("fp16", False, False, 1025, 4096),
    _SoftmaxOptions("fp32", False, False, 257, 1024),
    _SoftmaxOptions("bf16", True, False, 257, 1024),
    _SoftmaxOptions("fp16", True, True, 65, 256),
    _SoftmaxOptions("fp32", False, True, 1, 64),
)

_SMALL_ELEMENTS = 1 << 12  # of x where a CPU takes part: a dozen Triton programs
_LARGE_ELEMENTS = 1 << 22


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("softmax", accepts, small=small)))
    yield from properties("softmax", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in (o for o in _GROUPS if o.fits(accepts)):
        strategy = partial(_cases, options, most)
        yield Group(str(options), strategy, choices=_choices(options, accepts, most // options.wide))


def _choices(options: _SoftmaxOptions, accepts: frozenset[str], rows: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where x may have that many rows."""
    layouts = row_layouts(rows)
    found: dict[str, tuple[Option, ...]] = tensor_choices("x", (options.x,), _SCORES, layouts)
    if options.mask:
        found |= tensor_choices("mask", (options.x,), _MASKS, layouts)
    if options.keep:
        found |= tensor_choices("keep", ("bool",), _KEPT, layouts)
    found |= {"x columns % 16": residues(options.narrow, options.wide, 16)}
    found |= {"scale": _SCALES} if "scale" in accepts else {}
    return found | ({"fp32_output": (False, True)} if "fp32_output" in accepts else {})


@st.composite
def _cases(draw: st.DrawFn, options: _SoftmaxOptions, most: int, chosen: Chosen) -> Case:
    width = draw(widths_with(chosen["x columns % 16"], options.narrow, options.wide, 16))
    shape = (*draw(leading_dims(max(1, most // width), least_rows(chosen))), width)
    tensors = [chosen_tensor(name, chosen, shape) for name in ("x", "mask", "keep") if f"{name} dtype" in chosen]
    params = {"scale": chosen["scale"]} if "scale" in chosen else {}
    params |= {"fp32_output": chosen["fp32_output"]} if "fp32_output" in chosen else {}
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
