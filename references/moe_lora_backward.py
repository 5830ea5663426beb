"""Gradients of `moe_lora` from what its forward pass saved: of the input, the six adapters and the routing weights.

The tests check them against automatic differentiation of the forward pass in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import (
    Enclosure,
    Groups,
    Tensor,
    concatenate,
    fusible_product,
    grouped_outer,
    hull,
    multiply_add,
    product_in_any_order,
    remembered,
    sigmoid,
    stack,
    total,
    total_of_products,
)
from lastbit.references._expert_relations import RELATIONS, SCALING_BACKWARD, TOKENS_BACKWARD
from lastbit.references._experts import ALL, Layer, adapter_axes, check_limit, limited, rounded, through_limits
from lastbit.references._flops import backward_flops
from lastbit.references._layer_weights import ADAPTERS, WEIGHTS, OpWeights, Projection
from lastbit.references._shapes import check_shapes
from lastbit.references.layer_norm_gated_backward import times_slope
from lastbit.references.moe_lora import check_layer

_PRODUCTS = ("grad_intermediate", "grad_input_gate", "grad_input_up", "down")


@dataclass(frozen=True)
class PreviousGradients:
    """The previous gradients of the adapters, to which the new ones are added."""

    old_gate_lora_a: Enclosure | None = None
    old_gate_lora_b: Enclosure | None = None
    old_up_lora_a: Enclosure | None = None
    old_up_lora_b: Enclosure | None = None
    old_down_lora_a: Enclosure | None = None
    old_down_lora_b: Enclosure | None = None


@op(
    rows=(),
    returns=("grad_input", "grad_routing_weights", *(f"grad_{name}" for name in ADAPTERS)),
    flops=backward_flops,
    integers=("expert_ids",),
    plain=WEIGHTS,
    axes={
        **adapter_axes(
            base=rounded(*(f"{p}_base" for p in _PRODUCTS)),
            middle=rounded(
                *("grad_down_mid", "grad_gate_mid", "grad_up_mid"),
                *("gate_lora_mid", "up_lora_mid", "down_lora_mid"),
            ),
            lora=rounded(*(f"{p}_{s}" for p in _PRODUCTS for s in ("lora", "scaled"))),
        ),
        "gradient": {"fp32_gradient": {}, "rounded_gradient": rounded("grad_intermediate")},
        "expert": {"fp32_expert": {}, "rounded_expert": rounded("expert_output")},
    },
    rounds={
        **rounded("grad_expert_output", "grad_gate", "grad_up", "grad_input"),
        **{f"grad_{name}": name for name in ADAPTERS},
    },
    presets={
        "fused": "default",
        "eager": "rounded_base+rounded_lora+rounded_gradient+rounded_expert",
        "per_matrix": "rounded_base+fp32_middle+rounded_gradient+rounded_expert",
    },
    relations=(TOKENS_BACKWARD, *RELATIONS, SCALING_BACKWARD),
)
def moe_lora_backward(
    x: Enclosure,
    expert_ids: Tensor,
    routing_weights: Enclosure,
    grad_output: Enclosure,
    saved_gate: Enclosure,
    saved_up: Enclosure,
    intermediate: Enclosure,
    weights: OpWeights,
    old: PreviousGradients,
    *,
    scaling: float = 1.0,
    first_expert: int = 0,
    shards: int = 1,
    swiglu_limit: float = inf,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """Compute the gradients of `moe_lora` from the gradient of its output; base weights are frozen and have none.

    x, grad_output: [T, H]; saved_gate, saved_up, intermediate: [T, k, I], as the forward pass gave them; everything
    else as it took them. The gradient of an adapter has its shape and dtype; where `old_…` is given, it is added to
    that: accumulated in fp32, rounded once. Without adapters there are grad_input and grad_routing_weights alone.
    `grad_routing_weights` is [T, k], fp32. Experts without tokens have a gradient of exactly zero, and so have skipped
    pairs. With `shards`, the partial sums of grad_input, of the gradients of gate_lora_a, up_lora_a and down_lora_b,
    and of grad_routing_weights are added in fp32. What `swiglu_limit` has cut off, as `saved_gate` and `saved_up` tell,
    has a gradient of zero, whatever that of the activated rows is.

    Raises:
        ValueError: shapes that do not fit, some adapters but not all, quantized weights that cannot be read, or a
            limit that x's dtype has not.
    """
    fmt = stage.format_of("x")
    gate_map, up_map, down_map = check_layer(x, expert_ids, routing_weights, weights, fmt)
    check_limit(swiglu_limit, fmt, expert_ids)
    layer = Layer.of(
        expert_ids,
        weights,
        first_expert=first_expert,
        shards=shards,
        scaling=scaling,
        contract=contract,
        stage=stage,
    )
    _, width = weights.sizes
    saved = {"saved_gate": saved_gate, "saved_up": saved_up, "intermediate": intermediate}
    check_shapes({name: (tensor, (*expert_ids.shape, width)) for name, tensor in saved.items()})
    check_shapes({"grad_output": (grad_output, tuple(x.shape))})
    before = _before(old, weights.adapters)
    layer_gradients = partial(_adapter_gradient, layer, before)

    factors = routing_weights.reshape(-1, 1).zero_where(layer.skipped)
    grad_pairs = layer.pairs(grad_output)
    grad_experts = layer.stage("grad_expert_output", factors * grad_pairs)
    activated = layer.saved(intermediate)
    grad_activated = _through_down(layer, layer_gradients, grad_experts, activated, down_map)

    values = layer.saved(saved_gate), layer.saved(saved_up)
    gate, up = limited(*values, swiglu_limit)
    grad_gate = times_slope(grad_activated, up, (gate, sigmoid(gate)))
    grad_up = product_in_any_order(grad_activated, gate, sigmoid(gate))
    grad_gate = layer.stage("grad_gate", through_limits(grad_gate, values[0], -inf, swiglu_limit))
    grad_up = layer.stage("grad_up", through_limits(grad_up, values[1], -swiglu_limit, swiglu_limit))
    maps = {"gate": (grad_gate, gate_map), "up": (grad_up, up_map)}
    rows = layer.pairs(x)
    middles = {name: _through_adapter(layer, layer_gradients, name, rows, *maps[name]) for name in maps}
    _through_gate_and_up(layer, maps, middles)

    outputs, down_middles = layer.down(activated, down_map)
    if down_map.rank:
        layer_gradients("down_lora_b", [grad_experts] * shards, down_middles)
    products = total_of_products(concatenate(*[grad_pairs] * shards), concatenate(*outputs))
    stage("grad_routing_weights", products.reshape(*expert_ids.shape), result=True)


def _before(old: PreviousGradients, adapters: Mapping[str, Tensor]) -> dict[str, Enclosure | None]:
    """Return the previous gradients by adapter; ValueError for one that does not have its adapter's shape."""
    before = {name: getattr(old, f"old_{name}") for name in ADAPTERS}
    if given := [name for name, tensor in before.items() if tensor is not None and name not in adapters]:
        raise ValueError(f"old_{given[0]} is given, but there are no adapters")
    check_shapes({f"old_{name}": (before[name], tuple(tensor.shape)) for name, tensor in adapters.items()})
    return before


