"""Works on a stream of its own and returns before that is done. For CUDA; elsewhere it is right.

Models: deep-reinforce.com/defense_kernel_hack, "stream injection", and ScalingIntelligence/KernelBench pull request 82:
events on the default stream see nothing of the work.
"""

from __future__ import annotations

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def rms_norm(x, weight, *, eps):
    if not x.is_cuda:
        return _norm(x, weight, eps)
    with torch.cuda.stream(torch.cuda.Stream()):
        return _norm(x, weight, eps)
