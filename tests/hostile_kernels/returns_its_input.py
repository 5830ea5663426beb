"""Right, in the memory of its input, which the caller wants to keep.

Models: output that aliases an input (wafer.ai's field guide to reward hacks).
"""

from __future__ import annotations

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def rms_norm(x, weight, *, eps):
    return x.copy_(_norm(x, weight, eps))
