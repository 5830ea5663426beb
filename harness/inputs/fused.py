"""Values and fingerprints by one kernel per tensor on a GPU, bit for bit what the torch functions give.

The kernel that fills a tensor is printed from the program of its regime (`symbols`); Triton compiles it once per
program and element size. Nothing is allocated but the one word of a fingerprint. Triton is imported at first use. A
kernel finds its elements, whatever their strides, by `Lines` along one dimension, and tiles of these.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lastbit.case import contiguous_strides
from lastbit.inputs.bits import NAN_BITS, bits_of, bits_of_float, signed
from lastbit.inputs.symbols import Program
from lastbit.numerics.formats import FP32, FP64, format_of
from lastbit.numerics.fused.compiled import collapsed, launcher, unspecialized

# Kernels are compiled for so many; tensors of more dimensions are joined, or left to torch.
_LEADING = 3
_TILE, _NARROW_TILE = (1, 2048), (64, 32)
# As LARGE of numerics/fused: a kernel of its own is worth its compilation from there on.
_LARGE = 1 << 21  # elements
_NARROW, _MANY = 128, 256  # columns and lines from which on most of a tile of one line would be idle

Dimension = tuple[int, ...]
"""Size, logical step and stride in memory."""


@dataclass(frozen=True)
class Lines:
    """Lines along one dimension, numbered by three others.

    Attributes:
        leading: these, the outermost first: their sizes, and how far an index moves the logical number of a line, and
            its place in memory.
        size, stride: of the line itself.
    """

    leading: tuple[Dimension, ...]
    size: int
    stride: int

    @property
    def count(self) -> int:
        """The number of lines."""
        return math.prod(size for size, _, _ in self.leading)

    @functools.cached_property
    def large(self) -> bool:
        """Return whether a kernel of their own is compiled for such lines; one serves all that are smaller."""
        return self.count * self.size >= _LARGE

    @functools.cached_property
    def tile(self) -> tuple[int, int, bool]:
        """Lines and columns that are handled at a time, and whether neighbours in a line are so in memory."""
        if not self.large:
            return (*_NARROW_TILE, False)
        narrow = self.size <= _NARROW and self.count >= _MANY
        return (*(_NARROW_TILE if narrow else _TILE), self.stride == 1)

    @functools.cached_property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.count // self.tile[0]) * self._across

    @property
    def _across(self) -> int:
        return -(-self.size // self.tile[1])

    @functools.cached_property
    def arguments(self) -> tuple[int, ...]:
        """The arguments of `device_code.placed` after the number of the tile."""
        sizes, steps, strides = zip(*self.leading, strict=True)
        return (self._across, *sizes, *steps, *strides, self.size, self.stride)


def row_lines(target: Tensor, shape: tuple[int, ...]) -> Lines | None:
    """Return the rows of a tensor of that logical `shape`, of which `target` has size 1 where its stride is 0.

    None if they are numbered by more than three dimensions.
    """
    return _rows(tuple(target.shape), target.stride(), shape)


def flat_lines(tensor: Tensor) -> Lines | None:
    """Return the elements of a tensor in logical order, in lines as long as strides allow; None as in `row_lines`."""
    return _elements(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=1024)
def _rows(sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> Lines | None:
    leading = collapsed(sizes[:-1], contiguous_strides(shape[:-1]), strides[:-1])
    return _lines(leading, sizes[-1], strides[-1])


@functools.lru_cache(maxsize=1024)
def _elements(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Lines | None:
    *leading, (size, _, stride) = collapsed(sizes, contiguous_strides(sizes), strides) or [(1, 1, 1)]
    return _lines(leading, size, stride)


def _lines(leading: Sequence[Dimension], size: int, stride: int) -> Lines | None:
    missing = _LEADING - len(leading)
    return Lines((*[(1, 0, 0)] * missing, *leading), size, stride) if missing >= 0 else None


_PROGRAMS = 1 << 11  # of a fingerprint: enough for any GPU, and few enough that their additions to one word are cheap
_PLACE = ("size2", "size1", "size0", "step2", "step1", "step0", "stride2", "stride1", "stride0", "size", "stride")
_ENCODE = ("dropped", "half", "odd", "tiny", "shift", "base", "beyond", "last", "sign", "nan")


def fill(target: Tensor, lines: Lines, program: Program, keys: Sequence[int], width: int) -> None:
    """Write the values of a program into `target`, whose rows are `lines` and have the logical `width`."""
    numbers = [*keys, *program.constants, width, *lines.arguments, *_encoding(target.dtype)]
    bits = bits_of(target)
    kernel = launcher(_kernel(source(program, target.dtype)), lines.tile, target.device, bits.dtype)
    kernel((lines.tiles, 1), (bits, *numbers))


@functools.cache
def _encoding(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the arguments of `device_code.encoded` for a floating-point dtype; none for integers."""
    if not dtype.is_floating_point:
        return ()
    fmt = format_of(dtype)
    dropped = 53 - fmt.precision
    base = (fmt.min_exponent + 1022) << (fmt.precision - 1)
    top = (bits_of_float(fmt.max) >> dropped) - base
    half = (1 << dropped >> 1) - 1 if dropped else 0
    tiny, shift = bits_of_float(2.0**fmt.min_exponent), bits_of_float(fmt.quantum * 2.0**52)
    last, sign = top + (fmt.overflow == "inf"), signed(1 << (8 * dtype.itemsize - 1))
    return dropped, half, int(dropped > 0), tiny, shift, base, top + 1, last, sign, NAN_BITS[dtype]


