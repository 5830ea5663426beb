"""Cases of the gradients of the mixture of experts; what the forward pass saved is drawn for itself."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from lastbit import Case, Choices, Chosen, TensorSpec, chosen_tensor, layouts_like, tensor_choices
from lastbit.cases._expert_edges import LayerEdge
from lastbit.cases._expert_groups import SCALINGS, ExpertCases
from lastbit.cases._expert_variants import LayerVariant
from lastbit.cases._experts import (
    BALANCED,
    EXACT,
    LABELS,
    ONE_SIGN,
    Regimes,
    Sizes,
    choices,
    chosen_params,
    routing,
    sizes,
    weights,
)

_GRADIENTS = ("normal", "rows", "outlier", "sparse", "zero_rows", "tiny", "special")
_SAVED = ("saved_gate", "saved_up", "intermediate")
_FACTORS = ("sparse_signs", "quarters", "integers", "fractions")  # the first suits every size
_OLD = {f"old_{name}": labels for name, labels in LABELS.items() if "lora" in name}
_FIRST_OLD = "old_gate_lora_a"
_LIMITS = {"exact": (22.5,), "balanced": (7.0, 0.5), "one_sign": ()}
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
        "saved_gate": ("gates", "normal", "zeros", "special"),
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


def _choices(variant: LayerVariant, accepts: frozenset[str]) -> Choices:
    """Map tensors and parameters to their options; previous gradients have one regime, or there are none."""
    regimes, dtype = _REGIMES[variant.kind], variant.dtype
    limits = _LIMITS[variant.kind] if "swiglu_limit" in accepts else ()
    found = {**choices(variant, regimes, SCALINGS[variant.kind], limits)}
    found |= tensor_choices("grad_output", (dtype,), regimes["grad_output"], layouts_like(2, 64))
    for name in _SAVED:
        found |= tensor_choices(name, (dtype,), regimes[name], layouts_like(2, 2, 64))
    if _FIRST_OLD in accepts and variant.adapters:
        found |= {f"{_FIRST_OLD} dtype": (dtype,), f"{_FIRST_OLD} regime": (None, *regimes[_FIRST_OLD])}
    return found


@st.composite
def _cases(draw: st.DrawFn, variant: LayerVariant, small: bool, chosen: Chosen) -> Case:
    size = draw(sizes(variant, chosen, small=small))
    x, grad_output = (chosen_tensor(name, chosen, (size.tokens, size.hidden)) for name in ("x", "grad_output"))
    pairs, params = routing(size, chosen)
    saved = [chosen_tensor(name, chosen, shape) for name, shape in _saved(size).items()]
    tensors = [x, *pairs, grad_output, *saved, *draw(weights(size, variant, chosen))]
    if before := chosen.get(f"{_FIRST_OLD} regime"):
        tensors += _old(size, variant.dtype, _REGIMES[variant.kind], before)
    params |= chosen_params(chosen)
    return Case("moe_lora_backward", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _rows(size: Sizes) -> dict[str, tuple[int, ...]]:
    """Map the tensors beside routing and weights to their shapes: rows of tokens, and what the forward pass saved."""
    return dict.fromkeys(("x", "grad_output"), (size.tokens, size.hidden)) | _saved(size)


def _saved(size: Sizes) -> dict[str, tuple[int, ...]]:
    """Map the tensors that the forward pass saved to their shapes."""
    return dict.fromkeys(_SAVED, (*size.pairs, size.intermediate))


def _old(size: Sizes, dtype: str, regimes: Regimes, before: str) -> Iterator[TensorSpec]:
    """Yield previous gradients, of the kind that was chosen for the first of them."""
    kind = regimes[_FIRST_OLD].index(before)
    for name, shape in size.adapters().items():
        yield TensorSpec(f"old_{name}", dtype, shape, regime=regimes[f"old_{name}"][kind])


def _beside(edge: LayerEdge, accepts: frozenset[str]) -> Iterator[TensorSpec]:
    regimes = _REGIMES[edge.kind]
    if edge.old and _FIRST_OLD in accepts:
        yield from _old(edge.size, edge.dtype, regimes, regimes[_FIRST_OLD][0])


groups = ExpertCases("moe_lora_backward", _REGIMES, _rows, _choices, _cases, _beside).groups
"""Yields the groups for a kernel that takes some tensors and parameters."""
