"""An RMSNorm that multiplies by the weight in fp32, where its contract rounds before the product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit import kernel


@triton.jit
def _norm(x_ptr, weight_ptr, out_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=inside, other=0.0).to(tl.float32)
    variance = tl.sum(x * x, axis=0) / n
    inv_rms = tl.rsqrt(variance + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normalized = x * inv_rms
    out = normalized * weight
    tl.store(out_ptr + row * n + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("rms_norm", contract="native_multiply")
def norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    if out.numel():
        block = triton.next_power_of_2(rows.shape[1])
        _norm[(rows.shape[0],)](rows, weight.contiguous(), out, rows.shape[1], eps, BLOCK=block)
    return out.reshape(x.shape)
