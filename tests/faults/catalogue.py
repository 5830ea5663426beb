"""All faults, and the cases that they are hunted with."""

from __future__ import annotations

from tests.faults import completion_mask, layer_norm_gated, layer_norm_gated_backward, rms_norm

_OPS = {
    "rms_norm": rms_norm,
    "layer_norm_gated": layer_norm_gated,
    "layer_norm_gated_backward": layer_norm_gated_backward,
    "completion_mask": completion_mask,
}

FAULTS = tuple(fault for op in _OPS.values() for fault in op.FAULTS)
GROUPS = {name: op.GROUPS for name, op in _OPS.items()}
"""Op → options of a fault → dtype of the op's first input → the group of cases that it is hunted with."""
