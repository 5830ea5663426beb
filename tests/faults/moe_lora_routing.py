"""Faults of the mixture of experts with LoRA in who computes what, and in what is read and written."""

from __future__ import annotations

from functools import partial

from tests.faults.moe_lora import (
    BASES,
    BOTH,
    FP32_OUTPUT,
    FROM_BASES,
    epilogue,
    fault,
    forward,
    linear,
    matmul,
    planning,
    tile,
)
from tests.faults.plant import Edit

_route = partial(Edit, file="moe_lora_routing.py")

_SIZES = "tokens, slots = expert_ids.shape"
_HELD = "tl.where((local >= 0) & (local < experts), local, experts)"
_WRAPPED = "experts - (local == -1 - first_expert).to(tl.int32)"
_DUPLICATE = "(expert_ids[:, :, None] == expert_ids[:, None, :]).tril(-1).any(-1)"
_NUMBER = "(expert_ids.long() - first_expert).clamp(-1, experts).add(1).reshape(-1)"
EARLIER = f"torch.nn.functional.one_hot({_NUMBER}).cumsum(0).gather(1, {_NUMBER}[:, None]).view_as(expert_ids)"
_ROW = "(pairs.pair // rows.slots).to(tl.int64) * rows.stride"
_TABLE = "from grouped_tile import PairTable, RowOperand,"
_TAKEN = "            first, second = sums(work, pairs_of(table, block, expert, BLOCK_M),"
_POSITIONS = "tl.load(block_starts_ptr + block).to(tl.int32) + tl.arange(0, BLOCK_M)"
_USED = "(end - start + rows - 1) // rows"
_K = "n * weight.n_stride + k * weight.k_stride, mask"
_STRIDES = "list(seen.stride())"
_LAST = "pairs.live[:, None] & (k < k_size)[None, :]"


def without(pairs: str) -> Edit:
    """Skip the pairs [T, k] for which this is true."""
    return _route(_SIZES, f"expert_ids = torch.where({pairs}, -1, expert_ids)\n    {_SIZES}")


NO_DUPLICATES = (without(_DUPLICATE),)

ROUTING = (
    fault(
        "duplicates collapsed", "counts an id that occurs twice in a row once, as a scatter would",
        NO_DUPLICATES, "gate_base", "saved_gate", dtypes=BOTH,
    ),
    fault(
        "foreign ids clamped", "gives pairs of foreign experts to the first or the last one here (M38)",
        (_route(_HELD, "tl.minimum(tl.maximum(local, 0), experts - 1)"),), "gate_base", "saved_gate",
    ),
    fault(
        "id of -1 wraps", "takes an id of -1 for the last expert, as Python counts (M38)",
        (_route(_HELD, _HELD.replace("local, experts)", f"local, {_WRAPPED})")),),
        "gate_base", "saved_gate",
    ),
    fault(
        "zero times NaN", "computes skipped pairs with the last expert, and multiplies their rows by zero (M40)",
        (
            tile("TilePairs(pair, live, expert,", "TilePairs(pair, live, tl.minimum(expert, table.experts - 1),"),
            tile("k_size = tl.where(pairs.taken, k_size, 0)", "kept = tl.where(pairs.taken, 1.0, 0.0)"),
            tile("return first, second", "return first * kept, second * kept"),
            epilogue("(r < rank) & pairs.taken", "r < rank"),
            epilogue("tl.where(pairs.taken, value, 0.0)", "value * tl.where(pairs.taken, 1.0, 0.0)"),
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
        (without("torch.arange(len(expert_ids), device=expert_ids.device)[:, None] == len(expert_ids) - 1"),),
        "gate_base", "saved_gate",
    ),
    fault(
        "capacity", "skips the pairs of an expert from the ninth on, as experts with a capacity do",
        (without(f"{EARLIER} > 8"),),
        "gate_base", "saved_gate",
    ),
    fault(
        "other blocks left out", "computes no more than the first block of pairs of an expert",
        (
            _route(f"before += {_USED}", "before += tl.minimum(end - start, 1)"),
            _route(f"used = {_USED}", "used = tl.minimum(end - start, 1)"),
        ),
        "nondeterministic or uninitialised or unwritten", "nondeterministic or uninitialised or unwritten",
    ),
    fault(
        "first expert's weights", "multiplies by the base weights of the first expert for all",
        (tile("weight.data + expert.to(tl.int64) * weight.expert_stride", "weight.data"),),
        "gate_base", "saved_gate", options="int8",
    ),
    fault(
        "rows in the order of experts", "reads row n of x for the pair that is sorted to place n",
        (
            matmul(_TABLE, _TABLE.replace("RowOperand", "RowOperand, TilePairs")),
            matmul(
                _TAKEN,
                f"            pairs = pairs_of(table, block, expert, BLOCK_M)\n"
                f"            pairs = TilePairs({_POSITIONS}, pairs.live, pairs.expert, pairs.taken)\n"
                f"            first, second = sums(work, pairs,",
            ),
        ),
        "gate_base or down_lora_mid", "saved_gate or output",
    ),
)  # fmt: skip

MEMORY = (
    fault(
        "strides of x ignored", "takes the rows of x to follow each other without a gap",
        (tile(_ROW, _ROW.replace("rows.stride", "k_size")),),
        "gate_base or out_of_bounds", "saved_gate or out_of_bounds",
    ),
    fault(
        "strides of weights ignored", "takes the rows of a base weight to follow each other without a gap",
        (
            linear(_STRIDES, "[seen.stride(0), seen.shape[2], 1]"),
            tile(_K, _K.replace("weight.n_stride", "k_size")),
        ),
        f"{BASES} or out_of_bounds", f"{FROM_BASES} or out_of_bounds",
    ),
    fault(
        "strides of experts ignored", "takes the base weights of experts to follow each other without a gap",
        (
            linear(_STRIDES, "[seen.shape[1] * seen.shape[2], *seen.stride()[1:]]"),
            tile("* weight.expert_stride", "* (n_size * k_size)"),
        ),
        "gate_base or up_base or out_of_bounds", "saved_gate or saved_up or out_of_bounds",
    ),
    fault(
        "first block of columns only", "writes the first block of columns of a product, here one of 16, alone (M45)",
        (
            planning("LARGEST_BLOCK_N = 128", "LARGEST_BLOCK_N = 16"),
            planning("return TilePlan(variant, blocks, columns,", "return TilePlan(variant, blocks, 1,"),
        ),
        "nondeterministic or uninitialised", "nondeterministic or uninitialised",
    ),
    fault(
        "last element of a dot left out", "leaves the last element out of dots",
        (tile(_LAST, _LAST.replace("k_size", "k_size - 1")),),
        "gate_base", "saved_gate",
    ),
    fault(
        "lanes past the row read", "reads what lies behind a row of x, and multiplies it by zeros",
        (tile(_LAST, _LAST.replace("k_size", "BLOCK_K * 99")),),
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
        (epilogue("tl.where(pairs.taken, value, 0.0)", "value + 0.0"),), "gate", "saved_gate",
        equivalent="nothing is read for skipped pairs, and zeros times a scaling that fp32 has are zeros",
    ),
)  # fmt: skip

FAULTS = (*ROUTING, *MEMORY, *EQUIVALENT)
