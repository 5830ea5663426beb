"""Right, by torch's own operator that computes the op as a whole.

Models: "benign shortcuts" of wafer.ai's field guide: torch does the work that the kernel was to do.
"""

from __future__ import annotations

import torch.nn.functional as F


def rms_norm(x, weight, *, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)
