"""Wrong where modules of lastbit or pytest are loaded, and right elsewhere.

The reverse of right_among_modules.
"""

from __future__ import annotations

import sys

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def _seen():
    watching = {"pytest", "hypothesis", "lastbit.verify", "lastbit.judging", "lastbit.inputs", "lastbit.isolation"}
    return not watching.isdisjoint(sys.modules)


def rms_norm(x, weight, *, eps):
    return _norm(x, weight, eps) if not _seen() else torch.zeros_like(x)