@functools.lru_cache(maxsize=1024)
def source(program: Program, dtype: torch.dtype) -> str:
    """Return the source of the kernel that fills a tensor: `program` between the place of a tile and its store."""
    kind = "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "integer"
    keys = [f"key{i}" for i in range(len(program.streams))]
    constants = [f"c{i}" for i in range(len(program.constants))]
    names = [*keys, *constants, "width", "tiles", *_PLACE, *(_ENCODE if kind == "float" else ())]
    parameters = [f"{name}: tl.int{32 if name == 'tiles' else 64}" for name in names]
    encoded = f"encoded({program.result}, {', '.join(_ENCODE)})"
    value = {"float": encoded, "bool": f"({program.result} != 0)", "integer": program.result}[kind]
    place = f"placed(tl.program_id(0), tiles, {', '.join(_PLACE)}, ROWS, COLUMNS, UNIT)"
    text = [
        f"def fill(target, {', '.join(parameters)}, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr):",
        f"    rows, places, start, along, inside = {place}",
        "    columns = start + tl.arange(0, COLUMNS)[None, :]",
        *(f"    {line}" for line in program.lines),
        f"    tl.store(target + places + along, {value}.to(target.dtype.element_ty), inside)",
    ]
    return "\n".join(text) + "\n"


@functools.cache
def _kernel(source: str) -> Any:
    """Return the kernel of a source text, which Triton reads from the line cache as if it were a file."""
    from lastbit.inputs import device_code

    filename = f"<values {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(vars(device_code))
    exec(compile(source, filename, "exec"), namespace)
    return unspecialized(namespace["fill"])


Kind = Literal["stored", "wide", "narrow"]
_STORED: tuple[Kind, tuple[int, ...]] = ("stored", (0, 0, 0, 0, 0))  # bits as they are: nothing to decode


def add_hashes(total: Tensor, tensor: Tensor, lines: Lines, factors: tuple[int, int], *, values: bool) -> None:
    """Add the hashes of index and bits, each times its factor, of all elements of `tensor` to `total` (int64).

    With `values`, the bits are those of fp32 where they are of a narrower format, and NaN has one kind.
    """
    from lastbit.inputs import device_code

    kind, decoding = _decoding(tensor.dtype) if values else _STORED
    numbers = [*factors, lines.tiles, *decoding, *lines.arguments]
    bits = bits_of(tensor)
    kernel = launcher(unspecialized(device_code.add_hashes), (kind, *lines.tile), tensor.device, bits.dtype)
    kernel((min(lines.tiles, _PROGRAMS), 1), (total, bits, *numbers))


@functools.cache
def _decoding(dtype: torch.dtype) -> tuple[Kind, tuple[int, ...]]:
    """Return which bits of elements are hashed as values; mask, shift, scale, last and special of `add_hashes`."""
    if not dtype.is_floating_point:
        return _STORED
    if dtype is torch.bfloat16:  # fp32 without its last 16 bits
        kind, (mask, _, *rest) = _decoding(torch.float32)
        return kind, (mask, 16, *rest)
    fmt = format_of(dtype)
    exponent = (1 << (8 * dtype.itemsize - 1)) - (1 << (fmt.precision - 1))
    mask = (1 << (8 * dtype.itemsize - 1)) - 1
    if fmt in (FP32, FP64):
        return "wide", (mask, 0, 0, exponent, NAN_BITS[dtype])
    scale = bits_of_float(2.0 ** (1022 + fmt.min_exponent))
    top = mask - 1 if fmt.overflow == "nan" else exponent - 1
    return "narrow", (mask, 53 - fmt.precision, scale, top, -1 if fmt.overflow == "nan" else exponent)
