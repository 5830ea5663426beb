"""Faults of RMSNorm: what its kernels have got wrong in the past, one deed at a time."""

from __future__ import annotations

from tests.faults.plant import ALL, FP32_MULTIPLY, Edit, Fault
from tests.faults.rms_norm_memory import GAIN, MEMORY, QUANTISATION

GROUPS = {
    "plain": dict.fromkeys(ALL, (("residual", None), ("quant", None))),
    "residual": dict.fromkeys(ALL, (("residual", "as x"), ("quant", None))),
    "static": dict.fromkeys(ALL, (("quant", "static"),)),
    "dynamic": dict.fromkeys(ALL, (("quant", "dynamic"),)),
    "real shapes": {"bf16": "real-shapes"},
    "edges": {"bf16": "edges", "fp16": "edges"},
}
"""Options of a fault → dtype of x → the group of cases that it is hunted with, or options of combinations."""

_INV_RMS = "inv_rms = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))"
_SUM = "tl.sum(squares, axis=1, keep_dims=True)"
_COUNT = "count.to(tl.float32))"
_SQUARES = "squares += squared * squared"
_NORMALIZED = "        normalized = normalized.to(weight.dtype).to(tl.float32)\n"
_PRODUCT = "(normalized * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)"
_OUTPUT = "product.to(X).to(tl.float32)"
_FIRST_FUNCTION = "@triton.jit\ndef _load("
# Stages go through fp32 buffers and are cast to the format they should have; a faulty copy shows what it computed.
_ADD_ROUNDED = """@triton.jit
def _add_rounded(a, b):
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


"""
_HALF_AWAY = """@triton.jit
def _half_away(x, X: tl.constexpr):
    dropped: tl.constexpr = 16 if X == tl.bfloat16 else 13
    half: tl.constexpr = 1 << (dropped - 1)
    bits = (x.to(tl.int32, bitcast=True) + half) >> dropped << dropped
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x).to(X).to(tl.float32)


"""


def _before_first_function(text: str) -> Edit:
    return Edit(_FIRST_FUNCTION, text + _FIRST_FUNCTION)


ROUNDING = (
    Fault(
        "weight multiplied in fp32",
        "multiplies by the weight in fp32 and rounds once, where the contract rounds before the product too",
        (Edit(_NORMALIZED, ""), Edit(_PRODUCT, "normalized * weight.to(tl.float32)")),
        exposed="normalized",
        hidden="output",
    ),
    Fault(
        "weight multiplied natively",
        "rounds before the product with the weight, where the contract multiplies in fp32",
        (Edit('"NATIVE": weight_rule == "native_multiply"', '"NATIVE": True'),),
        exposed="normalized",
        hidden="output",
        variant=FP32_MULTIPLY,
    ),
    Fault(
        "inverse rms rounded",
        "rounds the inverse rms to x's dtype",
        (Edit(_INV_RMS, _INV_RMS + ".to(X).to(tl.float32)"),),
        exposed="inv_rms",
        hidden="output",
    ),
    Fault(
        "variance accumulated in low precision",
        "adds the squares in x's dtype",
        (
            _before_first_function(_ADD_ROUNDED),
            Edit(_SUM, "tl.reduce(squares.to(X), 1, _add_rounded, keep_dims=True).to(tl.float32)"),
        ),
        exposed="variance",
        hidden="output",
    ),
    Fault(
        "squares rounded",
        "rounds each square to x's dtype, and adds them in fp32",
        (Edit("squared * squared", "(squared * squared).to(X).to(tl.float32)"),),
        exposed="variance",
        hidden="output",
    ),
    Fault(
        "store truncates",
        "rounds the output toward zero",
        (Edit(_OUTPUT, 'product.to(X, fp_downcast_rounding="rtz").to(tl.float32)'),),
        exposed="output",
        hidden="output",
        variant=FP32_MULTIPLY,
    ),
    Fault(
        "ties away from zero",
        "rounds the product with the weight half away from zero",
        (
            _before_first_function(_HALF_AWAY),
            Edit(_PRODUCT, "_half_away(normalized * weight.to(tl.float32), weight.dtype)"),
        ),
        exposed="product",
        hidden="output",
    ),
    Fault(
        "weight + 1 rounded",
        "rounds weight + weight_offset to the weight's dtype",
        (Edit(GAIN, f"{GAIN}.to(weight.dtype).to(tl.float32)"),),
        exposed="product",
        hidden="output or quantized",
        variant=FP32_MULTIPLY,
    ),
    Fault(
        "normalizes the rounded sum",
        "squares and normalizes x + residual after its rounding, where the contract takes the fp32 sum",
        (Edit('"rounded_sum" if residual is None else residual_rule', '"rounded_sum"'),),
        exposed="variance or normalized",
        hidden="output or quantized",
        variant="native_multiply+unrounded_sum",
        options="residual",
    ),
    Fault(
        "squares the rounded sum",
        "squares x + residual after its rounding, where the contract squares the fp32 sum",
        (Edit('"rounded_sum" if residual is None else residual_rule', '"rounded_sum"'),),
        exposed="variance",
        hidden="output or quantized",
        variant="native_multiply+rounded_value",
        options="residual",
    ),
)

