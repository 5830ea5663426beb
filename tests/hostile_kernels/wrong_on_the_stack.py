"""Wrong where a function of lastbit or pytest has called it, and right elsewhere.

The reverse of right_on_the_stack.
"""

from __future__ import annotations

import sys

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def _seen():
    frame = sys._getframe()
    while frame is not None:
        if "/harness/" in frame.f_code.co_filename or "/_pytest/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def rms_norm(x, weight, *, eps):
    return _norm(x, weight, eps) if not _seen() else torch.zeros_like(x)
