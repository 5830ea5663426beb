"""Pairs of tensors that share memory, and tensors whose own elements do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from lastbit.inputs.guards import StorageView

# 1 GiB of bools. Overlaps of larger memory would be unknown.
_LARGEST_MAP = 1 << 30


@dataclass(frozen=True, slots=True)
class _Span:
    """The addresses of a tensor: runs of `run` bytes, repeated along `(step, size)` dimensions, all in bytes."""

    device: torch.device
    begin: int
    end: int
    run: int
    steps: tuple[tuple[int, int], ...]


def overlaps(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of names whose tensors share at least one byte.

    Interleaved tensors, such as the halves that `chunk` returns, share none. Two tensors that interleave in a way
    which strides alone do not settle, over more than a gigabyte of addresses, count as sharing.
    """
    spans = {name: span for name, tensor in tensors.items() if (span := _span(tensor)) is not None}
    return [(a, b) for a, b in combinations(spans, 2) if _share(spans[a], spans[b])]


def overlapping(places: Iterable[StorageView], itemsize: int) -> list[tuple[str, str]]:
    """Return the pairs of names whose tensors would share an element of one storage: see `overlaps`."""
    here = torch.device("meta")
    spans = {
        place.name: _span_of(here, place.offset * itemsize, itemsize, place.shape, place.strides)
        for place in places
        if 0 not in place.shape
    }
    return [(a, b) for a, b in combinations(spans, 2) if _share(spans[a], spans[b])]


def is_folded(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor share memory, as in what `expand` returns.

    Strides that do not settle it, over more than a gigabyte of addresses, count as elements apart.
    """
    if tensor.numel() < 2 or tensor.device.type == "meta":
        return False
    moving = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if not moving[0][0]:
        return True
    covered, nested = 1, True
    for stride, size in moving:
        nested &= stride >= covered
        covered += stride * (size - 1)
    if nested or covered > _LARGEST_MAP:
        return False
    marks = torch.zeros(covered, dtype=torch.bool)
    marks.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(marks.sum()) < tensor.numel()


def _span(tensor: Tensor) -> _Span | None:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    shape, strides = tuple(tensor.shape), tensor.stride()
    return _span_of(tensor.device, tensor.data_ptr(), tensor.element_size(), shape, strides)


def _span_of(
    device: torch.device, begin: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> _Span:
    pairs = zip(strides, shape, strict=True)
    moving = sorted((stride * itemsize, size) for stride, size in pairs if stride and size > 1)
    run = itemsize
    while moving and moving[0][0] == run:
        run *= moving.pop(0)[1]
    end = begin + run + sum(step * (size - 1) for step, size in moving)
    return _Span(device, begin, end, run, tuple(moving))


def _share(a: _Span, b: _Span) -> bool:
    if a.device != b.device or a.end <= b.begin or b.end <= a.begin:
        return False
    if not a.steps and not b.steps:
        return True
    return not _disjoint_residues(a, b) and _share_bytes(a, b)


def _disjoint_residues(a: _Span, b: _Span) -> bool:
    """Return whether the runs fall on different addresses modulo the greatest common divisor of all steps."""
    period = math.gcd(*(step for step, _ in a.steps + b.steps))
    distance = (b.begin - a.begin) % period
    return a.run <= distance and distance + b.run <= period


def _share_bytes(a: _Span, b: _Span) -> bool:
    """Mark the bytes of `a` on a map of the addresses that both span, then look at those of `b`."""
    begin, end = min(a.begin, b.begin), max(a.end, b.end)
    unit = math.gcd(a.begin - begin, b.begin - begin, a.run, b.run, *(step for step, _ in a.steps + b.steps))
    if (end - begin) // unit > _LARGEST_MAP:
        return True
    marks = torch.zeros((end - begin) // unit, dtype=torch.bool)
    _view(marks, a, begin, unit).fill_(True)
    return bool(_view(marks, b, begin, unit).any())


def _view(marks: Tensor, span: _Span, begin: int, unit: int) -> Tensor:
    sizes = [size for _, size in span.steps]
    strides = [step // unit for step, _ in span.steps]
    return marks.as_strided([*sizes, span.run // unit], [*strides, 1], (span.begin - begin) // unit)
