"""Cases of the gradients of the mixture of experts; what the forward pass saved is drawn for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from hypothesis import strategies as st

from lastbit import Case, Choices, Chosen, Group, TensorSpec, chosen_tensor, layouts_like, tensor_choices
from lastbit.cases._expert_edges import Edge, edges, properties
from lastbit.cases._expert_variants import Variant, has_adapters, plain_variants, variants
from lastbit.cases._experts import (
    BALANCED,
    EXACT,
    LABELS,
    ONE_SIGN,
    REAL_KINDS,
    Regimes,
    Sizes,
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
from lastbit.cases.moe_lora import SCALINGS

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
def _plain(draw: st.DrawFn, plain: Sequence[Variant], accepts: frozenset[str], small: bool) -> Case:
    """Draw a case of any of the variants, none of which has adapters."""
    variant = draw(st.sampled_from(plain))
    return draw(_cases(variant, small, draw(any_of(_choices(variant, accepts)))))


@st.composite
def _cases(draw: st.DrawFn, variant: Variant, small: bool, chosen: Chosen) -> Case:
    size = draw(sizes(variant, chosen, small=small))
    x, grad_output = (chosen_tensor(name, chosen, (size.tokens, size.hidden)) for name in ("x", "grad_output"))
    pairs, params = routing(size, chosen)
    saved = [chosen_tensor(name, chosen, shape) for name, shape in _saved(size).items()]
    tensors = [x, *pairs, grad_output, *saved, *draw(weights(size, variant, chosen))]
    if before := chosen.get(f"{_FIRST_OLD} regime"):
        tensors += _old(size, variant.dtype, _REGIMES[variant.kind], before)
    params |= chosen_params(chosen)
    return Case("moe_lora_backward", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _saved(size: Sizes) -> dict[str, tuple[int, int, int]]:
    """Map the tensors that the forward pass saved to their shapes."""
    return dict.fromkeys(_SAVED, (*size.pairs, size.intermediate))


def _old(size: Sizes, dtype: str, regimes: Regimes, before: str) -> Iterator[TensorSpec]:
    """Yield previous gradients, of the kind that was chosen for the first of them."""
    kind = regimes[_FIRST_OLD].index(before)
    for name, shape in size.adapters().items():
        yield TensorSpec(f"old_{name}", dtype, shape, regime=regimes[f"old_{name}"][kind])


def _real_layers(*, small: bool, adapters: bool) -> Iterator[Case]:
    """Yield the layer of every model of the table once, exact and of one sign in turn."""
    for seed, size in enumerate(real_sizes(small=small)):
        kind = REAL_KINDS[seed % 2]
        regimes = _REGIMES[kind]
        x = TensorSpec("x", "bf16", (size.tokens, size.hidden), regime=regimes["x"][0])
        grad_output = TensorSpec("grad_output", "bf16", x.shape, regime=regimes["grad_output"][0])
        saved = [TensorSpec(name, "bf16", shape, regime=regimes[name][0]) for name, shape in _saved(size).items()]
        own = real_weights(size, regimes, adapters=adapters)
        tensors = (x, *real_routing(size, kind), grad_output, *saved, *own)
        yield Case("moe_lora_backward", tensors, {"scaling": SCALINGS[kind][0]} if adapters else {}, seed)


def _edges(accepts: frozenset[str], chosen: tuple[Edge, ...]) -> Iterator[Case]:
    """Yield the edges that a kernel with these parameters can take."""
    for seed, edge in enumerate(chosen):
        regimes = _REGIMES[edge.kind]
        shapes = dict.fromkeys(("x", "grad_output"), (edge.size.tokens, edge.size.hidden)) | _saved(edge.size)
        rows = [TensorSpec(name, edge.dtype, shape, regime=regimes[name][0]) for name, shape in shapes.items()]
        tensors = [*rows, *edge.pairs(), *edge.weights(regimes)]
        if edge.old and _FIRST_OLD in accepts:
            tensors += _old(edge.size, edge.dtype, regimes, regimes[_FIRST_OLD][0])
        case = edge.case("moe_lora_backward", tensors, seed)
        if case.names <= accepts:
            yield case
