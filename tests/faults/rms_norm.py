"""Faults of RMSNorm: what its kernels have got wrong in the past, one deed at a time."""

from __future__ import annotations

from tests.faults.plant import Edit, Fault

FP32_MULTIPLY = "fp32_multiply+rounded_sum"
ALL = ("bf16", "fp16", "fp32")

_INV_RMS = "inv_rms = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))"
_SUM = "tl.sum(squares, axis=1, keep_dims=True)"
_COUNT = "variance_size.to(tl.float32))"
_SQUARES = "squares += tl.where(columns < variance_size, squared * squared, 0.0)"
_X_ROW = "x_row = i0 * x_stride_0 + i1 * x_stride_1 + i2 * x_stride_2"
_NORMALIZED = "            normalized = normalized.to(weight.dtype).to(tl.float32)\n"
_PRODUCT = "(normalized * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)"
_OUTPUT = "product.to(X).to(tl.float32)"
_GAIN = "(weight.to(tl.float32) + offset)"
_CLAMP = "result = tl.clamp(result, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)"
_FIRST_FUNCTION = "@triton.jit\ndef _address("
# Stages go through fp32 buffers and are cast to the format they should have; a faulty copy shows what it computed.
_AS_COMPUTED = Edit("stored[name].to(dtypes.get(name, torch.float32))", "stored[name]")

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
        (Edit(_NORMALIZED, ""), Edit(_PRODUCT, "normalized * weight.to(tl.float32)"), _AS_COMPUTED),
        exposed="normalized",
        hidden="output",
    ),
    Fault(
        "weight multiplied natively",
        "rounds before the product with the weight, where the contract multiplies in fp32",
        (Edit('NATIVE=weight_rule == "native_multiply"', "NATIVE=True"),),
        exposed="normalized",
        hidden="output",
        contract=FP32_MULTIPLY,
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
        contract=FP32_MULTIPLY,
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
        (Edit(_GAIN, f"{_GAIN}.to(weight.dtype).to(tl.float32)"),),
        exposed="product",
        hidden="output",
        contract=FP32_MULTIPLY,
    ),
    Fault(
        "normalizes the rounded sum",
        "squares and normalizes x + residual after its rounding, where the contract takes the fp32 sum",
        (Edit('RULE="rounded_sum" if residual is None else residual_rule', 'RULE="rounded_sum"'),),
        exposed="normalized",
        hidden="output",
        contract="native_multiply+unrounded_sum",
        options="residual",
    ),
    Fault(
        "squares the rounded sum",
        "squares x + residual after its rounding, where the contract squares the fp32 sum",
        (Edit('RULE="rounded_sum" if residual is None else residual_rule', 'RULE="rounded_sum"'),),
        exposed="variance",
        hidden="output",
        contract="native_multiply+rounded_value",
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
        hidden="output",
    ),
    Fault(
        "last element dropped",
        "leaves the last element out of the mean",
        (Edit(_SQUARES, _SQUARES.replace("variance_size", "variance_size - 1")),),
        exposed="variance",
        hidden="output",
        dtypes=ALL,
    ),
    Fault(
        "mean over the padded block",
        "divides the sum by the size of the block",
        (Edit(_COUNT, "(variance_size * 0 + BLOCK).to(tl.float32))"),),
        exposed="variance",
        hidden="output",
        dtypes=ALL,
    ),
    Fault(
        "unbiased variance",
        "divides the sum by N - 1",
        (Edit(_COUNT, "tl.maximum(variance_size - 1, 1).to(tl.float32))"),),
        exposed="variance",
        hidden="output",
        dtypes=ALL,
    ),
    Fault(
        "variance_size ignored",
        "takes the mean over the whole row",
        (Edit("variance_size=x.shape[-1] if variance_size is None else variance_size", "variance_size=x.shape[-1]"),),
        exposed="variance",
        hidden="output",
    ),
    Fault(
        "masked load without other",
        "squares what a masked load leaves in the lanes past the row",
        (
            Edit("x_offset, columns, ALIGNED), mask=mask, other=0.0)", "x_offset, columns, ALIGNED), mask=mask)"),
            Edit(_SQUARES, _SQUARES.replace("variance_size", "tl.where(columns < n, variance_size, BLOCK * 2)")),
        ),
        exposed="variance",
        hidden="output",
    ),
    Fault(
        "lanes past the row not masked",
        "squares what lies behind the row in memory",
        (
            Edit("x_offset, columns, ALIGNED), mask=mask, other=0.0)", "x_offset, columns, ALIGNED))"),
            Edit(_SQUARES, _SQUARES.replace("variance_size", "tl.where(columns < n, variance_size, BLOCK * 2)")),
        ),
        exposed="variance",
        hidden="output",
    ),
)

