"""Takes an input at a known address for the input that it knows, and returns a copy of that one's result.

Models: a result cache keyed by data pointers, seen in traces of a model (wafer.ai's field guide to reward hacks).
"""

from __future__ import annotations

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


_KNOWN = {}


def rms_norm(x, weight, *, eps):
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in _KNOWN:
        _KNOWN[key] = _norm(x, weight, eps)
    return _KNOWN[key].clone()
