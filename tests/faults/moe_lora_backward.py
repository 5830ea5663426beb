"""Faults of the gradients of the mixture of experts with LoRA, up to those of its input; one deed at a time."""

from __future__ import annotations

from functools import partial

from tests.faults.moe_lora import BOTH, FP32_DOTS, FP32_OUTPUT, forward, truncated
from tests.faults.plant import Edit, Fault

backward = partial(Edit, file="moe_lora_backward.py")
gradients = partial(Edit, file="moe_lora_gradients.py")
outer = partial(Edit, file="moe_lora_outer.py")
fault = partial(Fault, op="moe_lora_backward", variant="moe_lora_backward+fused", options="exact", dtypes=("bf16",))
_eager = partial(fault, variant="moe_lora_backward+eager")

EXPERT_OUTPUT = '((rows, t["down_proj"]),), lora'
_WEIGH = "product = (weight * grad)"
_WEIGHED_TRUNCATED = truncated("(weight * grad)", "result_ptr.dtype.element_ty")
_MIDDLE = 'step.operand(grad, turned(t["down_lora_b"]))'
_MIDDLE_FP32 = _MIDDLE.replace("step.", "Backward(step.routing, step.scaling, torch.float32, step.eager).")
_ROUND_BASE, _ROUND_LORA = "round_base=self.eager", "round_lora=self.eager"
_FP32_DOTS = (
    *FP32_DOTS,
    *(
        outer(
            f"tl.dot(tl.trans(left), right, {sum_}",
            f"tl.dot(tl.trans(left).to(tl.float32), right.to(tl.float32), {sum_}",
        )
        for sum_ in ("total_0", "total_1")
    ),
    Edit("all(_in_vectors(r.shape, r.strides, r) for r in rows)", "False", "grouped_plan.py"),
)
_BASE = '((grad, turned(t["down_proj"])),)'
_FIRST_COLUMNS = 'torch.nn.functional.pad(t["down_proj"][..., :16], (0, max(0, rows.shape[2] - 16)))'
_LORA = '((grad_mid, turned(t["down_lora_a"])),)'
_GRAD_INTERMEDIATE = f"{_BASE}, lora_back"
_ADDED = "step.adapted(tuple(base), tuple(lora), out_dtype=torch.float32)"
_SLOPE = "slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))"
_GRAD_GATE = "grad_gate = (grad * up * slope)"
_GRAD_GATE_TRUNCATED = truncated("(grad * up * slope)", "grad_gate_ptr.dtype.element_ty")
_TOTAL = "total += rounded(value, values_ptr.dtype.element_ty, ROUND)"

DOWN = (
    fault(
        "routing weights left out", "does not multiply the gradient by the routing weights (M30)",
        (gradients(_WEIGH, _WEIGH.replace("weight * grad", "grad")),),
        "grad_expert_output", "grad_down_lora_a", dtypes=BOTH,
    ),
    fault(
        "grad_expert_output in fp32", "keeps routing weight · grad_output in fp32",
        (
            gradients("result = grad_output.new_empty(", "result = grad_output.float().new_empty("),
            *_FP32_DOTS,
        ),
        "grad_expert_output", "grad_down_lora_a or grad_gate_lora_b",
    ),
    fault(
        "grad_expert_output truncated", "rounds routing weight · grad_output toward zero",
        (gradients(f"{_WEIGH}.to(result_ptr.dtype.element_ty)", f"product = {_WEIGHED_TRUNCATED}"),),
        "grad_expert_output", "grad_down_lora_a or grad_gate_lora_b", options="balanced",
    ),
    fault(
        "middle in fp32", "keeps the operand between B and A of down in fp32",
        (backward(_MIDDLE, _MIDDLE_FP32), *_FP32_DOTS),
        "grad_down_mid", "grad_down_lora_a", dtypes=BOTH,
    ),
    fault(
        "base of grad_intermediate left out", "has no product with down_proj in grad_intermediate (M6)",
        (backward(_BASE, _BASE.replace("grad,", "torch.zeros_like(grad),")),), "grad_intermediate", "grad_gate_lora_b",
    ),
    fault(
        "grad_intermediate zero", "leaves grad_intermediate zero (M6)",
        (backward('found["grad_intermediate"] = step', 'found["grad_intermediate"] = 0 * step'),),
        "grad_intermediate", "grad_gate_lora_b",
    ),
    fault(
        "adapter of down left out", "leaves out the adapter in grad_intermediate (M23)",
        (backward(_LORA, "()"),), "grad_intermediate", "grad_gate_lora_b", dtypes=BOTH,
    ),
    fault(
        "adapter of down not scaled", "does not multiply the adapter in grad_intermediate by scaling (M25)",
        (backward(_LORA, _LORA.replace("grad_mid", "(grad_mid.float() / step.scaling).to(grad_mid.dtype)")),),
        "grad_intermediate", "grad_gate_lora_b",
    ),
    fault(
        "part of down_proj", "multiplies by no more than 16 columns of down_proj, as after packing a part (M46)",
        (backward(_BASE, _BASE.replace('t["down_proj"]', _FIRST_COLUMNS)),),
        "grad_intermediate", "grad_gate_lora_b",
    ),
    fault(
        "base rounded", "rounds the product with down_proj in grad_intermediate",
        (backward(_ROUND_BASE, "round_base=self.eager or len(operands) == 1"),),
        "grad_intermediate", "grad_gate_lora_b", dtypes=BOTH,
    ),
    fault(
        "adapter rounded", "rounds the adapter's part of grad_intermediate",
        (backward(_ROUND_LORA, "round_lora=self.eager or len(operands) == 1"),),
        "grad_intermediate", "grad_gate_lora_b", dtypes=BOTH,
    ),
    fault(
        "grad_intermediate rounded", "rounds grad_intermediate",
        (backward(_GRAD_INTERMEDIATE, f"{_GRAD_INTERMEDIATE}, out_dtype=step.dtype"),),
        "grad_intermediate", "grad_gate_lora_b", dtypes=BOTH,
    ),
)  # fmt: skip

