"""Floating-point formats: correct rounding of fp64 values to them, and distance in units in the last place.

torch's own fp64 → bf16 and fp64 → fp16 casts go through fp32 and round twice, so rounding is done here: for normal
numbers by integer arithmetic on the bits of the fp64 value, for subnormal ones by adding and subtracting a power of two
whose last place is the subnormal quantum (one correctly rounded fp64 addition). docs/numerics.md derives what the ends
of an enclosure become in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal
from typing import cast as typed

import torch
from torch import Tensor

from lastbit.errors import unknown

_MANTISSA_BITS = 52
_BIAS = 1023

Direction = Literal["nearest", "zero", "ties_away", "either"]
DIRECTIONS: Mapping[Direction, str] = {
    "nearest": "to nearest",
    "zero": "toward zero",
    "ties_away": "with ties away from zero",
    "either": "to either neighbour",
}
"""Direction of a rounding → how it is told: to nearest, ties to even or away from zero; cut off; or to one of the two
neighbours, whichever a kernel chooses, as it does that rounds stochastically."""


@dataclass(frozen=True)
class Format:
    """A binary floating-point format, or one of integers.

    Integers are numbers of a floating-point format all of which are subnormal, so that their spacing is 1.

    Attributes:
        name: short name.
        dtype: the torch dtype that stores it.
        precision: significand bits, the hidden one included.
        min_exponent: exponent of the smallest normal number, 2**min_exponent.
        max: largest finite number.
        overflow: what a value that rounds beyond `max` becomes.
        lowest: the smallest number; None for -`max`.
        is_integer: its numbers are integers, which a kernel gives as such.
        direction: how numbers are rounded to it.
    """

    name: str
    dtype: torch.dtype
    precision: int
    min_exponent: int
    max: float
    overflow: Literal["inf", "nan"] = "inf"
    lowest: float | None = None
    is_integer: bool = False
    direction: Direction = "nearest"

    @classmethod
    def of_integers(cls, name: str, dtype: torch.dtype, lowest: int, largest: int) -> Format:
        """Make a format of the integers from `lowest` to `largest`, stored one per element of `dtype`.

        Of the numbers of `precision` bits, those up to 2**min_exponent are subnormal, and 1 apart.
        """
        bits = max(largest, -lowest - 1).bit_length()
        return cls(name, dtype, bits + 1, bits, float(largest), lowest=float(lowest), is_integer=True)

    @property
    def quantum(self) -> float:
        """Spacing of the subnormal numbers, the smallest positive value."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def epsilon(self) -> float:
        """Spacing of the numbers in [1, 2)."""
        return 2.0 ** (1 - self.precision)

    @property
    def roundoff(self) -> float:
        """Largest relative error of rounding a normal number: half of `epsilon` to nearest, else all of it."""
        return self.epsilon / (2 if self.direction in ("nearest", "ties_away") else 1)

    @property
    def told(self) -> str:
        """The name, and the direction unless that is to nearest: `bf16 toward zero`."""
        return self.name if self.direction == "nearest" else f"{self.name} {DIRECTIONS[self.direction]}"

    def toward(self, direction: Direction) -> Format:
        """Return the format of the same numbers with another direction of rounding."""
        return self if direction == self.direction else replace(self, direction=direction)

    @property
    def nearest(self) -> Format:
        """The format of the same numbers with rounding to nearest."""
        return self.toward("nearest")


FP32 = Format("fp32", torch.float32, 24, -126, torch.finfo(torch.float32).max)
BF16 = Format("bf16", torch.bfloat16, 8, -126, torch.finfo(torch.bfloat16).max)
FP16 = Format("fp16", torch.float16, 11, -14, 65504.0)
E4M3 = Format("e4m3", torch.float8_e4m3fn, 4, -6, 448.0, overflow="nan")
E5M2 = Format("e5m2", torch.float8_e5m2, 3, -14, 57344.0)
FP64 = Format("fp64", torch.float64, 53, -1022, torch.finfo(torch.float64).max)

FP64_U = 2.0**-53
"""How much one operation of fp64 errs at most, of its result: bounds are computed in fp64 and have to cover that."""

WIDE_FP32 = Format("fp32 of wide range", torch.float64, FP32.precision, FP32.min_exponent, (2 - 2.0**-23) * 2.0**1023)
"""What holds every finite result of a kernel that computes with more range than fp32, and is as precise as fp32."""

