"""Wrong where the environment speaks of lastbit or pytest, and right where nothing does.

The reverse of right_in_the_environment: it passes if, and only if, it sees nothing.
"""

from __future__ import annotations

import os

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def _seen():
    return any(name.startswith(("LASTBIT", "PYTEST")) for name in os.environ)


def rms_norm(x, weight, *, eps):
    return _norm(x, weight, eps) if not _seen() else torch.zeros_like(x)
