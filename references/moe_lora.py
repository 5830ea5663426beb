"""Mixture of experts with SwiGLU, whose three projections have low-rank adapters (LoRA), as fine-tuning runs it.

SwiGLU: Shazeer 2020, arXiv 2002.05202. Stages and routing rules are those of the SFT operator of ktransformers;
docs/contracts/moe_lora.md says who rounds where.
"""

from __future__ import annotations

from math import inf

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Enclosure, Format, Tensor, product_in_any_order, sigmoid, total, total_of_products
from lastbit.references._expert_relations import RELATIONS, SCALING, TOKENS
from lastbit.references._expert_sums import EXPERT_SUMS
from lastbit.references._experts import Layer, adapter_axes, check_limit, limited, rounded
from lastbit.references._flops import forward_flops
from lastbit.references._layer_weights import WEIGHTS, OpWeights, Projection
from lastbit.references._shapes import check_shapes


@op(
    rows=(),
    flops=forward_flops,
    integers=("expert_ids",),
    plain=WEIGHTS,
    axes={
        **adapter_axes(
            base=rounded("gate_base", "up_base", "down_base"),
            middle=rounded("gate_lora_mid", "up_lora_mid", "down_lora_mid"),
            lora=rounded(*(f"{p}_{s}" for p in ("gate", "up", "down") for s in ("lora", "scaled"))),
        ),
        "gate": {"fp32_gate": {}, "rounded_gate": rounded("gate", "up")},
        "silu": {"fp32_silu": {}, "rounded_silu": rounded("silu")},
        "expert": {"fp32_expert": {}, "rounded_expert": rounded("expert_output")},
        "weighted": {"fp32_weighted": {}, "rounded_weighted": rounded("weighted")},
    },
    rounds=rounded("saved_gate", "saved_up", "intermediate", "output"),
    optional_results=("saved_gate", "saved_up", "intermediate"),
    returns=("output", "saved_gate", "saved_up", "intermediate"),
    sums=EXPERT_SUMS,
    presets={
        "fused": "default",
        "eager": "rounded_base+rounded_lora+rounded_gate+rounded_silu+rounded_expert+rounded_weighted",
        "per_matrix": "rounded_base+fp32_middle+rounded_gate+rounded_expert",
    },
    relations=(TOKENS, *RELATIONS, SCALING),
)
def moe_lora(
    x: Enclosure,
    expert_ids: Tensor,
    routing_weights: Enclosure,
    weights: OpWeights,
    *,
    scaling: float = 1.0,
    first_expert: int = 0,
    shards: int = 1,
    swiglu_limit: float = inf,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """output[t] = Σ_j w[t, j] · down(silu(gate(x[t])) · up(x[t])), each map being W + scaling · B · A of an expert.

    x: [T, H]; expert_ids and routing_weights, w: [T, k]; gate_proj, up_proj: [E, I, H]; down_proj: [E, H, I]; A and B
    of a map from K to N numbers: [E, r, K] and [E, N, r]; a map without adapter is W. Base weights may be codes with
    scales and zero points (see `lastbit.numerics.dequantized`). Token t uses the experts of which it has the ids; the
    first one here has the id `first_expert`. A pair (t, j) whose id is of no expert here counts for nothing, and its
    rows of the stages [T, k, …] are zero; an id that occurs twice in a row counts twice. `saved_gate`, `saved_up` and
    `intermediate` are what the backward pass needs; a kernel need not return them. With `shards` = P the intermediate
    dimension is computed in P parts: each rounds the middle of the down adapter for itself, and what they give is added
    in fp32. With `swiglu_limit` = L the gate is activated as min(gate, L) and up enters as min(max(up, -L), L); both
    are saved as they were.

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
    rows = layer.pairs(x)
    gate = layer.stage("gate", layer.gate_or_up("gate", rows, gate_map))
    up = layer.stage("up", layer.gate_or_up("up", rows, up_map))
    layer.stage("saved_gate", gate, result=True)
    layer.stage("saved_up", up, result=True)

    gate, up = limited(gate, up, swiglu_limit)
    separate = contract.has("rounded_silu")
    product = (
        layer.stage("silu", gate * sigmoid(gate)) * up if separate else product_in_any_order(gate, sigmoid(gate), up)
    )
    intermediate = layer.stage("intermediate", product, result=True)
    outputs, _ = layer.down(intermediate, down_map)

    factors = routing_weights.reshape(-1, 1).zero_where(layer.skipped)
    if contract.has("rounded_weighted"):
        weighted = layer.stages("weighted", [factors * y for y in outputs])
        combined = total(layer.by_token(weighted))
    else:
        combined = total_of_products(layer.by_token([factors] * shards), layer.by_token(outputs))
    stage("output", combined[..., 0], result=True)


def check_layer(
    x: Enclosure, expert_ids: Tensor, routing_weights: Enclosure, weights: OpWeights, fmt: Format
) -> tuple[Projection, Projection, Projection]:
    """Return gate, up and down of a layer, with activations in a format; ValueError unless its tensors fit together."""
    rows = {"x": tuple(x.shape), "expert_ids": tuple(expert_ids.shape)}
    matrices = {"gate_proj": weights.gate_proj, **weights.adapters}
    three = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
    if {*map(len, rows.values())} != {2} or {*map(len, three.values())} != {3} or not expert_ids.shape[1]:
        shapes = ", ".join(f"{name} {shape}" for name, shape in (rows | three).items())
        raise ValueError(f"{shapes}: they must be [T, H], [T, k] with k > 0, [E, I, …], and [E, …, …]")
    tokens, hidden = x.shape
    experts, width = weights.sizes
    pairs = (tokens, expert_ids.shape[1])
    check_shapes({"expert_ids": (expert_ids, pairs), "routing_weights": (routing_weights, pairs)})
    maps = weights.projections(hidden, fmt)
    for name, projection, outputs in zip(("gate", "up", "down"), maps, (width, width, hidden), strict=True):
        projection.check(name, experts, outputs)
    return maps
