"""Values and fingerprints by one kernel per tensor on a GPU, bit for bit what the torch functions give.

The kernel that fills a tensor is printed from the program of its regime (`symbols`); Triton compiles it once per
program and element size. Nothing is allocated but the one word of a fingerprint. Triton is imported at first use.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lastbit.inputs.bits import NAN_BITS, bits_of, bits_of_float, signed
from lastbit.inputs.lines import Lines
from lastbit.inputs.symbols import Program
from lastbit.numerics.formats import FP32, FP64, format_of
from lastbit.numerics.fused.compiled import launcher, unspecialized

_PROGRAMS = 1 << 11  # of a fingerprint: enough for any GPU, and few enough that their additions to one word are cheap
_PLACE = ("size2", "size1", "size0", "step2", "step1", "step0", "stride2", "stride1", "stride0", "size", "stride")
_ENCODE = ("dropped", "half", "odd", "tiny", "shift", "base", "beyond", "last", "sign", "nan")
_HEAD = (
    "    rows, places, start, along, inside = placed(tl.program_id(0), tiles, {place}, ROWS, COLUMNS, UNIT)",
    "    columns = start + tl.arange(0, COLUMNS)[None, :]",
)
_STORE = "    tl.store(target + places + along, {value}.to(target.dtype.element_ty), inside)"


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
    """Return the source of the kernel that fills a tensor: `program` between the place of a tile and its store."""
    kind = "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "integer"
    keys = [f"key{i}" for i in range(len(program.streams))]
    constants = [f"c{i}" for i in range(len(program.constants))]
    names = [*keys, *constants, "width", "tiles", *_PLACE, *(_ENCODE if kind == "float" else ())]
    parameters = [f"{name}: tl.int{32 if name == 'tiles' else 64}" for name in names]
    encoded = f"encoded({program.result}, {', '.join(_ENCODE)})"
    value = {"float": encoded, "bool": f"({program.result} != 0)", "integer": program.result}[kind]
    text = [
        f"def fill(target, {', '.join(parameters)}, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr):",
        *(line.format(place=", ".join(_PLACE)) for line in _HEAD),
        *(f"    {line}" for line in program.lines),
        _STORE.format(value=value),
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


def add_hashes(total: Tensor, tensor: Tensor, lines: Lines, factors: tuple[int, int], *, values: bool) -> None:
    """Add the hashes of index and bits, each times its factor, of all elements of `tensor` to `total` (int64).

    With `values`, the bits are those of fp32 where they are of a narrower format, and NaN has one kind.
    """
    from lastbit.inputs import device_code

    kind, decoding = _decoding(tensor.dtype) if values else ("stored", (0, 0, 0, 0, 0))
    numbers = [*factors, lines.tiles, *decoding, *lines.arguments]
    bits = bits_of(tensor)
    kernel = launcher(unspecialized(device_code.add_hashes), (kind, *lines.tile), tensor.device, bits.dtype)
    kernel((min(lines.tiles, _PROGRAMS), 1), (total, bits, *numbers))


@functools.cache
def _decoding(dtype: torch.dtype) -> tuple[Kind, tuple[int, ...]]:
    """Return which bits of elements are hashed as values; mask, shift, scale, last and special of `add_hashes`."""
    if not dtype.is_floating_point:
        return "stored", (0, 0, 0, 0, 0)
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
