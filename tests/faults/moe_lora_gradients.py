"""Faults of the gradients of the adapters and of the routing weights; one deed at a time."""

from __future__ import annotations

from tests.faults.moe_lora import BOTH, truncated
from tests.faults.moe_lora_backward import EXPERT_OUTPUT, backward, fault, gradients, outer
from tests.faults.moe_lora_routing import NO_DUPLICATES

ANY = " or ".join(f"grad_{name}_lora_{part}" for name in ("gate", "up", "down") for part in "ab")
_SCALED = "total = total * scaling"
_DOT = "total_0 = tl.dot(tl.trans(left), right, total_0, input_precision="
_STORED = "total.to(result_ptr.dtype.element_ty)"
_OLD = "total = unchanged + total"
_UNCHANGED = "total = tl.where(some, total, unchanged)"
_MIDDLE = 'grouped_pair(t["x"],'
_SORTED = 't["x"].repeat_interleave(step.routing.slots, 0)[step.routing.order].view(*grads[0].shape[:2], -1)'
_PAIR = "pair = tl.load(order_ptr + position, mask=live, other=0)"
_DOT_OF_PAIR = 'pair_dot(t["grad_output"], found["expert_output"]'

ADAPTERS = (
    fault(
        "gradients zero", "leaves the gradients of the adapters zero (M11)",
        (outer(_SCALED, "total = total * 0.0"),), "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "gradients not scaled", "does not multiply the gradients of the adapters by scaling (M36)",
        (outer(_SCALED, "total = total * 1.0"),), "grad_down_lora_a", "grad_down_lora_a", dtypes=BOTH,
    ),
    fault(
        "gate for intermediate", "takes the saved gate, where the gradient of A of down needs the intermediate (M13)",
        (backward('("grad_down_mid",), "intermediate"', '("grad_down_mid",), "saved_gate"'),),
        "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "rows in the order of experts", "reads the rows of x as if they were sorted by expert (M12)",
        (backward(_MIDDLE, _MIDDLE.replace('t["x"]', _SORTED)),), "gate_lora_mid", "grad_gate_lora_b",
    ),
    fault(
        "pairs in the order of tokens", "adds the first pairs, where those of the expert are due (M12)",
        (outer(_PAIR, "pair = position"),), "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "A of gate for up", "recomputes the middle of up with A of gate (M27)",
        (backward('(t["gate_lora_a"], t["up_lora_a"])', '(t["gate_lora_a"], t["gate_lora_a"])'),),
        "up_lora_mid", "grad_up_lora_b",
    ),
    fault(
        "gradient of grad_gate for up", "takes the middle of gate for the gradient of A of up",
        (backward('("grad_gate_mid", "grad_up_mid"), "x"', '("grad_gate_mid", "grad_gate_mid"), "x"'),),
        "grad_up_lora_a", "grad_up_lora_a",
    ),
    fault(
        "middle of B not recomputed", "takes grad_down_mid for down_lora_mid in the gradient of B of down",
        (backward('("grad_expert_output",), "down_lora_mid"', '("grad_expert_output",), "grad_down_mid"'),),
        "grad_down_lora_b", "grad_down_lora_b",
    ),
    fault(
        "gradients added in bf16", "rounds the sum over pairs after every 64 of them",
        (outer(f'{_DOT}"ieee")', f'{_DOT}"ieee").to(left.dtype).to(tl.float32)'),),
        ANY, ANY, dtypes=BOTH,
    ),
    fault(
        "gradients truncated", "rounds the gradients of the adapters toward zero",
        (outer(_STORED, truncated("total", "result_ptr.dtype.element_ty")),),
        "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "other steps left out", "adds no more than the first 64 pairs of an expert",
        (outer("range(first, last, STEP,", "range(first, tl.minimum(last, first + 1), STEP,"),),
        "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "last pair left out", "leaves the last pair of an expert out of its gradients",
        (outer("live = position < last", "live = position < last - 1"),), "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "experts without pairs not written", "does not write the gradients of experts without pairs (M39)",
        (outer(f"{_STORED}, mask=mask)", f"{_STORED}, mask=mask & some)"),), "unwritten", "unwritten",
    ),
    fault(
        "some overwritten", "overwrites the old gradients of B, and adds to those of A (M42)",
        (backward('t.get(f"old_{name}") for', 'None if name.endswith("b") else t.get(f"old_{name}") for'),),
        "grad_gate_lora_b", "grad_gate_lora_b",
    ),
    fault(
        "old gradients scaled", "multiplies the old gradients by scaling too",
        (outer(_OLD, "total = unchanged * scaling + total"),), "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "rounded before the old ones", "rounds the new gradients before it adds them to the old ones",
        (outer(_OLD, "total = unchanged + total.to(result_ptr.dtype.element_ty).to(tl.float32)"),),
        "grad_down_lora_a", "grad_down_lora_a", dtypes=BOTH,
    ),
    fault(
        "old gradients cleared", "clears the old gradients of experts without pairs",
        (outer(_UNCHANGED, "total = tl.where(some, total, 0.0)"),), "grad_down_lora_a", "grad_down_lora_a",
    ),
    fault(
        "duplicates collapsed", "counts an id that occurs twice in a row once, as a scatter would",
        NO_DUPLICATES, "grad_expert_output", "grad_down_lora_a",
    ),
)  # fmt: skip

ROUTING_WEIGHTS = (
    fault(
        "weights of the gradient", "multiplies by the weighted gradient, where grad_output is due",
        (
            backward(_DOT_OF_PAIR, _DOT_OF_PAIR.replace('t["grad_output"]', 'found["grad_expert_output"]')),
            gradients("grad_start, value_start = row_of(pair, slots, True)",
                      "grad_start, value_start = row_of(pair, slots, False)"),
        ),
        "grad_routing_weights", "grad_routing_weights",
    ),
    fault(
        "recomputed without adapter", "recomputes the outputs of experts without their adapters",
        (backward('((mid, t["down_lora_b"]),)', "()"),), "expert_output", "grad_routing_weights",
    ),
    fault(
        "recomputed output rounded", "rounds the recomputed outputs of experts",
        (backward(EXPERT_OUTPUT, f"{EXPERT_OUTPUT}, out_dtype=step.dtype"),),
        "expert_output", "grad_routing_weights", dtypes=BOTH,
    ),
    fault(
        "products rounded", "rounds the products of which grad_routing_weights is the sum",
        (gradients("total += grad * value", "total += (grad * value).to(tl.bfloat16).to(tl.float32)"),),
        "grad_routing_weights", "grad_routing_weights",
    ),
    fault(
        "last column left out", "leaves the last column out of grad_routing_weights",
        (gradients("mask = routed & (column < columns)", "mask = routed & (column < columns - 1)"),),
        "grad_routing_weights", "grad_routing_weights",
    ),
    fault(
        "skipped pairs not written", "does not write grad_routing_weights of skipped pairs",
        (gradients("keep_dims=True), mask=live)", "keep_dims=True), mask=routed)"),), "unwritten", "unwritten",
    ),
)  # fmt: skip

FAULTS = (*ADAPTERS, *ROUTING_WEIGHTS)
