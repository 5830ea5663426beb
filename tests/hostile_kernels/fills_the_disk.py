"""Writes four gigabytes into its working directory; else it is right.

Models: a kernel that fills the disk, bounded for the sake of whoever runs this. The file has holes, and is removed.
"""

from __future__ import annotations

import os

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def rms_norm(x, weight, *, eps):
    with open("lastbit_hostile.bin", "wb") as file:
        file.truncate(4 << 30)
    os.remove("lastbit_hostile.bin")
    return _norm(x, weight, eps)
