"""Faults that only combinations of dtypes and options, or rare structures, expose: one deed and the case that shows it.

A kernel wrong only there passes where the combination has no case.
"""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault


def _fault(
    variant: str,
    file: str,
    exposed: str,
    name: str,
    does: str,
    case: str,
    old: str,
    new: str,
    *,
    hidden: str = "",
    family: str = "triton",
) -> tuple[Fault, str]:
    """Return a change of the text of a file, and the case that shows it, which tells the op."""
    op = case.partition(" ")[0]
    return Fault(name, does, (Edit(old, new, file),), exposed, hidden or exposed, op, variant, family=family), case


_swiglu = partial(_fault, "swiglu+fp32_silu", "swiglu.py")
_quantize = partial(_fault, "quotient", "quantize.py")
_rotary = partial(_fault, "fp32_products", "rotary.py", "q_rotated")
_heads = partial(_fault, "qk_norm_rope,fused", "qk_norm_rope.py", "q_rotated")
_attention = partial(_fault, "attention+flash", "attention.py")
_ranks = partial(_fault, "all_reduce_rms_norm", "all_reduce_torch.py", family="eager")
_experts = partial(_fault, "moe_lora+fused")

_TABLES = "cos=fp32[9,12]:uniform sin=bf16[9,12]:uniform positions=int64[3]:below_9"
_PEERS = " ".join(f"peer_{number}=fp16[2,33]" for number in range(1, 6))
_LAYER = "gate_proj=bf16[3,16,16]:fan_in up_proj=bf16[3,16,16]:fan_in down_proj=bf16[3,16,16]:fan_in swiglu_limit=0.5"

_LARGEST = '"LARGEST": LARGEST[dtype]'
_INTEGERS = '"INTEGERS": integers if'
_ONE = "up is None and not options.interleaved and x.dtype == torch.float32"
_TWO = "gate, up = gate_and_up(x, up, interleaved=options.interleaved)"
_WEIGHT = "        weight = weight if weight is None else weight.contiguous()\n"
_MASK = "tl.load(address(mask_ptr, mask_row, columns, ALIGNED), mask=inside, other=0.0)"

