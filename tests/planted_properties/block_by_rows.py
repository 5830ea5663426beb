"""A smaller block from some number of rows on, as in vLLM's rms_norm: a row's sum is in the order of the launch."""

import torch
import triton
import triton.language as tl

from lastbit.kernel import kernel

THRESHOLD = 17
"""From so many rows on a row has a small block."""

LARGE, SMALL = 1024, 256


@triton.jit
def normalize(x, weight, output, stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        squares += value * value
    inverse = tl.math.rsqrt(tl.sum(squares, axis=0) / width + eps)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        result = (value * inverse * gain).to(output.dtype.element_ty)
        tl.store(output + row * width + columns, result, mask=inside)


@kernel("rms_norm", contract="fp32_multiply", name="planted[block by rows]")
def block_by_rows(x, weight, *, eps):
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}, but x is on {x.device}: move it there")
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    output = torch.empty_like(rows)
    if rows.numel():
        block = LARGE if len(rows) < THRESHOLD else SMALL
        normalize[(len(rows),)](
            rows, weight.contiguous(), output, rows.stride(0), rows.shape[1], eps, BLOCK=block, num_warps=4
        )
    return output.view(x.shape)
