"""Promises of an op about two calls: other inputs, and which tensors of both calls are then the same.

    @relation("relabelling", "experts have the same results under other numbers")
    def relabelled(tensors, params, random):
        order = torch.randperm(len(tensors["gate"]))
        ...
        yield Related("experts numbered in another order", {**tensors, "gate": tensors["gate"][order]}, same)

The reference of an op names such functions in `@op(relations=…)`. What holds in exact arithmetic need not hold in a
kernel's bits: whether it does is found by `lastbit invariance`, and a kernel that promises it says `invariant=(…)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Independent",
    "Matched",
    "NotApplicable",
    "Related",
    "Relation",
    "Tensors",
    "at",
    "extended",
    "poison_of",
    "relation",
    "same",
    "scaled",
    "shuffled",
    "together",
]

Tensors = Mapping[str, Tensor]
Matched = Mapping[str, tuple[Tensor, Tensor]]
"""Result → the part of it that the first call gave, and the part that the second one gave, which must be equal."""


class NotApplicable(Exception):
    """A property means nothing for a case or a kernel; the message says why."""


def same(first: Tensors, second: Tensors) -> Matched:
    """Match every result of both calls as a whole."""
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
    """Make a matching that pairs results by name: `first` of the one call with `second` of the other, by indices."""

    def matched(one: Tensors, other: Tensors) -> Matched:
        return {name: (one[name][first], other[name][second]) for name in names if name in one and name in other}

    return matched


def together(*parts: Callable[[Tensors, Tensors], Matched]) -> Callable[[Tensors, Tensors], Matched]:
    """Combine matchings into one that pairs all that any of them pairs."""
    return lambda first, second: {name: pair for part in parts for name, pair in part(first, second).items()}


def shuffled(count: int, random: Random) -> list[int]:
    """Shuffle the numbers below `count`; the order differs from 0, 1, … where there are two or more."""
    order = random.sample(range(count), count)
    return order if order != sorted(order) else order[::-1]


def extended(tensor: Tensor, count: int, value: float | None = None, dim: int = 0) -> Tensor:
    """Add `count` indices along a dimension, filled with a value, or by default with NaN or integers of ones."""
    shape = [*tensor.shape]
    shape[dim] = count
    more = tensor.new_zeros(shape)
    return torch.cat([tensor, poison_of(more) if value is None else more.fill_(value)], dim)


def poison_of(tensor: Tensor) -> Tensor:
    """Make a tensor of NaN, or of integers whose bits are all ones, in the shape of another one."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    return torch.zeros_like(tensor) - 1


# Arbitrary: the nearest powers, and farther ones that leave the neighbours' binades.
_POWERS = (1, -1, 5, -5)
_LARGEST_POWER = 100  # of two, below 2^127 where fp32 ends: sums of up to 2^24 terms stay within


def scaled(inputs: tuple[str, ...], results: Mapping[str, int], among: tuple[str, ...] | None = None) -> Relation:
    """Make the property `scaling` of an op: inputs times 2^k make results times 2^(k · m), exactly.

        @op(rows=("x", "dy"), relations=(scaled(("dy",), {"dx": 1, "dw": 1}),))

    `results` maps those that are compared to m, 0 for what does not change; other results are left out, as are inputs
    and results that a case lacks. The inputs are also negated. Only powers are tried by which all elements of `inputs`
    are scaled exactly. An element of a result is compared where it is larger than the least normal number of its dtype
    before and after, to which a subnormal one may have been rounded; so is a zero, without its sign, if what it became
    is no smaller than that. `among` are the inputs whose elements are multiplied with those of `inputs` before anything
    is summed; None for all.
    """

    def matching(factor: float) -> Callable[[Tensors, Tensors], Matched]:
        def matched(first: Tensors, second: Tensors) -> Matched:
            names = [name for name in results if name in first and name in second]
            return {name: _rescaled(first[name], second[name], factor ** results[name]) for name in names}

        return matched

    def related(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
        given = {name: tensors[name] for name in inputs if name in tensors}
        if not given:
            raise NotApplicable(f"the case has no {' and no '.join(inputs)}")
        _check_range({n: t for n, t in tensors.items() if among is None or n in (*inputs, *among)})
        signed = [-1.0, *(2.0**power for power in _POWERS)]
        factors = [factor for factor in signed if all(_is_exact(tensor, factor) for tensor in given.values())]
        for factor in factors:
            what = "negated" if factor < 0 else f"times 2^{int(math.log2(factor))}"
            changed = {name: _times(tensor, factor) for name, tensor in given.items()}
            yield Related(f"{', '.join(given)} {what}", {**tensors, **changed}, matching(factor))

    return Relation("scaling", f"{', '.join(inputs)} times a power of two scales the results, bit for bit", related)


def _check_range(tensors: Tensors) -> None:
    """Raise `NotApplicable` where a product of one element of each input may leave the range of fp32.

    What a kernel computes on the way is not known; it is taken to lie about where such products do.
    """
    low = high = 0.0
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.numel():
            values = (tensor.float() if tensor.element_size() == 1 else tensor).abs()
            counted = values.isfinite() & (values > 0)
            if largest := float(torch.where(counted, values, 0.0).amax()):
                smallest = float(torch.where(counted, values, math.inf).amin())
                low, high = low + min(0.0, math.log2(smallest)), high + max(0.0, math.log2(largest))
    if max(-low, high) > _LARGEST_POWER:
        raise NotApplicable(
            f"products of elements of the inputs may reach from 2^{low:.0f} to 2^{high:.0f}, "
            "where the range of fp32 ends"
        )


def _is_exact(tensor: Tensor, factor: float) -> bool:
    return bool((_times(tensor, factor).double() == tensor.double() * factor)[~tensor.isnan()].all())


def _times(tensor: Tensor, factor: float) -> Tensor:
    return (tensor.double() * factor).to(tensor.dtype)


def _rescaled(first: Tensor, second: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return the scaled first result and the second result, with 0 in both where they are not compared."""
    if not first.is_floating_point() or (first.shape, first.dtype) != (second.shape, second.dtype):
        return first, second
    kind, before, after = torch.finfo(first.dtype), first.double(), second.double()
    wanted = before * factor
    # Not the least normal number, to which a subnormal one may have been rounded.
    normal = torch.stack([(each.abs() > kind.tiny) & (each.abs() <= kind.max) for each in (before, wanted)]).all(0)
    from_zero = (before == 0) & (after.abs() >= kind.tiny * max(1.0, abs(factor)))
    compared = normal | from_zero
    left, right = (torch.where(compared, tensor, 0.0).to(first.dtype) for tensor in (wanted, after))
    return left, right
