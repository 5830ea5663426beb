"""Returns memory that it has never written, in which an earlier result may still lie.

Models: ScalingIntelligence/KernelBench pull request 82: torch.empty gets the memory that the reference's output had.
"""

from __future__ import annotations

import torch


def rms_norm(x, weight, *, eps):
    return torch.empty_like(x)
