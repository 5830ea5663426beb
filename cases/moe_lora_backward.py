"""Cases of the gradients of the mixture of experts; what the forward pass saved is drawn for itself."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from cases._experts import (
    BALANCED,
    EXACT,
    LABELS,
    ONE_SIGN,
    Regimes,
    Sizes,
    Variant,
    real_routing,
    real_sizes,
    real_weights,
    routing,
    sizes,
    variants,
    weights,
)
from cases.moe_lora import SCALINGS
from harness.case import Case, Group, TensorSpec
from harness.inputs import strided

_GRADIENTS = ("normal", "normal", "rows", "outlier", "sparse", "zero_rows", "tiny", "special")
_FACTORS = ("sparse_signs", "quarters", "integers", "fractions")  # the first suits every size
_OLD = {f"old_{name}": labels for name, labels in LABELS.items() if "lora" in name}
_REGIMES: dict[str, Regimes] = {
    "exact": {
        **dict.fromkeys(EXACT, _FACTORS),
        **dict.fromkeys(("x", "grad_output", "saved_up", "intermediate", *_OLD), ("integers", "fractions")),
        "saved_gate": ("saturated",),
        "routing_weights": ("ones", "quarters"),
    },
    "balanced": {
        **BALANCED,
        "grad_output": _GRADIENTS,
        "saved_gate": ("gates", "normal", "gates", "zeros", "special"),
        "saved_up": ("normal", "rows", "special"),
        "intermediate": ("normal", "sparse", "special"),
        **dict.fromkeys(_OLD, ("normal", "zeros")),
    },
    "one_sign": {
        **ONE_SIGN,
        "grad_output": ("one_sign(,output)",),
        "saved_gate": ("one_sign(,gate)",),  # above -1.278, where the slope of silu changes its sign
        "saved_up": ("one_sign(,up)",),
        "intermediate": ("one_sign(,gate*up)",),
        **{name: (f"one_sign({labels})",) for name, labels in _OLD.items()},
    },
}


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts every dimension."""
    yield Group("real-layers", examples=tuple(_real_layers(small=small)))
    for variant in variants(accepts):
        yield Group(str(variant), strategy=_cases(variant, small=small, accumulate="old_gate_lora_a" in accepts))


@st.composite
def _cases(draw: st.DrawFn, variant: Variant, *, small: bool, accumulate: bool) -> Case:
    shards = draw(st.sampled_from(variant.shards))
    size = draw(sizes(small=small, multiple=shards * variant.multiple))
    regimes = _REGIMES[variant.kind]
    x, grad_output = (
        draw(strided(name, variant.dtype, (size.tokens, size.hidden), regimes[name])) for name in ("x", "grad_output")
    )
    pairs, params = draw(routing(size, regimes))
    saved = [draw(strided(name, variant.dtype, shape, regimes[name])) for name, shape in _saved(size).items()]
    tensors = [x, *pairs, grad_output, *saved, *draw(weights(size, shards, variant, regimes))]
    if accumulate and draw(st.booleans()):
        tensors += draw(_old(size, variant.dtype, regimes))
    params["scaling"] = draw(st.sampled_from(SCALINGS[variant.kind]))
    if shards > 1:
        params["shards"] = shards
    return Case("moe_lora_backward", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _saved(size: Sizes) -> dict[str, tuple[int, int, int]]:
    """Shapes of what the forward pass saved."""
    return dict.fromkeys(("saved_gate", "saved_up", "intermediate"), (*size.pairs, size.intermediate))


@st.composite
def _old(draw: st.DrawFn, size: Sizes, dtype: str, regimes: Regimes) -> list[TensorSpec]:
    """Gradients that are there before."""
    shapes = {f"old_{name}": shape for name, shape in size.adapters().items()}
    return [TensorSpec(name, dtype, s, regime=draw(st.sampled_from(regimes[name]))) for name, s in shapes.items()]


def _real_layers(*, small: bool) -> Iterator[Case]:
    """The layer of every model of the table once, exact and balanced in turn."""
    for seed, size in enumerate(real_sizes(small=small)):
        regimes = _REGIMES["exact" if seed % 2 == 0 else "balanced"]
        x = TensorSpec("x", "bf16", (size.tokens, size.hidden), regime=regimes["x"][0])
        grad_output = TensorSpec("grad_output", "bf16", x.shape, regime=regimes["grad_output"][0])
        saved = [TensorSpec(name, "bf16", shape, regime=regimes[name][0]) for name, shape in _saved(size).items()]
        tensors = (x, *real_routing(size), grad_output, *saved, *real_weights(size, regimes))
        yield Case("moe_lora_backward", tensors, {"scaling": 2.0}, seed)
