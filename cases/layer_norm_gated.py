"""Cases of gated LayerNorm: groups in which every two dtypes and options meet, real-model shapes, rows far from zero.

A group fixes what a Triton kernel is specialised on (dtypes, options, the power of two above the size of a group of
columns). Regimes, layouts, eps and what the width leaves when divided by 64 are chosen; Hypothesis draws the rest.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
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
    combinations,
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
from lastbit.cases._combinations import OTHER
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
        x, weight: dtypes; x's is also that of z and dy. A bias has the weight's, or another one.
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
    row: Chosen = field(default_factory=dict, compare=False)

    def without(self, accepts: frozenset[str]) -> GatedNormOptions | None:
        """Reduce the options to those of a kernel with these parameters; None if it lacks what defines them."""
        if self.norm not in norms(accepts) or (self.several and "group_size" not in accepts):
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

    @property
    def bias_dtypes(self) -> tuple[str, str]:
        """The dtypes of a bias: the weight's, and another one."""
        return self.weight, OTHER[self.weight]

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


_SIZES = (
    *((65, 128), (129, 256), (33, 64), (1025, 2048), (17, 32), (65, 128), (257, 512), (1, 16), (129, 256)),
    *((513, 1024), (4097, 8192), (2049, 4096)),
)
"""Ranges of the size of a group of columns, in turn: those of several groups, and with most to show, are narrow."""

_MOST_GROUPS = 6
_SMALL_ELEMENTS = 1 << 14  # of x where a CPU takes part: a few dozen Triton programs
_LARGE_ELEMENTS = 1 << 22


def norms(accepts: frozenset[str]) -> tuple[str, ...]:
    """Return the norms that a kernel computes: one without `is_rms_norm` computes LayerNorm.

    One with it and without a bias need not, as under `stepwise`, which no LayerNorm has.
    """
    rms = ("rms",) if "is_rms_norm" in accepts else ()
    return (*rms, "layer") if "bias" in accepts or not rms else rms


def rows(accepts: frozenset[str], norms: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Iterator[GatedNormOptions]:
    """Yield rows of options in which every two meet that a kernel with these parameters takes; sizes take turns."""
    axes: dict[str, Sequence[Option]] = {
        "x": ("bf16", "fp16", "fp32"),
        "gate": ("none", "after", "before", "after sigmoid", "before sigmoid"),
        "weight": ("own", "other"),
        "norm": norms,
        "bias": (None, True),
        "several": (None, True),
    }
    known = {"is_rms_norm", "mean"} & accepts

    def means(row: Mapping[str, Any]) -> dict[str, Any]:
        place, _, sigmoid = row["gate"].partition(" ")
        found = {"x dtype": row["x"], "weight dtype": _weight(row), "bias": row["bias"]}
        found |= {"z": None if place == "none" else True, "group_size": DRAWN if row["several"] else None}
        found |= {"norm_before_gate": False if place == "before" else None, "activation": sigmoid or None}
        norm = {"is_rms_norm": row["norm"] == "rms" or None, "mean": row["norm"] == "layer" or None}
        return found | {name: option for name, option in norm.items() if name in known}

    for row, size in zip(combinations(axes, accepts=accepts, means=means), cycle(sizes), strict=False):
        gate, _, sigmoid = row["gate"].partition(" ")
        options = bool(row["bias"]), bool(sigmoid), bool(row["several"])
        yield GatedNormOptions(row["x"], _weight(row), row["norm"], gate, size, *options, row)


def _weight(row: Mapping[str, Any]) -> str:
    return row["x"] if row["weight"] == "own" else OTHER[row["x"]]


def _norm_of(case: Case) -> str:
    return "rms" if case.params.get("is_rms_norm") else "layer"


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, most=most if small else None)))
    own = (c for c in edges("layer_norm_gated", accepts, small=small) if _norm_of(c) in norms(accepts))
    yield Group("edges", examples=tuple(own))
    yield from properties("layer_norm_gated", accepts, small=small)
    for options in rows(accepts, norms(accepts), _SIZES):
        choices = _choices(options, most)
        yield Group(str(options), partial(_cases, options, most), choices=choices, combination=options.row)
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
        **(tensor_choices("bias", options.bias_dtypes, _BIASES, vectors) if options.bias else {}),
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
