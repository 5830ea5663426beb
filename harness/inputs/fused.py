"""Values and fingerprints by one kernel per tensor on a GPU, bit for bit what the torch functions give.

The kernel that fills a tensor is printed from the program of its regime (`symbols`); Triton compiles it once per
program and element size. Nothing is allocated but the one word of a fingerprint. Triton is imported at first use.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import linecache
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from harness.case import contiguous_strides
from harness.inputs.bits import NAN_BITS, bits_of, bits_of_float, signed
from harness.inputs.symbols import Program
from harness.numerics.formats import FP32, FP64, format_of

_TILE, _NARROW_TILE, _NARROW, _MANY = (1, 2048), (64, 32), 128, 256
_PROGRAMS = 1 << 11  # of a fingerprint: enough for any GPU, and few enough that their additions to one word are cheap
_LEADING = 3
_PLACE = ("size2", "size1", "size0", "step2", "step1", "step0", "stride2", "stride1", "stride0", "size", "stride")
_ENCODE = ("dropped", "half", "odd", "tiny", "shift", "base", "beyond", "last", "sign", "nan")
_HEAD = "    rows, columns, where, inside = placed(tl.program_id(0), tiles, {place}, ROWS, COLUMNS)"
_STORE = "    tl.store(target + where, {value}.to(target.dtype.element_ty), inside)"


def fuses(device: torch.device) -> bool:
    """Whether kernels are compiled for tensors on `device`."""
    return device.type == "cuda" and _compiles()


@functools.cache
def _compiles() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return not triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Lines:
    """A tensor as lines along one dimension, numbered by up to three others.

    Attributes:
        sizes, steps, strides: of these, the outermost first: their size, and how far an index moves the logical number
            of a line, and its place in memory.
        size, stride: of the line itself.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    stride: int

    @property
    def count(self) -> int:
        return self.sizes[0] * self.sizes[1] * self.sizes[2]

    @property
    def tile(self) -> tuple[int, int]:
        """Lines and columns that a program handles at a time."""
        return _NARROW_TILE if self.size <= _NARROW and self.count >= _MANY else _TILE

    @property
    def tiles(self) -> tuple[int, int]:
        """How many tiles there are, and how many beside each other."""
        across = -(-self.size // self.tile[1])
        return -(-self.count // self.tile[0]) * across, across

    @property
    def arguments(self) -> tuple[int, ...]:
        """Those of `device_code.placed` after the number of the tile."""
        return (self.tiles[1], *self.sizes, *self.steps, *self.strides, self.size, self.stride)


Dimension = tuple[int, int, int]
"""Size, logical step and stride in memory."""


def _lines(leading: Sequence[Dimension], size: int, stride: int) -> Lines | None:
    """Lines numbered by these dimensions; None if more than three remain when neighbours are merged."""
    merged = _merged(leading)
    if len(merged) > _LEADING:
        return None
    sizes, steps, strides = zip(*[(1, 0, 0)] * (_LEADING - len(merged)), *merged, strict=True)
    return Lines(sizes, steps, strides, size, stride)


def _merged(dimensions: Iterable[Dimension]) -> list[Dimension]:
    """The same places and numbers with as few dimensions as possible."""
    merged: list[Dimension] = []
    for size, step, stride in dimensions:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * step, size * stride):
            size *= merged.pop()[0]
        merged.append((size, step, stride))
    return merged


def row_lines(target: Tensor, shape: tuple[int, ...]) -> Lines | None:
    """The rows of a tensor of that logical `shape`, of which `target` has size 1 where its stride is 0."""
    steps = contiguous_strides(shape[:-1])
    *leading, size = target.shape
    *strides, stride = target.stride()
    return _lines(list(zip(leading, steps, strides, strict=True)), size, stride)


def fill(target: Tensor, lines: Lines, program: Program, keys: Sequence[int], width: int) -> None:
    """Write the values of a program into `target`, whose rows are `lines` and have the logical `width`."""
    arguments = [*keys, *program.constants, width, *lines.arguments, *_encoding(target.dtype)]
    _launch(_kernel(source(program, target.dtype)), lines.tiles[0], bits_of(target), arguments, lines.tile)


def _launch(kernel: Any, programs: int, tensor: Tensor, arguments: Sequence[object], tile: tuple[int, int]) -> None:
    # A fused multiplication and addition would round once where the torch functions round twice.
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        kernel[(programs,)](tensor, *arguments, *tile, enable_fp_fusion=False)


@functools.cache
def _encoding(dtype: torch.dtype) -> tuple[int, ...]:
    """The arguments of `device_code.encoded` for a floating-point dtype; none for integers."""
    if not dtype.is_floating_point:
        return ()
    fmt = format_of(dtype)
    dropped = 53 - fmt.precision
    base = (fmt.min_exponent + 1022) << (fmt.precision - 1)
    top = (bits_of_float(fmt.max) >> dropped) - base
    half = (1 << dropped >> 1) - 1 if dropped else 0
    sign = signed(1 << (8 * dtype.itemsize - 1))
    last = top + (fmt.overflow == "inf")
    shift = bits_of_float(fmt.quantum * 2.0**52)
    return (
        dropped,
        half,
        int(dropped > 0),
        bits_of_float(2.0**fmt.min_exponent),
        shift,
        base,
        top + 1,
        last,
        sign,
        NAN_BITS[dtype],
    )


@functools.lru_cache(maxsize=1024)
def source(program: Program, dtype: torch.dtype) -> str:
    """The text of the kernel that fills a tensor: `program` between the place of a tile and its store."""
    kind = "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "integer"
    keys = [f"key{i}" for i in range(len(program.streams))]
    constants = [f"c{i}" for i in range(len(program.constants))]
    names = [*keys, *constants, "width", "tiles", *_PLACE, *(_ENCODE if kind == "float" else ())]
    parameters = [f"{name}: tl.int{32 if name == 'tiles' else 64}" for name in names]
    encoded = f"encoded({program.result}, {', '.join(_ENCODE)})"
    value = {"float": encoded, "bool": f"({program.result} != 0)", "integer": program.result}[kind]
    text = [
        f"def fill(target, {', '.join(parameters)}, ROWS: tl.constexpr, COLUMNS: tl.constexpr):",
        _HEAD.format(place=", ".join(_PLACE)),
        *(f"    {line}" for line in program.lines),
        _STORE.format(value=value),
    ]
    return "\n".join(text) + "\n"


@functools.cache
def _kernel(source: str) -> Any:
    """The kernel of a source text, which Triton reads from the line cache as that of a file."""
    import triton

    from harness.inputs import device_code

    filename = f"<values {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(vars(device_code))
    exec(compile(source, filename, "exec"), namespace)
    fill = namespace["fill"]
    return triton.jit(fill, do_not_specialize=_numbers(fill))


@functools.cache
def _hashing() -> Any:
    import triton

    from harness.inputs import device_code

    return triton.jit(device_code.add_hashes, do_not_specialize=_numbers(device_code.add_hashes))


def _numbers(function: Any) -> list[str]:
    """The parameters of a kernel whose values it is not compiled for: all but the capital ones."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return [name for name in names if not name.isupper()]


Kind = Literal["stored", "wide", "narrow"]


def flat_lines(tensor: Tensor) -> Lines | None:
    """The elements of a tensor in logical order, with lines as long as its strides allow."""
    steps = contiguous_strides(tuple(tensor.shape))
    *leading, (size, _, stride) = _merged(zip(tensor.shape, steps, tensor.stride(), strict=True)) or [(1, 1, 1)]
    return _lines(leading, size, stride)


def add_hashes(total: Tensor, tensor: Tensor, lines: Lines, factors: tuple[int, int], *, values: bool) -> None:
    """Add the hashes of index and bits, each times its factor, of all elements of `tensor` to `total` (int64).

    With `values`, the bits are those of fp32 where they are of a narrower format, and NaN has one kind.
    """
    kind, decoding = _decoding(tensor.dtype) if values else ("stored", (0, 0, 0, 0, 0))
    arguments = [bits_of(tensor), *factors, lines.tiles[0], *decoding, *lines.arguments, kind]
    _launch(_hashing(), min(lines.tiles[0], _PROGRAMS), total, arguments, lines.tile)


@functools.cache
def _decoding(dtype: torch.dtype) -> tuple[Kind, tuple[int, ...]]:
    """Which bits of elements are hashed as their values; mask, shift, scale, last and special of `add_hashes`."""
    if not dtype.is_floating_point:
        return "stored", (0, 0, 0, 0, 0)
    fmt = format_of(dtype)
    exponent = (1 << (8 * dtype.itemsize - 1)) - (1 << (fmt.precision - 1))
    mask = (1 << (8 * dtype.itemsize - 1)) - 1
    if fmt in (FP32, FP64):
        return "wide", (mask, 0, 0, exponent, NAN_BITS[dtype])
    scale = bits_of_float(2.0 ** (1022 + fmt.min_exponent))
    top = mask - 1 if fmt.overflow == "nan" else exponent - 1
    return "narrow", (mask, 53 - fmt.precision, scale, top, -1 if fmt.overflow == "nan" else exponent)
