"""Weights in narrow codes with a scale per row or per group: how they are stored, and the numbers they stand for.

A weight is [..., N, K]. Each code means a level, and an element is (level − zero) · scale, one fp32 operation. Codes of
four bits are packed along K into words, the first one in the lowest bits. `SCHEMES` holds all that differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.formats import Format

E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS, E8M0_NAN = 127, 255
LARGEST_ZERO = 15


@dataclass(frozen=True)
class Scheme:
    """One way to store weights.

    Attributes:
        name: its name in `SCHEMES`.
        words: dtype of the packed codes, by which it is recognised.
        levels: the number that each code means, from code 0; 16 or 256 of them.
        scales: dtypes of the scale, the usual one first; uint8 is E8M0, 2**(code − 127) with 255 for NaN.
        has_zero: whether a zero point (int8, 0 to 15) comes with each scale.
        group_size: elements per scale: a number, 0 for any that divides K, None for one scale per row.
    """

    name: str
    words: torch.dtype
    levels: tuple[float, ...]
    scales: tuple[torch.dtype, ...]
    has_zero: bool = False
    group_size: int | None = 0

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return len(self.levels).bit_length() - 1

    @property
    def codes_per_word(self) -> int:
        return self.words.itemsize * 8 // self.bits


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_SIGNED_BYTES = tuple(map(float, (*range(128), *range(-128, 0))))
_E2M1 = E2M1_LEVELS + tuple(-level for level in E2M1_LEVELS)

SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", torch.int8, _SIGNED_BYTES, (_FP32,), group_size=None),
        Scheme("int4_symmetric", torch.int32, tuple(map(float, range(-8, 8))), (_BF16,)),
        Scheme("int4_asymmetric", torch.int32, tuple(map(float, range(16))), (_FP16, _BF16), has_zero=True),
        Scheme("mxfp4", torch.uint8, _E2M1, (torch.uint8, _BF16), group_size=32),
    )
}


def dequantized(
    codes: Tensor, scale: Tensor | None = None, zero: Tensor | None = None, *, fmt: Format, columns: int | None = None
) -> Enclosure:
    """Dequantize a weight [..., N, K] to the operand of a dot: (level − zero) · scale in fp32, rounded to `fmt`.

    Weights of floating-point numbers, which come without a scale, are left as they are. `columns` is K, where the
    caller knows it. The scheme follows from the dtype of the codes, and from whether there is a zero point.

    Raises:
        ValueError: dtypes, shapes or zero points that make no quantised weight.
    """
    if codes.is_floating_point():
        for name, tensor in {"scale": scale, "zero": zero}.items():
            if tensor is not None:
                raise ValueError(f"{name} is given with a weight of {codes.dtype}; pass its codes, or no {name}")
        return Enclosure.point(codes)
    # Of two schemes of this dtype, that with a zero point or without.
    found = [scheme for scheme in SCHEMES.values() if scheme.words == codes.dtype]
    if not found:
        known = ", ".join(f"{scheme.words} ({scheme.name})" for scheme in SCHEMES.values())
        raise ValueError(f"a weight of {codes.dtype} is of no scheme; known are floating-point numbers, {known}")
    scheme = next((scheme for scheme in found if scheme.has_zero == (zero is not None)), found[0])
    _check_dtypes(scheme, scale, zero)
    assert scale is not None
    _check_shapes(scheme, codes, scale, zero, columns)
    if scale.dtype == torch.uint8:
        scale = torch.where(scale == E8M0_NAN, torch.nan, power_of_two(scale.to(torch.int64) - E8M0_BIAS))
    scales = Enclosure.point(scale.double())
    per_group = scales[..., None, None] if scheme.group_size is None else scales[..., None]
    levels = _levels(scheme, codes.device)
    groups = levels[unpack(codes, scheme.bits)].unflatten(-1, (per_group.shape[-2], -1))
    if zero is not None:
        groups = groups - zero.unsqueeze(-1)
    return (Enclosure.point(groups) * per_group).rounded(fmt).joined()


def unpack(words: Tensor, bits: int = 4) -> Tensor:
    """Unpack codes (int64, from 0) [..., K] from words [..., K / codes per word]; the first is in the lowest bits."""
    shifts = torch.arange(0, words.itemsize * 8, bits, device=words.device)
    shifted = words.to(torch.int64).unsqueeze(-1) >> shifts
    return (shifted & ((1 << bits) - 1)).flatten(-2)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp64, for the exponents of normal numbers."""
    bits: Tensor = (exponent.to(torch.int64) + 1023) << 52
    return bits.view(torch.float64)


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    """Join the names of dtypes by "or"."""
    return " or ".join(map(str, dtypes))


@cache
def _levels(scheme: Scheme, device: torch.device) -> Tensor:
    return torch.tensor(scheme.levels, dtype=torch.float64, device=device)


def _check_dtypes(scheme: Scheme, scale: Tensor | None, zero: Tensor | None) -> None:
    """Raise ValueError unless scale and zero are there as `scheme` has them."""
    if scale is None:
        raise ValueError(f"scale is missing; a weight of {scheme.words} is {scheme.name} and needs one")
    if scale.dtype not in scheme.scales:
        # Codes of this dtype may have been meant for a scheme with a zero point.
        others = [s for s in SCHEMES.values() if s.words == scheme.words and s.has_zero and not scheme.has_zero]
        hint = "".join(f"; with a zero point it would be {s.name}, which has {either(s.scales)}" for s in others)
        raise ValueError(f"scale is {scale.dtype}; {scheme.name} has {either(scheme.scales)}{hint}")
    if zero is None:
        return
    if not scheme.has_zero:
        raise ValueError(f"zero is given, but {scheme.name} has no zero point")
    if zero.dtype != torch.int8:
        raise ValueError(f"zero is {zero.dtype}; it must be {torch.int8}, 0 to {LARGEST_ZERO}")
    least, most = torch.stack(zero.aminmax()).tolist() if zero.numel() else (0, 0)
    if not 0 <= least <= most <= LARGEST_ZERO:
        raise ValueError(f"zero holds {least} to {most}; it must be 0 to {LARGEST_ZERO}")


def _check_shapes(scheme: Scheme, codes: Tensor, scale: Tensor, zero: Tensor | None, columns: int | None) -> None:
    """Raise ValueError unless codes have `columns` columns, and scale and zero one element per row or group of them."""
    width = codes.shape[-1] * scheme.codes_per_word
    if columns not in (None, width):
        raise ValueError(
            f"codes have shape {tuple(codes.shape)}, which is {width} columns at {scheme.codes_per_word} per "
            f"{codes.dtype}, but the weight has {columns}"
        )
    per_row = scheme.group_size is None
    *rows, groups = (*scale.shape, 1) if per_row else tuple(scale.shape) or (0,)
    if tuple(rows) != codes.shape[:-1]:
        wanted = ", ".join(map(str, (*codes.shape[:-1], *([] if per_row else ["groups"]))))
        raise ValueError(f"scale has shape {tuple(scale.shape)}; with codes {tuple(codes.shape)} it must be ({wanted})")
    if not groups or width % groups or scheme.group_size not in (None, 0, width // groups):
        size = f" of {scheme.group_size}" if scheme.group_size else ""
        raise ValueError(f"scale has {groups} groups in a row; they do not cut its {width} columns into groups{size}")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"zero has shape {tuple(zero.shape)}, but scale has {tuple(scale.shape)}; they must agree")
