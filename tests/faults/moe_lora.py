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
TO_ZERO = "(VALUE.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(TYPE)"

forward = partial(Edit, file="moe_lora.py")
linear = partial(Edit, file="grouped_linear.py")
matmul = partial(Edit, file="grouped_kernel.py")
planning = partial(Edit, file="grouped_plan.py")
tile = partial(Edit, file="grouped_tile.py")
epilogue = partial(Edit, file="grouped_epilogue.py")
fault = partial(Fault, op="moe_lora", variant="moe_lora+fused", options="exact", dtypes=("bf16",))
_eager = partial(fault, variant="moe_lora+eager")


FP32_OUTPUT = (
    forward("routing.local_experts, output,", "routing.local_experts, triton.reinterpret(output, tl.float32),"),
)


BASES, FROM_BASES = "gate_base or up_base or expert_output", "saved_gate or saved_up or output"


FP32_DOTS = (
    tile("first = tl.dot(left, right,", "first = tl.dot(left.to(tl.float32), right.to(tl.float32),"),
    tile("second = tl.dot(left, right,", "second = tl.dot(left.to(tl.float32), right.to(tl.float32),"),
    epilogue("tl.dot(middle, b,", "tl.dot(middle.to(tl.float32), b.to(tl.float32),"),
)


def truncated(value: str, dtype: str) -> str:
    """Source text that rounds an fp32 value to bf16 toward zero."""
    return TO_ZERO.replace("VALUE", value).replace("TYPE", dtype)


_LORA = "value = value + rounded(rounded(product, A, ROUND) * adapter.scaling, A, ROUND)"
_GATE_AND_UP = "gate, up = rounded(gate, A, ROUND), rounded(up, A, ROUND)"
_DOWN_BASE = "        round_base=eager,\n        round_lora=eager,\n    )"
_OUT_DTYPE = "out_dtype=dtype if eager else torch.float32"
_MIDDLES = "grouped_pair(x, lora_a, routing) if lora_a else []"
_DOWN_MIDDLE = "grouped_linear(((intermediate, lora_a),), routing, out_dtype=dtype)"
_SCALING = "scaling=float(scaling)"
_FIRST_DOT = 'first = tl.dot(left, right, first, input_precision="ieee")'
_PAIR_DTYPE = "new_rows(routing, weights[0].shape[1], rows.dtype)"
_ADAPTERS = "tuple(zip(middles, lora_b, strict=True))"
_SILU = "rounded(gate * tl.sigmoid(gate), A, ROUND)"
_SAVED_GATE = "store(outputs.saved_gate, gate,"
_INTERMEDIATE = "store(outputs.intermediate, silu * up,"
_ROWS = "return tl.load(pointers, mask=mask, other=0.0)"
_PARAMETER = 'parameters.get(f"{name}_{part}")'
_COMBINE = 'combine(found["expert_output"], routing_weights,'
_TOTAL = "total += rounded(value, values_ptr.dtype.element_ty, ROUND)"
_OUTPUT = "total.to(output_ptr.dtype.element_ty)"

