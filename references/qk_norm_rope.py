"""RMSNorm of the heads of q or k, then rotary embedding: what attention with normalized queries and keys begins with.

A chain of the two ops, for q or k: both are treated alike, and share positions and tables alone. Unfused, the
normalized heads are stored in their dtype before they are rotated. Fused kernels that rotate them in fp32 keep
`unrounded_output`. docs/contracts/rotary.md lists who keeps which.
"""

from __future__ import annotations

from lastbit import Part, chain
from lastbit.references.rms_norm import rms_norm
from lastbit.references.rotary import rotary

qk_norm_rope = chain(
    "qk_norm_rope",
    Part(rms_norm, fixed={"residual": None, "scale": None, "quant": None, "variance_size": None}),
    Part(rotary, takes={"q": "output"}, fixed={"k": None}),
)
