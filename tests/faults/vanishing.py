"""Kernels that end their process, or hang where no exception reaches them; a folder of kernels may hold this file.

`OUTCOMES` says what becomes of each: why it has no result, empty for a kernel that has one.
"""

import ctypes
import os

import torch

from lastbit.kernel import kernel

OUTCOMES = {
    "exits": "the process died without an exception",
    "holds_the_interpreter": "no result after",
    "stays": "",
}


@kernel("rms_norm", contract="fp32_multiply")
def exits(x, weight=None, *, eps):
    os._exit(0)


@kernel("rms_norm", contract="fp32_multiply")
def holds_the_interpreter(x, weight=None, *, eps):
    """Sleeps in C without releasing the interpreter lock, so that no other thread of Python runs."""
    ctypes.PyDLL(None).sleep(1000)


@kernel("rms_norm", contract="fp32_multiply")
def stays(x, weight=None, *, eps):
    xf = x.float()
    product = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return (product if weight is None else product * weight.float()).to(x.dtype)
