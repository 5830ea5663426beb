"""Starts processes as long as it can, two hundred at most, which sleep for some seconds; else it is right.

Models: a fork bomb, bounded for the sake of whoever runs this.
"""

from __future__ import annotations

import os
import time

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


_STARTED = []


def _start():
    while len(_STARTED) < 200:
        if not (pid := os.fork()):
            time.sleep(5)
            os._exit(0)
        _STARTED.append(pid)


def rms_norm(x, weight, *, eps):
    _start()
    return _norm(x, weight, eps)
