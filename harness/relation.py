"""What an op promises of two calls: other inputs, and which tensors of both calls are then the same.

    @relation("relabelling", "experts have the same results under other numbers")
    def relabelled(tensors, params, random):
        order = torch.randperm(len(tensors["gate"]))
        ...
        yield Related("experts numbered in another order", {**tensors, "gate": tensors["gate"][order]}, same)

The reference of an op names such functions in `@op(relations=…)`. What holds in exact arithmetic need not hold in a
kernel's bits: whether it does is found by `lastbit invariance`, and a kernel that promises it says `invariant=(…)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Matched = Mapping[str, tuple[Tensor, Tensor]]
"""Result → the part of it that the first call gave, and the part that the second one gave, which must be equal."""


class NotApplicable(Exception):
    """A property means nothing for a case or a kernel; the message says why."""


def same(first: Tensors, second: Tensors) -> Matched:
    """Every result of both calls as a whole."""
    return {name: (tensor, second[name]) for name, tensor in first.items() if name in second}


@dataclass(frozen=True)
class Related:
    """A second call.

    Attributes:
        what: how its inputs differ, in words that follow a comma: "rows in another order".
        tensors: name → input, on the device of the first call; an optional input may be left out, or added.
        matched: what must be equal, from the results of the first and the second call.
        params: parameters that differ from those of the first call.
        first: the call that it is compared with, where that is not the case's own.
    """

    what: str
    tensors: Tensors
    matched: Callable[[Tensors, Tensors], Matched] = same
    params: Mapping[str, Any] = field(default_factory=dict)
    first: Related | None = None


@dataclass(frozen=True)
class Relation:
    """A property of two calls.

    Attributes:
        name: of the property, as kernels declare it: `rows`.
        promise: what a kernel promises that has it, as a sentence without a period.
        related: inputs and parameters of a call, random numbers → further calls. Raises `NotApplicable`.
    """

    name: str
    promise: str
    related: Callable[[Tensors, Mapping[str, Any], Random], Iterable[Related]]


@dataclass(frozen=True)
class Independent:
    """Things that do not depend on each other, such as tokens: each has an index of the first dimension of tensors.

    Attributes:
        name: of the property, in the plural: `tokens`.
        promise: as of a relation.
        inputs: the inputs that have a part for each, the first input of the op among them, which is a matrix.
        results: the results that have a part for each; what others have is a sum over all.
    """

    name: str
    promise: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]


def relation(
    name: str, promise: str
) -> Callable[[Callable[[Tensors, Mapping[str, Any], Random], Iterable[Related]]], Relation]:
    """Make a generator of `Related` calls a `Relation`."""
    return lambda function: Relation(name, promise, function)


def at(names: Iterable[str], first: Any, second: Any = ...) -> Callable[[Tensors, Tensors], Matched]:
    """What is matched of results of these names: a part of the first call's, and one of the second's, by indices."""

    def matched(one: Tensors, other: Tensors) -> Matched:
        return {name: (one[name][first], other[name][second]) for name in names if name in one and name in other}

    return matched


def together(*parts: Callable[[Tensors, Tensors], Matched]) -> Callable[[Tensors, Tensors], Matched]:
    """What any of several says is matched."""
    return lambda first, second: {name: pair for part in parts for name, pair in part(first, second).items()}


def shuffled(count: int, random: Random) -> list[int]:
    """The numbers below `count` in an order that is not their own, where there are two or more."""
    order = random.sample(range(count), count)
    return order if order != sorted(order) else order[::-1]


def extended(tensor: Tensor, count: int, value: float | None = None, dim: int = 0) -> Tensor:
    """The tensor with so many more indices along a dimension, which hold a value, or else NaN or integers of ones."""
    shape = [*tensor.shape]
    shape[dim] = count
    more = tensor.new_zeros(shape)
    return torch.cat([tensor, poison_of(more) if value is None else more.fill_(value)], dim)


def poison_of(tensor: Tensor) -> Tensor:
    """NaN, or integers whose bits are all ones, in the shape of a tensor."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    return torch.zeros_like(tensor) - 1


def linear(inputs: tuple[str, ...], results: tuple[str, ...], *, unless: tuple[str, ...] = ()) -> Relation:
    """The relation `scaling` of an op whose `results` are linear in the inputs, all taken together.

    They are multiplied by powers of two and by -1, which rounds nothing where no range ends; the sign of a zero is not
    compared. Not applicable to fp16, whose subnormal numbers are never far, where a parameter of `unless` is given,
    and without any of the inputs.
    """
    where = " and ".join(inputs)

    def scaled(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterable[Related]:
        if given := [name for name in unless if params.get(name)]:
            raise NotApplicable(f"with {given[0]}={params[given[0]]} the results are not linear in {where}")
        if not any(name in tensors for name in inputs):
            raise NotApplicable(f"the case has no {where}")
        if any(tensor.dtype is torch.float16 for tensor in tensors.values()):
            raise NotApplicable("numbers of fp16 may become subnormal or overflow where they are scaled")
        for factor in (2.0, 0.25, -1.0):
            own = {n: t * factor if n in inputs else t for n, t in tensors.items()}
            yield Related(f"{' and '.join(n for n in inputs if n in tensors)} times {factor:g}", own, times(factor))

    def times(factor: float) -> Callable[[Tensors, Tensors], Matched]:
        return lambda one, other: {n: (one[n] * factor + 0.0, other[n] + 0.0) for n in results if n in one}

    return Relation("scaling", f"{where} times a power of two gives results times it, where no range ends", scaled)
