"""The values of a tensor: its regime evaluated block by block, rounded to its dtype, written where its strides say.

Every value follows from the seed of the case, the name of the tensor and the logical index of the element. Strides,
device and block size change nothing. Where a stride is 0, all indices share the value of index 0.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import Tensor

from lastbit.case import TensorSpec, contiguous_strides
from lastbit.errors import UsageError, unknown
from lastbit.inputs.bits import NAN_BITS, bits_of, key_of, signed
from lastbit.inputs.blocks import block_budget, row_blocks
from lastbit.inputs.captured import fill_captured, is_captured
from lastbit.inputs.draws import DrawnBlock
from lastbit.inputs.fused import fill as fill_at_once
from lastbit.inputs.fused import source
from lastbit.inputs.given import check_given, fill_given, is_given
from lastbit.inputs.integers import INTEGER_REGIMES, integer_regime
from lastbit.inputs.lines import row_lines
from lastbit.inputs.one_sign import SIGNED
from lastbit.inputs.one_sign import signed as with_signs
from lastbit.inputs.regimes import REGIMES
from lastbit.inputs.symbols import Program, recorded
from lastbit.numerics.formats import FP64, Format, cast, format_of
from lastbit.trust import fuses, trusted

Regime = Callable[[DrawnBlock], Tensor]

_SAMPLE = 1 << 16  # elements at least that a fused kernel is compared on
_FEW_USES = 256  # of a kernel for small tensors, which torch fills in less time than it takes to compile

_uses: Counter[Hashable] = Counter()


def regimes() -> Mapping[str, str]:
    """Return the one-line description of every regime by name, those of integer, given and captured values included."""
    floats = {name: (regime.__doc__ or "").strip() for name, regime in REGIMES.items()}
    both = {name: f"{floats[name]} {INTEGER_REGIMES[name]}" for name in floats.keys() & INTEGER_REGIMES.keys()}
    return {
        **floats,
        **SIGNED,
        **INTEGER_REGIMES,
        **both,
        "values(V,V,…)": "The elements themselves, in row-major order.",
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
    if is_given(spec.regime):
        fill_given(target if spec.shape else tensor, spec)
        return
    if is_captured(spec.regime):
        fill_captured(target if spec.shape else tensor, spec)
        return
    if budget is None and fuses(tensor) and _filled_at_once(target, spec, seed):
        return
    for rows, columns, piece in _pieces(target, spec.shape or (1,), budget or block_budget(tensor.device)):
        bits_of(piece).copy_(_bits(spec, seed, rows, columns).reshape(piece.shape))


def check_regime(spec: TensorSpec) -> None:
    """Raise a `UsageError` if `spec` names no regime, or one that makes no values of its dtype."""
    if is_given(spec.regime):
        check_given(spec)
        return
    if is_captured(spec.regime):
        return
    known_float = _float_regime(spec.regime) is not None
    known_integer = integer_regime(spec.regime) is not None
    if not known_float and not known_integer:
        raise unknown(f"regime of tensor {spec.name!r}:", spec.regime, regimes())
    if not (known_float if spec.torch_dtype.is_floating_point else known_integer):
        takes = ", ".join(REGIMES if spec.torch_dtype.is_floating_point else INTEGER_REGIMES)
        raise UsageError(f"regime {spec.regime!r} makes no {spec.dtype} values for tensor {spec.name!r}; use {takes}")


def _pieces(target: Tensor, shape: tuple[int, ...], budget: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield row numbers [R, 1], column numbers [1, C] and the part of `target` that they select, until all is done."""
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


def _bits(spec: TensorSpec, seed: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the bits of the values of `spec` in its dtype, [R, C]."""
    dtype = spec.torch_dtype
    block = DrawnBlock(seed, spec.name, _format(dtype), rows, columns, *_sizes(spec.shape))
    values = _regime(spec.regime, dtype)(block)
    if not dtype.is_floating_point:
        return bits_of(values.to(dtype))
    rounded = cast(values, dtype)
    return bits_of(rounded).masked_fill_(rounded.to(torch.float32).isnan(), NAN_BITS[dtype])


def _regime(name: str, dtype: torch.dtype) -> Regime:
    """Return the regime called `name` as a function of a block alone."""
    if dtype.is_floating_point:
        floats = _float_regime(name)
        assert floats is not None
        return floats
    integers = integer_regime(name)
    assert integers is not None
    return lambda block: integers(block, dtype)


def _float_regime(name: str) -> Regime | None:
    """Return the regime of floating-point tensors called `name`, with its signs, or None."""
    return REGIMES.get(name) or with_signs(name)


def _format(dtype: torch.dtype) -> Format:
    return format_of(dtype) if dtype.is_floating_point else FP64


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return rows and columns of a tensor, and rows of one of its matrices, as a `DrawnBlock` has them."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1, shape[-2] if len(shape) > 1 else 1


@functools.lru_cache(maxsize=1024)
def _program(regime: str, dtype: torch.dtype, name: str, shape: tuple[int, ...]) -> Program | None:
    return recorded(_regime(regime, dtype), name, _format(dtype), *_sizes(shape))


def _filled_at_once(target: Tensor, spec: TensorSpec, seed: int) -> bool:
    """Fill `target`, which has size 1 where its stride is 0, by one kernel; return whether it was done."""
    program = _program(spec.regime, spec.torch_dtype, spec.name, spec.shape)
    lines = row_lines(target, spec.shape or (1,))
    if program is None or lines is None:
        return False
    keys = [signed(key_of(seed, *stream)) for stream in program.streams]
    _, width, _ = _sizes(spec.shape)

    def fill() -> None:
        fill_at_once(target, lines, program, keys, width)

    def difference() -> str:
        fill()
        rows, columns, piece = next(_pieces(target, spec.shape or (1,), _SAMPLE))
        wrong = bits_of(piece) != _bits(spec, seed, rows, columns).reshape(piece.shape)
        return f"{int(wrong.sum())} of {wrong.numel()} elements have other bits than from torch" if wrong.any() else ""

    key = source(program, target.dtype), target.dtype, lines.tile
    if not lines.large and _uses[key] < _FEW_USES:
        _uses[key] += 1
        return False
    if not trusted(target.device, key, f"inputs of {spec.dtype} ({spec.regime})", difference):
        return False
    fill()
    return True
