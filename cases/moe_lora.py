"""Cases of the mixture of experts: exact, balanced, of one sign, in shards, of quantized weights, and real layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from hypothesis import strategies as st

from lastbit import Case, Choices, Chosen, Group, TensorSpec, chosen_tensor
from lastbit.cases._expert_edges import Edge, edges, properties
from lastbit.cases._expert_variants import Variant, has_adapters, plain_variants, variants
from lastbit.cases._experts import (
    BALANCED,
    EXACT,
    ONE_SIGN,
    REAL_KINDS,
    any_of,
    choices,
    chosen_params,
    real_routing,
    real_sizes,
    real_weights,
    routing,
    sizes,
    weights,
)
from lastbit.cases._properties import group_of

SCALINGS = {
    "exact": (0.75, 1.0, 2.0, 1.25),
    "balanced": (2.0, 0.7, 1.0, 0.3, -1.5, 0.0),
    "one_sign": (0.7, 1.0, 0.3, 1.4),
}
"""Scalings of adapters, alpha / r; the exact ones keep gates positive, those of one sign what adapters add its sign."""

_LIMITS = {"exact": (96.0,), "balanced": (7.0, 0.5), "one_sign": ()}
"""What `swiglu_limit` may be; sigmoids at the exact ones are 1."""

_REGIMES = {"exact": EXACT, "balanced": BALANCED, "one_sign": ONE_SIGN}


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts every dimension."""
    yield Group("real-layers", examples=tuple(_real_layers(small=small, adapters=has_adapters(accepts))))
    yield Group("edges", examples=tuple(_edges(accepts, edges(small=small))))
    yield from group_of(_edges(accepts, properties(small=small)), accepts)
    for variant in variants(accepts):
        yield Group(str(variant), partial(_cases, variant, small), choices=_choices(variant, accepts))
    if plain := plain_variants(accepts):
        yield Group("plain", _plain(plain, accepts, small))


def _choices(variant: Variant, accepts: frozenset[str]) -> Choices:
    limits = _LIMITS[variant.kind] if "swiglu_limit" in accepts else ()
    return choices(variant, _REGIMES[variant.kind], SCALINGS[variant.kind], limits)


@st.composite
def _plain(draw: st.DrawFn, plain: Sequence[Variant], accepts: frozenset[str], small: bool) -> Case:
    """Draw a case of any of the variants, none of which has adapters."""
    variant = draw(st.sampled_from(plain))
    return draw(_cases(variant, small, draw(any_of(_choices(variant, accepts)))))


@st.composite
def _cases(draw: st.DrawFn, variant: Variant, small: bool, chosen: Chosen) -> Case:
    size = draw(sizes(variant, chosen, small=small))
    x = chosen_tensor("x", chosen, (size.tokens, size.hidden))
    pairs, params = routing(size, chosen)
    tensors = (x, *pairs, *draw(weights(size, variant, chosen)))
    return Case("moe_lora", tensors, params | chosen_params(chosen), draw(st.integers(0, 2**32 - 1)))


def _real_layers(*, small: bool, adapters: bool) -> Iterator[Case]:
    """Yield the layer of every model of the table once, exact and of one sign in turn."""
    for seed, size in enumerate(real_sizes(small=small)):
        kind = REAL_KINDS[seed % 2]
        regimes = _REGIMES[kind]
        x = TensorSpec("x", "bf16", (size.tokens, size.hidden), regime=regimes["x"][0])
        tensors = (x, *real_routing(size, kind), *real_weights(size, regimes, adapters=adapters))
        yield Case("moe_lora", tensors, {"scaling": SCALINGS[kind][0]} if adapters else {}, seed)


def _edges(accepts: frozenset[str], chosen: tuple[Edge, ...]) -> Iterator[Case]:
    """Yield the edges that a kernel with these parameters can take."""
    for seed, edge in enumerate(chosen):
        regimes = _REGIMES[edge.kind]
        x = TensorSpec("x", edge.dtype, (edge.size.tokens, edge.size.hidden), regime=regimes["x"][0])
        case = edge.case("moe_lora", [x, *edge.pairs(), *edge.weights(regimes)], seed)
        if case.names <= accepts:
            yield case
