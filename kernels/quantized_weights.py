"""Base weights in narrow codes: checks of their tensors, and the way a kernel reads them.

An element stands for (level − zero) · scale, computed in fp32, then rounded to the dtype of the activations. A whole
weight is never copied in that dtype: slices and transposed weights are views, and kernels read tiles of the codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Codes = tuple[str, int, bool, bool]
NUMBERS: Codes = ("none", 1, False, False)
"""Of a weight without codes: scheme, elements per scale, whether it is turned, whether its bytes lie in vectors."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class WeightScheme:
    """One way to store weights.

    Attributes:
        words: dtype of the codes, by which the scheme is recognised; four bits each, lowest first, or a whole int8.
        codes_per_word: number of codes in a word.
        levels: the number that each code of four bits means; None for a byte, which means itself.
        scales: dtypes of the scale; uint8 is E8M0, 2**(code − 127), with 255 for NaN.
        has_zero: whether a zero point, an int8 of 0 to 15, comes with each scale.
        group_size: elements of a row per scale: a number, 0 for any that divides the row, None for the whole row.
    """

    words: torch.dtype
    codes_per_word: int
    levels: tuple[float, ...] | None
    scales: tuple[torch.dtype, ...]
    has_zero: bool = False
    group_size: int | None = 0


SCHEMES = {
    "int8": WeightScheme(torch.int8, 1, None, (FP32,), group_size=None),
    "int4_symmetric": WeightScheme(torch.int32, 8, tuple(range(-8, 8)), (BF16,)),
    "int4_asymmetric": WeightScheme(torch.int32, 8, tuple(range(16)), (FP16, BF16), has_zero=True),
    "mxfp4": WeightScheme(torch.uint8, 2, (*E2M1, *(-level for level in E2M1)), (torch.uint8, BF16), group_size=32),
}


@triton.jit
def _e2m1(code):
    """Decode a code of four bits to fp32."""
    digits = code & 7
    halves = tl.where(digits < 2, digits, ((digits & 1) | 2) << tl.maximum((digits >> 1) - 1, 0))
    return halves.to(tl.float32) * tl.where(code > 7, -0.5, 0.5)


