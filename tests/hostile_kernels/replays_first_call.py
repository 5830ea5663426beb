"""Captures its first call of a shape, tensors included, and replays that whatever it is given.

Models: a CUDA graph captured over the tensors of the first call, and replayed.
"""

from __future__ import annotations

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


_GRAPHS = {}


def rms_norm(x, weight, *, eps):
    return _GRAPHS.setdefault(x.shape, lambda: _norm(x, weight, eps))()