ROUNDING = (
    fault(
        "base rounded", "rounds the base products of gate, up and down",
        (planning("round_base=round_base, round_lora", "round_base=True, round_lora"),),
        "gate_base", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "base of down rounded", "rounds the base product of down alone",
        (forward(_DOWN_BASE, _DOWN_BASE.replace("base=eager", "base=True")),), "expert_output", "output",
    ),
    fault(
        "middle in fp32", "keeps the middles of the adapters of gate and up in fp32",
        (linear(_PAIR_DTYPE, _PAIR_DTYPE.replace("rows.dtype", "torch.float32")), *FP32_DOTS),
        "gate_lora_mid", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "product with B rounded", "rounds the products with B",
        (epilogue(_LORA, _LORA.replace("product, A, ROUND", "product, A, True")),),
        "gate", "saved_gate or intermediate",
    ),
    fault(
        "scaled product rounded", "rounds scaling times the products with B",
        (epilogue(_LORA, _LORA.replace("scaling, A, ROUND", "scaling, A, True")),), "gate", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "gate and up rounded", "rounds gate and up before they are activated",
        (epilogue(_GATE_AND_UP, _GATE_AND_UP.replace("ROUND", "True")),), "intermediate", "intermediate", dtypes=BOTH,
    ),
    fault(
        "silu rounded", "rounds silu(gate)",
        (epilogue(_SILU, _SILU.replace("ROUND", "True")),), "intermediate", "intermediate", dtypes=BOTH,
    ),
    fault(
        "sigmoid rounded", "rounds the sigmoid",
        (epilogue(_SILU, _SILU.replace("tl.sigmoid(gate)", "tl.sigmoid(gate).to(A).to(tl.float32)")),),
        "intermediate", "intermediate", options="balanced",
    ),
    fault(
        "intermediate truncated", "rounds the intermediate toward zero",
        (epilogue(_INTERMEDIATE, _INTERMEDIATE.replace("silu * up", truncated("(silu * up)", "A"))),),
        "intermediate", "intermediate",
    ),
    fault(
        "saved gate truncated", "rounds the gate that it saves toward zero",
        (epilogue(_SAVED_GATE, f"store(outputs.saved_gate, {truncated('gate', 'A')},"),), "saved_gate", "saved_gate",
    ),
    fault(
        "expert output rounded", "rounds what each expert puts out",
        (forward(_OUT_DTYPE, "out_dtype=dtype"),),
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
        (tile(_FIRST_DOT, f"{_FIRST_DOT}.to(tl.bfloat16).to(tl.float32)"),), "gate_base", "saved_gate",
    ),
    fault(
        "routing weights rounded", "rounds the routing weights to x's dtype",
        (forward(_COMBINE, _COMBINE.replace("weights", "weights.to(x.dtype)")),),
        "output", "output",
    ),
)  # fmt: skip

UNROUNDED = (
    _eager(
        "base not rounded", "keeps the base products of gate and up in fp32, where the contract rounds them",
        (forward("round_base=eager, round", "round_base=False, round"),), "gate_base", "saved_gate", dtypes=BOTH,
    ),
    _eager(
        "adapter not rounded", "keeps the products with B of gate and up in fp32, where the contract rounds them",
        (forward("round_lora=eager, round", "round_lora=False, round"),), "gate", "saved_gate", dtypes=BOTH,
    ),
    _eager(
        "gate not rounded", "activates gate and up in fp32, where the contract rounds them",
        (epilogue(_GATE_AND_UP, _GATE_AND_UP.replace("ROUND", "False")),), "intermediate", "intermediate",
    ),
    _eager(
        "silu not rounded", "keeps silu(gate) in fp32, where the contract rounds it",
        (epilogue(_SILU, _SILU.replace("ROUND", "False")),), "intermediate", "intermediate",
    ),
    _eager(
        "expert output not rounded", "keeps what each expert puts out in fp32, where the contract rounds it",
        (forward(_OUT_DTYPE, "out_dtype=torch.float32"),), "expert_output", "output",
    ),
    _eager(
        "weighted output not rounded", "keeps the weighted outputs in fp32, where the contract rounds them",
        (forward("ROUND=round_weighted", "ROUND=False"),), "output", "output",
    ),
)  # fmt: skip

