"""Quotients and roots without a call, bit for bit those of IEEE arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit.kernel import load_file
from tests.rms_norm_contract import DEVICE, FOLDER, assert_bits, needs_device

pytestmark = needs_device

MODULE = load_file(FOLDER / "arithmetic.py")
inverse_root, quotient = MODULE.inverse_root, MODULE.quotient
BLOCK = 4096
INFINITY = 0x7F800000  # as bits; the numbers below it are those from zero on


@triton.jit
def _inverse_root_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lanes, inverse_root(tl.load(x_ptr + lanes)))


@triton.jit(do_not_specialize=["count"])
def _quotient_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lanes, quotient(tl.load(x_ptr + lanes), count.to(tl.float32)))


def numbers(blocks: int, *, below: int = INFINITY) -> Tensor:
    """Numbers of random bits from zero on, the smallest and the largest among them, and infinity and NaN."""
    bits = torch.randint(0, below, (blocks * BLOCK,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    bits[:8] = torch.tensor([0, 1, 2, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, INFINITY, 0x7FC00000])
    return bits.view(torch.float32)


def test_inverse_roots_are_those_of_two_rounded_steps():
    """Every significand twice: two octaves have every root."""
    octaves = torch.arange(0x407FFFFF, 0x3F7FFFFF, -1 if DEVICE == "cuda" else -509, dtype=torch.int32)
    x = torch.cat([numbers(16), octaves[: len(octaves) // BLOCK * BLOCK].view(torch.float32)])
    y = torch.empty_like(x, device=DEVICE)
    _inverse_root_kernel[(len(x) // BLOCK,)](x.to(DEVICE), y, BLOCK=BLOCK)
    roots = torch.from_numpy(np.sqrt(x.numpy()))  # torch's own are not all correctly rounded
    assert_bits(y.cpu(), 1.0 / roots, "inverse roots")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 48, 96, 129, 768, 5120, 16385, 32767, 32768])
def test_quotients_are_rounded_once(count):
    x = torch.cat([numbers(2), -numbers(2)])
    x = torch.where(x.abs() < 2.0**-126 * count, x.sign() * count, x)  # subnormal quotients may be a tie
    y = torch.empty_like(x, device=DEVICE)
    _quotient_kernel[(len(x) // BLOCK,)](x.to(DEVICE), y, count, BLOCK=BLOCK)
    assert_bits(y.cpu(), x / count, f"quotients by {count}")
