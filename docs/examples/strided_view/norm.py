"""An RMSNorm over the heads of a query that is a view of a packed tensor, as after a projection to q, k and v."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit import kernel


@triton.jit
def _norm(x_ptr, weight_ptr, out_ptr, row_stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    x = tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    squares = x.to(tl.float32) * x.to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(squares, axis=0) / n + eps)
    normalized = (x.to(tl.float32) * inv_rms).to(x.dtype)
    out = (normalized.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row * n + columns, out, mask=inside)


@kernel("rms_norm", contract="native_multiply")
def norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    n = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = x if x.stride(-1) == 1 else x.contiguous()
        row_stride = x.stride(-2) if x.dim() > 1 else n
        _norm[(x.numel() // n,)](x, weight.contiguous(), out, row_stride, n, eps, BLOCK=triton.next_power_of_2(n))
    return out