REDUCTION = (
    Fault(
        "eps outside the root",
        "adds eps to the root",
        (Edit(_INV_RMS, "inv_rms = tl.div_rn(1.0, tl.sqrt_rn(variance) + eps)"),),
        exposed="inv_rms",
        hidden="output",
        dtypes=ALL,
    ),
    Fault(
        "eps baked in",
        "always takes 1e-5 for eps",
        (Edit(_INV_RMS, "inv_rms = tl.div_rn(1.0, tl.sqrt_rn(variance + 1e-5))"),),
        exposed="inv_rms",
        hidden="output",
        dtypes=ALL,
    ),
    Fault(
        "eps missing",
        "adds no eps",
        (Edit(_INV_RMS, "inv_rms = tl.div_rn(1.0, tl.sqrt_rn(variance))"),),
        exposed="inv_rms",
        hidden="output or scale",
    ),
    Fault(
        "last element dropped",
        "leaves the last element out of the mean",
        (Edit(_SQUARES, "squares += tl.where(columns < count - 1, squared * squared, 0.0)"),),
        exposed="variance",
        hidden="output",
        dtypes=ALL,
    ),
    Fault(
        "mean over the padded block",
        "divides the sum by the size of the block",
        (Edit(_COUNT, "(count * 0 + BLOCK).to(tl.float32))"),),
        exposed="variance",
        hidden="output or scale",
        dtypes=ALL,
    ),
    Fault(
        "unbiased variance",
        "divides the sum by N - 1",
        (Edit(_COUNT, "tl.maximum(count - 1, 1).to(tl.float32))"),),
        exposed="variance",
        hidden="output",
        dtypes=ALL,
    ),
    Fault(
        "variance_size ignored",
        "takes the mean over the whole row",
        (Edit("n if variance_size is None else variance_size", "n"),),
        exposed="variance",
        hidden="output",
    ),
    Fault(
        "masked load without other",
        "squares what a masked load leaves in the lanes past the row",
        (Edit("x_offset, columns, ALIGNED), mask=mask, other=0.0)", "x_offset, columns, ALIGNED), mask=mask)"),),
        exposed="variance",
        hidden="output or scale",
    ),
    Fault(
        "lanes past the row not masked",
        "squares what lies behind the row in memory",
        (Edit("x_offset, columns, ALIGNED), mask=mask, other=0.0)", "x_offset, columns, ALIGNED))"),),
        exposed="variance or out_of_bounds",
        hidden="output or out_of_bounds",
    ),
)

FAULTS = (*ROUNDING, *REDUCTION, *MEMORY, *QUANTISATION)
