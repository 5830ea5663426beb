"""Faults of the mixture of experts with LoRA: what is rounded, adapters, activation, weights; one deed at a time.

Numbers such as M23 are those of `tests/faults/known_bugs.py`.
"""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

GROUPS = {
    **{kind: {dtype: f"{dtype}-{kind}" for dtype in ("bf16", "fp16")} for kind in ("exact", "balanced")},
    "shards": {"bf16": "bf16-exact-shards", "fp16": "fp16-exact-shards"},
    **{scheme: {"bf16": f"bf16-{scheme}"} for scheme in ("int8", "int4_asymmetric", "int4_symmetric", "mxfp4")},
}
"""Options of a fault → dtype of x → the group of cases that it is hunted with; the same for the gradients."""

BOTH = ("bf16", "fp16")
DOT = "total = tl.dot(left, right, total, input_precision="
FP32_DOT = DOT.replace("left, right", "left.to(tl.float32), right.to(tl.float32)")
TO_ZERO = "(VALUE.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(TYPE)"

forward = partial(Edit, file="moe_lora.py")
linear = partial(Edit, file="grouped_linear.py")
fault = partial(Fault, op="moe_lora", variant="moe_lora+fused", options="exact", dtypes=("bf16",))
_eager = partial(fault, variant="moe_lora+eager")


FP32_OUTPUT = (
    forward("routing.local_experts, output,", "routing.local_experts, triton.reinterpret(output, tl.float32),"),
)


BASES, FROM_BASES = "gate_base or up_base or expert_output", "saved_gate or saved_up or output"


def truncated(value: str, dtype: str) -> str:
    """Source text that rounds an fp32 value to bf16 toward zero."""
    return TO_ZERO.replace("VALUE", value).replace("TYPE", dtype)


_LORA = "value = value + rounded(rounded(product, A, ROUND_LORA) * scaling, A, ROUND_LORA)\n    if middle_1_ptr"
_OUT_DTYPE = "out_dtype=rows.dtype if eager else torch.float32"
_MIDDLE = '{"lora_mid": grouped_linear(((rows, lora_a),), routing, out_dtype=rows.dtype)}'
_SILU = "rounded(gate * tl.sigmoid(gate), A, ROUND)"
_ROWS = "return tl.load(pointers, mask=mask, other=0.0)"
_WEIGHTS = "parameters = weights.operands(x)"
_PARAMETER = 'parameters[f"{name}_{part}"]'
_TOTAL = "total += rounded(value, values_ptr.dtype.element_ty, ROUND)"
_OUTPUT = "total.to(output_ptr.dtype.element_ty)"

