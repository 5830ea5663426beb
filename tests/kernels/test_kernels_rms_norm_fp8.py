"""The quotient that the Triton RMSNorm makes codes of, against division."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit.siblings import siblings
from tests.rms_norm_contract import DEVICE, FOLDER, needs_device

pytestmark = needs_device

with siblings(FOLDER):
    _quotient = importlib.import_module("rms_norm")._quotient

MIDDLES = np.arange(16, 32, dtype=np.float32)
"""Significands of 5 bits: those of all numbers in the middle between two codes."""
BLOCK = 1 << 14


@triton.jit
def _quotients(output_ptr, scale_ptr, quotient_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    output = tl.load(output_ptr + i, mask=i < n, other=1.0)
    tl.store(quotient_ptr + i, _quotient(output, tl.load(scale_ptr + i, mask=i < n, other=1.0)), mask=i < n)


def quotients(output: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's quotients, and the correctly rounded ones."""
    output, scale = (a.astype(np.float32).ravel() for a in np.broadcast_arrays(output, scale))
    found = torch.empty(output.size, device=DEVICE)
    parts = (torch.from_numpy(a.copy()).to(DEVICE) for a in (output, scale))
    _quotients[(triton.cdiv(output.size, BLOCK),)](*parts, found, output.size, BLOCK=BLOCK)
    with np.errstate(all="ignore"):
        return found.cpu().numpy(), output / scale


def around(values: np.ndarray, steps: int) -> np.ndarray:
    """Return the fp32 numbers up to that many steps from each value."""
    bits = values.astype(np.float32).view(np.int32)[..., None] + np.arange(-steps, steps + 1, dtype=np.int32)
    return bits.view(np.float32)


def codes(quotient: np.ndarray) -> Tensor:
    return torch.from_numpy(quotient).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("power", [-20, 0, 110])
def test_every_output_of_16_bits_beside_the_middle_between_two_codes(power):
    """All significands of 11 bits, and all scales that bring one within 3 ulp of a middle."""
    output = np.arange(1 << 10, 1 << 11, dtype=np.float32)[:, None]
    scale = around(output / MIDDLES, 3)
    found, wanted = quotients(np.ldexp(output[..., None], power), np.ldexp(scale, power))
    assert np.array_equal(found, wanted)


def test_outputs_of_fp32_beside_the_middle_between_two_codes():
    """Scales near eighths, which bring a quotient nearest to where its rounding changes, and any."""
    drawn = np.random.default_rng(0).uniform(1, 2, 2000).astype(np.float32)
    scale = np.concatenate([around(np.arange(8, 17, dtype=np.float32) / 8, 30).ravel(), drawn])[:, None]
    output = around((scale.astype(np.float64) * MIDDLES).astype(np.float32), 3)
    found, wanted = quotients(output, scale[..., None])
    assert np.array_equal(found, wanted)


def test_random_quotients_are_rounded_correctly():
    random = np.random.default_rng(1)
    scale = np.exp2(random.uniform(-17.8, 119, 1 << 15)).astype(np.float32)
    found, wanted = quotients(scale * random.uniform(2**-11, 448, scale.size).astype(np.float32), scale)
    assert np.array_equal(found, wanted)


def test_zeros_infinities_nan_and_what_vanishes():
    tiny, inf = 2.0**-133, float("inf")
    output = np.array([0.0, -0.0, tiny, -tiny, 2.0**-126, 1.0, -1.0, 3e38, -3e38, inf, -inf, float("nan")])
    scale = np.array([1 / (448 * 512), 1.0, 3.0, 2.0**119, inf])
    for s in scale:
        row = output if s == inf else output[np.abs(output) <= s * 448]  # the scale of a row is that of its largest
        found, wanted = quotients(row, np.array(s))
        assert np.array_equal(np.isnan(found), np.isnan(wanted))
        assert torch.equal(codes(np.nan_to_num(found)), codes(np.nan_to_num(wanted)))