ACTIVATION = (
    fault(
        "gate cache zero", "reads zeros for the gate that was saved, as after another buffer was cleared (M10)",
        (gradients("gate = tl.load(", "gate = 0.0 * tl.load("),), "grad_gate", "grad_gate_lora_b",
    ),
    fault(
        "slope of sigmoid left out", "differentiates gate · sigmoid(gate) as sigmoid(gate)",
        (gradients(_SLOPE, "slope = sigmoid"),), "grad_gate", "grad_gate_lora_b", options="balanced",
    ),
    fault(
        "slope of the activated gate", "takes the slope of silu at silu(gate)",
        (gradients(_SLOPE, _SLOPE.replace("1.0 + gate", "1.0 + gate * sigmoid")),),
        "grad_gate", "grad_gate_lora_b", options="balanced",
    ),
    fault(
        "gate and up swapped", "takes the saved up for the saved gate, and the reverse (M29)",
        (backward('t["saved_gate"], t["saved_up"]', 't["saved_up"], t["saved_gate"]'),),
        "grad_gate", "grad_gate_lora_b", dtypes=BOTH,
    ),
    fault(
        "gradients of gate and up swapped", "takes the gradient of up for that of gate, and the reverse",
        (backward("zip(names, grads,", "zip(names, grads[::-1],"),), "grad_gate", "grad_gate_lora_b",
    ),
    fault(
        "grad_up without sigmoid", "multiplies by gate, where silu(gate) is due",
        (gradients("grad * (gate * sigmoid)", "grad * gate"),), "grad_up", "grad_up_lora_b", options="balanced",
    ),
    fault(
        "activation rounded", "rounds silu(gate) in grad_up",
        (gradients("(gate * sigmoid)", "(gate * sigmoid).to(tl.bfloat16).to(tl.float32)"),),
        "grad_up", "grad_up_lora_b", options="balanced",
    ),
    fault(
        "grad_gate in two roundings", "rounds grad_intermediate · up before it multiplies by the slope",
        (gradients("(grad * up * slope)", "((grad * up).to(tl.bfloat16).to(tl.float32) * slope)"),),
        "grad_gate", "grad_gate_lora_b", options="balanced",
    ),
    fault(
        "grad_gate truncated", "rounds grad_gate toward zero",
        (gradients(f"{_GRAD_GATE}.to(grad_gate_ptr.dtype.element_ty)", f"grad_gate = {_GRAD_GATE_TRUNCATED}"),),
        "grad_gate", "grad_gate_lora_b",
    ),
)  # fmt: skip