ROUNDING = (
    fault(
        "base rounded", "rounds the base products of gate, up and down",
        (linear("ROUND_BASE=round_base", "ROUND_BASE=True"),), "gate_base", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "base of down rounded", "rounds the base product of down alone",
        (forward("round_base=eager", 'round_base=eager or name == "down"'),), "expert_output", "output",
    ),
    fault(
        "middle in fp32", "keeps the middles of the adapters of gate and up in fp32",
        (
            forward(_MIDDLE, _MIDDLE.replace("rows.dtype", 'rows.dtype if name == "down" else torch.float32')),
            linear(DOT, FP32_DOT),
        ),
        "gate_lora_mid", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "product with B rounded", "rounds the products with B",
        (linear(_LORA, _LORA.replace("product, A, ROUND_LORA", "product, A, True")),),
        "gate", "saved_gate or intermediate",
    ),
    fault(
        "scaled product rounded", "rounds scaling times the products with B",
        (linear(_LORA, _LORA.replace("A, ROUND_LORA)\n", "A, True)\n")),), "gate", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "gate and up rounded", "rounds gate and up before they are activated",
        (forward(_OUT_DTYPE, _OUT_DTYPE.replace("eager", 'eager or name != "down"')),),
        "gate", "intermediate", dtypes=BOTH,
    ),
    fault(
        "silu rounded", "rounds silu(gate)",
        (forward("ROUND=round_silu", "ROUND=True"),), "intermediate", "intermediate", dtypes=BOTH,
    ),
    fault(
        "sigmoid rounded", "rounds the sigmoid",
        (forward(_SILU, _SILU.replace("tl.sigmoid(gate)", "tl.sigmoid(gate).to(A).to(tl.float32)")),),
        "intermediate", "intermediate", options="balanced",
    ),
    fault(
        "intermediate truncated", "rounds the intermediate toward zero",
        (forward("(silu * up).to(A)", truncated("(silu * up)", "A")),), "intermediate", "intermediate",
    ),
    fault(
        "saved gate truncated", "rounds the gate that it saves toward zero",
        (forward("gate.to(A), mask", f"{truncated('gate', 'A')}, mask"),), "saved_gate", "saved_gate",
    ),
    fault(
        "expert output rounded", "rounds what each expert puts out",
        (forward(_OUT_DTYPE, _OUT_DTYPE.replace("eager", 'eager or name == "down"')),),
        "expert_output", "output", dtypes=BOTH,
    ),
    fault(
        "weighted output rounded", "rounds routing weight times what an expert puts out",
        (forward(_TOTAL, _TOTAL.replace("values_ptr.dtype.element_ty, ROUND", "output_ptr.dtype.element_ty, True")),),
        "output", "output", dtypes=BOTH,
    ),
    fault(
        "output added in bf16", "rounds the sum over slots after every one of them (M34)",
        (forward(_TOTAL, "total = (total + value).to(output_ptr.dtype.element_ty).to(tl.float32)"),),
        "output", "output", dtypes=BOTH,
    ),
    fault(
        "output truncated", "rounds the output toward zero",
        (forward(_OUTPUT, truncated("total", "output_ptr.dtype.element_ty")),), "output", "output",
    ),
    fault(
        "dots added in bf16", "rounds the sum of a dot after every block of it",
        (linear(f'{DOT}"ieee")', f'{DOT}"ieee").to(tl.bfloat16).to(tl.float32)'),), "gate_base", "saved_gate",
    ),
    fault(
        "routing weights rounded", "rounds the routing weights to x's dtype",
        (forward('combine(down["value"], routing_weights,', 'combine(down["value"], routing_weights.to(x.dtype),'),),
        "output", "output",
    ),
)  # fmt: skip

UNROUNDED = (
    _eager(
        "base not rounded", "keeps the base products of gate and up in fp32, where the contract rounds them",
        (forward("round_base=eager", 'round_base=eager and name == "down"'),), "gate_base", "saved_gate", dtypes=BOTH,
    ),
    _eager(
        "adapter not rounded", "keeps the products with B of gate and up in fp32, where the contract rounds them",
        (forward("round_lora=eager", 'round_lora=eager and name == "down"'),), "gate", "saved_gate", dtypes=BOTH,
    ),
    _eager(
        "gate not rounded", "activates gate and up in fp32, where the contract rounds them",
        (forward(_OUT_DTYPE, _OUT_DTYPE.replace("eager", 'eager and name == "down"')),), "gate", "intermediate",
    ),
    _eager(
        "silu not rounded", "keeps silu(gate) in fp32, where the contract rounds it",
        (forward("ROUND=round_silu", "ROUND=False"),), "intermediate", "intermediate",
    ),
    _eager(
        "expert output not rounded", "keeps what each expert puts out in fp32, where the contract rounds it",
        (forward(_OUT_DTYPE, _OUT_DTYPE.replace("eager", 'eager and name != "down"')),), "expert_output", "output",
    ),
    _eager(
        "weighted output not rounded", "keeps the weighted outputs in fp32, where the contract rounds them",
        (forward("ROUND=round_weighted", "ROUND=False"),), "output", "output",
    ),
)  # fmt: skip