PRECISE = Format("fp64 or better", torch.float64, 53, -1022, torch.finfo(torch.float64).max)
"""Stands for results that are not rounded to fp32: ends are moved outward by more than fp64 errs."""

INT8 = Format.of_integers("int8", torch.int8, -128, 127)
INT4 = Format.of_integers("int4", torch.int8, -8, 7)
UINT8 = Format.of_integers("uint8", torch.uint8, 0, 255)

_STORED = (BF16, FP16, E4M3, E5M2)  # formats narrower than fp32 that torch casts to
FORMATS: Mapping[str, Format] = {f.name: f for f in (FP64, FP32, BF16, FP16, E4M3, E5M2)}
"""The floating-point formats, which inputs may have."""
CODES: Mapping[str, Format] = {f.name: f for f in (INT8, INT4, UINT8)}
"""Formats of integers with freedom: a stage may be rounded to them, as quantized codes are."""
TARGETS: Mapping[str, Format] = {**FORMATS, **CODES}
"""All formats that a stage may be rounded to."""
_BY_DTYPE: Mapping[torch.dtype, Format] = {f.dtype: f for f in FORMATS.values()}


@dataclass(frozen=True)
class Integers:
    """The format of a stage of integers or truth values, whose every element must be equal."""

    name: str
    dtype: torch.dtype


def format_of(dtype: torch.dtype) -> Format:
    """Return the format that `dtype` stores.

    Raises:
        UsageError: `dtype` is not one of the supported floating-point types.
    """
    if dtype not in _BY_DTYPE:
        raise unknown("floating-point dtype", dtype, map(str, _BY_DTYPE))
    return _BY_DTYPE[dtype]


def split_target(target: str) -> tuple[str, Direction]:
    """Split a rounding target such as `x:zero` into the name of an input or format, and the direction."""
    name, _, direction = target.partition(":")
    return name, typed(Direction, direction or "nearest")


def round_to(x: Tensor, fmt: Format) -> Tensor:
    """Round `x` (fp64, any shape) once to `fmt`, in its direction, to nearest if that is `either`; the result is fp64.

    Signs of zeros and NaN are kept; overflow gives what `fmt.overflow` says (toward zero it gives the largest number).
    """
    if fmt.precision == FP64.precision:
        return x
    if fmt.is_integer:
        return _rounded_integers(x, fmt, fmt.direction)
    if fmt is FP32:
        return x.to(torch.float32).to(torch.float64)  # one correct rounding on every device, and the fastest
    if fmt in _STORED and x.device.type == "cpu":
        narrow = x.to(torch.float32)
        if torch.equal(narrow.to(torch.float64), x) and (
            x.numel() == 0 or max(map(abs, map(float, torch.aminmax(narrow)))) <= fmt.max
        ):
            return narrow.to(fmt.dtype).to(torch.float64)  # from fp32, a cast of torch rounds once
    return round_bits(x, fmt)


