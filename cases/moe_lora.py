"""Cases of the mixture of experts with adapters: exact ones, balanced ones, shards, quantized weights, real layers."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from cases._experts import (
    BALANCED,
    EXACT,
    Variant,
    limits,
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

LIMITS = {"exact": (32.0, 64.0), "balanced": (7.0, 1.0, 2.0**-12)}
"""What `swiglu_limit` may be; the exact ones leave sigmoids at 1."""

_REGIMES = {"exact": EXACT, "balanced": BALANCED}


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts every dimension."""
    yield Group("real-layers", examples=tuple(_real_layers(small=small)))
    for variant in variants(accepts):
        yield Group(str(variant), strategy=_cases(variant, small=small, limited="swiglu_limit" in accepts))


@st.composite
def _cases(draw: st.DrawFn, variant: Variant, *, small: bool, limited: bool) -> Case:
    shards = draw(st.sampled_from(variant.shards))
    size = draw(sizes(small=small, multiple=shards * variant.multiple))
    regimes = _REGIMES[variant.kind]
    x = draw(strided("x", variant.dtype, (size.tokens, size.hidden), regimes["x"]))
    pairs, params = draw(routing(size, regimes))
    tensors = (x, *pairs, *draw(weights(size, shards, variant, regimes)))
    params["scaling"] = draw(st.sampled_from(SCALINGS[variant.kind]))
    if shards > 1:
        params["shards"] = shards
    if limited:
        params |= draw(limits(LIMITS[variant.kind]))
    return Case("moe_lora", tensors, params, draw(st.integers(0, 2**32 - 1)))


def _real_layers(*, small: bool) -> Iterator[Case]:
    """The layer of every model of the table once, exact and balanced in turn."""
    for seed, size in enumerate(real_sizes(small=small)):
        regimes = (EXACT, BALANCED)[seed % 2]
        x = TensorSpec("x", "bf16", (size.tokens, size.hidden), regime=regimes["x"][0])
        tensors = (x, *real_routing(size), *real_weights(size, regimes))
        yield Case("moe_lora", tensors, {"scaling": 2.0}, seed)
