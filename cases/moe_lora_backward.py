"""Cases of the gradients of the mixture of experts; what the forward pass saved is drawn for itself."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from cases._expert_edges import edges
from cases._experts import (
    BALANCED,
    EXACT,
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
_REGIMES: dict[str, Regimes] = {
    "exact": {
        **dict.fromkeys(EXACT, _FACTORS),
        **dict.fromkeys(("x", "grad_output", "saved_up", "intermediate", "old"), ("integers", "fractions")),
        "saved_gate": ("saturated",),
        "routing_weights": ("ones", "quarters"),
    },
    "balanced": {
        **BALANCED,
        "grad_output": _GRADIENTS,
        "saved_gate": ("gates", "normal", "gates", "zeros", "special"),
        "saved_up": ("normal", "rows", "special"),
        "intermediate": ("normal", "sparse", "special"),
        "old": ("normal", "zeros"),
    },
}


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts every dimension."""
    yield Group("real-layers", examples=tuple(_real_layers(small=small)))
    yield Group("edges", examples=tuple(_edges(accepts, small=small)))
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
        tensors += _old(size, variant.dtype, draw(st.sampled_from(regimes["old"])))
    params["scaling"] = draw(st.sampled_from(SCALINGS[variant.kind]))
    if shards > 1:
        params["shards"] = shards
    return Case("moe_lora_backward", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _saved(size: Sizes) -> dict[str, tuple[int, int, int]]:
    """Shapes of what the forward pass saved."""
    return dict.fromkeys(("saved_gate", "saved_up", "intermediate"), (*size.pairs, size.intermediate))


def _old(size: Sizes, dtype: str, regime: str) -> Iterator[TensorSpec]:
    """Gradients that are there before."""
    for name, shape in size.adapters().items():
        yield TensorSpec(f"old_{name}", dtype, shape, regime=regime)


def _real_layers(*, small: bool) -> Iterator[Case]:
    """The layer of every model of the table once, exact and balanced in turn."""
    for seed, size in enumerate(real_sizes(small=small)):
        regimes = _REGIMES["exact" if seed % 2 == 0 else "balanced"]
        x = TensorSpec("x", "bf16", (size.tokens, size.hidden), regime=regimes["x"][0])
        grad_output = TensorSpec("grad_output", "bf16", x.shape, regime=regimes["grad_output"][0])
        saved = [TensorSpec(name, "bf16", shape, regime=regimes[name][0]) for name, shape in _saved(size).items()]
        tensors = (x, *real_routing(size), grad_output, *saved, *real_weights(size, regimes))
        yield Case("moe_lora_backward", tensors, {"scaling": 2.0}, seed)


def _edges(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """The edges that a kernel with these parameters can take."""
    for seed, edge in enumerate(edges(small=small)):
        regimes = _REGIMES[edge.kind]
        shapes = dict.fromkeys(("x", "grad_output"), (edge.size.tokens, edge.size.hidden)) | _saved(edge.size)
        rows = [TensorSpec(name, edge.dtype, shape, regime=regimes[name][0]) for name, shape in shapes.items()]
        tensors = [*rows, *edge.pairs(), *edge.weights(regimes)]
        if edge.old and "old_gate_lora_a" in accepts:
            tensors += _old(edge.size, edge.dtype, regimes["old"][0])
        case = edge.case("moe_lora_backward", tensors, seed)
        if case.names <= accepts:
            yield case