def around(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the numbers of `fmt` below and above each element of `x` (fp64), both the element itself if `fmt` has it.

    Beyond the largest number these are that and the result of overflow.
    """
    if fmt.precision == FP64.precision:
        return x, x
    made = _rounded_integers if fmt.is_integer else round_bits
    inward, outward = made(x, fmt, "zero"), made(x, fmt, "outward")
    return torch.where(x < 0, outward, inward), torch.where(x < 0, inward, outward)


def round_ends(lo: Tensor, hi: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the least and the largest number that numbers from `lo` to `hi` may be rounded to."""
    if fmt.direction == "either":
        return around(lo, fmt)[0], around(hi, fmt)[1]
    return round_to(lo, fmt), round_to(hi, fmt)


_Way = Literal[Direction, "outward"]
"""A direction, or away from zero to the next number, which no contract has."""


def _rounded_integers(x: Tensor, fmt: Format, way: _Way) -> Tensor:
    """Round to integers as `round_to`; numbers beyond their range become infinite."""
    inward = x.trunc()
    rest = (x - inward).abs()  # NaN of an infinity, which then stays
    up = {"zero": rest > 1, "ties_away": rest >= 0.5, "outward": rest > 0}.get(way)
    whole = x.round() if up is None else torch.where(up, inward + x.sign(), inward)
    assert fmt.lowest is not None
    below = torch.where(whole < fmt.lowest, -torch.inf, whole)
    return torch.where(whole > fmt.max, torch.inf, below)


def round_bits(x: Tensor, fmt: Format, way: _Way | None = None) -> Tensor:
    """Round to any floating-point format but fp64 as `round_to`, by integer operations on the bits of `x`."""
    way = fmt.direction if way is None else way
    magnitude = x.abs()
    dropped = _MANTISSA_BITS + 1 - fmt.precision
    bits = magnitude.view(torch.int64)
    if way in ("zero", "ties_away", "outward"):
        steps = magnitude / fmt.quantum  # exact: by a power of two, and of matter for what is small alone
        up = {"zero": 0, "ties_away": 1 << (dropped - 1), "outward": (1 << dropped) - 1}[way]
        whole = steps.ceil() if way == "outward" else steps.floor()
        whole = whole + (steps - whole >= 0.5) if way == "ties_away" else whole
        bits, subnormal = bits + up, whole * fmt.quantum
    else:
        bits = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
        shift = fmt.quantum * 2.0**_MANTISSA_BITS
        subnormal = (magnitude + shift) - shift
    normal = ((bits >> dropped) << dropped).view(torch.float64)
    rounded = torch.where(magnitude < 2.0**fmt.min_exponent, subnormal, normal)
    infinite = float("inf" if fmt.overflow == "inf" else "nan")
    rounded = torch.where(rounded > fmt.max, fmt.max if way == "zero" else infinite, rounded)
    if way == "zero" or fmt.overflow == "nan":
        rounded = torch.where(torch.isinf(x), infinite, rounded)
    return torch.where(torch.isnan(x), x, torch.copysign(rounded, x))


def are_fp32(x: Tensor) -> bool:
    """Check whether `x` (fp64) holds only numbers of fp32 and infinities."""
    return torch.equal(x, x.to(torch.float32).to(torch.float64))


def sum_to_odd(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in fp64, rounded to odd if inexact, so that rounding it again to fp32 is one correct rounding.

    The error of the sum is Knuth's TwoSum; the fp64 neighbour on its side is the odd one if the sum is even
    (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Trans. Comput. 57(4), 2008).
    """
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.view(torch.int64)
    step = ((bits ^ error.view(torch.int64)) >> 63) | 1  # away from zero, 1, or -1
    inexact = (bits & 1 == 0) & (error != 0) & (error.abs() < torch.inf)
    return (bits + step * inexact).view(torch.float64)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `x` (fp64) correctly and store it as `dtype`; the storage cast is exact, also where torch's saturates."""
    fmt = format_of(dtype)
    rounded = round_to(x, fmt)
    if fmt is FP64:
        return rounded
    return rounded.to(torch.float32).to(dtype)


def ordinals(x: Tensor, fmt: Format) -> Tensor:
    """Return the position of each value of `x` (fp64, finite, representable in `fmt`) on the grid of `fmt`, as int64.

    Neighbours differ by one and both zeros are 0, so a difference of ordinals is a distance in ulp. An infinity counts
    as the value after the largest one.
    """
    magnitude = x.abs()
    dropped = _MANTISSA_BITS + 1 - fmt.precision
    hidden = 1 << (fmt.precision - 1)
    first_normal = (fmt.min_exponent + _BIAS) << (fmt.precision - 1)
    normal = (magnitude.clamp(max=2 * fmt.max).view(torch.int64) >> dropped) - first_normal + hidden
    largest = int(torch.tensor(fmt.max, dtype=torch.float64).view(torch.int64))
    last = (largest >> dropped) - first_normal + hidden
    normal = normal.clamp(max=(int(fmt.max) if fmt.is_integer else last) + 1)
    small = magnitude < 2.0**fmt.min_exponent
    subnormal = (torch.where(small, magnitude, 0.0) / fmt.quantum).to(torch.int64)
    position = torch.where(small, subnormal, normal)
    return torch.where(x < 0, -position, position)


def from_ordinals(position: Tensor, fmt: Format) -> Tensor:
    """Return the values (fp64) at the given int64 positions; inverse of `ordinals` within the finite range."""
    magnitude = position.abs()
    dropped = _MANTISSA_BITS + 1 - fmt.precision
    hidden = 1 << (fmt.precision - 1)
    first_normal = (fmt.min_exponent + _BIAS) << (fmt.precision - 1)
    normal = ((magnitude - hidden + first_normal).clamp(min=0) << dropped).view(torch.float64)
    value = torch.where(magnitude < hidden, magnitude.to(torch.float64) * fmt.quantum, normal)
    return torch.where(position < 0, -value, value)