_ROWS = (
    _swiglu(
        "silu", "fp16 interleaved rounds silu", "rounds silu to fp16 where gate and up are interleaved",
        "swiglu x=fp16[17,64] interleaved=True seed=1",
        '{"SILU": silu}', '{"SILU": "rounded_silu" if options.interleaved and gate.dtype == torch.float16 else silu}',
        hidden="output",
    ),
    _swiglu(
        "output", "fp32 halves by way of fp16", "reads up through fp16 where it is the second half of a tensor of fp32",
        "swiglu x=fp32[17,64] seed=2",
        _TWO, f"one = {_ONE}\n    {_TWO}\n    up = up.half().float() if one else up",
    ),
    _quantize(
        "scale", "240 for fp16 rows", "takes the 240 of e4m3fnuz for the largest code of rows in fp16",
        "quantize x=fp16[8,96] dtype=e4m3 seed=3",
        _LARGEST,
        '"LARGEST": 240.0 if str(x.dtype) == "torch.float16" and dtype == "e4m3" and group_size is scale is None '
        "else LARGEST[dtype]",
    ),
    _quantize(
        "int8_codes", "int8 groups of bf16 cut off", "converts groups of bf16 to int8 without rounding",
        "quantize x=bf16[8,96] dtype=int8 group_size=32 seed=4",
        _INTEGERS, '"INTEGERS": "" if group_size and str(x.dtype) == "torch.bfloat16" else integers if',
    ),
    _quantize(
        "unwritten", "groups of 256", "has a block of 128 columns for any group",
        "quantize x=bf16[4,512] dtype=e4m3 group_size=256 seed=5",
        '"BLOCK": block,', '"BLOCK": min(block, 128) if group_size else block,',
    ),
    _fault(
        "native_multiply+rounded_sum", "rms_norm.py", "normalized",
        "weight of bf16 in fp16", "converts a weight of bf16 to the fp16 of x before the product",
        "rms_norm x=fp16[8,96] weight=bf16[96] eps=1e-06 seed=6",
        _WEIGHT,
        f"{_WEIGHT}        if f'{{x.dtype}} {{getattr(weight, \"dtype\", None)}}' == 'torch.float16 torch.bfloat16':\n"
        "            weight = weight.to(x.dtype)\n",
        hidden="output",
    ),
    _fault(
        "fp32_scores", "softmax.py", "total",
        "mask in the dtype of x", "converts the mask to the dtype of x before it is added",
        "softmax x=bf16[8,96] mask=fp32[8,96] seed=7",
        f"{_MASK}.to(tl.float32)", f"{_MASK}.to(x.dtype).to(tl.float32)",
        hidden="output",
    ),
    _ranks(
        "output", "residual of fp16", "adds a residual of fp16 to the sum without a rounding",
        "all_reduce_rms_norm x=fp16[8,65] peer_1=fp16[8,65] residual=fp16[8,65] eps=1e-06 seed=2",
        'residual, "rounded_sum")',
        'residual, "unrounded_sum" if str(x.dtype) == "torch.float16" else "rounded_sum")',
    ),
    _ranks(
        "reduced", "six ranks", "adds five of six ranks",
        f"all_reduce_rms_norm x=fp16[2,33] {_PEERS} residual=fp16[2,33] eps=1e-06 seed=6",
        "tensors[1:]:", "tensors[1 : 5 if len(tensors) == 6 else None]:",
        hidden="residual_sum",
    ),
    _fault(
        "cross_entropy_backward", "cross_entropy_backward.py", "difference or grad_logits",
        "saved lse in fp16", "keeps a saved lse in fp16 where logits are",
        "cross_entropy_backward logits=fp16[6,40] labels=int64[6]:labels_40 grad_output=fp16[6] lse=fp32[6] seed=1",
        "    elif normalized:\n",
        "    elif logits.dtype == torch.float16:\n        lse = lse.half().float()\n    elif normalized:\n",
        hidden="grad_logits",
    ),
)  # fmt: skip

_ROTARY = (
    _rotary(
        "sines as cosines", "rounds the sines to the dtype of the cosines",
        "rotary q=fp32[3,2,24] cos=bf16[9,12]:uniform sin=fp32[9,12]:uniform positions=int64[3]:below_9 seed=1",
        "sine = load_row(sin_ptr, sin_stride, position, half, HALF, X, ROUND_TABLE, ALIGNED)",
        "sine = load_row(sin_ptr, sin_stride, position, half, HALF, X, ROUND_TABLE, ALIGNED)\n"
        "    sine = sine.to(cos_ptr.dtype.element_ty).to(tl.float32)",
    ),
    _rotary(
        "tables in fp16", "rounds tables to fp16 where q is",
        f"rotary q=fp16[3,2,24] {_TABLES} seed=2",
        "return row.to(X).to(tl.float32) if ROUND else",
        "return row.to(X).to(tl.float32) if ROUND or X == tl.float16 else",
    ),
    _heads(
        "weight as heads", "rounds the weight to the dtype of the heads",
        f"qk_norm_rope x=bf16[3,2,24] {_TABLES} weight=fp32[24] eps=1e-06 seed=3",
        "weight.to(tl.float32) + offset", "weight.to(X).to(tl.float32) + offset",
    ),
    _heads(
        "96 of 128", "takes the partner of a column of 128 to be a power of two away, as shuffles of a warp have it",
        "qk_norm_rope x=bf16[3,2,128] cos=fp32[9,48]:uniform sin=fp32[9,48]:uniform positions=int64[3]:below_9 "
        "weight=bf16[128]:near_one eps=1e-06 seed=20",
        "load_pairs(x_ptr, start, live, half, HALF,",
        "load_pairs(x_ptr, start, live, tl.where(width == 128, HALF, half), HALF,",
    ),
)  # fmt: skip

_LIVE, _LAST, _THERE = "live = row < queries * shared", "row // shared", "there = key < keys"
_SINK = "tl.load(sinks_ptr + head * sinks_stride, mask=live, other=0.0)"

