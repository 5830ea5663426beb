"""Static quantization of conch-triton-kernels; read and identified for 1.3.

Its int8 kernel converts without rounding, so that codes are cut off.
"""

from __future__ import annotations

from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel

REQUIREMENT = "conch-triton-kernels"
ROWS = ("packed rows", "non-empty")


@kernel(
    "quantize", contract="reciprocal+approximate", name="conch[scaled_fp8_quant]",
    takes={"tensors": ROWS, "dtype": "e4m3"},
)  # fmt: skip
def scaled_fp8_quant(x, scale, *, dtype):
    refuse_elsewhere(x, scale=scale)
    return {"e4m3_codes": upstream("conch.ops.quantization.fp8", REQUIREMENT).scaled_fp8_quant(x, scale)[0]}


@kernel(
    "quantize", contract="reciprocal+approximate+truncated", name="conch[scaled_int8_quant]",
    takes={"tensors": ROWS, "dtype": "int8"},
)  # fmt: skip
def scaled_int8_quant(x, scale, *, dtype):
    refuse_elsewhere(x, scale=scale)
    return {"int8_codes": upstream("conch.ops.quantization.int8", REQUIREMENT).scaled_int8_quant(x, scale)[0]}
