"""Kernels of softcap: in PyTorch, one per contract, and in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from lastbit import kernel


@kernel("softcap", contract="fp32_steps", name="torch[softcap+fp32_steps]")
def fp32_steps(x, *, cap):
    """Compute everything in fp32, rounded once."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


@kernel("softcap", contract="rounded_steps", name="torch[softcap+rounded_steps]", stages=("scaled", "squashed"))
def rounded_steps(x, *, cap, stages=()):
    """Compute as Transformers does: each operation rounds to the dtype of x."""
    scaled = x / cap
    squashed = torch.tanh(scaled)
    output = squashed * cap
    return {"output": output, "scaled": scaled, "squashed": squashed} if stages else output


@triton.jit
def _softcap(x_ptr, output_ptr, columns, cap, BLOCK: tl.constexpr):
    """Compute one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=inside).to(tl.float32)
        tl.store(output_ptr + row * columns + column, libdevice.tanh(x / cap) * cap, mask=inside)


@kernel("softcap", contract="fp32_steps", name="triton[softcap+fp32_steps]")
def softcap(x, *, cap):
    """Take rows of any layout: a copy where they do not follow each other."""
    rows = x.contiguous()
    output = torch.empty_like(rows)
    if not x.numel():
        return output
    columns = x.shape[-1]
    _softcap[(x.numel() // columns,)](rows, output, columns, cap, BLOCK=128)
    return output
