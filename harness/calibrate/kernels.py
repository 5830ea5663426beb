"""The Triton kernels that calibration measures with: one primitive, cast, sum or dot each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

# Any power of two does: nothing is timed here.
_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _unary_kernel(x_ptr, y_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    if OP == "1/sqrt":
        y = 1.0 / tl.sqrt(x)
    elif OP == "1/sqrt_rn":
        y = 1.0 / tl.sqrt_rn(x)
    elif OP == "div_rn(1, sqrt)":
        y = tl.div_rn(1.0, tl.sqrt(x))
    elif OP == "div_rn(1, sqrt_rn)":
        y = tl.div_rn(1.0, tl.sqrt_rn(x))
    elif OP == "1/x":
        y = 1.0 / x
    elif OP == "x/3":
        y = x / 3.0
    elif OP == "x/7168":
        y = x / 7168.0
    elif OP == "div_rn":
        y = tl.div_rn(1.0, x)
    elif OP == "x/4096":
        y = x / 4096.0
    elif OP == "x*2^-126":
        y = x * 1.1754943508222875e-38
    elif OP == "cast":
        y = x
    else:
        y = getattr(tl, OP)(x)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def _libdevice_kernel(x_ptr, y_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    y = getattr(libdevice, OP)(x)
    tl.store(y_ptr + at, y, mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def _row_sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, tl.sum(x * x, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _dot_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows[:, None] * K + (start + inner)[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


def apply(op: str, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Apply `op` to every element of `x` (fp32, contiguous), stored as `dtype`."""
    y = torch.empty_like(x, dtype=dtype)
    _launch(_unary_kernel, triton.cdiv(x.numel(), _BLOCK), x, y, x.numel(), OP=op, BLOCK=_BLOCK)
    return y


def libdevice_function(op: str, x: Tensor) -> Tensor:
    """Apply the function of libdevice of that name to every element of `x` (fp32, contiguous)."""
    y = torch.empty_like(x)
    _launch(_libdevice_kernel, triton.cdiv(x.numel(), _BLOCK), x, y, x.numel(), OP=op, BLOCK=_BLOCK)
    return y


def sums_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of each row of `x` [rows, n], in fp32, one program per row."""
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _launch(_row_sum_kernel, x.shape[0], x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def dot(a: Tensor, b: Tensor, block: int = 64) -> Tensor:
    """Multiply a [64, K] by b [K, 64] in fp32, `block` terms after another; K is a multiple of `block`."""
    c = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    _launch(_dot_kernel, 1, a, b, c, a.shape[1], M=a.shape[0], N=b.shape[1], BLOCK=block)
    return c


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    kernel[(programs,)](*arguments, **constants)