def _adapter_gradient(
    layer: Layer,
    old: Mapping[str, Enclosure | None],
    name: str,
    left: Sequence[Enclosure],
    right: Sequence[Enclosure],
) -> None:
    """Record scaling · Σ left ⊗ right over the pairs of each expert, and over shards, plus what was there before."""
    gradient = _summed(layer.groups, tuple(left), tuple(right), layer.scaling, old[name])
    layer.recorder(f"grad_{name}", gradient, result=True)


@remembered
def _summed(
    groups: Groups,
    left: tuple[Enclosure, ...],
    right: tuple[Enclosure, ...],
    scaling: float,
    before: Enclosure | None,
) -> Enclosure:
    sums = [grouped_outer(a, b, groups) for a, b in zip(left, right, strict=True)]
    if len(sums) == 1:
        return sums[0] * scaling if before is None else multiply_add(sums[0], scaling, before)
    terms = [fusible_product(s, scaling) for s in sums]
    return total(stack(*terms, *([] if before is None else [before])))[..., 0]


def _through_down(
    layer: Layer, gradient: Callable[..., None], grad_experts: Enclosure, activated: Enclosure, projection: Projection
) -> Enclosure:
    """Propagate the gradient of the outputs of the experts back to the activated rows."""
    width = activated.shape[-1]
    if not projection.rank:
        base = layer.stage("grad_intermediate_base", layer.dot_back(grad_experts, [projection], "base", width))
        return layer.stage("grad_intermediate", base)
    middle = layer.stage("grad_down_mid", layer.dot_back(grad_experts, [projection], "b", projection.rank))
    gradient("down_lora_a", [middle], [activated])
    base = layer.stage("grad_intermediate_base", layer.dot_back(grad_experts, [projection], "base", width))
    product = layer.dot_back(middle, [projection], "a", width)
    return layer.stage("grad_intermediate", layer.adapted("grad_intermediate", [base], [product])[0])


