"""Faults that no rule of `harness/diagnosing` was made with: they say whether the lines that it names are right."""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault


def _family(op: str, file: str, variant: str, group: str, dtype: str, family: str = "triton"):  # type: ignore[no-untyped-def]
    """Make faults of one kernel: by name, the text that is replaced, and what takes its place."""

    def fault(name: str, old: str, new: str, *, file: str = file, variant: str = variant, group: str = group) -> Fault:
        edits = (Edit(old, new, file),)
        own = name if family == "triton" else f"{name}, eager"
        made = partial(Fault, own, "is held out", edits, "output", "output", op, options=group, dtypes=(dtype,))
        return made(variant=variant, family=family)

    return fault


_norm = _family("rms_norm", "rms_norm.py", "native_multiply+rounded_sum", "plain", "bf16")
_sum = partial(_norm, group="residual")
_gated = _family("layer_norm_gated", "layer_norm_gated.py", "single_rounding", "layer", "bf16")
_after = partial(_gated, group="after in steps", variant="stepwise")
_softmax = _family("softmax", "softmax.py", "fp32_scores", "plain", "bf16")
_masked = partial(_softmax, group="mask", variant="rounded_scores")
_swiglu = _family("swiglu", "swiglu.py", "swiglu+fp32_silu", "plain", "bf16")
_limited = partial(_swiglu, group="limited")
_eager_norm = _family("rms_norm", "rms_norm_torch.py", "native_multiply+rounded_sum", "plain", "bf16", "eager")
_eager_gated = _family("layer_norm_gated", "layer_norm_gated_torch.py", "stepwise", "after in steps", "bf16", "eager")
_eager_softmax = _family("softmax", "softmax_torch.py", "base2", "plain", "bf16", "eager")
_eager_swiglu = _family("swiglu", "swiglu_torch.py", "swiglu+fp32_silu", "plain", "bf16", "eager")

_FP32 = ".to(tl.float32)"
_BIAS = "        if bias_ptr is not None:\n            affine += bias"
_X = f".to(x_ptr.dtype.element_ty){_FP32}"

