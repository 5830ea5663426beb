"""Faults that only combinations of dtypes and options, or rare structures, expose, each with a case that shows it.

A kernel wrong only there passes where the combination has no case: tests/kernels/test_faults_combined.py.
"""

from __future__ import annotations

from functools import partial

from tests.faults.cross_entropy import Shown
from tests.faults.plant import Edit, Fault

_TABLES = "cos=fp32[9,12]:uniform sin=bf16[9,12]:uniform positions=int64[3]:below_9"
_THERE, _LIVE, _LAST = "there = key < keys", "live = row < queries * shared", "row // shared"
_SINK = "tl.load(sinks_ptr + head * sinks_stride, mask=live, other=0.0)"


def _rotary(name: str, description: str, case: str, old: str, new: str, file: str = "rotary.py") -> Shown:
    op = case.partition(" ")[0]
    variant = "fp32_products" if op == "rotary" else "qk_norm_rope,fused"
    return Shown(Fault(name, description, (Edit(old, new, file),), "q_rotated", "q_rotated", op, variant), case)


def _attention(name: str, description: str, case: str, old: str, new: str, named: str = "lse or output") -> Shown:
    edits = (Edit(old, new, "attention.py"),)
    return Shown(Fault(name, description, edits, named, named, "attention", "attention+flash"), case)


ROTARY = (
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
    _rotary(
        "weight as heads", "rounds the weight to the dtype of the heads",
        f"qk_norm_rope x=bf16[3,2,24] {_TABLES} weight=fp32[24] eps=1e-06 seed=3",
        "weight.to(tl.float32) + offset", "weight.to(X).to(tl.float32) + offset", "qk_norm_rope.py",
    ),
    _rotary(
        "96 of 128", "takes the partner of a column of 128 to be a power of two away, as shuffles of a warp have it",
        "qk_norm_rope x=bf16[3,2,128] cos=fp32[9,48]:uniform sin=fp32[9,48]:uniform positions=int64[3]:below_9 "
        "weight=bf16[128]:near_one eps=1e-06 seed=20",
        "load_pairs(x_ptr, start, live, half, HALF,",
        "load_pairs(x_ptr, start, live, tl.where(width == 128, HALF, half), HALF,",
        "qk_norm_rope.py",
    ),
)  # fmt: skip

ATTENTION = (
    _attention(
        "sinks as queries", "rounds sinks to the dtype of q",
        "attention q=bf16[2,4,4,8] k=bf16[2,9,2,8] v=bf16[2,9,2,8] sinks=fp32[4] scale=0.25 seed=1",
        f"sink = {_SINK}.to(tl.float32)", f"sink = {_SINK}.to(q_ptr.dtype.element_ty).to(tl.float32)",
    ),
    _attention(
        "no cap in fp32", "caps no scores of fp32",
        "attention q=fp32[2,4,4,8] k=fp32[2,9,2,8] v=fp32[2,9,2,8] scale=0.25 cap=5.0 seed=2",
        "if CAPPED:", "if CAPPED and q_ptr.dtype.element_ty != tl.float32:",
    ),
    _attention(
        "one sequence of keys", "takes the keys of the first sequence where one head has all",
        "attention q=bf16[2,3,6,8] k=bf16[2,129,1,8] v=bf16[2,129,1,8] scale=0.25 causal=True seed=38",
        "k_at = k_ptr + batch * k_batch", "k_at = k_ptr + tl.where(groups > 1, batch, 0) * k_batch",
    ),
    _attention(
        "six heads share", "computes six heads at most that share keys",
        "attention q=bf16[1,4,14,8] k=bf16[1,9,2,8] v=bf16[1,9,2,8] scale=0.35 causal=True seed=41",
        _LIVE, "live = (row < queries * shared) & (row % shared < 6)", "unwritten",
    ),
    _attention(
        "129 keys", "leaves a last key out that is alone in a tile of 128",
        "attention q=bf16[2,3,6,8] k=bf16[2,129,1,8] v=bf16[2,129,1,8] scale=0.25 causal=True seed=38",
        _THERE, "there = (key < keys) & ((key < keys - 1) | (keys % 128 != 1) | (keys == 1))",
    ),
    _attention(
        "129 queries", "leaves a last query out that is alone in a tile of 128",
        "attention q=bf16[1,129,5,4] k=bf16[1,5,1,4] v=bf16[1,5,1,4] scale=0.5 seed=39",
        _LIVE, f"{_LIVE}\n    live = live & (({_LAST} < queries - 1) | (queries % 128 != 1) | (queries == 1))",
        "unwritten",
    ),
)  # fmt: skip

