"""Raises SystemExit with the exit code of success in the second call.

Models: sys.exit(0) where a harness takes the exit code for the verdict.
"""

from __future__ import annotations

import sys

import torch

_CALLS = [0]


def rms_norm(x, weight, *, eps):
    _CALLS[0] += 1
    if _CALLS[0] > 1:
        sys.exit(0)
    return torch.zeros_like(x)
