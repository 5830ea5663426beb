"""Faults of the mixture of experts with LoRA in who computes what, and in what is read and written."""

from __future__ import annotations

from functools import partial

from tests.faults.moe_lora import BASES, BOTH, FP32_OUTPUT, FROM_BASES, fault, forward, linear
from tests.faults.plant import Edit

_route = partial(Edit, file="moe_lora_routing.py")

_HELD = "held = (ids >= first_expert) & (ids < first_expert + experts)"
_LOCAL = "local_experts = torch.where(held, ids - first_expert, experts)"
_DUPLICATE = "(expert_ids[:, :, None] == expert_ids[:, None, :]).tril(-1).any(-1).reshape(-1)"
NO_DUPLICATES = (_route(_HELD, f"{_HELD} & ~{_DUPLICATE}"),)
_EARLIER = "torch.nn.functional.one_hot(local_experts, experts + 1).cumsum(0).gather(1, local_experts[:, None])[:, 0]"
_WEIGHT = "weight_0_ptr + expert * weight_0_expert_stride, n, n_size, weight_0_n_stride"
_ROW = "rows_0_ptr, pair // rows_0_slots, live, rows_0_row_stride"
_GRID = "(blocks * triton.cdiv(n, block_n),)"

ROUTING = (
    fault(
        "duplicates collapsed", "counts an id that occurs twice in a row once, as a scatter would",
        NO_DUPLICATES, "gate_base", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "foreign ids clamped", "gives pairs of foreign experts to the first or the last one here (M38)",
        (_route(_LOCAL, "local_experts = (ids - first_expert).clamp(0, experts - 1)"),), "gate_base", "saved_gate",
    ),
    fault(
        "id of -1 wraps", "takes an id of -1 for the last expert, as Python counts (M38)",
        (_route(_LOCAL, _LOCAL.replace("first_expert, experts", "first_expert, experts - (ids == -1).long()")),),
        "gate_base", "saved_gate",
    ),
    fault(
        "zero times NaN", "computes skipped pairs with the last expert, and multiplies their rows by zero (M40)",
        (
            linear("k_size = tl.where(taken, k_size, 0)", "kept = 1 - expert // experts"),
            linear("rank = tl.where(taken, rank, 0)", "expert += kept - 1"),
            linear("base = rounded(base, A, ROUND_BASE)", "base = rounded(base, A, ROUND_BASE) * kept"),
            linear("value = tl.where(taken, value, 0.0)", "value = value * kept"),
        ),
        "gate_base", "saved_gate", options="balanced",
    ),
    fault(
        "weights of skipped pairs", "multiplies the zeros of skipped pairs by their weights, which may be NaN (M40)",
        (forward("mask=taken, other=0.0)\n", "mask=row < tokens, other=0.0)\n"),),
        "output", "output", options="balanced",
    ),
    fault(
        "first expert ignored", "takes the ids to start from 0",
        (forward("len(weights.gate_proj), first_expert)", "len(weights.gate_proj), 0)"),), "gate_base", "saved_gate",
    ),
    fault(
        "last token left out", "skips the pairs of the last token",
        (_route(_HELD, f"{_HELD} & (torch.arange(len(ids), device=ids.device) < len(ids) - expert_ids.shape[1])"),),
        "gate_base", "saved_gate",
    ),
    fault(
        "capacity", "skips the pairs of an expert from the ninth on, as experts with a capacity do",
        (_route(_LOCAL, f"{_LOCAL}\n    local_experts = torch.where({_EARLIER} > 8, experts, local_experts)"),),
        "gate_base", "saved_gate",
    ),
    fault(
        "other blocks left out", "computes no more than the first block of pairs of an expert",
        (_route("per_expert = (offsets.diff() + rows - 1) // rows", "per_expert = offsets.diff().clamp(max=1)"),),
        "nondeterministic or uninitialised", "nondeterministic or uninitialised",
    ),
    fault(
        "first expert's weights", "multiplies by the base weights of the first expert for all",
        (linear(_WEIGHT, _WEIGHT.replace("expert * weight_0_expert_stride", "0")),),
        "gate_base", "saved_gate", options="int8",
    ),
    fault(
        "rows in the order of experts", "reads row n of x for the pair that is sorted to place n",
        (linear(_ROW, _ROW.replace("pair", "position")),),
        "gate_base or down_lora_mid", "saved_gate or output",
    ),
)  # fmt: skip

MEMORY = (
    fault(
        "strides of x ignored", "takes the rows of x to follow each other without a gap",
        (linear(_ROW, _ROW.replace("rows_0_row_stride", "k_size")),),
        "gate_base or out_of_bounds", "saved_gate or out_of_bounds",
    ),
    fault(
        "strides of weights ignored", "takes the rows of a base weight to follow each other without a gap",
        (linear(_WEIGHT, _WEIGHT.replace("weight_0_n_stride", "k_size")),),
        f"{BASES} or out_of_bounds", f"{FROM_BASES} or out_of_bounds",
    ),
    fault(
        "strides of experts ignored", "takes the base weights of experts to follow each other without a gap",
        (linear(_WEIGHT, _WEIGHT.replace("weight_0_expert_stride", "(n_size * k_size)")),),
        "gate_base or up_base or out_of_bounds", "saved_gate or saved_up or out_of_bounds",
    ),
    fault(
        "first block of columns only", "writes the first block of columns of a product, here one of 16, alone (M45)",
        (linear("LARGEST_BLOCK_N = 128", "LARGEST_BLOCK_N = 16"), linear(_GRID, "(blocks,)")),
        "nondeterministic or uninitialised", "nondeterministic or uninitialised",
    ),
    fault(
        "last element of a dot left out", "leaves the last element out of dots",
        (linear("left_mask = live[:, None] & (k < k_size)", "left_mask = live[:, None] & (k < k_size - 1)"),),
        "gate_base", "saved_gate",
    ),
    fault(
        "lanes past the row read", "reads what lies behind a row of x, and multiplies it by zeros",
        (linear("left_mask = live[:, None] & (k < k_size)", "left_mask = live[:, None] & (k < BLOCK_K * 99)"),),
        "nondeterministic or out_of_bounds", "nondeterministic or out_of_bounds",
    ),
    fault(
        "fp32 in the output", "writes the output in fp32 to memory for x's dtype (M1)",
        FP32_OUTPUT, "wrote_outside or out_of_bounds", "wrote_outside or out_of_bounds",
    ),
    fault(
        "last row of the output not written", "does not write the last token's row of the output",
        (forward("mask = (row < tokens) & inside", "mask = (row < tokens - 1) & inside"),), "unwritten", "unwritten",
    ),
)  # fmt: skip

EQUIVALENT = (
    fault(
        "rows of skipped pairs not cleared", "stores what it has computed for skipped pairs",
        (linear("value = tl.where(taken, value, 0.0)", "value = value + 0.0"),), "gate", "saved_gate",
        equivalent="nothing is read for skipped pairs, and zeros times a scaling that fp32 has are zeros",
    ),
)  # fmt: skip

FAULTS = (*ROUTING, *MEMORY, *EQUIVALENT)
