"""The values of a tensor: its regime evaluated block by block, rounded to its dtype, written where its strides say.

Every value follows from the seed of the case, the name of the tensor and the logical index of the element. Strides,
device and block size change nothing. Where a stride is 0, all indices share the value of index 0.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors import safe_open
from torch import Tensor

from lastbit.case import TensorSpec, contiguous_strides
from lastbit.dtypes import DTYPES
from lastbit.errors import UsageError, unknown
from lastbit.inputs.bits import NAN_BITS, bits_of, key_of, signed
from lastbit.inputs.blocks import block_budget, row_blocks
from lastbit.inputs.draws import DrawnBlock
from lastbit.inputs.fused import fill as fill_at_once
from lastbit.inputs.fused import row_lines, source
from lastbit.inputs.given import check_given, fill_given, is_given
from lastbit.inputs.integer_regimes import INTEGER_REGIMES, integer_regime
from lastbit.inputs.regimes import REGIMES, SIGNED
from lastbit.inputs.regimes import signed as with_signs
from lastbit.inputs.symbols import Program, recorded
from lastbit.numerics.formats import FP64, Format, cast, format_of
from lastbit.trust import fuses, trusted

_CALL = re.compile(r"captured\((?P<path>[^#]+)#(?P<key>.+)\)$")
_STORED_DTYPES = {
    "F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2",
    "I64": "int64", "I32": "int32", "I8": "int8", "BOOL": "bool",
}  # fmt: skip


def is_captured(regime: str) -> bool:
    """Return whether `regime` names a captured tensor (perhaps wrongly spelled)."""
    return regime == "captured" or regime.startswith("captured(")


def fill_captured(target: Tensor, spec: TensorSpec) -> None:
    """Copy the captured tensor that `spec.regime` names into `target`, bit for bit.

    The stored tensor has the dtype and shape of `spec`, or more rows in the first dimension, of which the first ones
    are taken. `target` may have size 1 where `spec` has stride 0; index 0 is taken there.

    Raises:
        UsageError: the regime is misspelled; the file or the key does not exist; dtype or shape does not fit.
    """
    path, key = _location(spec.regime)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            keys = list(file.keys())
            if key not in keys:
                raise unknown(f"tensor in {str(path)!r}:", key, keys)
            stored = file.get_slice(key)
            shape = tuple(stored.get_shape())
            _check(spec, f"{key!r} in {str(path)!r}", stored.get_dtype(), shape)
            if not shape:
                target.copy_(file.get_tensor(key))
                return
            inner = tuple(slice(0, size) for size in target.shape[1:])
            row_bytes = max(target[:1].numel() * target.element_size(), 1)
            step = max((64 << 20) // row_bytes, 1)
            for start in range(0, target.shape[0], step):
                stop = min(start + step, target.shape[0])
                target[start:stop].copy_(stored[start:stop][(slice(None), *inner)])
    except safetensors.SafetensorError as error:
        raise UsageError(f"{str(path)!r} is not a readable safetensors file: {error}") from error


def _location(regime: str) -> tuple[Path, str]:
    match = _CALL.match(regime)
    if match is None:
        raise UsageError(
            f"cannot read regime {regime!r}: expected captured(PATH#KEY), a safetensors file and a key in it"
        )
    path = Path(match["path"])
    if not path.is_file():
        raise UsageError(f"captured file {str(path)!r} does not exist or is not a file")
    return path, match["key"]


def _check(spec: TensorSpec, source: str, dtype: str, shape: tuple[int, ...]) -> None:
    name = _STORED_DTYPES.get(dtype, dtype)
    if name != spec.dtype:
        known = "" if name in DTYPES else ", a dtype that cases do not have"
        raise UsageError(f"captured tensor {source} is {name}{known}, but tensor {spec.name!r} is {spec.dtype}")
    fits = shape == spec.shape or (
        len(shape) == len(spec.shape) > 0 and shape[1:] == spec.shape[1:] and shape[0] >= spec.shape[0]
    )
    if not fits:
        raise UsageError(
            f"captured tensor {source} has shape {list(shape)}, but tensor {spec.name!r} has {list(spec.shape)}; "
            "it must have the same shape, or more rows in the first dimension"
        )


Regime = Callable[[DrawnBlock], Tensor]

# Arbitrary: larger than that of a fingerprint, as values are fp64 and have rarer cases.
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
