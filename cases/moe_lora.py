"""Cases of the mixture of experts with adapters: exact ones, balanced ones, shards, quantized weights, real layers."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from cases._expert_edges import edges
from cases._experts import (
    BALANCED,
    EXACT,
    Variant,
    real_routing,
    real_sizes,
    real_weights,
    routing,
    sizes,
    variants,
    weights,
)
from harness.case import Case, Group, TensorSpec
from harness.inputs import strided

SCALINGS = {"exact": (0.75, 1.0, 2.0, 1.25), "balanced": (2.0, 0.7, 1.0, 0.3, -1.5, 0.0)}
"""Scalings of adapters, alpha / r; the exact ones keep gates positive."""

_REGIMES = {"exact": EXACT, "balanced": BALANCED}


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts every dimension."""
    yield Group("real-layers", examples=tuple(_real_layers(small=small)))
    yield Group("edges", examples=tuple(_edges(accepts, small=small)))
    for variant in variants(accepts):
        yield Group(str(variant), strategy=_cases(variant, small=small))


@st.composite
def _cases(draw: st.DrawFn, variant: Variant, *, small: bool) -> Case:
    shards = draw(st.sampled_from(variant.shards))
    size = draw(sizes(small=small, multiple=shards * variant.multiple))
    regimes = _REGIMES[variant.kind]
    x = draw(strided("x", variant.dtype, (size.tokens, size.hidden), regimes["x"]))
    pairs, params = draw(routing(size, regimes))
    tensors = (x, *pairs, *draw(weights(size, shards, variant, regimes)))
    params["scaling"] = draw(st.sampled_from(SCALINGS[variant.kind]))
    if shards > 1:
        params["shards"] = shards
    return Case("moe_lora", tensors, params, draw(st.integers(0, 2**32 - 1)))


def _real_layers(*, small: bool) -> Iterator[Case]:
    """The layer of every model of the table once, exact and balanced in turn."""
    for seed, size in enumerate(real_sizes(small=small)):
        regimes = (EXACT, BALANCED)[seed % 2]
        x = TensorSpec("x", "bf16", (size.tokens, size.hidden), regime=regimes["x"][0])
        tensors = (x, *real_routing(size), *real_weights(size, regimes))
        yield Case("moe_lora", tensors, {"scaling": 2.0}, seed)


def _edges(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """The edges that a kernel with these parameters can take."""
    for seed, edge in enumerate(edges(small=small)):
        regimes = _REGIMES[edge.kind]
        x = TensorSpec("x", edge.dtype, (edge.size.tokens, edge.size.hidden), regime=regimes["x"][0])
        case = edge.case("moe_lora", [x, *edge.pairs(), *edge.weights(regimes)], seed)
        if case.names <= accepts:
            yield case
