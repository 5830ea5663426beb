"""A 64-bit hash of a tensor's dtype, shape and elements that does not depend on device, strides or torch version."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.inputs.bits import bits_of, finalize, key_of, signed
from harness.inputs.blocks import block_budget, row_blocks

_INDEX, _BITS = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F


def fingerprint(tensor: Tensor) -> str:
    """16 hex digits; equal for equal dtype, shape and element bits in logical order.

    Every element contributes a hash of its index and bits, and the contributions are added modulo 2**64, so that the
    order and size of the pieces do not matter but exchanged elements and flipped signs do.
    """
    total = 0
    shape = tuple(tensor.shape)
    elements = bits_of(tensor).reshape(1) if not shape else bits_of(tensor)
    *leading, width = elements.shape
    budget = block_budget(tensor.device)
    start = 0
    for block in row_blocks(tuple(leading), width, budget):
        piece = elements[block]
        for column in range(0, width, budget):
            part = piece[..., column : column + budget]
            total += _contribution(part.flatten().to(torch.int64), start + column)
        start += piece.numel()
    return f"{key_of(str(tensor.dtype), shape, total % 2**64):016x}"


def value_fingerprint(tensor: Tensor) -> str:
    """The fingerprint of the values with one kind of NaN: payloads and signs of NaN differ between devices."""
    if not tensor.is_floating_point():
        return fingerprint(tensor)
    values = tensor if tensor.dtype is torch.float64 else tensor.to(torch.float32)
    return fingerprint(torch.where(torch.isnan(values), torch.nan, values))


def combined(fingerprints: Mapping[str, str]) -> str:
    """One fingerprint of several named ones; the order of the names does not matter."""
    return f"{key_of(*sorted(fingerprints.items())):016x}"


def _contribution(bits: Tensor, start: int) -> int:
    """Sum of the hashes of consecutive elements, the first of which has logical index `start`."""
    index = torch.arange(start, start + bits.numel(), device=bits.device)
    return int(finalize(index * signed(_INDEX) + bits * signed(_BITS)).sum())
