"""Faults of the limit of SwiGLU in the mixture of experts and its gradients; one deed at a time."""

from __future__ import annotations

from functools import partial

from tests.faults.moe_lora import epilogue, fault
from tests.faults.moe_lora_backward import fault as fault_of_backward
from tests.faults.moe_lora_backward import gradients
from tests.faults.plant import Edit

limit = partial(Edit, file="swiglu_limit.py")

_LIMITED = "    gate, up = limited(gate, up, limit)\n"
_SILU = "    silu = rounded(gate * tl.sigmoid(gate), A, ROUND)\n"
_STORED = "    store(outputs.saved_gate, gate, pairs, n, n_size, VECTORS)\n"
_GATE = "gate = tl.where(gate > limit, limit, gate)"
_UP = "tl.where(up < -limit, -limit, up)"
_CUT_GATE, _CUT_UP = "tl.where(gate > limit, 0.0, grad_gate)", "tl.where(tl.abs(up) > limit, 0.0, grad_up)"
_THROUGH = "through_limit(grad_gate, grad_up, saved_gate, saved_up, limit)"

FORWARD = tuple(
    fault(name, description, edits, exposed, exposed, options="balanced")
    for name, description, edits, exposed in (
        ("limit left out", "does not limit the gate", (limit(_GATE, "gate = gate"),), "intermediate"),
        (
            "gate limited from below", "limits the gate to ±limit, as MiniMax-M3 does",
            (limit(_GATE, f"{_GATE}\n        gate = tl.where(gate < -limit, -limit, gate)"),), "intermediate",
        ),
        ("up limited from above alone", "limits up as it does the gate", (limit(_UP, "up"),), "intermediate"),
        (
            "silu limited", "limits silu(gate), where the gate is to be limited",
            (epilogue(_LIMITED + _SILU, _SILU + _LIMITED.replace("gate", "silu")),), "intermediate",
        ),
        (
            "saved gate limited", "saves the gate as it is activated",
            (epilogue(_STORED, ""), epilogue(_LIMITED, _LIMITED + _STORED)), "saved_gate",
        ),
        (
            "NaN limited", "takes a gate that is NaN for one beyond the limit, as vminps does",
            (limit(_GATE, "gate = tl.where(gate <= limit, gate, limit)"),), "intermediate",
        ),
    )
)  # fmt: skip

BACKWARD = tuple(
    fault_of_backward(name, description, edits, exposed, hidden, options="balanced")
    for name, description, edits, exposed, hidden in (
        (
            "gradient of a gate beyond the limit", "passes the gradient to gates that were cut off",
            (limit(_CUT_GATE, "grad_gate"),), "grad_gate", "grad_gate_lora_a or grad_gate_lora_b",
        ),
        (
            "gradient of up below the limit", "passes the gradient to up where it was cut off from below",
            (limit(_CUT_UP, _CUT_UP.replace("tl.abs(up)", "up")),), "grad_up", "grad_up_lora_b or grad_input",
        ),
        (
            "no gradient below the limit", "has no gradient for gates below -limit",
            (limit(_CUT_GATE, _CUT_GATE.replace("gate >", "tl.abs(gate) >")),),
            "grad_gate", "grad_gate_lora_a or grad_gate_lora_b",
        ),
        (
            "mask of limited values", "looks at values that are limited for those that were cut off",
            (gradients(_THROUGH, _THROUGH.replace("saved_", "")),), "grad_gate", "grad_gate_lora_b",
        ),
        (
            "gradient at unlimited values", "takes the slope at the gate and up that were saved",
            (gradients(_LIMITED, ""),), "grad_gate or grad_up", "grad_gate_lora_b or grad_up_lora_b",
        ),
    )
)  # fmt: skip

FAULTS = (*FORWARD, *BACKWARD)