@triton.jit
def _e8m0(code):
    """Decode a byte to its power of two; code 0 is subnormal in fp32."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_quantized(
    codes_ptr, scale_ptr, zero_ptr, n, k, n_stride, word_stride, scale_start, scale_n_stride, scale_group_stride, mask,
    A: tl.constexpr, SCHEME: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr = False,
):  # fmt: skip
    """Load the elements (n, k) of an expert's weight [N, K], of dtype A, zero outside of the mask.

    With UNIT a row of codes has no gaps and starts on a 16-byte boundary; k is then the last dimension of the tile.

    n and k broadcast to the shape of the tile, in whichever order its dimensions are. The expert's codes start at
    codes_ptr, its scales and zero points, which have the same strides, `scale_start` elements from their pointers.
    """
    if SCHEME == "int8":
        pointers = codes_ptr + n * n_stride + k * (1 if UNIT else word_stride)
        if UNIT:
            pointers = tl.multiple_of(pointers, (1, 16))
        level = tl.load(pointers, mask=mask, other=0).to(tl.float32)
    else:
        CODES: tl.constexpr = 2 if SCHEME == "mxfp4" else 8
        word = tl.load(codes_ptr + n * n_stride + k // CODES * word_stride, mask=mask, other=0).to(tl.int32)
        code = (word >> (k % CODES * 4)) & 15
        level = _e2m1(code) if SCHEME == "mxfp4" else code.to(tl.float32)
    group = scale_start + n * scale_n_stride + k // GROUP * scale_group_stride
    if SCHEME == "int4_symmetric":
        level = level - 8.0
    if SCHEME == "int4_asymmetric":
        level = level - tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
    scale = tl.load(scale_ptr + group, mask=mask, other=0)
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = _e8m0(scale)
    return tl.where(mask, level * scale.to(tl.float32), 0.0).to(A)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Weights [E, N, K] in codes, or seen as [E, K, N], with as much of a tensor's interface as the kernels need.

    Attributes:
        name: of the weight, for errors.
        scheme: one of `SCHEMES`.
        dtype: of the operands that the codes stand for.
        codes: [E, N, K / codes per word].
        scale, zero: [E, N, K / group], with equal strides; zero is None where the scheme has no zero points.
        group: elements per scale; 1 where a row has only one, which is expanded.
        turned: whether the weight is seen as [E, K, N].
    """

    name: str
    scheme: str
    dtype: torch.dtype
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int
    turned: bool = False

    @property
    def shape(self) -> torch.Size:
        experts, n, words = self.codes.shape
        k = words * SCHEMES[self.scheme].codes_per_word
        return torch.Size((experts, k, n) if self.turned else (experts, n, k))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dim(self) -> int:
        return 3

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: int) -> Tensor:
        """Return the weight of one expert, [N, K] or as it is seen, in a tensor of its own."""
        scheme, levels, scale = SCHEMES[self.scheme], self.codes[expert], self.scale[expert]
        if scheme.levels is not None:
            shifts = torch.arange(0, 4 * scheme.codes_per_word, 4, device=self.device)
            nibbles = (levels.to(torch.int64).unsqueeze(-1) >> shifts & 15).flatten(-2)
            levels = torch.tensor(scheme.levels, dtype=FP32, device=self.device)[nibbles]
        if self.zero is not None:
            levels = levels - self.zero[expert].repeat_interleave(self.group, -1)
        scale = scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale.float()
        weight = (levels * scale.repeat_interleave(self.group, -1)).to(self.dtype)
        return weight.t() if self.turned else weight

    def transpose(self, first: int, second: int) -> QuantizedWeight:
        """Return the view with dimensions 1 and 2 exchanged."""
        if {first, second} != {1, 2}:
            raise ValueError(f"{self.name}: only dimensions 1 and 2 can be exchanged, not {first} and {second}")
        return replace(self, turned=not self.turned)

    def chunk(self, chunks: int, dim: int) -> list[QuantizedWeight]:
        """Cut into equal parts along dimension 1 or 2, as views; ValueError if that would cut a word or a group."""
        axis = 3 - dim if self.turned else dim
        per_word = SCHEMES[self.scheme].codes_per_word
        unit, per_scale = (per_word, self.group) if axis == 2 else (1, 1)
        width, rest = divmod(self.shape[dim], chunks)
        if rest or width % unit or width % per_scale:
            raise ValueError(
                f"{self.name}: {chunks} shards of its {self.shape[dim]} columns would cut {self.scheme} codes that "
                f"share a word ({per_word} of them) or a scale ({self.group}); choose shards that hold whole ones"
            )
        return [
            replace(
                self,
                codes=self.codes.narrow(axis, i * width // unit, width // unit),
                scale=self.scale.narrow(axis, i * width // per_scale, width // per_scale),
                zero=None if self.zero is None else self.zero.narrow(axis, i * width // per_scale, width // per_scale),
            )
            for i in range(chunks)
        ]


def base_weight(
    name: str, weight: Tensor, scale: Tensor | None, zero: Tensor | None, *, columns: int, dtype: torch.dtype
) -> Tensor | QuantizedWeight:
    """Return the weights NAME_proj [E, N, K] for kernels that compute in `dtype`: a tensor, or one in codes.

    `columns` is K. The scheme follows from the dtype of the codes, and from whether there is a zero point.

    Raises:
        ValueError: shapes, devices, a scale or a zero point that do not go with the codes.
        TypeError: a dtype that does not.
    """
    if weight.is_floating_point():
        for part, tensor in {"scale": scale, "zero": zero}.items():
            if tensor is not None:
                raise ValueError(
                    f"{name}_{part} is given, but {name}_proj is {weight.dtype}; pass codes, or leave it out"
                )
        return weight
    scheme = _recognised(name, weight, zero)
    if scale is None:
        raise ValueError(f"{name}_scale is missing; {name}_proj is {weight.dtype}, which is {scheme}")
    _check_dtypes(name, scheme, scale, zero)
    group = _checked_group(name, scheme, weight, scale, columns)
    _check_places(name, weight, scale, zero)
    if SCHEMES[scheme].group_size is None:
        scale, group = scale.unsqueeze(-1).expand(-1, -1, columns), 1
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = scale.contiguous(), zero.contiguous()
    return QuantizedWeight(f"{name}_proj", scheme, dtype, weight, scale, zero, group)


def base_weights(
    x: Tensor, tensors: Mapping[str, Tensor], codes: tuple[Tensor | None, ...]
) -> dict[str, Tensor | QuantizedWeight]:
    """Replace gate_proj, up_proj and down_proj in `tensors` by their `base_weight`; `codes` are the scales and zeros.

    Raises:
        ValueError, TypeError: as `base_weight` does.
    """
    hidden, width = x.shape[-1:].numel(), tensors["gate_proj"].shape[1:2].numel()
    columns = {"gate": hidden, "up": hidden, "down": width}
    parts = zip(columns.items(), codes[:3], codes[3:], strict=True)
    return dict(tensors) | {
        f"{name}_proj": base_weight(name, tensors[f"{name}_proj"], scale, zero, columns=k, dtype=x.dtype)
        for (name, k), scale, zero in parts
    }


def scale_arguments(weights: Sequence[Tensor | QuantizedWeight]) -> dict[str, Any]:
    """Return the arguments of a kernel that describe the scales of up to two weights."""
    arguments: dict[str, Any] = {}
    for i in (0, 1):
        weight, scale, zero, strides = weights[i] if i < len(weights) else None, None, None, (0, 0, 0)
        if isinstance(weight, QuantizedWeight):
            scale, zero, strides = weight.scale, weight.zero, weight.scale.stride()
        arguments |= {f"scale_{i}_ptr": scale, f"zero_{i}_ptr": zero}
        arguments |= {f"scale_{i}_{dim}_stride": s for dim, s in zip(("expert", "n", "group"), strides, strict=True)}
    return arguments


def _recognised(name: str, weight: Tensor, zero: Tensor | None) -> str:
    """Find the name of the scheme of codes of this dtype; of two, by whether there is a zero point."""
    found = [scheme for scheme, what in SCHEMES.items() if what.words == weight.dtype]
    if not found:
        known = ", ".join(f"{what.words} ({scheme})" for scheme, what in SCHEMES.items())
        raise TypeError(f"{name}_proj is {weight.dtype}; it must be of the dtype of x, or codes: {known}")
    return next((scheme for scheme in found if SCHEMES[scheme].has_zero == (zero is not None)), found[0])


def _check_dtypes(name: str, scheme: str, scale: Tensor, zero: Tensor | None) -> None:
    expected = SCHEMES[scheme]
    if scale.dtype not in expected.scales:
        choice = " or ".join(map(str, expected.scales))
        needs = "; with zero points it is another scheme, pass them too" if scheme == "int4_symmetric" else ""
        raise TypeError(f"{name}_scale is {scale.dtype}; with {scheme} codes it must be {choice}{needs}")
    if zero is not None and not expected.has_zero:
        raise ValueError(f"{name}_zero is given, but {scheme} codes have no zero point; leave it out")
    if zero is not None and zero.dtype != torch.int8:
        raise TypeError(f"{name}_zero is {zero.dtype}; it must be {torch.int8}, 0 to 15")


def _checked_group(name: str, scheme: str, codes: Tensor, scale: Tensor, columns: int) -> int:
    """Return the number of elements that share a scale."""
    expected = SCHEMES[scheme]
    if codes.dim() != 3 or codes.shape[2] * expected.codes_per_word != columns:
        raise ValueError(
            f"{name}_proj has shape {tuple(codes.shape)}; {expected.codes_per_word} of its {columns} columns are one "
            f"{codes.dtype} in {scheme}, so it must be (E, N, {columns / expected.codes_per_word:g})"
        )
    rows = tuple(codes.shape[:2])
    if expected.group_size is None:
        if scale.shape != rows:
            raise ValueError(f"{name}_scale has shape {tuple(scale.shape)}; {scheme} has one per row, {rows}")
        return columns
    groups = scale.shape[-1] if scale.dim() == 3 else 0
    if tuple(scale.shape[:-1]) != rows or groups == 0:
        raise ValueError(
            f"{name}_scale has shape {tuple(scale.shape)}; {scheme} has one per group, {(*rows, 'groups')}"
        )
    if columns % groups or expected.group_size not in (0, columns // groups):
        size = expected.group_size or "one size"
        raise ValueError(f"{name}_scale has {groups} groups, which do not cut {columns} columns into groups of {size}")
    return columns // groups


def _check_places(name: str, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    """Raise ValueError unless the zero points lie as the scales do, and all of them where the codes are."""
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"{name}_zero has shape {tuple(zero.shape)}, but {name}_scale has {tuple(scale.shape)}")
    for part, tensor in {"scale": scale, "zero": zero}.items():
        if tensor is not None and tensor.device != codes.device:
            raise ValueError(
                f"{name}_{part} is on {tensor.device}, but {name}_proj is on {codes.device}: move it there"
            )
