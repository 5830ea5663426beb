"""Kernels whose residues the tests read: one formula in many forms, faults, and tricks with bits and roundings."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


@triton.jit
def norm_kernel(
    x_ptr, w_ptr, y_ptr, eps, n, BLOCK: tl.constexpr, FORM: tl.constexpr, FAULT: tl.constexpr, ROUNDED: tl.constexpr
):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        seen = column < (n - 1 if FAULT == "column" else n)
        x = tl.load(x_ptr + row * n + column, mask=seen, other=0.0).to(tl.float32)
        total = tl.fma(x, x, total) if FORM == "fma" else total + x * x
    mean = tl.sum(total, 0) * (1 / n) if FORM == "times" else tl.sum(total, 0) / (n - 1 if FAULT == "count" else n)
    rstd = tl.rsqrt(mean + eps) if FORM == "plain" else 1.0 / tl.sqrt_rn(mean + eps)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + column, mask=column < n).to(tl.float32)
        w = tl.load(w_ptr + column, mask=column < n)
        y = x * rstd
        if ROUNDED:
            y = y.to(w.dtype)
        tl.store(y_ptr + row * n + column, (y * w).to(y_ptr.dtype.element_ty), mask=column < n)


def norm(x: Tensor, w: Tensor, *, eps: float = 1e-6, block: int = 64, form: str = "plain", fault: str = "") -> Tensor:
    y = torch.empty_like(x)
    norm_kernel[(x.shape[0],)](x, w, y, eps, x.shape[1], block, form, fault, fault == "rounded")
    return y


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n, N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at, mask=at < n, other=float("-inf"))
    if FORM == "online":
        largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
        for start in range(0, n, BLOCK):
            part = start + tl.arange(0, BLOCK)
            own = tl.load(x_ptr + part, mask=part < n, other=float("-inf"))
            larger = tl.maximum(largest, tl.max(own, 0))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(own - larger), 0)
            largest = larger
        y = tl.exp(x - largest) / total
    elif FORM == "base 2":
        scaled = x * 1.4426950408889634
        e = tl.exp2(scaled - tl.max(scaled, 0))
        y = e / tl.sum(e, 0)
    elif FORM == "masked":
        scores = tl.where(at < n, x, -1e30)
        e = tl.exp(scores - tl.max(scores, 0))
        y = e / (tl.sum(e, 0) + 1e-20)
    elif FORM == "masked by a half":
        scores = tl.where(at < n, x, tl.full([N], -1000.0, tl.float16))
        e = tl.exp(scores - tl.max(scores, 0))
        y = e / tl.sum(e, 0)
    elif FORM == "masked by a sum":
        scores = tl.load(x_ptr + at, mask=at < n, other=0.0) * 1.44269504 + tl.where(at < n, 0, -1.0e6)
        e = tl.exp2(scores - tl.max(scores, 0))
        y = e / tl.sum(e, 0)
    elif FORM == "first tile masked":
        largest, total = -1e30, 0.0
        for start in range(-BLOCK, n, BLOCK):
            part = start + tl.arange(0, BLOCK)
            inside = (part >= 0) & (part < n)
            own = tl.where(inside, tl.load(x_ptr + part, mask=inside, other=0.0), -1e30)
            larger = tl.maximum(largest, tl.max(own, 0))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(own - larger), 0)
            largest = larger
        y = tl.exp(x - largest) / total
    elif FORM == "one masked":
        e = tl.exp(tl.where(at == 3, -1e30, x) - tl.max(x, 0))
        y = tl.exp(x - tl.max(x, 0)) / tl.sum(e, 0)
    elif FORM == "unshifted":
        e = tl.exp(x)
        y = e * (1 / tl.sum(e, 0))
    elif FORM == "unscaled":
        y = tl.exp(x - tl.max(x, 0)) / tl.sum(tl.exp(x), 0)
    else:
        y = tl.softmax(x)
    tl.store(y_ptr + at, y, mask=at < n)


def softmax(x: Tensor, form: str, block: int = 8) -> Tensor:
    y = torch.empty_like(x)
    softmax_kernel[(1,)](x, y, x.numel(), triton.next_power_of_2(x.numel()), block, form)
    return y


@triton.jit
def _merged(count, mean, squares, other_count, other_mean, other_squares):
    delta = other_mean - mean
    both = count + other_count
    share = tl.where(both == 0.0, 0.0, other_count / both)
    return both, mean + delta * share, squares + other_squares + delta * delta * count * share


@triton.jit
def variance_kernel(x_ptr, y_ptr, n, N: tl.constexpr, FORM: tl.constexpr):
    at = tl.arange(0, N)
    seen = at < n
    x = tl.load(x_ptr + at, mask=seen, other=0.0)
    if FORM == "welford":
        _, mean, squares = tl.reduce((tl.where(seen, 1.0, 0.0), x, tl.zeros_like(x)), 0, _merged)
        variance = squares / n
    elif FORM == "kahan":
        total, lost = 0.0, 0.0
        for i in range(n):
            term = tl.load(x_ptr + i) - lost
            sum = total + term
            lost = (sum - total) - term
            total = sum
        mean = total / n
        variance = tl.sum(tl.where(seen, (x - mean) * (x - mean), 0.0), 0) / n
    elif FORM == "squares":
        mean = tl.sum(x, 0) / n
        variance = tl.sum(x * x, 0) / n - mean * mean
    elif FORM == "running":
        mean = tl.max(tl.where(at == n - 1, tl.cumsum(x, 0), float("-inf")), 0) / n
        variance = tl.sum(tl.where(seen, (x - mean) * (x - mean), 0.0), 0) / n
    else:
        mean = tl.sum(x, 0) / n
        variance = tl.sum(tl.where(seen, (x - mean) * (x - mean), 0.0), 0) / n
    tl.store(y_ptr, mean)
    tl.store(y_ptr + 1, variance)


def variance(x: Tensor, form: str) -> Tensor:
    y = torch.empty(2)
    variance_kernel[(1,)](x, y, x.numel(), triton.next_power_of_2(x.numel()), form)
    return y


@triton.jit
def columns_kernel(x_ptr, y_ptr, rows, N: tl.constexpr, FORM: tl.constexpr):
    at = tl.arange(0, N)
    if FORM == "add":
        tl.atomic_add(y_ptr + at, tl.load(x_ptr + tl.program_id(0) * N + at))
    elif FORM == "same address":
        block = tl.load(x_ptr + tl.arange(0, 4)[:, None] * N + at[None, :])
        tl.atomic_add(y_ptr + at[None, :] + tl.zeros([4, 1], tl.int32), block)
    elif FORM == "max":
        tl.atomic_max(y_ptr + at, tl.load(x_ptr + tl.program_id(0) * N + at))
    else:
        total = tl.load(x_ptr + at)
        for row in range(1, rows):
            x = tl.load(x_ptr + row * N + at)
            total = tl.maximum(total, x) if FORM == "largest" else total + x
        tl.store(y_ptr + at, total)


def columns(x: Tensor, form: str) -> Tensor:
    y = torch.zeros(x.shape[1], dtype=x.dtype)
    if form == "max":
        y.fill_(float("-inf"))
    columns_kernel[(x.shape[0] if form in ("add", "max") else 1,)](x, y, x.shape[0], x.shape[1], form)
    return y


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def elementwise_kernel(x_ptr, z_ptr, y_ptr, N: tl.constexpr, FORM: tl.constexpr):
    at = tl.arange(0, N)
    x, z = tl.load(x_ptr + at), tl.load(z_ptr + at)
    product = x * z  # in fp32 it has other values than its residues say
    if FORM == "plain":
        y = product
    elif FORM == "sorted":
        y = tl.sort(product)
    elif FORM == "sorted in halves":
        low, high = tl.split(tl.trans(tl.reshape(product, [2, N // 2])))
        y = tl.sort(tl.flip(tl.cat(low, high, can_reorder=True), 0))
    elif FORM == "moved":
        pairs = tl.join(product, product)
        first, _ = tl.split(pairs)
        y = tl.gather(tl.gather(first, N - 1 - at, 0), N - 1 - at, 0)
    elif FORM == "largest":
        y = tl.zeros([N], tl.float32) + tl.reduce(product, 0, _larger)
    elif FORM == "max":
        y = tl.zeros([N], tl.float32) + tl.max(product, 0)
    elif FORM == "abs":
        y = tl.abs(product)
    elif FORM == "abs by bits":
        y = (product.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    elif FORM == "abs by choice":
        y = tl.where(product < 0, -product, product)
    elif FORM == "bits and back":
        y = product.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
    elif FORM == "cut bits":
        y = (product.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    elif FORM == "power of two":
        y = (product.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    elif FORM == "power of two by log2":
        y = tl.exp2(tl.floor(tl.log2(tl.abs(product))))
    elif FORM == "split":
        high = product.to(tl.bfloat16).to(tl.float32)
        middle = (product - high).to(tl.bfloat16).to(tl.float32)
        y = high + middle + (product - high - middle).to(tl.bfloat16).to(tl.float32)
    elif FORM == "magic":
        y = (product + 12582912.0) - 12582912.0
    elif FORM == "fused magic":
        y = tl.fma(x, z, 12582912.0) - 12582912.0
    elif FORM == "fixed point":
        y = (product * 1048576.0).to(tl.int64).to(tl.float32) / 1048576.0
    elif FORM == "rounded bits":
        bits = product.to(tl.int32, bitcast=True)
        y = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    elif FORM == "rint":
        y = libdevice.rint(product)
    elif FORM == "e4m3":
        y = (product * 300.0).to(tl.float8e4nv).to(tl.float32)
    elif FORM == "clamped e4m3":
        y = tl.clamp(product * 300.0, -448.0, 448.0).to(tl.float8e4nv).to(tl.float32)
    elif FORM == "bf16":
        y = product.to(tl.bfloat16).to(tl.float32)
    elif FORM == "bf16 toward zero":
        y = product.to(tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32)
    elif FORM == "tanh":
        y = libdevice.tanh(product)
    elif FORM == "tanh of exp":
        y = 1.0 - 2.0 / (tl.exp(2.0 * product) + 1.0)
    elif FORM == "exp":
        y = tl.exp(product)
    elif FORM == "ex2":
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [product * 1.4426950408889634], tl.float32, True, 1
        )
    elif FORM == "expm1":
        y = libdevice.expm1(product) + 1.0
    elif FORM == "sigmoid":
        y = tl.sigmoid(product)
    elif FORM == "sigmoid of tanh":
        y = 1.0 / (1.0 + tl.exp2(-product * 1.4426950408889634))
    elif FORM == "cube":
        y = product * product * product
    elif FORM == "pow":
        y = libdevice.pow(product, tl.full([N], 3.0, tl.float32))
    elif FORM == "larger":
        y = tl.maximum(product, z)
    elif FORM == "max of PTX":
        y = tl.inline_asm_elementwise("max.f32 $0, $1, $2;", "=f,f,f", [product, z], tl.float32, True, 1)
    elif FORM == "saturated":
        y = tl.inline_asm_elementwise("add.sat.f32 $0, $1, $2;", "=f,f,f", [product, z], tl.float32, True, 1)
    elif FORM == "saturated sum":
        y = tl.clamp(product + z, 0.0, 1.0)
    elif FORM == "sin":
        y = -tl.sin(-product)
    elif FORM == "sine":
        y = libdevice.sin(product)
    elif FORM == "assembly":
        y = tl.inline_asm_elementwise("copysign.f32 $0, $2, $1;", "=f,f,f", [product, z], tl.float32, True, 1)
    else:
        tl.static_assert(False, "no such form")
    tl.store(y_ptr + at, y)


def elementwise(form: str, x: Tensor, z: Tensor) -> Tensor:
    y = torch.empty(x.numel())
    elementwise_kernel[(1,)](x, z, y, x.numel(), form)
    return y


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, N: tl.constexpr, FORM: tl.constexpr):
    at = tl.arange(0, N)
    seen = at < n
    if FORM == "bits":
        x_ptr, y_ptr = (
            x_ptr.to(tl.pointer_type(tl.int32), bitcast=True),
            y_ptr.to(tl.pointer_type(tl.int32), bitcast=True),
        )
    x = tl.load(x_ptr + at, mask=seen)
    if FORM == "cut bits":
        y_ptr = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        x = x.to(tl.int32, bitcast=True) & -65536
    tl.store(y_ptr + at, x, mask=seen)


def copied(x: Tensor, w: Tensor, form: str) -> Tensor:
    """Copy the norm of x."""
    y = norm(x, w)
    z = torch.empty_like(y)
    copy_kernel[(1,)](y, z, y.numel(), triton.next_power_of_2(y.numel()), form)
    return z


@triton.jit
def merge_kernel(a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, y_ptr, N: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, N), tl.arange(0, WIDTH)
    at = row[:, None] * WIDTH + column[None, :]
    a_lse, b_lse = tl.load(a_lse_ptr + row), tl.load(b_lse_ptr + row)
    larger = tl.maximum(a_lse, b_lse)
    lse = larger + tl.log(tl.exp(a_lse - larger) + tl.exp(b_lse - larger))
    of_a, of_b = tl.exp(a_lse - lse)[:, None], tl.exp(b_lse - lse)[:, None]
    tl.store(y_ptr + at, tl.load(a_ptr + at) * of_a + tl.load(b_ptr + at) * of_b)


def merged(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """Two parts [N, WIDTH] of attention over other keys as one, by the logarithms of their sums."""
    y = torch.empty_like(a)
    merge_kernel[(1,)](a, a_lse, b, b_lse, y, *a.shape)
    return y


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, K: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    i, j = tl.arange(0, 16), tl.arange(0, 16)
    total = tl.zeros([16, 16], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a, b = tl.load(a_ptr + i[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * 16 + j[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + i[:, None] * 16 + j[None, :], total)


def dot(a: Tensor, b: Tensor, *, block: int = 16, precision: Any = "ieee") -> Tensor:
    c = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, c, a.shape[1], block, precision)
    return c
