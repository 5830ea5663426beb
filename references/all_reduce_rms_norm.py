"""All-reduce, then RMSNorm with its residual add: what tensor parallelism does after every row-parallel layer.

A chain of the two ops. Unfused, the sum over the ranks is stored in the dtype of its inputs before the residual is
added. A fused kernel that adds the residual to the fp32 sum keeps `unrounded_reduced`, as aiter's one-stage kernel did
before ROCm/aiter #2586. docs/chains.md tells of it.
"""

from __future__ import annotations

from lastbit import Part, chain
from lastbit.references.all_reduce import all_reduce
from lastbit.references.rms_norm import rms_norm

all_reduce_rms_norm = chain(
    "all_reduce_rms_norm",
    Part(all_reduce),
    Part(rms_norm, takes={"x": "reduced"}, fixed={"scale": None, "quant": None, "variance_size": None}),
)
