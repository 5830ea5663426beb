"""Norms of PyTorch as people call them: `F.rms_norm` without a look at its input, and sources that are compiled.

Those of kernels/rms_norm_torch.py take every case, which costs them time. Here a graph is compiled for each set of
shapes, as torch.compile does at first, or with `dynamic` for all of them: verify these on few shapes.
"""

from __future__ import annotations

import functools
from contextlib import suppress

import torch
import torch.nn.functional as F
from norm_packages import refuse_elsewhere
from torch._dynamo.exc import FailOnRecompileLimitHit

from lastbit import kernel

FP8_MAX = 448.0
SMALLEST_SCALE = 1 / (448.0 * 512.0)
MOST_GRAPHS = 256

_compiled_for: set[object] = set()


@kernel("rms_norm", contract="fp32_multiply", name="F.rms_norm[unchecked]")
def rms_norm(x, weight=None, *, eps):
    """Call `F.rms_norm`: on CUDA, for some N, a row whose sum of squares is infinite becomes NaN as a whole."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@functools.cache
def compiled(source, dynamic, **options):
    return torch.compile(source, dynamic=dynamic, fullgraph=True, options=options or None)


def run(source, *arguments, dynamic=False, **options):
    """Call a source compiled for the shapes and numbers of its arguments.

    Where no graph is left, torch would run the source eagerly, in silence and under another contract; that is an error.
    """
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    refuse_elsewhere(tensors[0], **{f"argument {i}": t for i, t in enumerate(tensors)})
    key = source, dynamic, *((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments)
    if key in _compiled_for:  # patching takes longer than a small kernel
        with suppress(FailOnRecompileLimitHit):  # of 8 graphs, where torch guards what is no part of the key
            return compiled(source, dynamic, **options)(*arguments)
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
        found = compiled(source, dynamic, **options)(*arguments)
    _compiled_for.add(key)
    return found


def plain_source(x, weight, residual, eps):
    value = x.float() if residual is None else x.float() + residual.float()
    output = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return {"output": output} if residual is None else {"output": output, "residual_sum": value.to(x.dtype)}


def fp8_source(x, weight, scale, limit, eps):
    value = x.float()
    y = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype).float()
    if scale is not None:
        return {"quantized": (y * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)}
    amax = torch.where(y.isnan(), 0.0, y.abs()).amax(-1, keepdim=True)  # no NaN spoils the scale of its row
    own = (amax / limit).clamp(min=SMALLEST_SCALE)
    return {"quantized": (y / own).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), "scale": own}


def gated_source(x, weight, z, eps, size, is_rms_norm):
    grouped = x.float().unflatten(-1, (-1, size))
    centered = grouped if is_rms_norm else grouped - grouped.mean(-1, keepdim=True)
    normalized = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    gate = z.float() * torch.sigmoid(z.float())
    return (normalized.flatten(-2) * weight.float() * gate).to(x.dtype)


ROWS = ("packed rows", "non-empty")


def declare(name, *, dynamic):
    @kernel("rms_norm", contract="fp32_multiply+unrounded_sum", name=name, takes=ROWS)
    def compiled_rms_norm(x, weight, residual=None, *, eps):
        return run(plain_source, x, weight, residual, eps, dynamic=dynamic)


declare("torch.compile[rms_norm]", dynamic=False)
declare("torch.compile[rms_norm,dynamic]", dynamic=True)


@kernel("rms_norm", contract="fp32_multiply", name="torch.compile[rms_norm_fp8]", takes=ROWS)
def compiled_fp8(x, weight, scale=None, *, eps, quant):
    """Run as eager: by default the compiler drops the rounding before the division by a scale, and divides roughly.

    The largest code is a tensor, because division by a number may become multiplication by its reciprocal.
    """
    return run(fp8_source, x, weight, scale, largest_code(x.device), eps, **as_eager())


@functools.cache
def largest_code(device):
    return torch.tensor(FP8_MAX, device=device)


@functools.cache
def as_eager():
    """Return options under which the compiler rounds where PyTorch does, by their names in the installed version.

    Its patterns take a rounding that is converted back for pointless: torch 2.11 applies them under all other options.
    """
    known = set(torch._inductor.list_options())
    division = ("eager_numerics.division_rounding", "emulate_divison_rounding", "emulate_division_rounding")
    rounding = {name: True for name in ("emulate_precision_casts", *division) if name in known}
    return {**rounding, "pattern_matcher": False}


@kernel("layer_norm_gated", contract="single_rounding", name="torch.compile[layer_norm_gated]", takes=ROWS)
def compiled_gated(x, weight, z, *, eps, group_size=None, is_rms_norm=False):
    return run(gated_source, x, weight, z, eps, group_size or x.shape[-1], is_rms_norm)