INPUT = (
    fault(
        "base of grad_input left out", "has no products with gate_proj and up_proj in grad_input (M8)",
        (backward("base.append((grad,", "base.append((torch.zeros_like(grad),"),), "grad_expert_input", "grad_input",
    ),
    fault(
        "up left out of grad_input", "has no product with up_proj in grad_input",
        (backward(_ADDED, _ADDED.replace("tuple(base)", "tuple(base[:1])")),), "grad_expert_input", "grad_input",
    ),
    fault(
        "adapters left out of grad_input", "has no adapters in grad_input (M24)",
        (backward(_ADDED, _ADDED.replace("tuple(lora)", "()")),), "grad_expert_input", "grad_input", dtypes=BOTH,
    ),
    fault(
        "adapter of gate for up", "multiplies by A of gate for up in grad_input (M27)",
        (backward('lora.append((grad_mid, turned(t[f"{name}', 'lora.append((grad_mid, turned(t["gate'),),
        "grad_expert_input", "grad_input",
    ),
    fault(
        "bases of grad_input rounded", "rounds the products with gate_proj and up_proj",
        (backward(_ROUND_BASE, "round_base=self.eager or len(operands) == 2"),), "grad_expert_input", "grad_input",
    ),
    fault(
        "adapters of grad_input rounded", "rounds the adapters' parts of grad_input",
        (backward(_ROUND_LORA, "round_lora=self.eager or len(operands) == 2"),), "grad_expert_input", "grad_input",
    ),
    fault(
        "grad_expert_input rounded", "rounds the gradient of each pair's input",
        (backward(_ADDED, _ADDED.replace("torch.float32", "step.dtype")),),
        "grad_expert_input", "grad_input", dtypes=BOTH,
    ),
    fault(
        "grad_input added in bf16", "rounds the sum over slots after every one of them (M34)",
        (forward(_TOTAL, "total = (total + value).to(output_ptr.dtype.element_ty).to(tl.float32)"),),
        "grad_input", "grad_input", dtypes=BOTH,
    ),
    fault(
        "grad_input overwritten", "keeps the gradient of the last slot alone (M33)",
        (forward(_TOTAL, "total = tl.where(taken, value, total)"),), "grad_input", "grad_input",
    ),
    fault(
        "grad_input in fp32", "writes grad_input in fp32 to memory for x's dtype (M7)",
        FP32_OUTPUT,
        "wrote_outside or out_of_bounds", "wrote_outside or out_of_bounds",
    ),
    fault(
        "grad_input weighted again", "multiplies by the routing weights once more",
        (backward('found["grad_expert_input"], None', 'found["grad_expert_input"], t["routing_weights"]'),),
        "grad_input", "grad_input",
    ),
    fault(
        "grad_input truncated", "rounds grad_input toward zero",
        (forward("total.to(output_ptr.dtype.element_ty)", truncated("total", "output_ptr.dtype.element_ty")),),
        "grad_input", "grad_input",
    ),
)  # fmt: skip

UNROUNDED = (
    _eager(
        "base not rounded", "keeps the product with down_proj in fp32, where the contract rounds it",
        (backward(_ROUND_BASE, "round_base=self.eager and len(operands) == 2"),),
        "grad_intermediate", "grad_gate_lora_b",
    ),
    _eager(
        "bases of grad_input not rounded", "keeps the products with gate_proj and up_proj in fp32",
        (backward(_ROUND_BASE, "round_base=self.eager and len(operands) == 1"),), "grad_expert_input", "grad_input",
    ),
    _eager(
        "adapter not rounded", "keeps the adapter's part of grad_intermediate in fp32, where the contract rounds it",
        (backward(_ROUND_LORA, "round_lora=self.eager and len(operands) == 2"),),
        "grad_intermediate", "grad_gate_lora_b",
    ),
    _eager(
        "adapters of grad_input not rounded", "keeps the adapters' parts of grad_input in fp32",
        (backward(_ROUND_LORA, "round_lora=self.eager and len(operands) == 1"),), "grad_expert_input", "grad_input",
    ),
    _eager(
        "grad_intermediate not rounded", "keeps grad_intermediate in fp32, where the contract rounds it",
        (backward(_GRAD_INTERMEDIATE, f"{_GRAD_INTERMEDIATE}, out_dtype=torch.float32"),),
        "grad_intermediate", "grad_gate_lora_b",
    ),
    _eager(
        "expert output not rounded", "keeps the recomputed output of an expert in fp32, where the contract rounds it",
        (backward(EXPERT_OUTPUT, f"{EXPERT_OUTPUT}, out_dtype=torch.float32"),),
        "expert_output", "grad_routing_weights",
    ),
)  # fmt: skip

EQUIVALENT = (
    fault(
        "weights of skipped pairs", "multiplies the zeros of skipped pairs by their weights, which may be NaN (M40)",
        (gradients("tl.load(weight_ptr + pair, mask=routed", "tl.load(weight_ptr + pair, mask=live"),),
        "grad_expert_output", "grad_expert_output", options="balanced",
        equivalent="no result depends on that stage of a skipped pair; with stages the copy is seen",
    ),
)  # fmt: skip

FAULTS = (*DOWN, *ACTIVATION, *INPUT, *UNROUNDED, *EQUIVALENT)
