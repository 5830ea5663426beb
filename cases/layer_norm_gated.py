"""Cases of gated LayerNorm: one group per combination of dtypes and options, real-model shapes, rows far from zero.

A group fixes what a Triton kernel is specialised on (dtypes, options, the power of two above the size of a group of
columns). Regimes, layouts, eps and what the width leaves when divided by 64 are chosen; Hypothesis draws the rest.
"""

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
    TensorSpec,
    chosen_tensor,
    cut_rows,
    layouts_like,
    leading_dims,
    least_rows,
    residues,
    row_layouts,
    tensor_choices,
    widths,
    widths_with,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

SHAPES = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())["layer_norm_gated"]

_ACTIVATIONS = (
    *("normal", "rows", "tiny", "tiniest", "outlier", "outlier_last", "offset", "lattice", "zero_rows"),
    *("constant", "pow2", "subnormal", "huge", "special", "sparse", "integers"),
)
_GATES = ("gates", "normal", "saturated", "gates", "zeros", "special", "huge")
_WEIGHTS = ("normal", "near_one", "ones", "zeros", "signs", "small", "special_columns")
_BIASES = ("normal", "small", "zeros", "special_columns")
_EPS = (1e-5, 1e-6, 1e-12, 1e-3)


@dataclass(frozen=True)
class GatedNormOptions:
    """The fixed facts of a group: dtypes, options, and the range of the size of a group of columns.

    Attributes:
        x, weight: dtypes; x's is also that of z and dy, the weight's also that of the bias.
        norm: `rms` or `layer`.
        gate: `after`, `before` or `none`.
        sizes: least and largest size of a group of columns.
        several: rows have several groups of columns.
    """

    x: str
    weight: str
    norm: str
    gate: str
    sizes: tuple[int, int]
    bias: bool = False
    sigmoid: bool = False
    several: bool = False

    def without(self, accepts: frozenset[str]) -> GatedNormOptions | None:
        """Reduce the options to those of a kernel with these parameters; None if it lacks what defines them."""
        if not _norm_is_accepted(self.norm, accepts) or (self.several and "group_size" not in accepts):
            return None
        gate = self.gate if "z" in accepts else "none"
        if gate == "before" and "norm_before_gate" not in accepts:
            return None
        sigmoid = self.sigmoid and gate != "none" and "activation" in accepts
        bias = self.bias and "bias" in accepts
        return GatedNormOptions(self.x, self.weight, self.norm, gate, self.sizes, bias, sigmoid, self.several)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that say all this to a kernel, where they are not the defaults."""
        chosen: dict[str, Any] = {"is_rms_norm": True} if self.norm == "rms" else {}
        if self.gate == "before":
            chosen["norm_before_gate"] = False
        if self.sigmoid:
            chosen["activation"] = "sigmoid"
        return chosen

    def layouts(self, most: int) -> tuple[str, ...]:
        """Return the layouts of tensors of rows with `most` elements."""
        return row_layouts(most // (self.sizes[1] * (_MOST_GROUPS if self.several else 1)))

    @property
    def residues(self) -> Choices:
        """The remainders of the number of columns modulo 64; none if groups of columns determine it."""
        return {} if self.several else {"x columns % 64": residues(*self.sizes)}

    def __str__(self) -> str:
        words = [
            self.x,
            f"weight_{self.weight}" if self.weight != self.x else "",
            self.norm,
            "bias" if self.bias else "",
        ]
        words.append(f"{'sigmoid' if self.sigmoid else 'gate'}_{self.gate}" if self.gate != "none" else "")
        low, high = self.sizes
        return "-".join(filter(None, [*words, "groups_of" if self.several else "", f"N{low}to{high}"]))


GROUPS = (
    GatedNormOptions("bf16", "bf16", "rms", "after", (65, 128)),
    GatedNormOptions("bf16", "bf16", "rms", "before", (129, 256), several=True),
    GatedNormOptions("bf16", "fp32", "layer", "none", (1025, 2048), bias=True),
    GatedNormOptions("bf16", "bf16", "layer", "after", (129, 256), bias=True),
    GatedNormOptions("bf16", "bf16", "rms", "before", (4097, 8192)),
    GatedNormOptions("fp16", "fp16", "rms", "after", (33, 64), sigmoid=True),
    GatedNormOptions("fp16", "fp16", "layer", "before", (17, 32), bias=True, several=True),
    GatedNormOptions("fp16", "fp16", "rms", "none", (513, 1024)),
    GatedNormOptions("fp16", "fp32", "rms", "after", (129, 256), several=True),
    GatedNormOptions("fp32", "fp32", "layer", "none", (1025, 2048)),
    GatedNormOptions("fp32", "fp32", "rms", "before", (257, 512)),
    GatedNormOptions("fp32", "fp32", "layer", "before", (33, 64)),
    GatedNormOptions("fp32", "fp32", "layer", "after", (1, 16), bias=True, sigmoid=True),
)

_MOST_GROUPS = 6
_SMALL_ELEMENTS = 1 << 14  # of x where a CPU takes part: a few dozen Triton programs
_LARGE_ELEMENTS = 1 << 22


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, most=most if small else None)))
    yield Group("edges", examples=tuple(edges("layer_norm_gated", accepts, small=small)))
    yield from properties("layer_norm_gated", accepts, small=small)
    for options in dict.fromkeys(o for options in GROUPS if (o := options.without(accepts)) is not None):
        yield Group(str(options), partial(_cases, options, most), choices=_choices(options, most))
    for dtype in ("bf16", "fp32"):
        far = GatedNormOptions(dtype, dtype, "layer", "none", (513, 1024)).without(accepts)
        if far is not None:
            choices = {**_choices(far, most), "x regime": ("offset",)}
            yield Group(f"{dtype}-far-from-zero", partial(_cases, far, most), choices=choices)


def _choices(options: GatedNormOptions, most: int) -> Choices:
    """Map the tensors and parameters of a group to their options, where x has about `most` elements at most."""
    layouts, vectors = options.layouts(most), layouts_like(64)
    return {
        **tensor_choices("x", (options.x,), _ACTIVATIONS, layouts),
        **tensor_choices("weight", (options.weight,), _WEIGHTS, vectors),
        **(tensor_choices("bias", (options.weight,), _BIASES, vectors) if options.bias else {}),
        **(tensor_choices("z", (options.x,), _GATES, layouts) if options.gate != "none" else {}),
        **options.residues,
        "eps": _EPS,
    }


@st.composite
def shape_of(draw: st.DrawFn, options: GatedNormOptions, most: int, chosen: Chosen) -> tuple[tuple[int, ...], int]:
    """Draw the shape of x, of about `most` elements at most, and the number of groups of columns."""
    residue = chosen.get("x columns % 64")
    size = draw(widths(*options.sizes) if residue is None else widths_with(residue, *options.sizes))
    count = draw(st.integers(2, _MOST_GROUPS)) if options.several else 1
    return (*draw(leading_dims(max(1, most // (size * count)), least_rows(chosen))), size * count), count


@st.composite
def _cases(draw: st.DrawFn, options: GatedNormOptions, most: int, chosen: Chosen) -> Case:
    shape, count = draw(shape_of(options, most, chosen))
    tensors = [chosen_tensor("x", chosen, shape), chosen_tensor("weight", chosen, shape[-1:])]
    if options.bias:
        tensors.append(chosen_tensor("bias", chosen, shape[-1:]))
    if options.gate != "none":
        tensors.append(chosen_tensor("z", chosen, shape))
    params = {"eps": chosen["eps"], **options.params}
    if count > 1:
        params["group_size"] = shape[-1] // count
    return Case("layer_norm_gated", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _norm_is_accepted(norm: str, accepts: frozenset[str]) -> bool:
    """Check whether a kernel takes the norm: LayerNorm is for kernels that take a bias, the others are RMSNorm."""
    return ("bias" if norm == "layer" else "is_rms_norm") in accepts


def _real_shapes(accepts: frozenset[str], *, most: int | None) -> Iterator[Case]:
    """Yield every shape of the table once in bf16, gated where the kernel can."""
    for seed, shape in enumerate(SHAPES):
        norm, gate = "rms" if shape["rms"] else "layer", "after" if shape["before"] else "before"
        several = "group" in shape
        options = GatedNormOptions("bf16", "bf16", norm, gate, (1, 1), several=several).without(accepts)
        if options is None:
            continue
        rows = shape["rows"] if most is None else cut_rows(shape["rows"], shape["width"], most)
        x = TensorSpec("x", "bf16", (*rows, shape["width"]), regime=shape.get("regime", "normal"))
        tensors = [x, TensorSpec("weight", "bf16", x.shape[-1:], regime="near_one")]
        if options.gate != "none":
            tensors.append(TensorSpec("z", "bf16", x.shape, regime="gates"))
        params = {"eps": shape["eps"], **options.params, **({"group_size": shape["group"]} if several else {})}
        yield Case("layer_norm_gated", tuple(tensors), params, seed)