ADAPTERS = (
    fault(
        "adapters left out", "leaves out all adapters (M24)",
        (linear(_SCALING, "scaling=0.0"),), "gate", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "adapter of down left out", "leaves out the adapter of down",
        (forward("scaling=scaling,\n        out_dtype", "scaling=0.0,\n        out_dtype"),), "expert_output", "output",
    ),
    fault(
        "not scaled", "does not multiply the adapters by scaling (M25)",
        (linear(_SCALING, "scaling=1.0"),), "gate", "saved_gate",
    ),
    fault(
        "scaled twice", "multiplies by scaling twice",
        (linear(_SCALING, "scaling=float(scaling) ** 2"),), "gate", "saved_gate",
    ),
    fault(
        "scaled by the root of the rank", "multiplies by alpha / √r, where alpha / r is due",
        (linear(_SCALING, "scaling=float(scaling) * (b[0].shape[-1] if b else 1) ** 0.5"),), "gate", "saved_gate",
    ),
    fault(
        "middle scaled", "multiplies the middle by scaling, where the product with B is due",
        (
            forward(_MIDDLES, f"[scaling * middle for middle in {_MIDDLES.partition(' if')[0]}]"),
            forward(_DOWN_MIDDLE, f"scaling * {_DOWN_MIDDLE}"), linear(_SCALING, "scaling=1.0"),
        ),
        "gate_lora_mid", "saved_gate",
    ),
    fault(
        "scaling rounded", "rounds scaling to bf16",
        (linear(_SCALING, "scaling=torch.tensor(scaling).bfloat16().item()"),),
        "gate", "saved_gate", options="balanced",
    ),
    fault(
        "up with A of gate", "multiplies by A of gate for up (M27)",
        (forward(_PARAMETER, 'parameters.get(f"{name}_{part}".replace("up_lora_a", "gate_lora_a"))'),),
        "up_lora_mid", "saved_up",
    ),
    fault(
        "up with B of gate", "multiplies by B of gate for up (M27)",
        (forward(_PARAMETER, 'parameters.get(f"{name}_{part}".replace("up_lora_b", "gate_lora_b"))'),),
        "up", "saved_up",
    ),
    fault(
        "middle of another pair", "reads the middle of the pair before, as from scratch that two workers share (M14)",
        (forward(_ADAPTERS, _ADAPTERS.replace("middles", "[m.flatten(0, 1).roll(1, 0).view_as(m) for m in middles]")),),
        "gate", "saved_gate",
    ),
)  # fmt: skip

VALUES = (
    fault(
        "silu of up", "computes gate · silu(up) (M29)",
        (epilogue(_SILU, _SILU.replace("gate", "up")), epilogue(_INTERMEDIATE, _INTERMEDIATE.replace("up", "gate"))),
        "intermediate", "intermediate", dtypes=BOTH,
    ),
    fault(
        "weights of gate and up swapped", "reads the base weights of up for gate and those of gate for up (M29)",
        (forward("base = (gate_proj, up_proj, down_proj)", "base = (up_proj, gate_proj, down_proj)"),),
        "gate_base", "saved_gate",
    ),
    fault(
        "saved gate and up swapped", "saves gate as up, and up as gate",
        (
            epilogue(_SAVED_GATE, _SAVED_GATE.replace("saved_gate", "saved_up")),
            epilogue("store(outputs.saved_up, up,", "store(outputs.saved_gate, up,"),
        ),
        "saved_gate", "saved_gate",
    ),
    fault(
        "saved gate activated", "saves silu(gate) for gate",
        (epilogue(_SAVED_GATE, "store(outputs.saved_gate, gate * tl.sigmoid(gate),"),),
        "saved_gate", "saved_gate", options="balanced",
    ),
    fault(
        "gelu for silu", "activates by gate · sigmoid(1.702 gate)",
        (epilogue(_SILU, _SILU.replace("sigmoid(gate)", "sigmoid(1.702 * gate)")),),
        "intermediate", "intermediate", options="balanced",
    ),
    fault(
        "gate clamped", "activates no gate above 7, as models with a limit do",
        (epilogue(_SILU, "rounded(tl.minimum(gate, 7.0) * tl.sigmoid(gate), A, ROUND)"),),
        "intermediate", "intermediate",
    ),
    fault(
        "weights normalized", "divides the routing weights by their sum",
        (forward(_COMBINE, _COMBINE.replace("weights", "weights / routing_weights.sum(-1, keepdim=True)")),),
        "output", "output",
    ),
    fault(
        "output not weighted", "adds what the experts put out without their weights",
        (forward(_COMBINE, _COMBINE.replace("routing_weights", "None")),), "output", "output",
    ),
    fault(
        "last slot wins", "overwrites what the slots before have put out",
        (forward(_TOTAL, "total = tl.where(taken, value, total)"),), "output", "output",
    ),
    fault(
        "NaN read as zero", "reads NaN in x as zero (Q11)",
        (tile(_ROWS, f"rows = {_ROWS[7:]}\n    return tl.where(rows == rows, rows, 0.0).to(rows.dtype)"),),
        "gate_base or up or down_lora_mid", "saved_gate or saved_up or output", options="balanced",
    ),
)  # fmt: skip

FAULTS = (*ROUNDING, *UNROUNDED, *ADAPTERS, *VALUES)
