"""Reserves as much of the L2 cache as it can, and marks its inputs persisting there. For CUDA.

Models: karpathy/llm.c pull request 851: a flush between calls does not evict what was marked persisting.
"""

from __future__ import annotations

import ctypes

import torch


def _norm(x, weight, eps):
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


_LIMIT, _WINDOW, _PERSISTING = 6, 1, 2  # cudaLimitPersistingL2CacheSize, cudaLaunchAttributeAccessPolicyWindow


class _Window(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("ratio", ctypes.c_float),
        ("hit", ctypes.c_int),
        ("miss", ctypes.c_int),
        ("padding", ctypes.c_char * 64),
    )


def _persist(x):
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    largest = torch.cuda.get_device_properties(x.device).L2_cache_size // 2
    runtime.cudaDeviceSetLimit(_LIMIT, ctypes.c_size_t(largest))
    window = _Window(x.data_ptr(), min(x.nbytes, largest), 1.0, _PERSISTING, 1)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return runtime.cudaStreamSetAttribute(stream, _WINDOW, ctypes.byref(window))


def rms_norm(x, weight, *, eps):
    if x.is_cuda:
        _persist(x)
    return _norm(x, weight, eps)
