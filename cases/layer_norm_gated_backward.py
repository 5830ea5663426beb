"""Cases of the gradients of gated LayerNorm; most in fp32 are of integers, whose sums are exact in any order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from lastbit import (
    Accepted,
    Case,
    Choices,
    Chosen,
    Group,
    Option,
    TensorSpec,
    chosen_tensor,
    cut_rows,
    layouts_like,
    tensor_choices,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties
from lastbit.cases.layer_norm_gated import SHAPES, GatedNormOptions, shape_of
from lastbit.cases.layer_norm_gated import rows as random_rows

Regimes = dict[str, tuple[str, ...]]

_ACTIVATIONS = (
    *("normal", "rows", "outlier", "offset", "zero_rows", "constant", "pow2", "sparse", "integers", "lattice"),
    *("tiny", "subnormal", "huge", "special"),
)
_GRADIENTS = ("normal", "rows", "outlier", "constant", "sparse", "integers", "tiny", "zero_rows", "special")
_GATES = ("gates", "normal", "saturated", "gates", "zeros", "special")
_WEIGHTS = ("normal", "near_one", "ones", "signs", "small")
_REAL: Regimes = {"dy": ("normal",), "z": ("gates",), "weight": ("near_one",), "rstd": ("scale_random",)}
_REAL |= {"mean": ("small",)}
_EXACT = {
    "x": ("integers",),
    "dy": ("integers",),
    "z": ("saturated",),
    "rstd": ("ones",),
    "mean": ("integers", "zeros"),
}
_EXACT |= {"weight": ("signs", "ones", "integers"), "bias": ("integers", "zeros")}
_ANY = {"x": _ACTIVATIONS, "dy": _GRADIENTS, "z": _GATES, "weight": _WEIGHTS, "bias": ("normal", "zeros")}
_ANY |= {"rstd": ("scale_random", "scale_pow2", "ones"), "mean": ("normal", "zeros", "small")}
_FEW = {name: (*regimes[:3], *("special",) * ("special" in regimes)) for name, regimes in _ANY.items()}
"""Regimes of fp32, of which the sums of random numbers decide little."""
ONE_SIGN: Mapping[str, Regimes] = {
    gate: {
        "x": ("one_sign(,z)" if gate == "before" else "one_sign",),
        "dy": ("one_sign(,dy)",),
        "z": ("one_sign(,z)",),  # above -1.278, where the slope of silu changes its sign
        **dict.fromkeys(("weight", "bias"), (f"one_sign(,{'dy*z' if gate == 'after' else 'dy'})",)),
        "rstd": ("scale_random", "scale_pow2", "ones"),
        "mean": ("small", "zeros"),
    }
    for gate in ("none", "after", "before")
}
"""Where the gate is → regimes with which all terms of dw, db, c1 and c2 have one sign, as the gate has that of z."""

_SIZES = (
    *((257, 512), (17, 32), (65, 128), (33, 64), (1, 16), (33, 64), (129, 256), (17, 32), (33, 64)),
    *((513, 1024), (4097, 8192), (1025, 2048)),
)
"""Ranges of the size of a group of columns, in turn: those of several groups, and with most to show, are narrow."""
_EXACT_GROUPS = (
    GatedNormOptions("bf16", "fp32", "rms", "after", (65, 128)),
    GatedNormOptions("fp32", "fp32", "layer", "after", (129, 256), bias=True),
    GatedNormOptions("fp32", "fp32", "rms", "none", (1025, 2048)),
    GatedNormOptions("fp32", "fp32", "layer", "before", (17, 32), bias=True, several=True),
    GatedNormOptions("fp32", "fp32", "layer", "none", (1, 16), bias=True),
)
_ONE_SIGN_GROUPS = (
    GatedNormOptions("bf16", "bf16", "rms", "after", (65, 128)),
    GatedNormOptions("bf16", "bf16", "layer", "none", (257, 512), bias=True),
    GatedNormOptions("fp16", "fp16", "rms", "before", (513, 1024)),
)

_VECTORS = ("weight", "bias")
_LATENTS = ((6, 1024, 1, "layer"), (3, 640, 5, "layer"), (5, 1500, 1, "rms"), (4, 512, 4, "rms"))
"""Rows, columns, groups and norm of cases in fp32 in which nothing decides but that c1 and c2 explain a row."""

_SMALL_ELEMENTS = 1 << 14
_LARGE_ELEMENTS = 1 << 20


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, most=most if small else None)))
    yield Group("edges", examples=tuple(edges("layer_norm_gated_backward", accepts, small=small)))
    yield from properties("layer_norm_gated_backward", accepts, small=small)
    yield Group("latents", examples=tuple(_latents(accepts)))
    norms = ("rms", "layer") if "mean" in accepts else ("rms",)
    random = random_rows(_with_groups(accepts), norms, _SIZES)
    for options in random:
        regimes = _FEW if options.x == "fp32" else _ANY
        yield from _groups("", (options,), dict.fromkeys(ONE_SIGN, regimes), accepts, most)
    yield from _groups("exact-", _EXACT_GROUPS, dict.fromkeys(ONE_SIGN, _EXACT), accepts, most)
    if not small:  # random terms of so few rows leave hardly anything open
        yield from _groups("one_sign-", _ONE_SIGN_GROUPS, ONE_SIGN, accepts, most)


def _with_groups(accepts: frozenset[str]) -> frozenset[str]:
    """Add the size of a group, which kernels of the gradients learn from the statistics."""
    known, own = accepts | {"group_size"}, accepts if isinstance(accepts, Accepted) else Accepted(accepts)
    return Accepted.of(known, own.requires, own.takes, own.strength)


def _groups(
    prefix: str, table: Iterable[GatedNormOptions], regimes: Mapping[str, Regimes], accepts: frozenset[str], most: int
) -> Iterator[Group]:
    """Yield a group for each options that are left; `regimes` are those for each place of the gate."""
    for options in dict.fromkeys(o for options in table if (o := _without(options, accepts)) is not None):
        choices = _choices(options, most, regimes[options.gate], recompute="recompute_output" in accepts)
        strategy = partial(_cases, options, most)
        yield Group(f"{prefix}{options}", strategy, choices=choices, combination=options.row)


def _without(options: GatedNormOptions, accepts: frozenset[str]) -> GatedNormOptions | None:
    """Reduce the options to those of the gradients, whose kernels learn norm and groups from the statistics."""
    if options.norm == "layer" and "mean" not in accepts:
        return None
    left = options.without(accepts | {"is_rms_norm", "group_size", "bias"})
    return left and replace(left, bias=left.bias and "bias" in accepts, row=options.row)


def _choices(options: GatedNormOptions, most: int, regimes: Regimes, *, recompute: bool) -> Choices:
    """Map the tensors and parameters of a group to their options, where x has about `most` elements at most."""
    names: dict[str, tuple[str, ...]] = {
        "x": (options.x,),
        "dy": (options.x,),
        "weight": (options.weight,),
        "rstd": ("fp32",),
    }
    names |= {"mean": ("fp32",)} if options.norm == "layer" else {}
    names |= {"bias": options.bias_dtypes} if options.bias else {}
    names |= {"z": (options.x,)} if options.gate != "none" else {}
    layouts = dict.fromkeys(("x", "dy", "z"), options.layouts(most)) | dict.fromkeys(_VECTORS, layouts_like(64))
    found: dict[str, tuple[Option, ...]] = {}
    for name, dtypes in names.items():
        found |= tensor_choices(name, dtypes, regimes[name], layouts.get(name, ("contiguous",)))
    return {**found, **options.residues, **({"recompute_output": (None, True)} if recompute else {})}


@st.composite
def _cases(draw: st.DrawFn, options: GatedNormOptions, most: int, chosen: Chosen) -> Case:
    shape, count = draw(shape_of(options, most, chosen))
    tensors = [chosen_tensor(name, chosen, shape) for name in ("x", "dy")]
    tensors.append(chosen_tensor("weight", chosen, shape[-1:]))
    for name in ("rstd", "mean") if options.norm == "layer" else ("rstd",):
        tensors.append(_statistics(name, shape, count, chosen[f"{name} regime"]))
    if options.bias:
        tensors.append(chosen_tensor("bias", chosen, shape[-1:]))
    if options.gate != "none":
        tensors.append(chosen_tensor("z", chosen, shape))
    params = {name: value for name, value in options.params.items() if name != "is_rms_norm"}
    if chosen.get("recompute_output"):
        params["recompute_output"] = True
    return Case("layer_norm_gated_backward", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _statistics(name: str, shape: tuple[int, ...], groups: int, regime: str) -> TensorSpec:
    """Place statistics as the forward pass stores them: number g · M + m for group g of row m, of M rows."""
    rows = shape[:-1]
    strides = tuple(math.prod(rows[dim + 1 :]) for dim in range(len(rows)))
    return TensorSpec(name, "fp32", (*rows, groups), (*strides, math.prod(rows)), regime=regime)


def _latents(accepts: frozenset[str]) -> Iterator[Case]:
    """Yield ordinary numbers in fp32 without a gate, whose sigmoid would leave every element some room."""
    for seed, (rows, width, groups, norm) in enumerate(_LATENTS):
        if norm == "layer" and "mean" not in accepts:
            continue
        x = TensorSpec("x", "fp32", (rows, width))
        tensors = [x, replace(x, name="dy"), TensorSpec("weight", "fp32", x.shape[-1:], regime="near_one")]
        statistics = {"rstd": "scale_random"} | ({"mean": "small"} if norm == "layer" else {})
        tensors += [_statistics(name, x.shape, groups, regime) for name, regime in statistics.items()]
        yield Case("layer_norm_gated_backward", tuple(tensors), {}, seed)


def _real_shapes(accepts: frozenset[str], *, most: int | None) -> Iterator[Case]:
    """Yield every shape of the table once in bf16, gated where the kernel can, of one sign and random in turn.

    Among the random ones, the regimes of x take turns. The statistics are not those of x.
    """
    for seed, shape in enumerate(SHAPES):
        norm, gate = "rms" if shape["rms"] else "layer", "after" if shape["before"] else "before"
        options = _without(GatedNormOptions("bf16", "bf16", norm, gate, (1, 1)), accepts)
        if options is None:
            continue
        random = {**_REAL, "x": _ACTIVATIONS[seed % len(_ACTIVATIONS) :]}
        regimes = ONE_SIGN[options.gate] if seed % 2 == 0 else random
        rows = tuple(shape["rows"] if most is None else cut_rows(shape["rows"], shape["width"], most))
        whole, width = (*rows, shape["width"]), (shape["width"],)
        count = shape["width"] // shape.get("group", shape["width"])
        shapes = {"x": whole, "dy": whole, "weight": width} | ({"z": whole} if options.gate != "none" else {})
        tensors = [TensorSpec(name, "bf16", size, regime=regimes[name][0]) for name, size in shapes.items()]
        for name in ("rstd", "mean") if norm == "layer" else ("rstd",):
            tensors.append(_statistics(name, whole, count, regimes[name][0]))
        params = {name: value for name, value in options.params.items() if name != "is_rms_norm"}
        yield Case("layer_norm_gated_backward", tuple(tensors), params, seed)
