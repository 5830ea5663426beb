"""Faults of the mixtures of experts, forward and backward, that only the edges of `cases/_expert_edges.py` expose."""

from __future__ import annotations

from functools import partial

from tests.faults.moe_lora_routing import EARLIER, without
from tests.faults.plant import Edit, Fault

_forward = partial(Fault, op="moe_lora", variant="moe_lora+fused", options="edges", dtypes=("bf16",))
_backward = partial(_forward, op="moe_lora_backward", variant="moe_lora_backward+fused")
_text = partial(Edit, file="moe_lora.py")
_linear = partial(Edit, file="grouped_linear.py")
_planning = partial(Edit, file="grouped_plan.py")
_route = partial(Edit, file="moe_lora_routing.py")
_gradients = partial(Edit, file="moe_lora_gradients.py")
_outer = partial(Edit, file="moe_lora_outer.py")
_codes = partial(Edit, file="quantized_weights.py")

_ADAPTERS = "tuple(zip(middles, lora_b, strict=True))"
_USED = "(end - start + rows - 1) // rows"
_UNREAD = "nondeterministic or uninitialised"

EXPERTS = (
    _forward(
        "full block left out", "computes no block of an expert that has exactly as many pairs as one block takes",
        (
            _route(f"before += {_USED}", f"before += tl.where(end - start == rows, 0, {_USED})"),
            _route(f"used = {_USED}", f"used = tl.where(end - start == rows, 0, {_USED})"),
        ),
        _UNREAD, _UNREAD,
    ),
    _forward(
        "capacity of 128", "skips the pairs of an expert from the 129th on",
        (without(f"{EARLIER} > 128"),),
        "gate_base or up_base", "saved_gate or saved_up",
    ),
    _backward(
        "gradients of no tokens", "launches nothing where there are no tokens, and leaves the gradients unwritten",
        (_outer("[(routing.experts * row_tiles * column_tiles,)]",
                "[(routing.experts * row_tiles * column_tiles * min(len(routing.order), 1),)]"),),
        "unwritten", "unwritten",
    ),
    _forward(
        "first 32 slots", "adds what the experts of the first 32 slots put out",
        (_text("for j in range(0, slots):", "for j in range(0, tl.minimum(slots, 32)):"),), "output", "output",
    ),
)  # fmt: skip

STRIDES = (
    _forward(
        "strides of routing weights ignored", "reads the routing weights as if rows followed each other without a gap",
        (_text("else weights.stride())", "else (slots, 1))"),), "output or out_of_bounds", "output or out_of_bounds",
    ),
    _backward(
        "strides of routing weights ignored", "reads the routing weights as if rows followed each other without a gap",
        (_gradients("routing_weights.contiguous()", "routing_weights"),),
        "grad_expert_output or out_of_bounds", "grad_down_lora_a or grad_down_lora_b or out_of_bounds",
    ),
    _forward(
        "strides of ids ignored", "reads the expert ids as if rows followed each other without a gap",
        (_route("*expert_ids.stride(), experts", "slots, 1, experts"),),
        "gate_base or gate_lora_mid or out_of_bounds", "saved_gate or saved_up or output or out_of_bounds",
    ),
    _forward(
        "strides of adapters ignored", "takes the rows of B to follow each other without a gap",
        (_linear("[weight.contiguous() for weight in weights]", "list(weights)"),),
        "gate or up or expert_output or out_of_bounds", "saved_gate or saved_up or output or out_of_bounds",
    ),
    _forward(
        "zero points where the scales are", "reads the zero points with the strides of the scales",
        (_codes("if zero is not None and zero.stride() != scale.stride():", "if False:"),),
        "gate_base or up_base or out_of_bounds", "saved_gate or saved_up or out_of_bounds",
    ),
    _backward(
        "strides of old gradients ignored", "adds to the old gradients as if rows followed each other without a gap",
        (_outer("else old.contiguous() for", "else old for"),),
        "grad_down_lora_a or out_of_bounds", "grad_down_lora_a or out_of_bounds",
    ),
)  # fmt: skip

SIZES = (
    _forward(
        "first 1024 columns", "adds the first block of columns of the outputs of experts alone",
        (_text("triton.cdiv(columns, block))](", "1)]("),), "output", "output",
    ),
    _forward(
        "first 64 ranks", "multiplies by the first block of ranks of the adapters alone",
        (_planning("rank_steps=-(-rank // block_r)", "rank_steps=1"),),
        "gate or up or expert_output", "saved_gate or saved_up or output",
    ),
    _backward(
        "first 1024 columns", "adds the first block of columns of a row to the gradients of routing weights alone",
        (_gradients("total += grad * value", "total += tl.where(start < BLOCK, grad * value, 0.0)"),),
        "grad_routing_weights", "grad_routing_weights",
    ),
)  # fmt: skip

VALUES = (
    _forward(
        "no adapters for a scaling of 0", "leaves adapters out where scaling is 0, also where they hold NaN",
        (_text(_ADAPTERS, f"{_ADAPTERS} if scaling else ()"),),
        "gate or up", "saved_gate or saved_up",
    ),
    _forward(
        "output saturates", "gives the largest finite number for outputs that overflow",
        (_text("total.to(output_ptr.dtype.element_ty), mask=mask)",
               "tl.clamp(total, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)"
               ".to(output_ptr.dtype.element_ty), mask=mask)"),),
        "output", "output", dtypes=("fp16",),
    ),
    _forward(
        "scale of NaN as 0", "takes a scale that is NaN for 0",
        (_codes("return tl.where(mask, level * scale.to(tl.float32), 0.0).to(A)",
                "return tl.where(mask & (scale == scale), level * scale.to(tl.float32), 0.0).to(A)"),),
        "gate_base", "saved_gate",
    ),
    _backward(
        "old gradients left alone", "gives the old gradient where the new one is not finite",
        (_outer("total = unchanged + total",
                "total = unchanged + tl.where(tl.abs(total) < 3e38, total, 0.0)"),),
        "grad_down_lora_a", "grad_down_lora_a", dtypes=("fp16",),
    ),
)  # fmt: skip

PLAIN = (
    _forward(
        "no limit without adapters", "activates as if there were no limit where there are no adapters",
        (_text('"swiglu_limit": swiglu_limit, "eager"',
               '"swiglu_limit": swiglu_limit if "gate_lora_a" in parameters else inf, "eager"'),),
        "intermediate", "intermediate",
    ),
    _forward(
        "scales swapped without adapters", "reads the scales of up for gate and the reverse without adapters",
        (Edit("for side in SIDES)", "for side in (SIDES if self.gate_lora_a is not None else _SWAPPED))",
              file="moe_lora_weights.py"),
         Edit('SIDES = ("gate", "up", "down")', 'SIDES = ("gate", "up", "down")\n_SWAPPED = ("up", "gate", "down")',
              file="moe_lora_weights.py")),
        "gate_base", "saved_gate", dtypes=("fp16",),
    ),
    _backward(
        "no limit without adapters", "passes on the gradient beyond the limit where there are no adapters",
        (Edit('contract == "eager", swiglu_limit)',
              'contract == "eager", swiglu_limit if "gate_lora_a" in tensors else inf)', file="moe_lora_backward.py"),),
        "grad_gate or grad_up", "grad_input",
    ),
)  # fmt: skip
"""Of layers without adapters."""

FAULTS = (*EXPERTS, *STRIDES, *SIZES, *VALUES, *PLAIN)
