"""Faults of RMSNorm in what is read and written, and in the codes that are made of the output."""

from __future__ import annotations

from tests.faults.plant import ALL, FP32_MULTIPLY, Edit, Fault

_X_ROW = "x_row = row_start(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2, FLAT)"
GAIN = "(weight.to(tl.float32) + offset)"
_SCALED = "output * row_scale"
_CLAMP = "result = tl.clamp(output * row_scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)"

MEMORY = (
    Fault(
        "row stride ignored",
        "takes the rows of a matrix, and those along the last but one dimension, to follow each other without a gap",
        (Edit(_X_ROW, _X_ROW.replace("x_stride_2", "n")),),
        exposed="variance or out_of_bounds",
        hidden="output or out_of_bounds",
    ),
    Fault(
        "view flattened",
        "takes the rows of a tensor whose leading dimensions do not merge to follow each other without a gap",
        (Edit(_X_ROW, "x_row = tl.where(rows == size_2, row * x_stride_2, row * n)"),),
        exposed="variance or out_of_bounds",
        hidden="output or out_of_bounds",
        options="real shapes",
        dtypes=("bf16",),
    ),
    Fault(
        "residual not written back",
        "returns the old residual for the sum",
        (
            Edit(
                "columns, ALIGNED), rounded.to(X), mask=mask)",
                "columns, ALIGNED), "
                "tl.load(address(residual_ptr, residual_row, columns, ALIGNED), mask=mask), mask=mask)",
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
        exposed="variance or normalized",
        hidden="output or quantized",
        options="residual",
    ),
    Fault(
        "weight offset missing",
        "multiplies by the weight without its offset",
        (Edit(GAIN, "weight.to(tl.float32)"),),
        exposed="product",
        hidden="output or quantized",
        variant=FP32_MULTIPLY,
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
        exposed="wrote_outside or out_of_bounds",
        hidden="wrote_outside or out_of_bounds",
    ),
    Fault(
        "output overwrites x",
        "writes the output over a contiguous x",
        (
            Edit(
                "contiguous_like(x, dtype=quant and torch.float8_e4m3fn)}",
                "x if x.is_contiguous() and not quant else contiguous_like(x, dtype=quant and torch.float8_e4m3fn)}",
                file="rms_norm_launch.py",
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
        (Edit(_CLAMP, f"result = {_SCALED}"),),
        exposed="quantized",
        hidden="quantized",
        options="static",
        equivalent="Triton's cast to e4m3 saturates, infinities included, and keeps NaN, as the clamp does",
    ),
    Fault(
        "overflow becomes NaN",
        "turns values beyond the range of e4m3 into NaN, as a cast does that does not saturate",
        (Edit(_CLAMP, f'result = tl.where(tl.abs({_SCALED}) > 464.0, float("nan"), {_SCALED})'),),
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
        (Edit(_SCALED, "product * row_scale"),),
        exposed="quantized",
        hidden="quantized",
        variant=FP32_MULTIPLY,
        options="static",
    ),
    Fault(
        "divides by a static scale",
        "divides by the scale, where the contract multiplies by its reciprocal",
        (Edit(_SCALED, "tl.div_rn(output, tl.load(scale_ptr))"),),
        exposed="quantized",
        hidden="quantized",
        options="static",
    ),
    Fault(
        "multiplies by a dynamic scale's reciprocal",
        "multiplies by the reciprocal of a row's scale, where the contract divides",
        (Edit("result = _quotient(output, row_scale)", "result = output * tl.div_rn(1.0, row_scale)"),),
        exposed="quantized",
        hidden="quantized",
        options="edges",
    ),
    Fault(
        "infinite scale",
        "gives NaN for finite values beside an infinity, where the division gives zero",
        (Edit('tl.where(scale == float("inf"), 0.0, scale)', "scale"),),
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