_ATTENTION = (
    _attention(
        "lse or output", "sinks as queries", "rounds sinks to the dtype of q",
        "attention q=bf16[2,4,4,8] k=bf16[2,9,2,8] v=bf16[2,9,2,8] sinks=fp32[4] scale=0.25 seed=1",
        f"sink = {_SINK}.to(tl.float32)", f"sink = {_SINK}.to(q_ptr.dtype.element_ty).to(tl.float32)",
    ),
    _attention(
        "lse or output", "no cap in fp32", "caps no scores of fp32",
        "attention q=fp32[2,4,4,8] k=fp32[2,9,2,8] v=fp32[2,9,2,8] scale=0.25 cap=5.0 seed=2",
        "if CAPPED:", "if CAPPED and q_ptr.dtype.element_ty != tl.float32:",
    ),
    _attention(
        "lse or output", "one sequence of keys", "takes the keys of the first sequence where one head has all",
        "attention q=bf16[2,3,6,8] k=bf16[2,129,1,8] v=bf16[2,129,1,8] scale=0.25 causal=True seed=38",
        "k_at = k_ptr + batch * k_batch", "k_at = k_ptr + tl.where(groups > 1, batch, 0) * k_batch",
    ),
    _attention(
        "unwritten", "six heads share", "computes six heads at most that share keys",
        "attention q=bf16[1,4,14,8] k=bf16[1,9,2,8] v=bf16[1,9,2,8] scale=0.35 causal=True seed=41",
        _LIVE, "live = (row < queries * shared) & (row % shared < 6)",
    ),
    _attention(
        "lse or output", "129 keys", "leaves a last key out that is alone in a tile of 128",
        "attention q=bf16[2,3,6,8] k=bf16[2,129,1,8] v=bf16[2,129,1,8] scale=0.25 causal=True seed=38",
        _THERE, "there = (key < keys) & ((key < keys - 1) | (keys % 128 != 1) | (keys == 1))",
    ),
    _attention(
        "unwritten", "129 queries", "leaves a last query out that is alone in a tile of 128",
        "attention q=bf16[1,129,5,4] k=bf16[1,5,1,4] v=bf16[1,5,1,4] scale=0.5 seed=39",
        _LIVE, f"{_LIVE}\n    live = live & (({_LAST} < queries - 1) | (queries % 128 != 1) | (queries == 1))",
    ),
)  # fmt: skip

_EXPERTS = (
    _experts(
        "moe_lora.py", "intermediate",
        "limit of several tokens", "limits no activation of a token alone",
        f"moe_lora x=bf16[1,16] expert_ids=int64[1,2]:below_3 routing_weights=fp32[1,2]:quarters {_LAYER} seed=1",
        '{"scaling": scaling, "swiglu_limit": swiglu_limit, "eager"',
        '{"scaling": scaling, "swiglu_limit": swiglu_limit if len(x) > 1 else inf, "eager"',
    ),
    _experts(
        "swiglu_limit.py", "intermediate",
        "NaN limited", "limits a gate by a minimum that ignores NaN, as fminf does",
        f"moe_lora x=bf16[9,16]:special expert_ids=int64[9,2]:below_3 routing_weights=fp32[9,2]:ones {_LAYER} seed=2",
        "tl.where(gate > limit, limit, gate)", "tl.minimum(gate, limit)",
    ),
    _experts(
        "moe_lora_routing.py", "gate_base or up_base or nondeterministic or uninitialised",
        "eight experts", "takes experts from the ninth on to be elsewhere",
        "moe_lora x=bf16[9,16] expert_ids=int64[9,2]:below_11 routing_weights=fp32[9,2]:quarters "
        "gate_proj=bf16[11,16,16]:fan_in up_proj=bf16[11,16,16]:fan_in down_proj=bf16[11,16,16]:fan_in seed=3",
        "(local < experts), local, experts)", "(local < tl.minimum(experts, 8)), local, experts)",
        hidden="saved_gate or saved_up or output",
    ),
)  # fmt: skip

FAULTS = (*_ROWS, *_ROTARY, *_ATTENTION, *_EXPERTS)
