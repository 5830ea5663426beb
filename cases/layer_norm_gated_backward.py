"""Cases of the gradients of gated LayerNorm; most in fp32 are of integers, whose sums are exact in any order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from cases._edges import edges
from cases.layer_norm_gated import SHAPES, Options, shape_of
from harness.case import Case, Group, TensorSpec
from harness.inputs import cut_rows, strided

_ACTIVATIONS = (
    *("normal", "rows", "outlier", "offset", "zero_rows", "constant", "pow2", "sparse", "integers", "lattice"),
    *("tiny", "subnormal", "huge", "special"),
)
_GRADIENTS = ("normal", "rows", "outlier", "constant", "sparse", "integers", "tiny", "zero_rows", "special")
_GATES = ("gates", "normal", "saturated", "gates", "zeros", "special")
_WEIGHTS = ("normal", "near_one", "ones", "signs", "small")
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

_GROUPS = (
    Options("bf16", "bf16", "rms", "after", (65, 128)),
    Options("bf16", "bf16", "rms", "before", (65, 128), several=True),
    Options("bf16", "fp32", "layer", "none", (257, 512), bias=True),
    Options("bf16", "bf16", "layer", "after", (1025, 2048), bias=True),
    Options("bf16", "bf16", "rms", "none", (4097, 8192)),
    Options("fp16", "fp16", "layer", "after", (33, 64), bias=True, sigmoid=True),
    Options("fp16", "fp16", "layer", "before", (17, 32), bias=True, several=True),
    Options("fp16", "fp16", "rms", "none", (513, 1024)),
    Options("fp32", "fp32", "layer", "before", (33, 64), bias=True),
)
_EXACT_GROUPS = (
    Options("bf16", "fp32", "rms", "after", (65, 128)),
    Options("fp32", "fp32", "layer", "after", (129, 256), bias=True),
    Options("fp32", "fp32", "rms", "none", (1025, 2048)),
    Options("fp32", "fp32", "layer", "before", (17, 32), bias=True, several=True),
    Options("fp32", "fp32", "layer", "none", (1, 16), bias=True),
)

_SMALL_ELEMENTS = 1 << 14
_LARGE_ELEMENTS = 1 << 20


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the rows."""
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, most=most if small else None)))
    yield Group("edges", examples=tuple(edges("layer_norm_gated_backward", accepts, small=small)))
    for prefix, table, regimes in (("", _GROUPS, _ANY), ("exact-", _EXACT_GROUPS, _EXACT)):
        fitted = dict.fromkeys(o for options in table if (o := _without(options, accepts)) is not None)
        for options in fitted:
            recompute = "recompute_output" in accepts and options.gate != "before"
            yield Group(f"{prefix}{options}", strategy=_cases(options, most, regimes, recompute=recompute))


def _without(options: Options, accepts: frozenset[str]) -> Options | None:
    """What is left of the options for the gradients, whose kernels learn norm and groups from the statistics."""
    if options.norm == "layer" and "mean" not in accepts:
        return None
    left = options.without(accepts | {"is_rms_norm", "group_size", "bias"})
    return left and replace(left, bias=left.bias and "bias" in accepts)


@st.composite
def _cases(
    draw: st.DrawFn, options: Options, most: int, regimes: dict[str, tuple[str, ...]], *, recompute: bool
) -> Case:
    shape, count = draw(shape_of(options, most))
    tensors = [draw(strided(name, options.x, shape, regimes[name])) for name in ("x", "dy")]
    tensors.append(TensorSpec("weight", options.weight, shape[-1:], regime=draw(st.sampled_from(regimes["weight"]))))
    for name in ("rstd", "mean") if options.norm == "layer" else ("rstd",):
        tensors.append(_statistics(name, shape, count, draw(st.sampled_from(regimes[name]))))
    if options.bias:
        tensors.append(TensorSpec("bias", options.weight, shape[-1:], regime=draw(st.sampled_from(regimes["bias"]))))
    if options.gate != "none":
        tensors.append(draw(strided("z", options.x, shape, regimes["z"])))
    params = {name: value for name, value in options.params.items() if name != "is_rms_norm"}
    if recompute and draw(st.integers(0, 3)) == 0:
        params["recompute_output"] = True
    return Case("layer_norm_gated_backward", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _statistics(name: str, shape: tuple[int, ...], groups: int, regime: str) -> TensorSpec:
    """Statistics as the forward pass stores them: number g · M + m for group g of row m, where there are M rows."""
    rows = shape[:-1]
    strides = tuple(math.prod(rows[dim + 1 :]) for dim in range(len(rows)))
    return TensorSpec(name, "fp32", (*rows, groups), (*strides, math.prod(rows)), regime=regime)


def _real_shapes(accepts: frozenset[str], *, most: int | None) -> Iterator[Case]:
    """Every shape of the table once in bf16, gated where the kernel can, with the regimes of x taking turns.

    The statistics are not those of x.
    """
    for seed, shape in enumerate(SHAPES):
        norm, gate = "rms" if shape["rms"] else "layer", "after" if shape["before"] else "before"
        options = _without(Options("bf16", "bf16", norm, gate, (1, 1)), accepts)
        if options is None:
            continue
        rows = tuple(shape["rows"] if most is None else cut_rows(shape["rows"], shape["width"], most))
        x = TensorSpec("x", "bf16", (*rows, shape["width"]), regime=_ACTIVATIONS[seed % len(_ACTIVATIONS)])
        tensors = [
            x,
            replace(x, name="dy", regime="normal"),
            TensorSpec("weight", "bf16", x.shape[-1:], regime="near_one"),
        ]
        count = shape["width"] // shape.get("group", shape["width"])
        tensors.append(_statistics("rstd", x.shape, count, "scale_random"))
        if norm == "layer":
            tensors.append(_statistics("mean", x.shape, count, "small"))
        if options.gate != "none":
            tensors.append(replace(x, name="z", regime="gates"))
        params = {name: value for name, value in options.params.items() if name != "is_rms_norm"}
        yield Case("layer_norm_gated_backward", tuple(tensors), params, seed)
