"""The rules by which weights are put into the codes of `quantized.SCHEMES`.

Rules give exact codes, so that two implementations of one can be compared bit by bit. All arithmetic is fp32, each
operation rounded to nearest, ties to even, unless a rule says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lastbit.numerics.formats import Format, cast, ordinals, round_to
from lastbit.numerics.quantized import E8M0_BIAS, LARGEST_ZERO, SCHEMES, Scheme, either, power_of_two

_E2M1 = Format("e2m1", torch.uint8, 2, 0, 6.0)
_E2M1_LARGEST_EXPONENT = 2
_SIGN = 8  # of an E2M1 code


class Quantized(NamedTuple):
    """A quantised weight, as `dequantized` takes it.

    Attributes:
        codes: [..., N, K / codes per word].
        scale, zero: [..., N, K / group], or [..., N] where the scheme has one scale per row.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


class _Groups(NamedTuple):
    """Codes from 0 [..., G, g], and for each group a scale (fp64) and a zero point [..., G, 1]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None


def pack(codes: Tensor, words: torch.dtype, bits: int = 4) -> Tensor:
    """Pack codes [..., K] of `bits` bits into words [..., K / codes per word]; the first code is in the lowest bits.

    Raises:
        ValueError: a code out of range, or a last word that is not full.
    """
    per_word = words.itemsize * 8 // bits
    if codes.shape[-1] % per_word:
        raise ValueError(f"{codes.shape[-1]} codes do not fill words of {words}, which hold {per_word} each")
    if codes.numel() and not 0 <= int(codes.amin()) <= int(codes.amax()) < 1 << bits:
        raise ValueError(f"codes are {int(codes.amin())} to {int(codes.amax())}; {bits} bits hold 0 to {2**bits - 1}")
    grouped: Tensor = codes.to(torch.int64).unflatten(-1, (-1, per_word))
    return (
        (grouped << torch.arange(0, words.itemsize * 8, bits, device=codes.device)).sum(-1).to(words)
    )  # the cast keeps the low bits


def encoded(
    weight: Tensor, scheme: str, group_size: int | None = None, *, scale_dtype: torch.dtype | None = None
) -> Quantized:
    """Quantize `weight` [..., N, K], taken to fp32, to the codes of a scheme by the rule in the function `_SCHEME`.

    `group_size` may be left out where the scheme has only one, `scale_dtype` for the first that the scheme has.

    Raises:
        ValueError: an unknown scheme, a group size or dtype that it does not have, numbers that are not finite.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(map(repr, SCHEMES))}")
    chosen = SCHEMES[scheme]
    dtype = scale_dtype or chosen.scales[0]
    if dtype not in chosen.scales:
        raise ValueError(f"scale_dtype={dtype}, but {scheme} has {either(chosen.scales)}")
    if not torch.isfinite(weight).all():
        raise ValueError("weight holds numbers that are not finite; they have no code")
    size = _checked_group_size(chosen, weight.shape[-1], group_size)
    codes, scales, zeros = _RULES[scheme](weight.to(torch.float32).unflatten(-1, (-1, size)))
    scale = _stored_scale(scales, dtype).flatten(-2)
    return Quantized(
        pack(codes.flatten(-2), chosen.words, chosen.bits),
        scale.squeeze(-1) if chosen.group_size is None else scale,
        zeros if zeros is None else zeros.flatten(-2),
    )


def _int8(groups: Tensor) -> _Groups:
    """Quantize: s = amax / 127; code = w · (1 / s), rounded and saturated; 0 where 1 / s overflows, as for zeros."""
    scale = _divided(_largest(groups), 127)
    inverse = torch.ones_like(scale) / scale
    codes = (groups * torch.where(torch.isfinite(inverse), inverse, 0.0)).round().clamp(-128, 127)
    return _Groups(codes.to(torch.int64) & 0xFF, scale.double())


def _int4_symmetric(groups: Tensor) -> _Groups:
    """Quantize: s = max(amax, 1e-8) / 7; code = w / s, rounded, in −8…7, from the fp32 s and not from the stored one.

    compressed-tensors, as Kimi-K2 uses it: a code c is stored as the nibble c + 8.
    """
    scale = _divided(_largest(groups).clamp(min=1e-8), 7)
    codes = (groups / scale).round().clamp(-8, 7)
    return _Groups(codes.to(torch.int64) + 8, scale.double())


def _int4_asymmetric(groups: Tensor) -> _Groups:
    """Quantize: s = max(max − min, 1e-5) / 15; zero = −min / s, rounded; code = w / s, rounded, + zero; both in 0…15.

    AWQ (Lin et al., arXiv:2306.00978), `pseudo_quantize_tensor` of mit-han-lab/llm-awq.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = _divided((high - low).clamp(min=1e-5), 15)
    zero = (-low / scale).round().clamp(0, LARGEST_ZERO)
    codes = ((groups / scale).round() + zero).clamp(0, 15)
    return _Groups(codes.to(torch.int64), scale.double(), zero.to(torch.int8))


def _mxfp4(groups: Tensor) -> _Groups:
    """Quantize: scale 2**(floor(log2(amax)) − 2) in E8M0, the least one for zeros; elements to nearest E2M1, ±6 beyond.

    OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3. Quotients are exact.
    """
    amax = _largest(groups).double()
    exponent = torch.frexp(amax).exponent - 1 - _E2M1_LARGEST_EXPONENT
    scale = power_of_two(torch.where(amax == 0, -E8M0_BIAS, exponent).clamp(-E8M0_BIAS, E8M0_BIAS))
    elements = round_to((groups.double() / scale).clamp(-_E2M1.max, _E2M1.max), _E2M1)
    return _Groups(ordinals(elements.abs(), _E2M1) + _SIGN * torch.signbit(elements), scale)


_RULES: Mapping[str, Callable[[Tensor], _Groups]] = {
    "int8": _int8,
    "int4_symmetric": _int4_symmetric,
    "int4_asymmetric": _int4_asymmetric,
    "mxfp4": _mxfp4,
}


def _largest(groups: Tensor) -> Tensor:
    return groups.abs().amax(-1, keepdim=True)


def _divided(x: Tensor, number: int) -> Tensor:
    """Return x / number, correctly rounded: by a tensor, as a GPU multiplies by the reciprocal of a Python number."""
    return x / torch.full_like(x, number)


def _stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the scale (fp64) to `dtype`; for E8M0 it is a power of two already."""
    if dtype == torch.uint8:
        return (torch.frexp(scale).exponent - 1 + E8M0_BIAS).to(torch.uint8)
    stored = cast(scale, dtype)
    if not torch.isfinite(stored).all():
        raise ValueError(f"a group needs the scale {float(scale.amax()):g}, which is beyond {dtype}")
    return stored


def _checked_group_size(scheme: Scheme, columns: int, group_size: int | None) -> int:
    """Return the number of elements that share a scale; ValueError where the scheme or K has no groups of this size."""
    only = columns if scheme.group_size is None else scheme.group_size
    size = only if group_size is None else group_size
    if only and size != only:
        raise ValueError(f"group_size={size}, but {scheme.name} has one scale per {only} of {columns} columns")
    if size < 1 or columns % size:
        raise ValueError(f"group_size={size} does not divide the {columns} columns of the weight")
    return size
