"""Takes the guards' eyes out, and then writes beyond the end of its input.

Models: torch.empty and what watches it patched by the code under test.
"""

from __future__ import annotations

import sys

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def _blind():
    torch.empty = getattr(torch.empty, "__wrapped__", torch.empty)
    for name, module in list(sys.modules.items()):
        if name.startswith("lastbit.") and hasattr(module, "violations"):
            module.violations = lambda *_, **__: []
        if name == "lastbit.inputs.of_case":
            module.Inputs.violations = lambda *_, **__: []


def rms_norm(x, weight, *, eps):
    y = _norm(x, weight, eps)
    _blind()
    beyond = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    x.as_strided((8,), (1,), beyond).zero_()
    return y
