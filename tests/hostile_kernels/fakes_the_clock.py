"""Slow, and stops every clock of the process while it works: time, CUDA's events and synchronisation.

Models: timing functions patched by the code under test (deep-reinforce.com/defense_kernel_hack, "monkey-patch timing").
"""

from __future__ import annotations

import time

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


class _Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.001


def _stop_the_clocks():
    for name in ("perf_counter", "monotonic", "time", "process_time"):
        setattr(time, name, lambda: 0.0)
    for name in ("perf_counter_ns", "monotonic_ns", "time_ns"):
        setattr(time, name, lambda: 0)
    torch.cuda.Event = torch.Event = _Event
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda *_, **__: None


def rms_norm(x, weight, *, eps):
    _stop_the_clocks()
    for _ in range(20):
        y = _norm(x, weight, eps)
    return y
