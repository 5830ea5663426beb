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
    """

    what: str
    tensors: Tensors
    matched: Callable[[Tensors, Tensors], Matched] = same
    params: Mapping[str, Any] = field(default_factory=dict)


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


def relation(
    name: str, promise: str
) -> Callable[[Callable[[Tensors, Mapping[str, Any], Random], Iterable[Related]]], Relation]:
    """Make a generator of `Related` calls a `Relation`."""
    return lambda function: Relation(name, promise, function)
