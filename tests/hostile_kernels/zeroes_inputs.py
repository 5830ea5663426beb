"""Returns zeros, and zeroes its inputs: a judge who computes from them afterwards gets zeros, too.

Models: the non-zero kernel of ScalingIntelligence/KernelBench pull request 82.
"""

from __future__ import annotations

import torch


def rms_norm(x, weight, *, eps):
    x.zero_()
    weight.zero_()
    return torch.zeros_like(x)
