"""Returns a tensor that computes itself when somebody looks at it.

Models: deep-reinforce.com/defense_kernel_hack, "lazy evaluation": a subclass of torch.Tensor with __torch_function__.
"""

from __future__ import annotations

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


class _Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for lazy in args:
                if isinstance(lazy, cls) and (pending := lazy.__dict__.pop("pending", None)):
                    lazy.copy_(_norm(*pending))
            return function(*args, **(kwargs or {}))


def rms_norm(x, weight, *, eps):
    y = torch.zeros_like(x).as_subclass(_Lazy)
    y.__dict__["pending"] = (x.clone(), weight.clone(), eps)
    return y
