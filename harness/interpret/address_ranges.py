"""The tensors that a launch was given, as ranges of addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from lastbit.interpret.numpy_formats import Array, DType

BYTE = np.dtype(np.uint8)


@dataclass(eq=False)
class Given:
    """A tensor that a launch was given, as a range of addresses.

    Attributes:
        name: of the kernel's parameter.
        tensor: the argument.
        start, stop: address of its first byte, and of the first one behind its last element.
        region, shared: number, start and stop of the range of memory that it shares with the tensors that it overlaps.
        unit: bytes that elements of all these tensors consist of.
        blank: what an element holds to which nothing was written; None if that is not known.
    """

    name: str
    tensor: Tensor
    start: int
    stop: int
    region: int = -1
    shared: tuple[int, int] = (0, 0)
    unit: int = 1
    blank: int | None = None
    _views: dict[Any, Array] = field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        return self.tensor.element_size()

    def view(self, raw: DType) -> Array:
        """Return the tensor's memory, from its first byte on, as an array of numbers of `raw`."""
        if raw not in self._views:
            self._views[raw] = view(self.start, (self.stop - self.start) // raw.itemsize, raw)
        return self._views[raw]

    def shared_bytes(self) -> Array:
        """Return all bytes of the range of memory that the tensor shares."""
        return view(self.shared[0], self.shared[1] - self.shared[0], BYTE)

    @cached_property
    def layout(self) -> tuple[int, list[tuple[int, int]]]:
        """Bytes without a gap, and stride in bytes and count of what repeats them, the outermost first.

        Nothing repeats a tensor without gaps, nor one whose windows overlap: where its gaps are is not sure.
        """
        if self.tensor.is_contiguous():
            return self.stop - self.start, []
        sized = zip(self.tensor.stride(), self.tensor.shape, strict=True)
        run, reach = self.itemsize, self.itemsize
        dims: list[tuple[int, int]] = []
        for stride, size in sorted((stride * self.itemsize, size) for stride, size in sized if stride and size > 1):
            if stride < reach:
                return self.stop - self.start, []
            reach = stride * (size - 1) + reach
            if stride == run and not dims:
                run *= size
            else:
                dims.insert(0, (stride, size))
        return run, dims

    def holds(self, where: Array, width: int) -> Array:
        """Return which of these addresses are those of `width` bytes of the tensor's elements."""
        offset = where - np.uint64(self.start)
        inside = (where >= self.start) & (offset + np.uint64(width) <= np.uint64(self.stop - self.start))
        run, dims = self.layout
        for stride, size in dims:
            inside &= offset < np.uint64(stride * size)
            offset = offset % np.uint64(stride)
        return inside & (offset + np.uint64(width) <= np.uint64(run)) if dims else inside

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        strides = "" if self.tensor.is_contiguous() else f", strides {list(self.tensor.stride())}"
        return f"{self.name} ({dtype} {list(self.tensor.shape)}{strides})"


def view(start: int, count: int, raw: DType) -> Array:
    """Return `count` numbers in memory as a writable array."""
    interface = {"data": (start, False), "shape": (count,), "typestr": raw.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def given(arguments: Iterable[tuple[str, Any]], blank: Callable[[Tensor], int | None]) -> list[Given]:
    """Return the tensors among named arguments, also within tuples and descriptors, that have memory, and those beside.

    A caller that gives a kernel several views of one tensor says so in the attribute `views` of that tensor: name
    → shape, strides and offset. A program may then find the others by the address of one.
    """
    found = [
        Given(name, tensor, tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), blank=blank(tensor))
        for name, value in arguments
        for tensor in _tensors(value)
        if tensor.numel()
    ]
    for each in {x.tensor._base: x for x in found if x.tensor._base is not None}.values():
        found += _beside(each, found)
    regions: list[list[Given]] = []
    end = 0
    for each in sorted(found, key=lambda x: x.start):
        if each.start >= end:
            regions.append([])
        regions[-1].append(each)
        end = max(end, each.stop)
    for number, region in enumerate(regions):
        start, unit = region[0].start, min(x.itemsize for x in region)
        unit = 1 if any((x.start - start) % unit for x in region) else unit
        for each in region:
            each.region, each.shared, each.unit = number, (start, max(x.stop for x in region)), unit
    return found


def _beside(one: Given, known: list[Given]) -> Iterator[Given]:
    base: Any = one.tensor._base
    places = {(x.start, x.tensor.shape, x.tensor.stride()) for x in known}
    for name, (shape, strides, offset) in getattr(base, "views", {}).items():
        other = base.as_strided(shape, strides, offset)
        if other.numel() and (other.data_ptr(), other.shape, other.stride()) not in places:
            yield Given(name, other, other.data_ptr(), other.data_ptr() + _extent(other))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (Tensor, int, float, str, type(None))):
        if isinstance(value, Tensor):
            yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(found := getattr(value, "base", value), Tensor):
        yield found


def _extent(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum(stride * (size - 1) for stride, size in steps)) * tensor.element_size()
