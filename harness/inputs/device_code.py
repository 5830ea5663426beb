"""Triton functions that the fused kernels of values and fingerprints consist of.

Only integer operations and single correctly rounded operations of fp64 occur, as in the torch functions that define the
values; the launcher forbids the compiler to fuse multiplications with additions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.inputs.bits import FIRST, SECOND, signed
from lastbit.numerics.fused.fp64 import bits_of, number_of

_FIRST, _SECOND = tl.constexpr(signed(FIRST)), tl.constexpr(signed(SECOND))
_INFINITY = tl.constexpr(0x7FF << 52)
_MAGNITUDE = tl.constexpr(2**63 - 1)


@triton.jit
def finalized(words):  # type: ignore[no-untyped-def]
    """Apply the finaliser of splitmix64, as `bits.finalize` does."""
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * _FIRST
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


@triton.jit
def hashed(counter, key, step):  # type: ignore[no-untyped-def]
    """Return a pseudorandom word per counter, as `bits.hashed` does."""
    return finalized(counter * step + key)


@triton.jit  # type: ignore[untyped-decorator]
def placed(  # type: ignore[no-untyped-def]
    tile, tiles, size2, size1, size0, step2, step1, step0, stride2, stride1, stride0, size, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return a tile of lines: logical rows and their places [ROWS, 1], first column, places in lines, and a mask.

    Places in lines are 32-bit where the stride is 1 (UNIT): 64-bit multiplications would cost as much as a hash.
    """
    line = (tile // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    start = (tile % tiles).to(tl.int64) * COLUMNS
    local = tl.arange(0, COLUMNS)[None, :]
    inside = (line < size2 * size1 * size0) & (local < tl.minimum(size - start, COLUMNS).to(tl.int32))
    outer = line // size0
    at0, at1, at2 = line - outer * size0, outer % size1, outer // size1
    rows = at2 * step2 + at1 * step1 + at0 * step0
    places = at2 * stride2 + at1 * stride1 + at0 * stride0 + start * stride
    along = local if UNIT else local * stride
    return rows, places, start, along, inside


@triton.jit
def encoded(  # type: ignore[no-untyped-def]
    value, dropped, half, odd, tiny, shift, base, beyond, last, sign, nan
):
    """Return the bits (int64) of fp64 values rounded to a format, as `formats.cast` and the one NaN of `values`.

    The bits of a magnitude are its position on the grid of the format, so rounding up into the next binade, or beyond
    the largest number, needs nothing of its own.
    """
    bits = bits_of(value)
    magnitude = bits & _MAGNITUDE
    normal = ((magnitude + half + ((magnitude >> dropped) & odd)) >> dropped) - base
    subnormal = bits_of(number_of(magnitude) + number_of(shift)) - shift
    position = tl.where(magnitude < tiny, subnormal, normal)
    position = tl.where(position > beyond, beyond, position)
    signed_ = tl.where(bits < 0, position | sign, position)
    return tl.where((magnitude > _INFINITY) | (position > last), nan, signed_)


@triton.jit
def as_fp32(bits, mask, shift, scale, last, infinity):  # type: ignore[no-untyped-def]
    """Return the bits of fp32 (those of an int32) of the values of a narrower format, with one kind of NaN."""
    magnitude = bits & mask
    value = number_of(magnitude << shift) * number_of(scale)
    finite = value.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    finite = tl.where(magnitude > last, 0x7F800000, finite)
    value = tl.where((bits & (mask + 1)) != 0, finite - 0x80000000, finite)
    return tl.where((magnitude > last) & (magnitude != infinity), 0x7FC00000, value)


def add_hashes(  # type: ignore[no-untyped-def]
    total, source, of_index: tl.int64, of_bits: tl.int64, count: tl.int32, mask: tl.int64, shift: tl.int64,
    scale: tl.int64, last: tl.int64, special: tl.int64, tiles: tl.int32, size2: tl.int64, size1: tl.int64,
    size0: tl.int64, step2: tl.int64, step1: tl.int64, step0: tl.int64, stride2: tl.int64, stride1: tl.int64,
    stride0: tl.int64, size: tl.int64, stride: tl.int64, KIND: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add the hashes of index and bits of all elements to `total`, modulo 2**64; to be compiled.

    KIND says which bits: those "stored", those of a "wide" format, shifted to where fp32 has them, with `special` for
    what exceeds `last`, or those of fp32 for a "narrow" format, whose infinity is `special`.
    """
    of_columns = tl.arange(0, COLUMNS)[None, :] * of_index
    sums = tl.zeros([ROWS, COLUMNS], tl.int64)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        rows, places, start, along, inside = placed(
            tile, tiles, size2, size1, size0, step2, step1, step0, stride2, stride1, stride0, size, stride,
            ROWS, COLUMNS, UNIT,
        )  # fmt: skip
        bits = tl.load(source + places + along, inside, other=0).to(tl.int64)
        if KIND == "wide":
            bits = bits << shift
            bits = tl.where((bits & mask) > last, special, bits)
        if KIND == "narrow":
            bits = as_fp32(bits, mask, shift, scale, last, special)
        words = (rows + start) * of_index + of_columns + bits * of_bits
        sums += tl.where(inside, finalized(words), 0)
    tl.atomic_add(total, tl.sum(sums))
