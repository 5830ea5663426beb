"""`tl.dot` of interpreted kernels in the order and with the truncation of tensor cores.

In a step they add some products and the sum so far. Of each number they keep so many bits below the largest exponent
among them, where a product has the sum of its factors' exponents, and of the new sum 24 bits; nothing is rounded.
Measured for factors of bf16 and fp16 and sums of fp32; other products stay as they are. A sum beyond fp32 is infinite,
which was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from lastbit.interpret import builder
from lastbit.interpret.numpy_formats import BFLOAT16, Array, round_float
from lastbit.numerics.tensor_cores import BY_CAPABILITY, TensorCores

HOPPER = BY_CAPABILITY[9, 0]
_NONE = -(1 << 20)
"""The exponent of a number that does not count: zero."""


@contextmanager
def tensor_cores(model: TensorCores = HOPPER) -> Iterator[None]:
    """Let interpreted products of matrices within add as `model` does, to the bit, instead of in an order of the CPU's.

    That is what tapes do, too: they look up how products are added when they run.
    """
    plain = builder._accumulated

    def accumulated(a: Array, b: Array, d: Array) -> Array:
        known = a.dtype in (BFLOAT16, np.float16) and d.dtype == np.float32
        return dot(model, a, b, d) if known else plain(a, b, d)

    with patch.object(builder, "_accumulated", accumulated):
        yield


def dot(model: TensorCores, a: Array, b: Array, d: Array) -> Array:
    """Return a [..., M, K] @ b [..., K, N] + d [..., M, N], added as the model's tensor cores add."""
    (left, left_exponents), (right, right_exponents) = _factors(a), _factors(b)
    total = d.astype(np.float64)
    for start in range(0, a.shape[-1], model.products):
        step = range(start, min(start + model.products, a.shape[-1]))
        exponent = _exponent(total, _NONE)
        for k in step:
            pair = left_exponents[..., :, k, None] + right_exponents[..., k, None, :]
            exponent = np.maximum(exponent, pair)
        shift = 23 + model.extra_bits - np.maximum(exponent, -500)
        kept = np.trunc(np.ldexp(total, shift))
        for k in step:
            kept = kept + np.trunc(np.ldexp(left[..., :, k, None] * right[..., k, None, :], shift))
        total = _cut(np.ldexp(kept, -shift))
    return total.astype(np.float32)


def _factors(x: Array) -> tuple[Array, Array]:
    """Return fp64 values and exponents; subnormal numbers have that of the smallest normal one."""
    wide = x.astype(np.float64)
    return wide, _exponent(wide, -14 if x.dtype == np.float16 else -126)


def _exponent(x: Array, least: int) -> Array:
    return np.where(x == 0, _NONE, np.maximum(np.frexp(x)[1] - 1, least))


def _cut(total: Array) -> Array:
    """Truncate each number to its first 24 bits; the result is fp64."""
    nearest = total.astype(np.float32)
    cut = np.where(np.isinf(nearest), nearest, round_float(total, nearest.dtype, toward_zero=True))
    return cut.astype(np.float64)