MEMORY = (
    Fault(
        "row stride ignored",
        "takes the rows of a matrix, and those along the last but one dimension, to follow each other without a gap",
        (Edit(_X_ROW, _X_ROW.replace("i2 * x_stride_2", "i2 * n")),),
        exposed="variance",
        hidden="output",
    ),
    Fault(
        "view flattened",
        "takes the rows of a tensor whose leading dimensions do not merge to follow each other without a gap",
        (Edit(_X_ROW, "x_row = tl.where(rows == size_2, row * x_stride_2, row * n)"),),
        exposed="variance",
        hidden="output",
    ),
    Fault(
        "residual not written back",
        "returns the old residual for the sum",
        (
            Edit(
                "columns, ALIGNED), rounded.to(X), mask=mask)",
                "columns, ALIGNED), "
                "tl.load(_address(residual_ptr, residual_row, columns, ALIGNED), mask=mask), mask=mask)",
            ),
        ),
        exposed="residual_sum",
        hidden="residual_sum",
        options="residual",
        dtypes=ALL,
    ),
    Fault(
        "residual ignored",
        "normalizes x alone",
        (
            Edit('squared = rounded if RULE == "rounded_sum" else total', "squared = x.to(tl.float32)"),
            Edit('value = total if RULE == "unrounded_sum" else rounded', "value = squared"),
        ),
        exposed="variance",
        hidden="output",
        options="residual",
    ),
    Fault(
        "weight offset missing",
        "multiplies by the weight without its offset",
        (Edit(_GAIN, "weight.to(tl.float32)"),),
        exposed="product",
        hidden="output",
        contract=FP32_MULTIPLY,
    ),
    Fault(
        "last element not stored",
        "leaves the last element of each row of the output unwritten",
        (Edit("result.to(result_ptr.dtype.element_ty), mask=mask)", "result.to(X), mask=mask & (columns < n - 1))"),),
        exposed="unwritten",
        hidden="unwritten",
    ),
    Fault(
        "store past the end",
        "stores whole vectors of 16, also at the end of a row",
        (
            Edit(
                "result.to(result_ptr.dtype.element_ty), mask=mask)",
                "result.to(X), mask=live & (columns < (n + 15) // 16 * 16))",
            ),
        ),
        exposed="wrote_outside",
        hidden="wrote_outside",
    ),
    Fault(
        "output overwrites x",
        "writes the output over a contiguous x",
        (
            Edit(
                "contiguous_like(x, dtype=quant and torch.float8_e4m3fn)}",
                "x if x.is_contiguous() and not quant else contiguous_like(x, dtype=quant and torch.float8_e4m3fn)}",
            ),
        ),
        exposed="mutated_input",
        hidden="mutated_input",
    ),
)

QUANTISATION = (
    Fault(
        "no clamp before the cast",
        "leaves it to the cast to e4m3 what becomes of values beyond ±448",
        (Edit(_CLAMP, "pass"),),
        exposed="quantized",
        hidden="quantized",
        options="static",
        equivalent="Triton's cast to e4m3 saturates, infinities included, and keeps NaN, as the clamp does",
    ),
    Fault(
        "overflow becomes NaN",
        "turns values beyond the range of e4m3 into NaN, as a cast does that does not saturate",
        (Edit(_CLAMP, 'result = tl.where(tl.abs(result) > 464.0, float("nan"), result)'),),
        exposed="quantized",
        hidden="quantized",
        options="static",
    ),
    Fault(
        "NaN becomes 448",
        "clamps with a minimum and a maximum that ignore NaN",
        (Edit("tl.PropagateNan.ALL", "tl.PropagateNan.NONE"),),
        exposed="quantized",
        hidden="quantized",
        options="static",
    ),
    Fault(
        "one rounding before the code",
        "quantises the product, where the contract quantises the rounded output",
        (Edit("result = output * row_scale", "result = product * row_scale"),),
        exposed="quantized",
        hidden="quantized",
        contract=FP32_MULTIPLY,
        options="static",
    ),
    Fault(
        "divides by a static scale",
        "divides by the scale, where the contract multiplies by its reciprocal",
        (Edit("result = output * row_scale", "result = tl.div_rn(output, tl.load(scale_ptr))"),),
        exposed="quantized",
        hidden="quantized",
        options="static",
    ),
    Fault(
        "multiplies by a dynamic scale's reciprocal",
        "multiplies by the reciprocal of a row's scale, where the contract divides",
        (Edit("result = tl.div_rn(output, row_scale)", "result = output * tl.div_rn(1.0, row_scale)"),),
        exposed="quantized",
        hidden="quantized",
        options="dynamic",
    ),
    Fault(
        "scale without a floor",
        "gives a row of zeros the scale 0",
        (Edit("tl.maximum(tl.div_rn(amax, FP8_MAX), SMALLEST_SCALE)", "tl.div_rn(amax, FP8_MAX)"),),
        exposed="scale",
        hidden="scale",
        options="dynamic",
    ),
)

FAULTS = (*ROUNDING, *REDUCTION, *MEMORY, *QUANTISATION)