ADAPTERS = (
    fault(
        "adapters left out", "leaves out all adapters (M24)",
        (forward("scaling=scaling,", "scaling=0.0,"),), "gate", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "adapter of down left out", "leaves out the adapter of down",
        (forward("scaling=scaling,", 'scaling=0.0 if name == "down" else scaling,'),), "expert_output", "output",
    ),
    fault(
        "not scaled", "does not multiply the adapters by scaling (M25)",
        (forward("scaling=scaling,", "scaling=1.0,"),), "gate", "saved_gate",
    ),
    fault(
        "scaled twice", "multiplies by scaling twice",
        (forward("scaling=scaling,", "scaling=scaling * scaling,"),), "gate", "saved_gate",
    ),
    fault(
        "scaled by the root of the rank", "multiplies by alpha / √r, where alpha / r is due",
        (forward("scaling=scaling,", "scaling=scaling * lora_b.shape[-1] ** 0.5,"),), "gate", "saved_gate",
    ),
    fault(
        "middle scaled", "multiplies the middle by scaling, where the product with B is due",
        (
            forward(_MIDDLE, _MIDDLE.replace("grouped_linear", "scaling * grouped_linear")),
            forward("scaling=scaling,", "scaling=1.0,"),
        ),
        "gate_lora_mid", "saved_gate",
    ),
    fault(
        "scaling rounded", "rounds scaling to bf16",
        (linear("scaling=float(scaling)", "scaling=torch.tensor(scaling).bfloat16().item()"),),
        "gate", "saved_gate", options="balanced",
    ),
    fault(
        "up with A of gate", "multiplies by A of gate for up (M27)",
        (forward(_PARAMETER, 'parameters[f"{name}_{part}".replace("up_lora_a", "gate_lora_a")]'),),
        "up_lora_mid", "saved_up",
    ),
    fault(
        "up with B of gate", "multiplies by B of gate for up (M27)",
        (forward(_PARAMETER, 'parameters[f"{name}_{part}".replace("up_lora_b", "gate_lora_b")]'),),
        "up", "saved_up",
    ),
    fault(
        "middle of another pair", "reads the middle of the pair before, as from scratch that two workers share (M14)",
        (
            forward(
                'lora = ((found["lora_mid"], lora_b),)',
                'lora = ((found["lora_mid"].flatten(0, 1).roll(1, 0).view_as(found["lora_mid"]), lora_b),)',
            ),
        ),
        "gate", "saved_gate",
    ),
)  # fmt: skip

VALUES = (
    fault(
        "silu of up", "computes gate · silu(up) (M29)",
        (forward(_SILU, _SILU.replace("gate", "up")), forward("(silu * up).to(A)", "(silu * gate).to(A)")),
        "intermediate", "intermediate", dtypes=BOTH,
    ),
    fault(
        "weights of gate and up swapped", "reads the base weights of up for gate and those of gate for up (M29)",
        (forward(_WEIGHTS, f'{_WEIGHTS}\n        parameters |= {{"gate_proj": parameters["up_proj"], '
                           '"up_proj": parameters["gate_proj"]}'),),
        "gate_base", "saved_gate",
    ),
    fault(
        "saved gate and up swapped", "saves gate as up, and up as gate",
        (forward('names = ("saved_gate", "saved_up",', 'names = ("saved_up", "saved_gate",'),),
        "saved_gate", "saved_gate",
    ),
    fault(
        "saved gate activated", "saves silu(gate) for gate",
        (forward("gate.to(A), mask", "(gate * tl.sigmoid(gate)).to(A), mask"),),
        "saved_gate", "saved_gate", options="balanced",
    ),
    fault(
        "gelu for silu", "activates by gate · sigmoid(1.702 gate)",
        (forward(_SILU, _SILU.replace("sigmoid(gate)", "sigmoid(1.702 * gate)")),),
        "intermediate", "intermediate", options="balanced",
    ),
    fault(
        "gate clamped", "activates no gate above 7, as models with a limit do",
        (forward(_SILU, "rounded(tl.minimum(gate, 7.0) * tl.sigmoid(gate), A, ROUND)"),),
        "intermediate", "intermediate",
    ),
    fault(
        "weights normalized", "divides the routing weights by their sum",
        (
            forward(
                'combine(down["value"], routing_weights,',
                'combine(down["value"], routing_weights / routing_weights.sum(-1, keepdim=True),',
            ),
        ),
        "output", "output",
    ),
    fault(
        "output not weighted", "adds what the experts put out without their weights",
        (forward('combine(down["value"], routing_weights,', 'combine(down["value"], None,'),), "output", "output",
    ),
    fault(
        "last slot wins", "overwrites what the slots before have put out",
        (forward(_TOTAL, "total = tl.where(taken, value, total)"),), "output", "output",
    ),
    fault(
        "NaN read as zero", "reads NaN in x as zero (Q11)",
        (linear(_ROWS, f"rows = {_ROWS[7:]}\n    return tl.where(rows == rows, rows, 0.0).to(rows.dtype)"),),
        "gate_base or up", "saved_gate or saved_up", options="balanced",
    ),
)  # fmt: skip

FAULTS = (*ROUNDING, *UNROUNDED, *ADAPTERS, *VALUES)
