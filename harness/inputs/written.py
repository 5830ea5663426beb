"""Writes of a kernel where it must not write: into canaries, or into elements that it does not declare to change."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lastbit.inputs.bits import INTEGER_OF_SIZE, numbers, unequal_flags
from lastbit.inputs.guards import Guarded, canary, extent, integer_of, moving, once, separates, twin
from lastbit.result import Finding

# As _AT_ONCE of poison.py.
_PIECE = 1 << 22  # places that are compared at a time where differences are looked for

Region = Literal["before", "gap", "element", "after"]
_REGIONS: tuple[Region, ...] = get_args(Region)


@dataclass(frozen=True, slots=True, eq=False)
class AllocationCheck:
    """The contents that an allocation must have: see `unchanged` and `only_canaries`.

    Attributes:
        guards: the tensors in the allocation.
        expected: integers of the size of an element, for the whole allocation or one for all places.
        free: the tensors whose elements may be anything.
    """

    guards: tuple[Guarded, ...]
    expected: Tensor
    free: frozenset[str]

    @property
    def _first(self) -> Guarded:
        return self.guards[0]

    @property
    def _only_canaries(self) -> bool:
        return len(self.guards) == 1 and self._first.name in self.free

    def pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each part of the allocation that is looked at: first place, contents, and those that it must have."""
        actual = _integers(self._contents(), self._first)
        for begin, end in _canary_ranges(self._first) if self._only_canaries else [(0, actual.numel())]:
            for start in range(begin, end, _PIECE):
                here = slice(start, min(start + _PIECE, end))
                yield start, actual[here], self.expected if self.expected.dim() == 0 else self.expected[here]

    def flags(self) -> list[Tensor]:
        """Return whether there are differences: bools on the device of the allocation, any of which may say so."""
        if not self._only_canaries:
            return unequal_flags(self._contents(), self.expected.view(torch.int64))
        parts = [unequal_flags(actual, expected.expand_as(actual)) for _, actual, expected in self.pieces()]
        return [flag for flags in parts for flag in flags]

    def _contents(self) -> Tensor:
        """Return the words of the allocation; of several tensors, with what is expected in those that are `free`."""
        free = [] if self._only_canaries else [guarded for guarded in self.guards if guarded.name in self.free]
        if not free:
            return self._first.words
        words = self._first.words.clone()
        for guarded in free:
            once(twin(guarded, words)).copy_(once(twin(guarded, self.expected.view(torch.int64))))
        return words

    def violations(self) -> list[Finding]:
        """Return a finding for each region of a tensor with differences: how many places there are, and the first.

        Regions are before the first element, after the last one, gaps between strided rows, and elements. What is no
        element of any tensor counts for that whose last element is before it, or else for the first one.
        """
        guards = sorted(self.guards, key=lambda guarded: guarded.start)
        counts, first = dict[tuple[str, Region], int](), dict[tuple[str, Region], int]()
        for start, actual, expected in self.pieces():
            places = (actual != expected).nonzero().flatten() + start
            for region, guarded, where in _regions(places, guards):
                if (chosen := places[where]).numel():
                    key = guarded.name, region
                    counts[key] = counts.get(key, 0) + chosen.numel()
                    first.setdefault(key, int(chosen[0]) - guarded.start)
        found = []
        for region in _REGIONS:
            for guarded in self.guards:
                key = guarded.name, region
                if key in counts and (region != "element" or guarded.name not in self.free):
                    shape, strides = tuple(guarded.tensor.shape), guarded.tensor.stride()
                    parts, _ = _indices(torch.tensor([first[key]]), shape, strides)
                    index = [int(part) for part in parts]
                    found.append(_violation(guarded.name, region, counts[key], first[key], index))
        return found


