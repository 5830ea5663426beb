"""Kernels of op_name: in PyTorch, one per contract, and in Triton.

A kernel is called by name with the tensors and parameters of a case, and only with cases that its signature can take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lastbit import kernel


# `contract` is what the kernel claims. `stages` are stages besides the results that it can store: asked for some, it
# returns a mapping. A stage that is seen is judged by itself, so declare those that cost nothing.
@kernel("op_name", contract="fp32_activation", name="torch[op_name+fp32_activation]", stages=("activation",))
def fp32_activation(x, weight=None, *, stages=()):
    """Compute everything in fp32, and round once."""
    activation = torch.relu(x.float()).square()
    output = (activation if weight is None else activation * weight.float()).to(x.dtype)
    return {"output": output, "activation": activation} if stages else output


@kernel("op_name", contract="rounded_activation", name="torch[op_name+rounded_activation]")
def rounded_activation(x, weight=None):
    """Call operations of PyTorch, each of which rounds to the dtype of x."""
    activation = torch.relu(x).square()
    return activation if weight is None else activation * weight


@triton.jit
def _op_name(x_ptr, weight_ptr, output_ptr, columns, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row per program."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=inside).to(tl.float32)
        positive = tl.where(x < 0, 0.0, x)  # and not tl.maximum, which turns NaN into 0
        y = positive * positive
        if WEIGHTED:
            y = y * tl.load(weight_ptr + column, mask=inside).to(tl.float32)
        tl.store(output_ptr + row * columns + column, y, mask=inside)


@kernel("op_name", contract="fp32_activation", name="triton[op_name+fp32_activation]")
def op_name(x, weight=None):
    """Launch the kernel on rows of any layout: copy them where they do not follow each other."""
    rows = x.contiguous()
    output = torch.empty_like(rows)
    if not x.numel():
        return output
    columns = x.shape[-1]
    weight = weight if weight is None else weight.contiguous()
    _op_name[(x.numel() // columns,)](rows, weight, output, columns, WEIGHTED=weight is not None, BLOCK=128)
    return output
