"""Cases of the mixture of experts: exact, balanced, of one sign, in shards, of quantized weights, and real layers."""

from __future__ import annotations

from hypothesis import strategies as st

from lastbit import Case, Choices, Chosen, chosen_tensor
from lastbit.cases._expert_groups import SCALINGS, ExpertCases
from lastbit.cases._expert_variants import LayerVariant
from lastbit.cases._experts import BALANCED, EXACT, ONE_SIGN, choices, chosen_params, routing, sizes, weights

_LIMITS = {"exact": (96.0,), "balanced": (7.0, 0.5), "one_sign": ()}
"""What `swiglu_limit` may be; sigmoids at the exact ones are 1."""

_REGIMES = {"exact": EXACT, "balanced": BALANCED, "one_sign": ONE_SIGN}


def _choices(variant: LayerVariant, accepts: frozenset[str]) -> Choices:
    limits = _LIMITS[variant.kind] if "swiglu_limit" in accepts else ()
    return choices(variant, _REGIMES[variant.kind], SCALINGS[variant.kind], limits)


@st.composite
def _cases(draw: st.DrawFn, variant: LayerVariant, small: bool, chosen: Chosen) -> Case:
    size = draw(sizes(variant, chosen, small=small))
    x = chosen_tensor("x", chosen, (size.tokens, size.hidden))
    pairs, params = routing(size, chosen)
    tensors = (x, *pairs, *draw(weights(size, variant, chosen)))
    return Case("moe_lora", tensors, params | chosen_params(chosen), draw(st.integers(0, 2**32 - 1)))


groups = ExpertCases("moe_lora", _REGIMES, lambda size: {"x": (size.tokens, size.hidden)}, _choices, _cases).groups
"""Yields the groups for a kernel that takes some tensors and parameters."""
