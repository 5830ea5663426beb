"""Takes two gigabytes and touches them once; else it is right.

Models: a kernel that brings its machine to its knees, bounded for the sake of whoever runs this.
"""

from __future__ import annotations

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


_CALLS = [0]


def rms_norm(x, weight, *, eps):
    _CALLS[0] += 1
    taken = [torch.ones(64 << 20, dtype=torch.int32) for _ in range(8 if _CALLS[0] == 1 else 0)]
    del taken
    return _norm(x, weight, eps)