def _regions(places: Tensor, guards: Sequence[Guarded]) -> Iterator[tuple[Region, Guarded, Tensor]]:
    """Yield for each region of each tensor, these by their first elements, which places of the allocation are in it."""
    left = torch.ones_like(places, dtype=torch.bool)
    inside = dict[str, Tensor]()
    for guarded in guards:
        shape, strides = tuple(guarded.tensor.shape), guarded.tensor.stride()
        own, end = places - guarded.start, extent(shape, strides)
        _, rest = _indices(own.clamp(0, max(end - 1, 0)), shape, strides)
        inside[guarded.name] = (own >= 0) & (own < end)
        element = inside[guarded.name] & (rest == 0)
        yield "element", guarded, element
        left &= ~element
    for guarded in reversed(guards):
        yield "gap", guarded, left & inside[guarded.name]
        left &= ~inside[guarded.name]
    for guarded in reversed(guards):
        yield "after", guarded, left & (places >= guarded.start)
        left &= places < guarded.start
    yield "before", guards[0], left


def _violation(tensor: str, region: Region, count: int, offset: int, index: list[int]) -> Finding:
    """Say how many elements of a region changed that were not the kernel's to write, and where the first of them is.

    `offset` counts it from the first element of the tensor; `index` is its own, or that of the last element before it.
    """
    elements, first = f"{count} element{'s' if count != 1 else ''}", f"first at element {offset} counted from its start"
    sentences = {
        "before": f"wrote {elements} before the start of {tensor} ({first})",
        "after": f"wrote {elements} past the end of {tensor} ({first})",
        "gap": f"wrote {elements} between the rows of {tensor} (first after {tensor}{index})",
        "element": f"changed {elements} of the input {tensor} (first {tensor}{index})",
    }
    return Finding("mutated_input" if region == "element" else "wrote_outside", tensor, sentences[region])


def unchanged(guards: Sequence[Guarded], pristine: Tensor, expect: Collection[str]) -> AllocationCheck:
    """Return the check that the allocation of inputs equals its `pristine` copy, but for elements of `expect`."""
    free = frozenset(guarded.name for guarded in guards if guarded.name in expect)
    return AllocationCheck(tuple(guards), _integers(pristine, guards[0]), free)


def only_canaries(guarded: Guarded, number: int) -> AllocationCheck:
    """Return the check that margins of an allocation and gaps between its rows hold canary `number`."""
    itemsize = guarded.tensor.element_size()
    bits = integer_of(canary(guarded.tensor.dtype, number), itemsize)
    pattern = torch.full((), bits, dtype=INTEGER_OF_SIZE[itemsize], device=guarded.words.device)
    return AllocationCheck((guarded,), pattern, frozenset({guarded.name}))


def violations(checks: Iterable[AllocationCheck]) -> list[Finding]:
    """Return the violations that checks find, in order; where there are none, a device is waited for once."""
    checks = list(checks)
    flags = [(check, flag) for check in checks for flag in check.flags()]
    found = numbers([flag for _, flag in flags])
    suspects = dict.fromkeys(check for (check, _), raised in zip(flags, found, strict=True) if raised)
    return [violation for check in suspects for violation in check.violations()]


def _canary_ranges(guarded: Guarded) -> Iterator[tuple[int, int]]:
    """Yield the ranges of canaries: around the tensor, and in it if it has gaps that strides tell from elements."""
    shape, strides = tuple(guarded.tensor.shape), guarded.tensor.stride()
    end = guarded.start + extent(shape, strides)
    yield 0, guarded.start
    distinct = 0 if 0 in shape else math.prod(size for _, _, size in moving(shape, strides))
    if separates(shape, strides) and end - guarded.start > distinct:
        yield guarded.start, end
    yield end, guarded.words.nbytes // guarded.tensor.element_size()


def _integers(words: Tensor, guarded: Guarded) -> Tensor:
    return words.view(INTEGER_OF_SIZE[guarded.tensor.element_size()])


def _indices(places: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """Return the logical indices of the last elements not after `places`, and how far after them the places are."""
    parts = [torch.zeros_like(places)] * len(shape)
    for dim, stride, size in reversed(list(moving(shape, strides))):
        parts[dim] = (places // stride).clamp(max=size - 1)
        places = places - parts[dim] * stride
    return parts, places
