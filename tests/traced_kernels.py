"""Kernels whose traces the tests read: every kind of operation, and every way in which a line can look."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_kernel(x_ptr, w_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n + eps)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + cols, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)


def norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    y = torch.empty_like(x)
    norm_kernel[(x.shape[0],)](x, w, y, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def moving_kernel(x_ptr, y_ptr, z_ptr):
    x = tl.load(x_ptr + tl.arange(0, 8))
    turned = tl.trans(tl.reshape(x, (2, 4)))
    left, right = tl.split(tl.reshape(turned, (4, 1, 2)))
    both = tl.join(left.reshape((4,)), right.reshape((4,)))
    wide = tl.broadcast_to(both[:, :, None], (4, 2, 2))
    tl.store(y_ptr + tl.arange(0, 16), tl.reshape(wide, (16,)))
    tl.store(z_ptr + tl.arange(0, 8), tl.gather(x, 7 - tl.arange(0, 8), 0))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))


@triton.jit
def running_kernel(x_ptr, y_ptr, index_ptr):
    cols = tl.arange(0, 8)
    x = tl.load(x_ptr + cols)
    tl.store(y_ptr + cols, tl.cumsum(x, axis=0))
    tl.store(index_ptr, tl.argmax(x, axis=0))


@triton.jit
def standard_kernel(x_ptr, y_ptr):
    cols = tl.arange(0, 8)
    x = tl.load(x_ptr + cols)
    y = tl.softmax(x) + tl.flip(x, 0) + tl.sort(x) * tl.sigmoid(x) + tl.clamp(x, -1.0, 1.0)
    tl.store(y_ptr + cols, y + tl.max(x, axis=0) - tl.xor_sum(x.to(tl.int32), axis=0))


@triton.jit
def looping_kernel(x_ptr, y_ptr, rounds):
    total = 0.0
    for i in range(rounds):
        total += tl.load(x_ptr + i)
    tl.store(y_ptr, total)


@triton.jit
def choosing_kernel(x_ptr, y_ptr, n):
    cols = tl.arange(0, 8)
    x = tl.load(x_ptr + cols, mask=cols < n, other=5.0)
    tl.store(y_ptr + cols, tl.where(cols < 2, x, x + 1.0))


@triton.jit
def adding_kernel(x_ptr, total_ptr):
    tl.atomic_add(total_ptr, tl.load(x_ptr + tl.program_id(0)))


@triton.jit
def doubling_kernel(x_ptr, y_ptr):
    here = tl.program_id(0)
    tl.store(y_ptr + here, 2.0 * tl.load(x_ptr + here))


@triton.jit
def block_pointer_kernel(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (4, 8), (8, 1), (0, 0), (4, 4), (1, 0))
    y = tl.make_block_ptr(y_ptr, (4, 4), (4, 1), (0, 0), (4, 4), (1, 0))
    tl.store(y, tl.load(tl.advance(x, (0, 4))) * 3.0)


# Lines


@triton.jit
def half(x):
    return x / 2.0


@triton.jit
def smooth(x):
    return half(x) + half(x * x)


@triton.jit
def lines_kernel(x_ptr, y_ptr, n):
    x = tl.load(x_ptr)
    y = (
        smooth(x)
        + tl.exp(
            x,
        )
    )  # fmt: skip
    größe = y * 1.5; y = größe - 0.25  # fmt: skip # noqa: E702
    inside = 0 < n < 9 and not (n == 5 or n == 7)
    if inside:
        y += 1.0
    tl.store(y_ptr, y)


def indented() -> object:
    if True:

        class Inner:
            @triton.jit
            def kernel(x_ptr, y_ptr):
                x = tl.load(x_ptr)
                tl.store(y_ptr, x * x)

        return Inner.kernel
