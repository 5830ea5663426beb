"""Writes of a kernel where it must not write: into canaries, or into elements that it does not declare to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lastbit.inputs.bits import INTEGER_OF_SIZE, numbers, unequal_flags
from lastbit.inputs.guards import Guarded, canary, extent, integer_of, moving, separates
from lastbit.result import Finding

# As _AT_ONCE of poison.py.
_PIECE = 1 << 22  # places that are compared at a time where differences are looked for

Region = Literal["before", "gap", "element", "after"]
_REGIONS: tuple[Region, ...] = get_args(Region)


@dataclass(frozen=True, slots=True, eq=False)
class AllocationCheck:
    """The contents that an allocation must have: see `unchanged` and `only_canaries`.

    Attributes:
        guarded: the allocation.
        expected: integers of the size of an element, for the whole allocation or one for all places.
        elements: whether elements are looked at, or canaries only.
    """

    guarded: Guarded
    expected: Tensor
    elements: bool

    def pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each part of the allocation that is looked at: first place, contents, and those that it must have."""
        actual = _integers(self.guarded.words, self.guarded)
        for begin, end in [(0, actual.numel())] if self.elements else _canary_ranges(self.guarded):
            for start in range(begin, end, _PIECE):
                here = slice(start, min(start + _PIECE, end))
                yield start, actual[here], self.expected if self.expected.dim() == 0 else self.expected[here]

    def flags(self) -> list[Tensor]:
        """Return whether there are differences: bools on the device of the allocation, any of which may say so."""
        if self.elements:
            return unequal_flags(self.guarded.words, self.expected.view(torch.int64))
        parts = [unequal_flags(actual, expected.expand_as(actual)) for _, actual, expected in self.pieces()]
        return [flag for flags in parts for flag in flags]

    def violations(self) -> list[Finding]:
        """Return a finding for each region with differences: how many places there are, and the first.

        Regions are before the first element, after the last one, gaps between strided rows, and elements.
        """
        shape, strides = tuple(self.guarded.tensor.shape), self.guarded.tensor.stride()
        end = extent(shape, strides)
        counts, first = dict[Region, int](), dict[Region, int]()
        for start, actual, expected in self.pieces():
            places = (actual != expected).nonzero().flatten() + (start - self.guarded.start)
            before, after = places < 0, places >= end
            inside = ~(before | after)
            _, rest = _indices(places.clamp(0, max(end - 1, 0)), shape, strides)
            masks = (before, inside & (rest != 0), inside & (rest == 0), after)
            for region, where in zip(_REGIONS, masks, strict=True):
                if (chosen := places[where]).numel():
                    counts[region] = counts.get(region, 0) + chosen.numel()
                    first.setdefault(region, int(chosen[0]))
        found = []
        for region in _REGIONS:
            if region in counts and (self.elements or region != "element"):
                parts, _ = _indices(torch.tensor([first[region]]), shape, strides)
                index = [int(part) for part in parts]
                found.append(_violation(self.guarded.name, region, counts[region], first[region], index))
        return found


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


def unchanged(guarded: Guarded, pristine: Tensor, *, elements: bool) -> AllocationCheck:
    """Return the check that an input's allocation equals its `pristine` copy, in elements only if `elements`."""
    return AllocationCheck(guarded, _integers(pristine, guarded), elements)


def only_canaries(guarded: Guarded, number: int) -> AllocationCheck:
    """Return the check that margins of an allocation and gaps between its rows hold canary `number`."""
    itemsize = guarded.tensor.element_size()
    bits = integer_of(canary(guarded.tensor.dtype, number), itemsize)
    pattern = torch.full((), bits, dtype=INTEGER_OF_SIZE[itemsize], device=guarded.words.device)
    return AllocationCheck(guarded, pattern, elements=False)


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
