"""RMSNorm with its residual add, then codes of 8 bits: what precedes every matrix product of a quantized layer.

A chain of the two ops. Unfused, the output of the norm is stored in the dtype of x before it is quantized; a fused
kernel that quantizes it in fp32 keeps `unrounded_output`. docs/contracts/quantize.md says who does what.
"""

from __future__ import annotations

from lastbit import Part, chain
from lastbit.references.quantize import quantize
from lastbit.references.rms_norm import rms_norm

rms_norm_quantize = chain(
    "rms_norm_quantize",
    Part(rms_norm, fixed={"scale": None, "quant": None, "variance_size": None}),
    Part(quantize, takes={"x": "output"}),
    presets={
        "per_token": "native_multiply+unrounded_sum+quotient",
        "per_group": "native_multiply+unrounded_sum+reciprocal",
        "per_tensor": "fp32_multiply+rounded_sum+reciprocal",
    },
)
