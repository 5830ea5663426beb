"""All-reduce, then RMSNorm with its residual add, then FP8 codes."""

from __future__ import annotations

from e4m3_codes import e4m3_codes

from lastbit import Part, chain
from lastbit.references.all_reduce import all_reduce
from lastbit.references.rms_norm import rms_norm

all_reduce_rms_norm_codes = chain(
    "all_reduce_rms_norm_codes",
    Part(all_reduce),
    Part(rms_norm, takes={"x": "reduced"}, fixed={"scale": None, "quant": None, "variance_size": None}),
    Part(e4m3_codes, takes={"x": "output"}),
)