HELD_OUT = (
    _norm("eps twice", "variance + eps))", "variance + 2.0 * eps))"),
    _norm("one more in the count", "count.to(tl.float32))", "(count + 1).to(tl.float32))"),
    _norm("squares rounded", "squares += squared * squared", f"squares += (squared * squared){_X}"),
    _norm("value rounded once more", "normalized = value * inv_rms", f"normalized = value * inv_rms.to(X){_FP32}"),
    _norm("product in fp32", "product = (normalized * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)",
          "product = normalized * weight.to(tl.float32) * 1.0078125"),
    _norm("normalized not rounded", "        normalized = normalized.to(weight.dtype).to(tl.float32)\n", ""),
    _norm("sign of the root", "inv_rms = tl.div_rn(1.0,", "inv_rms = tl.div_rn(-1.0,"),
    _norm("weight of the column before", "weight = tl.load(address(ptr, 0, columns,",
          "weight = tl.load(address(ptr, 0, tl.maximum(columns - 1, 0),"),
    _norm("magnitudes summed", "squares += squared * squared", "squares += tl.abs(squared)"),
    _norm("first column left out", "squared = rounded if RULE", "rounded = tl.where(columns == 0, 0.0, rounded)\n"
          "    squared = rounded if RULE"),
    _sum("residual subtracted", "total = total + residual", "total = total - residual"),
    _sum("sum not rounded", f"rounded = total.to(x.dtype){_FP32}", "rounded = total"),
    _gated("mean of all but one", "mean = quotient(tl.sum(value, axis=1, keep_dims=True), size)",
           "mean = quotient(tl.sum(value, axis=1, keep_dims=True), size - 1.0)"),
    _gated("variance not centered", "tl.sum(centered * centered, axis=1", "tl.sum(value * value, axis=1"),
    _gated("bias subtracted", "affine += bias", "affine -= bias"),
    _gated("normalized rounded", "affine = normalized * weight\n", f"affine = normalized{_X} * weight\n"),
    _gated("bias before the weight", f"affine = normalized * weight\n{_BIAS}",
           f"affine = normalized\n{_BIAS}\n        affine = affine * weight"),
    _after("affine not rounded", "(normalized * weight).to(W).to(tl.float32)", "normalized * weight"),
    _after("gate rounded", "output = affine * gate", f"output = affine * gate.to(X){_FP32}"),
    _softmax("sum rounded", "output = terms / divisor", f"output = terms / divisor{_X}"),
    _softmax("terms rounded", "output = terms / divisor", f"output = terms{_X} / divisor"),
    _softmax("inverse rounded", "output = terms / divisor", f"output = terms * (1.0 / divisor){_X}"),
    _softmax("padding counted", "return scaled, masked, tl.where(kept, masked, -float(\"inf\"))",
             "return scaled, masked, tl.where(kept, masked, 0.0)"),
    _softmax("base of 2", "tl.exp2(scores - shift) if BASE2 else tl.exp(scores - shift)", "tl.exp2(scores - shift)"),
    _masked("mask subtracted", "masked = scaled + tl.load(", "masked = scaled - tl.load("),
    _masked("masked not rounded", "            masked = masked.to(x.dtype).to(tl.float32)\n", "            pass\n"),
    _swiglu("up rounded to fp16", "output = silu * shifted(up, up_offset, X, SILU == \"rounded_sigmoid\")",
            "output = silu * (up * 1.015625)"),
    _swiglu("sigmoid rounded", "s = rounded(sigmoid_of(scaled), X, STEPS)", "s = rounded(sigmoid_of(scaled), X, True)",
            file="swiglu_tile.py"),
    _swiglu("no silu", "return scaled, s, rounded(gate * s,", "return scaled, s, rounded(s,", file="swiglu_tile.py"),
    _swiglu("gate for up", "output = silu * shifted(up,", "output = silu * shifted(gate,"),
    _limited("half the limit", "gate = tl.where(gate > limit, limit, gate)",
             "gate = tl.where(gate > limit, limit * 0.5, gate)", file="swiglu_limit.py"),
    _eager_norm("sum for mean", ".square().mean(-1, keepdim=True)", ".square().sum(-1, keepdim=True)"),
    _eager_norm("squares in 16 bits", "squared[..., :variance_size].square()",
                "squared[..., :variance_size].square().bfloat16().float()"),
    _eager_norm("eps after the root", "torch.rsqrt(variance + eps)", "(torch.rsqrt(variance) + eps)"),
    _eager_norm("root rounded", "torch.rsqrt(variance + eps)", "torch.rsqrt(variance + eps).bfloat16()"),
    _eager_norm("product in fp32", "(normalized.to(weight.dtype) * weight).to(dtype)",
                "(normalized * weight.float()).to(dtype)"),
    _eager_gated("weight not applied", "affine = weight * normalize(value, eps, size, is_rms_norm=True).to(x.dtype)",
                 "affine = normalize(value, eps, size, is_rms_norm=True).to(x.dtype)"),
    _eager_softmax("not shifted", "terms = torch.exp2(scores - largest.masked_fill(empty, 0.0))",
                   "terms = torch.exp2((scores - largest.masked_fill(empty, 0.0)).bfloat16().float())"),
    _eager_softmax("inverse rounded", ".reciprocal()).to(x.dtype)", ".reciprocal().bfloat16()).to(x.dtype)"),
    _eager_swiglu("silu rounded", "activated = F.silu(gate)", "activated = F.silu(gate).bfloat16()"),
    _eager_swiglu("silu twice", "return (activated * factor).to(x.dtype)",
                  "return (activated * activated * factor).to(x.dtype)"),
)  # fmt: skip
