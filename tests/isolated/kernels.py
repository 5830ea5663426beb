"""Kernels for rms_norm that do right and wrong in all ways that one call can show, for processes of their own."""

import ctypes
import os
import sys
import time
import warnings
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit.kernel import UnsupportedCase, kernel
from lastbit.placement import PlacementWarning


@triton.jit
def _rows(x, weight, out, columns, eps, STEP: tl.constexpr, BEYOND: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, STEP)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value) / columns + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * columns + at, (value * inverse).to(x.dtype.element_ty) * scale, mask=inside)
    if BEYOND:
        tl.store(out + tl.num_programs(0) * columns + row, inverse.to(x.dtype.element_ty))


def _launched(x, weight, out, eps, beyond=False):
    x = x.contiguous()
    columns = x.shape[-1]
    grid = (x.numel() // columns,)
    _rows[grid](x, weight, out, columns, eps, triton.next_power_of_2(columns), beyond)
    return out


def right(x, weight, eps):
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@kernel("rms_norm", stages=("normalized",))
def with_stages(x, weight, *, eps, stages=()):
    value = x.float()
    normalized = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return {"output": normalized * weight, **dict.fromkeys(stages, normalized)}


@kernel("rms_norm")
def interpreted(x, weight, *, eps):
    return _launched(x, weight, torch.empty_like(x), eps)


@kernel("rms_norm")
def faulty(x, weight, *, eps):
    return _launched(x, weight, torch.empty_like(x), eps, beyond=True)


@kernel("rms_norm", mutates={"x": "output"})
def in_place(x, weight, *, eps):
    x.copy_(right(x, weight, eps))


@kernel("rms_norm", out={"out": "output"})
def receiving(out, x, weight, *, eps):
    out.copy_(right(x, weight, eps))


@dataclass(frozen=True)
class Both:
    x: Tensor
    weight: Tensor


@kernel("rms_norm")
def bundled(both: Both, *, eps):
    return right(both.x, both.weight, eps)


@kernel("rms_norm")
def transposed(x, weight, *, eps):
    return right(x, weight, eps).t().contiguous().t()


@kernel("rms_norm")
def mutating(x, weight, *, eps):
    result = right(x, weight, eps)
    x.zero_()
    return result


@kernel("rms_norm")
def unwritten(x, weight, *, eps):
    out = torch.empty_like(x)
    out[1:] = right(x, weight, eps)[1:]
    return out


@kernel("rms_norm")
def writing_outside(x, weight, *, eps):
    out = torch.empty_like(x)
    out.copy_(right(x, weight, eps))
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 1, 4)
    return out


@kernel("rms_norm")
def aliasing(x, weight, *, eps):
    x.copy_(right(x, weight, eps))
    return x


_memory = {}


@kernel("rms_norm")
def reusing(x, weight, *, eps):
    kept = _memory.setdefault(x.shape, torch.zeros(x.shape, dtype=x.dtype))
    return kept.copy_(right(x, weight, eps))


_answers = {}


@kernel("rms_norm")
def caching(x, weight, *, eps):
    key = x.data_ptr(), x.shape
    if key not in _answers:
        _answers[key] = right(x, weight, eps)
    return _answers[key].clone()


@kernel("rms_norm")
def watchful(x, weight, *, eps):
    return right(x, weight, eps) if "lastbit.inputs" in sys.modules else torch.zeros_like(x)


@kernel("rms_norm")
def moving(x, weight, *, eps):
    os.chdir("/")
    return right(x, weight, eps)


@kernel("rms_norm")
def flushing(x, weight, *, eps):
    torch.set_flush_denormal(True)
    return right(x, weight, eps)


@kernel("rms_norm")
def declining(x, weight, *, eps):
    raise UnsupportedCase("not this one")


@kernel("rms_norm")
def raising(x, weight, *, eps):
    return {}["x"]


@kernel("rms_norm")
def giving_nothing(x, weight, *, eps):
    return None


@kernel("rms_norm")
def of_another_shape(x, weight, *, eps):
    return right(x, weight, eps)[:1]


@kernel("rms_norm")
def without_memory(x, weight, *, eps):
    return torch.empty_like(x, device="meta")


@kernel("rms_norm")
def large(x, weight, *, eps):
    return {"output": right(x, weight, eps), "normalized": torch.zeros(1).expand(1 << 20)}


@kernel("rms_norm")
def claiming(x, weight, *, eps):
    return torch.zeros(1, dtype=x.dtype).expand(1 << 30)


@kernel("rms_norm")
def vast(x, weight, *, eps):
    return torch.zeros(1).expand(1 << 50)


@kernel("rms_norm")
def printing(x, weight, *, eps):
    print("\x1b[31mPASSED", "x" * 100_000)
    return right(x, weight, eps)


@kernel("rms_norm")
def exiting(x, weight, *, eps):
    os._exit(0)


@kernel("rms_norm")
def exiting_later(x, weight, *, eps):
    if x.shape[0] == 3:
        os._exit(3)
    return right(x, weight, eps)


@kernel("rms_norm", placement="moves")
def warning(x, weight, *, eps):
    warnings.warn(PlacementWarning("weight", torch.device("cuda", 1), x.device), stacklevel=1)
    warnings.warn("\x1b[31mmoved", stacklevel=1)
    if x.shape[0] == 3:
        raise ValueError("x is on cpu, but weight is on cuda:1")
    x.zero_()
    return weight


@kernel("rms_norm")
def crashing(x, weight, *, eps):
    ctypes.string_at(0)


@kernel("rms_norm")
def hanging(x, weight, *, eps):
    time.sleep(1000)


@kernel("rms_norm", depth=lambda terms: 0)
def shallow(x, weight, *, eps):
    return right(x, weight, eps)


@kernel("rms_norm")
def of_another_eps(x, weight, *, eps):
    """Right as far as sums of 4,096 terms tell, and another formula."""
    return right(x, weight, 1.001 * eps)


@kernel("rms_norm")
def interpreted_of_another_eps(x, weight, *, eps):
    return _launched(x, weight, torch.empty_like(x), 1.001 * eps)


@kernel("rms_norm")
def exiting_while_followed(x, weight, *, eps):
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        os._exit(3)
    return right(x, weight, eps)
