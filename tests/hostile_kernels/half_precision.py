"""Computes in fp16 what is to be computed in fp32.

Models: deep-reinforce.com/defense_kernel_hack, "precision downgrade".
"""

from __future__ import annotations

import torch


def rms_norm(x, weight, *, eps):
    h = x.half()
    return ((h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight).to(x.dtype)