_BACKWARD = partial(Fault, op="cross_entropy_backward", variant="cross_entropy_backward")
_RANKS = partial(Fault, op="all_reduce_rms_norm", variant="all_reduce_rms_norm", family="eager")
_EXPERTS = partial(Fault, op="moe_lora", variant="moe_lora+fused")
_PEERS = " ".join(f"peer_{number}=fp16[2,33]" for number in range(1, 6))

OTHERS = (
    Shown(
        _BACKWARD(
            "saved lse in fp16", "keeps a saved lse in fp16 where logits are",
            (Edit("    elif normalized:\n",
                  "    elif logits.dtype == torch.float16:\n        lse = lse.half().float()\n    elif normalized:\n",
                  "cross_entropy_backward.py"),),
            "difference or grad_logits", "grad_logits",
        ),
        "cross_entropy_backward logits=fp16[6,40] labels=int64[6]:labels_40 grad_output=fp16[6] lse=fp32[6] seed=1",
    ),
    Shown(
        _RANKS(
            "residual of fp16", "adds a residual of fp16 to the sum without a rounding",
            (Edit('residual, "rounded_sum")',
                  'residual, "unrounded_sum" if str(x.dtype) == "torch.float16" else "rounded_sum")',
                  "all_reduce_torch.py"),),
            "output", "output",
        ),
        "all_reduce_rms_norm x=fp16[8,65] peer_1=fp16[8,65] residual=fp16[8,65] eps=1e-06 seed=2",
    ),
    Shown(
        _RANKS(
            "six ranks", "adds five of six ranks",
            (Edit("tensors[1:]:", "tensors[1 : 5 if len(tensors) == 6 else None]:", "all_reduce_torch.py"),),
            "reduced", "output",
        ),
        f"all_reduce_rms_norm x=fp16[2,33] {_PEERS} residual=fp16[2,33] eps=1e-06 seed=6",
    ),
)  # fmt: skip

_LAYER = "gate_proj=bf16[3,16,16]:fan_in up_proj=bf16[3,16,16]:fan_in down_proj=bf16[3,16,16]:fan_in swiglu_limit=0.5"

EXPERTS = (
    Shown(
        _EXPERTS(
            "limit of several tokens", "limits no activation of a token alone",
            (Edit('{"scaling": scaling, "swiglu_limit": swiglu_limit, "eager"',
                  '{"scaling": scaling, "swiglu_limit": swiglu_limit if len(x) > 1 else inf, "eager"', "moe_lora.py"),),
            "intermediate", "intermediate",
        ),
        f"moe_lora x=bf16[1,16] expert_ids=int64[1,2]:below_3 routing_weights=fp32[1,2]:quarters {_LAYER} seed=1",
    ),
    Shown(
        _EXPERTS(
            "NaN limited", "limits a gate by a minimum that ignores NaN, as fminf does",
            (Edit("tl.where(gate > limit, limit, gate)", "tl.minimum(gate, limit)", "swiglu_limit.py"),),
            "intermediate", "intermediate",
        ),
        f"moe_lora x=bf16[9,16]:special expert_ids=int64[9,2]:below_3 routing_weights=fp32[9,2]:ones {_LAYER} seed=2",
    ),
    Shown(
        _EXPERTS(
            "eight experts", "takes experts from the ninth on to be elsewhere",
            (Edit("(local < experts), local, experts)", "(local < tl.minimum(experts, 8)), local, experts)",
                  "moe_lora_routing.py"),),
            "gate_base or up_base or nondeterministic or uninitialised", "saved_gate or saved_up or output",
        ),
        "moe_lora x=bf16[9,16] expert_ids=int64[9,2]:below_11 routing_weights=fp32[9,2]:quarters "
        "gate_proj=bf16[11,16,16]:fan_in up_proj=bf16[11,16,16]:fan_in down_proj=bf16[11,16,16]:fan_in seed=3",
    ),
)  # fmt: skip

SHOWN = (*ROTARY, *ATTENTION, *OTHERS, *EXPERTS)
