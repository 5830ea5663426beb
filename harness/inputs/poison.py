"""Elements of a result that still hold the poison with which memory was filled before a kernel got it.

Run a kernel twice, once with each of the two poisons: an element that holds the poison both times was not written. One
run alone cannot tell, because a kernel may write the poison's bits; and for bool, whose only patterns are False
(poison 0) and True (poison 1), it tells nothing at all.

Such an element differs between the two runs, so that results of the same bits have none.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.inputs.bits import bits_of
from lastbit.inputs.blocks import pieces
from lastbit.inputs.guards import canary, integer_of

# 4 MiB for each of the masks; fewer cost more operations.
_AT_ONCE = 1 << 22  # elements that are counted at a time; there are several masks of them

POISONS = (0, 1)


@dataclass(frozen=True)
class Poison:
    """The canaries that a result may hold if it was not written, or was computed from memory that was not.

    Attributes:
        own: the canary that its own memory was filled with; None if that was not guarded.
        others: the canaries of other allocations of its dtype, where that tells them apart.
    """

    own: int | None = None
    others: frozenset[int] = frozenset()

    def masks(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """Return which elements of the result hold the poison of its own memory, and which hold any poison."""
        own = _held(result, [] if self.own is None else [self.own])
        return own, own | _held(result, self.others)


@dataclass(frozen=True)
class Differences:
    """Numbers of elements of a result that were never written, came from such memory, and differ between two runs."""

    unwritten: int
    uninitialised: int
    changed: int


def held_before(tensor: Tensor, allocations: int) -> Tensor:
    """Return which elements of `tensor` hold the bits that one of the first `allocations` of a call gets, as bool."""
    return _held(tensor, range(2 * allocations))


def unwritten(a: Tensor, b: Tensor, first: Poison, second: Poison) -> tuple[Tensor, Tensor]:
    """Return which elements a kernel left unwritten, and which it computed from unwritten memory, as bool.

    `a` is its result under poison 0, `b` under poison 1. Elements that were not written are exact for every dtype if
    the kernel writes the same elements both times and the same values to them.
    """
    (own, any_one), (own_too, any_too) = first.masks(a), second.masks(b)
    blank = own & own_too
    return blank, any_one & any_too & ~blank


def differences(a: Tensor, b: Tensor, first: Poison, second: Poison) -> Differences:
    """Count the elements in which results of one shape and dtype differ; those of complex numbers count in parts."""
    total = torch.zeros(3, dtype=torch.int64, device=a.device)
    for x, y in pieces(a, b, budget=_AT_ONCE):
        masks = [*unwritten(x, y, first, second), _bits(x) != _bits(y)]
        total += torch.stack([mask.sum() for mask in masks])
    return Differences(*total.tolist())


def _held(tensor: Tensor, numbers: Collection[int]) -> Tensor:
    """Return which elements hold the bits of one of these canaries, as bool of the same shape."""
    found = torch.zeros_like(tensor, dtype=torch.bool)
    if tensor.dtype is torch.bool:
        return functools.reduce(operator.or_, (tensor == bool(number % 2) for number in numbers), found)
    bits = _bits(tensor)
    for number in numbers:  # both parts of a complex number hold it
        same = bits == integer_of(canary(tensor.dtype, number), bits.element_size())
        found = found | (same.all(dim=-1) if tensor.is_complex() else same)
    return found


def _bits(tensor: Tensor) -> Tensor:
    return bits_of(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
