"""Tensors inside larger allocations whose other bytes are canaries.

The canary of a floating-point tensor is a NaN of a recognisable payload, so that a kernel that reads beyond the tensor
also spoils its result. (The 8-bit formats have no payload to choose: their canaries are NaNs that arithmetic on GPUs
does not make.) Other tensors have a repeated byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.inputs.bits import signed

ALIGNMENT = 256
_LEAST_MARGIN, _MOST_MARGIN = 64 << 10, 4 << 20
_NAN_OF_BYTE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7D}
# Prime to 63, so that as many numbers have different payloads in bf16; not small, so that none is a usual NaN.
_FIRST_PAYLOAD = 43
MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7, torch.complex64: 23}
"""Dtypes whose canaries are NaNs of a payload that depends on the number."""


@dataclass(frozen=True, slots=True, eq=False)
class Guarded:
    """A tensor and the allocation around it.

    Attributes:
        name: what to call it in a violation.
        tensor: no autograd view; its storage is that of `words`.
        words: the whole allocation as int64; tensors that share it have one object of words in common.
        start: where the tensor's first element is, in elements of its dtype.
    """

    name: str
    tensor: Tensor
    words: Tensor
    start: int


class StorageView(NamedTuple):
    """Where a tensor lies in a storage, in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def canary(dtype: torch.dtype, number: int) -> int:
    """Return the bits of one element of canary `number`; different numbers differ where the dtype has enough patterns.

    Numbers of different parity always differ.
    """
    if dtype in _NAN_OF_BYTE:
        return _NAN_OF_BYTE[dtype] | (0x80 if number % 2 else 0)
    if dtype not in MANTISSA_BITS:
        byte = (0xA5 if number % 2 else 0x5A) ^ (number // 2 % 16)
        return int.from_bytes(bytes([byte] * dtype.itemsize), "little")
    mantissa = MANTISSA_BITS[dtype]
    width = 32 if dtype is torch.complex64 else 8 * dtype.itemsize
    quiet = 1 << (mantissa - 1)
    exponent = (1 << (width - 1)) - (1 << mantissa)
    payload = _FIRST_PAYLOAD * (number // 2 + 1) % (quiet - 1)
    bits = (number % 2) << (width - 1) | exponent | quiet | payload
    return bits << 32 | bits if dtype is torch.complex64 else bits


def word_of(bits: int, itemsize: int) -> int:
    """Return the int64 that repeats the `bits` of one element."""
    return signed(int.from_bytes(bits.to_bytes(itemsize, "little") * (8 // itemsize), "little"))


def integer_of(bits: int, itemsize: int) -> int:
    """Return the last `bits`, of one element, as the integer of `INTEGER_OF_SIZE`: unsigned for bytes, else signed."""
    unused = 64 - 8 * itemsize
    return bits if itemsize == 1 else signed(bits << unused) >> unused


def guard(
    name: str,
    shape: tuple[int, ...],
    *,
    strides: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    number: int,
    pin_memory: bool = False,
) -> Guarded:
    """Allocate a tensor amid canaries `number`; it starts `offset` elements after a 256-byte-aligned address."""
    places = [StorageView(name, shape, strides, offset)]
    return guard_together(places, dtype=dtype, device=device, number=number, pin_memory=pin_memory)[0]


def guard_together(
    places: Sequence[StorageView], *, dtype: torch.dtype, device: torch.device, number: int, pin_memory: bool = False
) -> list[Guarded]:
    """Allocate tensors in one storage amid canaries `number`; offsets count from a 256-byte-aligned address."""
    itemsize = dtype.itemsize
    row = max(place.shape[-1] * itemsize if place.shape else itemsize for place in places)
    margin = max(_LEAST_MARGIN, min(4 * row, _MOST_MARGIN))
    reach = max(place.offset + extent(place.shape, place.strides) for place in places)
    total = ALIGNMENT + 2 * margin + reach * itemsize
    word = word_of(canary(dtype, number), itemsize)
    words = torch.full((-(-total // 8),), word, dtype=torch.int64, device=device, pin_memory=pin_memory)
    start = (margin + -(words.data_ptr() + margin) % ALIGNMENT) // itemsize
    return [
        Guarded(name, _place(words, start + offset, shape, strides, dtype), words, start + offset)
        for name, shape, strides, offset in places
    ]


def memories(guards: Iterable[Guarded]) -> list[tuple[Guarded, ...]]:
    """Return guarded tensors by allocation, in the order of the first of each."""
    found: dict[int, list[Guarded]] = {}
    for guarded in guards:
        found.setdefault(id(guarded.words), []).append(
            guarded
        )  # a kernel can free the storage, which has no address then
    return [tuple(together) for together in found.values()]


def copied(guards: Iterable[Guarded]) -> list[Guarded]:
    """Copy guarded tensors with all that is around them; those that share an allocation share the copy."""
    found = []
    for together in memories(guards):
        words = together[0].words.clone()
        found += [Guarded(guarded.name, twin(guarded, words), words, guarded.start) for guarded in together]
    return found


def handed_out(guards: Iterable[Guarded]) -> dict[str, Tensor]:
    """Return new tensors in the memory of guarded ones, by name, as a kernel gets them.

    Tensors that share an allocation are views of one tensor, as those that a model makes of what it holds in one.
    """
    guards = list(guards)
    handed: dict[str, Tensor] = {}
    for together in memories(guards):
        first, *others = together
        handed |= {first.name: twin(first, first.words)} if not others else _views(together)
    return {guarded.name: handed[guarded.name] for guarded in guards}


def _views(together: Sequence[Guarded]) -> dict[str, Tensor]:
    begin = min(guarded.start for guarded in together)
    ends = (guarded.start + extent(tuple(guarded.tensor.shape), guarded.tensor.stride()) for guarded in together)
    base: Any = _place(together[0].words, begin, (max(ends) - begin,), (1,), together[0].tensor.dtype)
    base.views = {g.name: (tuple(g.tensor.shape), g.tensor.stride(), g.start) for g in together}  # for the interpreter
    return {name: base.as_strided(*place) for name, place in base.views.items()}


def twin(guarded: Guarded, words: Tensor) -> Tensor:
    """Return the tensor at the place of `guarded.tensor` in `words`, another allocation of the same size."""
    tensor = guarded.tensor
    return _place(words, guarded.start, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def once(tensor: Tensor) -> Tensor:
    """Narrow dimensions of stride 0 to their first index, so that every element of memory occurs once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _place(words: Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Unlike as_strided, set_ gives a tensor that autograd does not take for a view.
    return torch.tensor([], dtype=dtype, device=words.device).set_(words.untyped_storage(), start, shape, strides)


def is_whole(guarded: Guarded) -> bool:
    """Return whether an allocation has the size that it was made with: whoever gets a tensor can resize its storage."""
    return guarded.words.untyped_storage().nbytes() == guarded.words.nbytes


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the distance in elements from the first element of a tensor to the end of its last one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def separates(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether each stride steps over all that smaller ones reach, so that no two indices share an element.

    Stride 0 and dimensions of size 1 are left aside.
    """
    reach = 1
    for _, stride, size in moving(shape, strides):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def check_separate(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raise a `UsageError` for strides under which different indices (other than of stride 0) may share an element."""
    if 0 not in shape and not separates(shape, strides):
        raise UsageError(
            f"strides {list(strides)} of tensor {name!r} with shape {list(shape)} make its elements overlap: "
            "each stride must exceed what the smaller strides span"
        )


def moving(shape: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Return dimension, stride and size of the dimensions along which elements differ, smallest stride first."""
    dims = sorted(range(len(shape)), key=lambda dim: strides[dim])
    return ((dim, strides[dim], shape[dim]) for dim in dims if strides[dim] and shape[dim] > 1)
