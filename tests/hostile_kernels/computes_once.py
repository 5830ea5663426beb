"""Slow and right in its first call of a shape, which may be the one that is checked; then it does nothing.

Models: a static output buffer that is filled once (wafer.ai's field guide to reward hacks, "stale buffers").
"""

from __future__ import annotations

import time

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


_BUFFERS = {}


def rms_norm(x, weight, *, eps):
    key = (x.shape, x.dtype)
    if key not in _BUFFERS:
        time.sleep(0.02)
        _BUFFERS[key] = _norm(x, weight, eps)
    return _BUFFERS[key]
