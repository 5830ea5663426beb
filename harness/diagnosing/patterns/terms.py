"""The numbers that a mistake may be made of: inputs and stages, and products of two of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.wrong import Wrong
from lastbit.judging.expected import Numbers

_MOST_SLICES = 16


@dataclass(frozen=True, eq=False)
class Term:
    """An input or stage in fp64, in a shape that broadcasts to the wrong stage."""

    name: str
    values: Tensor


def terms_of(wrong: Wrong, stage: str = "") -> list[Term]:
    """Inputs and earlier stages that broadcast to a stage, and slices of those that do without one dimension."""
    stage = stage or wrong.stage
    shape = wrong.trace.stages[stage].shape
    return [term for name, values in numbers_of(wrong) if name != stage for term in _shaped(name, values, shape)]


def products_of(terms: list[Term]) -> list[Term]:
    """The products of two different terms."""
    return [Term(f"{a.name} times {b.name}", a.values * b.values) for a, b in itertools.combinations(terms, 2)]


def numbers_of(wrong: Wrong) -> Iterator[tuple[str, Tensor]]:
    """Floating-point inputs, and the stages before the wrong one, in fp64."""
    for name, tensor in wrong.problem.tensors.items():
        if tensor.is_floating_point():
            yield name, tensor.to(torch.float64)
    for name, expected in wrong.trace.stages.items():
        if name == wrong.stage or expected.of_all_rows or not isinstance(expected, Numbers):
            continue
        given = wrong.given.get(name)
        yield name, expected.enclosure.exact if given is None else given.to(torch.float64)


def _shaped(name: str, values: Tensor, shape: torch.Size) -> Iterator[Term]:
    if _broadcasts(values.shape, shape):
        yield Term(name, values)
        return
    if values.ndim == len(shape) and values.shape[:-1] == shape[:-1] and values.shape[-1] > 1:
        groups = values.shape[-1]
        if shape[-1] % groups == 0:
            yield Term(name, values.repeat_interleave(shape[-1] // groups, -1))
            return
    if values.ndim == len(shape) + 1:
        for axis, size in enumerate(values.shape):
            if size <= _MOST_SLICES and values.shape[:axis] + values.shape[axis + 1 :] == shape:
                for i in range(size):
                    yield Term(f"{name} at index {i} of dimension {axis}", values.select(axis, i))
                return


def _broadcasts(own: torch.Size, shape: torch.Size) -> bool:
    if len(own) > len(shape):
        return False
    return all(a in (1, b) for a, b in zip(reversed(own), reversed(shape), strict=False))
