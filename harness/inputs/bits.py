"""64-bit hashing in wrap-around int64 arithmetic, and the bits of tensors.

Only integer operations are used, which every torch device and version computes alike. The hash is the finaliser of
splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) applied to a counter
times the golden-ratio increment, so that word number i needs no words before it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from lastbit.inputs.blocks import pieces
from lastbit.numerics import format_of
from lastbit.numerics.formats import ordinals

INCREMENT = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size in bytes → the integer dtype through which bits are compared."""

# 32 MiB for the mask. Fewer cost launches, and a GPU is busy with a few million.
_AT_ONCE = 1 << 25  # integers that are compared at a time: the mask of that many is all the memory that it takes

NAN_BITS = {
    torch.float64: 0x7FF8 << 48,
    torch.float32: 0x7FC00000,
    torch.bfloat16: 0x7FC0,
    torch.float16: 0x7E00,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
}
"""Bits of the one NaN of values: conversions make NaNs of different bits on different devices."""


def signed(word: int) -> int:
    """Return `word` modulo 2**64, as the int64 with the same bits."""
    return (word + 2**63) % 2**64 - 2**63


def bits_of_float(value: float) -> int:
    """Return the bits of a number in fp64, as int64."""
    [bits] = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def key_of(*words: object) -> int:
    """Return a 64-bit key that depends on every word and on their order."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little")


def shift_right(words: Tensor, count: int) -> Tensor:
    """Shift int64 words right, filling with zeros (torch's own shift fills with the sign)."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def finalize(words: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, a bijection of 64-bit words; overwrite `words` and return it."""
    words.bitwise_xor_(shift_right(words, 30)).mul_(signed(FIRST))
    words.bitwise_xor_(shift_right(words, 27)).mul_(signed(SECOND))
    return words.bitwise_xor_(shift_right(words, 31))


def hashed(counter: Tensor, key: int, *, lane: int = 0, lanes: int = 1) -> Tensor:
    """Return one pseudorandom 64-bit word per int64 counter: word `counter * lanes + lane` of the sequence `key`."""
    return finalize(counter * signed(INCREMENT * lanes) + signed(key + INCREMENT * lane))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers of the same size: a view of the same shape and strides.

    Raises:
        KeyError: the elements have another size than 1, 2, 4 or 8 bytes.
    """
    return tensor.view(INTEGER_OF_SIZE[tensor.element_size()])


def numbers(tensors: Sequence[Tensor]) -> list[int]:
    """Return the integers in tensors of one element, in order; each of their devices is waited for once."""
    found: dict[int, int] = {}
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        if device.type == "cpu":
            found.update((place, int(tensors[place])) for place in places)
        else:
            values = torch.stack([tensors[place].reshape(()) for place in places]).tolist()
            found.update(zip(places, values, strict=True))
    return [found[place] for place in range(len(tensors))]


def unequal(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return which pairs of tensors, each of one shape and dtype, differ in a bit; a device is waited for once."""
    flags = [(place, flag) for place, pair in enumerate(pairs) for flag in unequal_flags(*pair)]
    raised = numbers([flag for _, flag in flags])
    found = {place for (place, _), is_raised in zip(flags, raised, strict=True) if is_raised}
    return [place in found for place in range(len(pairs))]


def unequal_flags(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return bools on the device of two tensors of one shape and dtype, some of which are true if a bit differs."""
    a, b = _widest(*(bits_of(torch.view_as_real(t) if t.is_complex() else t) for t in (a, b)))
    if a.device.type == "cpu":  # stops at the first difference
        return [torch.tensor(not torch.equal(a, b))]
    return [(x != y).any() for x, y in pieces(a, b, budget=_AT_ONCE)]


def _widest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """View two tensors of integers as int64, eight bytes at a time, where both tensors allow it."""
    size = a.element_size()
    if all(t.is_contiguous() and t.numel() * size % 8 == 0 and t.storage_offset() * size % 8 == 0 for t in (a, b)):
        return a.flatten().view(torch.int64), b.flatten().view(torch.int64)
    return a, b


def bits_with_one_nan(x: Tensor) -> Tensor:
    """Return the bits of every element as integers, with a single pattern for all kinds of NaN."""
    bits = bits_of(x)
    if not x.is_floating_point():
        return bits
    all_ones = 255 if bits.dtype is torch.uint8 else -1
    seen = x.to(torch.float32) if x.element_size() == 1 else x  # not every device compares numbers of 8 bits
    return bits.masked_fill(seen.isnan(), all_ones)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the distance of two tensors of one dtype in its ulp, as fp64; infinite where one alone is NaN."""
    first, second = a.to(torch.float64), b.to(torch.float64)
    if not a.is_floating_point():
        return (first - second).abs()
    unknown = torch.isnan(first) | torch.isnan(second)
    fmt = format_of(a.dtype)
    steps = ordinals(first.nan_to_num(0.0, math.inf, -math.inf), fmt) - ordinals(
        second.nan_to_num(0.0, math.inf, -math.inf), fmt
    )
    return torch.where(unknown, math.inf, steps.abs().to(torch.float64))
