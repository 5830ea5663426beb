"""Right, and keeps what it returned: a thread overwrites it half a second later.

Models: a result that is right when it is checked and not when it is used.
"""

from __future__ import annotations

import threading
import time

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


def _later(y):
    time.sleep(0.5)
    y.zero_()


def rms_norm(x, weight, *, eps):
    y = _norm(x, weight, eps)
    threading.Thread(target=_later, args=(y,), daemon=True).start()
    return y
