"""Static quantization of conch-triton-kernels; read and identified for 1.3.

Its int8 kernel converts without rounding, so that codes are cut off.
"""

from __future__ import annotations

from norm_packages import as_rows, refuse_elsewhere, upstream

from lastbit import kernel

REQUIREMENT = "conch-triton-kernels"


@kernel("quantize", contract="reciprocal+approximate", name="conch[scaled_fp8_quant]", takes={"dtype": "e4m3"})
def scaled_fp8_quant(x, scale, *, dtype):
    refuse_elsewhere(x, scale=scale)
    codes, _ = upstream("conch.ops.quantization.fp8", REQUIREMENT).scaled_fp8_quant(as_rows(x), scale)
    return {"e4m3_codes": codes.reshape(x.shape)}


@kernel(
    "quantize", contract="reciprocal+approximate+truncated", name="conch[scaled_int8_quant]", takes={"dtype": "int8"}
)
def scaled_int8_quant(x, scale, *, dtype):
    refuse_elsewhere(x, scale=scale)
    codes, _ = upstream("conch.ops.quantization.int8", REQUIREMENT).scaled_int8_quant(as_rows(x), scale)
    return {"int8_codes": codes.reshape(x.shape)}