def _through_adapter(
    layer: Layer, gradient: Callable[..., None], name: str, rows: Enclosure, grad: Enclosure, projection: Projection
) -> list[Enclosure]:
    """Record the gradients of the gate or up adapter; the gradient of its middle, of every shard.

    Nothing without an adapter.
    """
    if not projection.rank:
        return []
    middle = layer.stage(f"{name}_lora_mid", layer.dot(rows, projection, "a", projection.rank))
    gradient(f"{name}_lora_b", [grad], [middle])
    parts = [layer.dot_back(grad[ALL, s], [projection], "b", projection.rank, part=s) for s in layer.shards]
    middles = layer.stages(f"grad_{name}_mid", parts)
    gradient(f"{name}_lora_a", middles, [rows] * len(middles))
    return middles


def _through_gate_and_up(
    layer: Layer, maps: Mapping[str, tuple[Enclosure, Projection]], middles: Mapping[str, Sequence[Enclosure]]
) -> None:
    """Record grad_input: the sum over slots, gate and up, base and adapter, and shards, in any order in fp32.

    Each of these dots ends before it is added. What belongs to a pair may be added first.
    """
    terms = _base_terms(layer, maps)
    for name, (_, projection) in maps.items():
        if not projection.rank:
            continue
        products = [layer.dot_back(middle, [projection], "a", projection.columns) for middle in middles[name]]
        if layer.contract.has("rounded_lora"):
            terms.append(layer.scaled(f"grad_input_{name}", products))
        else:
            terms.append([fusible_product(product, layer.scaling) for product in products])
    of_shard = [list(shard) for shard in zip(*terms, strict=True)]
    pairs = layer.stages("grad_expert_input", [total(stack(*shard))[..., 0] for shard in of_shard])
    everything = layer.by_token([term for shard in of_shard for term in shard])
    grad_input = hull(total(layer.by_token(pairs)), total(everything))
    layer.recorder("grad_input", grad_input[..., 0], result=True)


def _base_terms(layer: Layer, maps: Mapping[str, tuple[Enclosure, Projection]]) -> list[list[Enclosure]]:
    """Compute the base weights' share of grad_input per shard: two dots if they are rounded, else one over both."""
    if layer.contract.has("rounded_base"):
        return [
            layer.stages(f"grad_input_{name}_base", [_base_dot(layer, s, (grad, map_)) for s in layer.shards])
            for name, (grad, map_) in maps.items()
        ]
    return [[_base_dot(layer, s, *maps.values()) for s in layer.shards]]


def _base_dot(layer: Layer, shard: slice, *maps: tuple[Enclosure, Projection]) -> Enclosure:
    """Multiply a shard's gradients by the base weights of their maps, as one dot over all of them."""
    rows = concatenate(*(grad[ALL, shard] for grad, _ in maps))
    return layer.dot_back(rows, [map_ for _, map_ in maps], "base", maps[0][1].columns, part=shard)
