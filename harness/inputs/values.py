"""The values of a tensor: its regime evaluated block by block, rounded to its dtype, written where its strides say.

Every value follows from the seed of the case, the name of the tensor and the logical index of the element. Strides,
device and block size change nothing. Where a stride is 0, all indices share the value of index 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from harness.case import TensorSpec, contiguous_strides
from harness.errors import UsageError, unknown
from harness.inputs.bits import bits_of
from harness.inputs.blocks import block_budget, row_blocks
from harness.inputs.captured import fill_captured, is_captured
from harness.inputs.draws import Block
from harness.inputs.integers import INTEGER_REGIMES, integer_regime
from harness.inputs.regimes import REGIMES
from harness.numerics.formats import FP64, cast, format_of

_NAN_BITS = {
    torch.float64: 0x7FF8 << 48,
    torch.float32: 0x7FC00000,
    torch.bfloat16: 0x7FC0,
    torch.float16: 0x7E00,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
}


def regimes() -> Mapping[str, str]:
    """Name → one-line description of every regime, those of integer tensors and captured values included."""
    floats = {name: (regime.__doc__ or "").strip() for name, regime in REGIMES.items()}
    both = {name: f"{floats[name]} {INTEGER_REGIMES[name]}" for name in floats.keys() & INTEGER_REGIMES.keys()}
    return {
        **floats,
        **INTEGER_REGIMES,
        **both,
        "captured(PATH#KEY)": "The tensor KEY of the safetensors file PATH, or as many of its leading rows.",
    }


def fill(tensor: Tensor, spec: TensorSpec, seed: int, *, budget: int | None = None) -> None:
    """Write the values of `spec` under the seed of its case into `tensor`, at most `budget` elements at a time.

    `tensor` has the dtype, shape and strides of `spec`.

    Raises:
        UsageError: the regime is unknown, or makes no values of this dtype or shape.
    """
    check_regime(spec)
    if spec.numel == 0:
        return
    target = tensor.view(1) if not spec.shape else tensor
    strides = spec.element_strides or (1,)
    target = target[tuple(slice(0, 1 if stride == 0 else None) for stride in strides)]
    if is_captured(spec.regime):
        fill_captured(target if spec.shape else tensor, spec)
        return
    for rows, columns, piece in _pieces(target, spec.shape or (1,), budget or block_budget(tensor.device)):
        bits_of(piece).copy_(bits_of(_values(spec, seed, rows, columns)).reshape(piece.shape))


def check_regime(spec: TensorSpec) -> None:
    """Raise a `UsageError` if `spec` names no regime, or one that makes no values of its dtype."""
    if is_captured(spec.regime):
        return
    known_float = spec.regime in REGIMES
    known_integer = integer_regime(spec.regime) is not None
    if not known_float and not known_integer:
        raise unknown(f"regime of tensor {spec.name!r}:", spec.regime, regimes())
    if not (known_float if spec.torch_dtype.is_floating_point else known_integer):
        takes = ", ".join(REGIMES if spec.torch_dtype.is_floating_point else INTEGER_REGIMES)
        raise UsageError(f"regime {spec.regime!r} makes no {spec.dtype} values for tensor {spec.name!r}; use {takes}")


def _pieces(target: Tensor, shape: tuple[int, ...], budget: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Row numbers [R, 1], column numbers [1, C] and the part of `target` that they select, until all is covered."""
    *leading, width = target.shape
    steps = contiguous_strides(shape[:-1])
    for block in row_blocks(tuple(leading), width, budget):
        rows = torch.zeros((), dtype=torch.int64, device=target.device)
        for part, step in zip(block, steps, strict=True):
            numbers = torch.arange(part.start, part.stop, device=target.device)
            rows = rows[..., None] + numbers * step
        for start in range(0, width, budget):
            stop = min(start + budget, width)
            columns = torch.arange(start, stop, device=target.device)
            yield rows.reshape(-1, 1), columns[None], target[block][..., start:stop]


def _values(spec: TensorSpec, seed: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Values of `spec` in its dtype, [R, C]."""
    width = spec.shape[-1] if spec.shape else 1
    integers = None if spec.torch_dtype.is_floating_point else integer_regime(spec.regime)
    fmt = format_of(spec.torch_dtype) if integers is None else FP64
    block = Block(seed, spec.name, fmt, rows, columns, math.prod(spec.shape[:-1]), width)
    if integers is not None:
        return integers(block, spec.torch_dtype).to(spec.torch_dtype)
    values = cast(REGIMES[spec.regime](block), spec.torch_dtype)
    # Conversions make NaNs of different bits on different devices, so their bits are set here.
    nan = values.to(torch.float32).isnan()
    bits_of(values).masked_fill_(nan, _NAN_BITS[spec.torch_dtype])
    return values
