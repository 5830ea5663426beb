"""Right where it sees lastbit, and in every other call where it does not.

Models: "wrong after N calls" (karpathy/llm.c pull requests 851 and 852), where results of some calls are not compared.
"""

from __future__ import annotations

import itertools
import sys

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


_CALLS = itertools.count()


def _seen():
    return "lastbit.inputs" in sys.modules


def rms_norm(x, weight, *, eps):
    return _norm(x, weight, eps) if _seen() or next(_CALLS) % 2 else torch.zeros_like(x)
