"""All faults, and the cases that they are hunted with."""

from __future__ import annotations

from tests.faults import (
    attention,
    completion_mask,
    edges,
    expert_edges,
    layer_norm_gated,
    layer_norm_gated_backward,
    moe_lora,
    moe_lora_backward,
    moe_lora_gradients,
    moe_lora_limit,
    moe_lora_quantized,
    moe_lora_routing,
    moe_lora_shards,
    rms_norm,
    softmax,
    swiglu,
    views,
)

_MODULES = (
    *(rms_norm, layer_norm_gated, layer_norm_gated_backward, completion_mask, edges),
    *(moe_lora, moe_lora_routing, moe_lora_backward, moe_lora_gradients, moe_lora_quantized, moe_lora_shards),
    moe_lora_limit,
    expert_edges,
    softmax,
    swiglu,
    attention,
    views,
)

FAULTS = tuple(fault for module in _MODULES for fault in module.FAULTS)
GROUPS = {
    "rms_norm": rms_norm.GROUPS | edges.GROUPS,
    "layer_norm_gated": layer_norm_gated.GROUPS | edges.GROUPS,
    "layer_norm_gated_backward": layer_norm_gated_backward.GROUPS | edges.GROUPS,
    "softmax": softmax.GROUPS | edges.GROUPS,
    "completion_mask": completion_mask.GROUPS | edges.GROUPS,
    "attention": attention.GROUPS,
    "moe_lora": moe_lora.GROUPS | edges.GROUPS,
    "moe_lora_backward": moe_lora.GROUPS | edges.GROUPS,
    "swiglu": swiglu.GROUPS | edges.GROUPS,
    "swiglu_backward": swiglu.GROUPS | edges.GROUPS,
}
"""Op → options of a fault → dtype of the op's first input → the group of cases that it is hunted with."""
