"""Shrinking of a failing case: fewer rows and columns, ordinary memory and values, nothing that can be left out.

The smaller cases are guesses, made without knowledge of the op: the caller says of each whether the op takes it, and
whether it fails as the case did. Sizes that are equal in all cases of a group change together; so do sizes of which
one divides the other (codes that share an element, columns that share a scale), where the op takes no other change. A
tensor whose values the line lists keeps them, and its size. Hypothesis shrinks nothing: it cannot leave the strategy of
its group, and knows no examples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np

from lastbit.case import Case, TensorSpec, contiguous_strides
from lastbit.inputs.given import is_given
from lastbit.inputs.layouts import LAYOUTS, contiguous, padded
from lastbit.ops import REQUIRED, Op

# Arbitrary: a try takes as long as the case that failed, and each is smaller than the last.
MOST_TRIES = 60
"""Cases that are run after a failure: a smaller one helps the reader, but not at any price."""

# Arbitrary: asking takes a small part of what a try takes.
_MOST_ASKED = 10 * MOST_TRIES
"""Cases of which is asked whether they mean anything: an op may evaluate its reference to say so."""

_MOST_LINKED = 3  # sizes that follow another one: codes, their scales, and scales of other groups

# 64 MiB of places; a case that is as large is run on GPUs alone, where strides stay as they are.
_MOST_PLACES = 1 << 23

_NUMBER = re.compile(r"_(\d+)$")

Place = tuple[str, int]
"""Where a size is: a tensor and a dimension, -1 for the last, or 1 for the number in its regime; a parameter and 0."""

_REGIME = 1  # of a place: the number in a regime, which follows a size or stays unchanged

Places = frozenset[Place]
Change = Callable[[Case], Case]


def shrink(
    case: Case,
    op: Op,
    alike: Iterable[Case],
    takes: Callable[[Case], bool],
    fails: Callable[[Case], bool],
    *,
    most: int = MOST_TRIES,
) -> Case:
    """Search for the smallest case, in at most `most` tries, by steps that each fail alike; return `case` if none does.

    `alike` are cases of the same group, by which sizes that are equal by chance are told from those that must be.
    `takes` tells whether the op and kernel take a case, and is asked first, since it costs less than a run; `fails`
    tells whether a case fails in the same way.
    """
    samples = [sizes_of(other) for other in (case, *alike)]
    tries = _Tries(takes, fails, most)
    smaller = _simpler(_with_smaller_sizes(case, samples, tries, known=False), op, tries)
    while smaller != case:
        case = smaller
        smaller = _simpler(_with_smaller_sizes(case, samples, tries, known=True), op, tries)
    return case


class _Tries:
    """Answers each question once, and says no after so many tries."""

    def __init__(self, takes: Callable[[Case], bool], fails: Callable[[Case], bool], most: int) -> None:
        self._takes, self._fails, self._most = takes, fails, most
        self._taken: dict[Case, bool] = {}
        self._tried: set[Case] = set()

    def takes(self, case: Case) -> bool:
        if len(self._tried) >= self._most or len(self._taken) >= _MOST_ASKED:
            return self._taken.get(case, False)
        if case not in self._taken:
            self._taken[case] = self._takes(case)
        return self._taken[case]

    def fails(self, case: Case) -> bool:
        """Return whether a case that was not tried before fails; one that was tried is no progress."""
        if case in self._tried or len(self._tried) >= self._most:
            return False
        self._tried.add(case)
        return self._fails(case)


# Sizes

Sizes = Mapping[Place, int]


def sizes_of(case: Case) -> dict[Place, int]:
    """Return the sizes of all dimensions, and the integers among parameters and in regimes."""
    dims = {(t.name, dim - len(t.shape)): size for t in case.tensors for dim, size in enumerate(t.shape)}
    regimes = {(t.name, 1): int(found[1]) for t in case.tensors if (found := _NUMBER.search(t.regime))}
    return dims | regimes | {(name, 0): value for name, value in case.params.items() if type(value) is int}


def _with_smaller_sizes(case: Case, samples: Sequence[Sizes], trial: _Tries, *, known: bool) -> Case:
    """Minimise every size, the largest first; with `known`, the sizes were minimised before, and one less is tried."""
    seen: set[Place] = set()
    for place, size in sorted(sizes_of(case).items(), key=lambda item: -item[1]):
        if size < 2 or place in seen or place[1] == _REGIME:
            continue
        for number, places in enumerate(together(place, sizes_of(case), samples)):
            seen |= places if not number else set()
            if any(is_given(case[name].regime) for name, kind in places if kind):
                continue
            case, taken = _least(case, places, trial, known=known)
            if taken:
                break
    return case


def _least(case: Case, places: Places, trial: _Tries, *, known: bool) -> tuple[Case, bool]:
    """Minimise the sizes at `places` in proportion, by bisection; also return whether the op took any such case."""
    sizes = sizes_of(case)
    high = unit = math.gcd(*(sizes[place] for place in places))
    low, guess, found, taken = 0, high - 1 if known else 1, case, False
    while high - low > 1:
        smaller = _in_sizes(case, {place: sizes[place] // unit * guess for place in places})
        takes = trial.takes(smaller)
        taken |= takes
        if takes and trial.fails(smaller):
            high, found = guess, smaller
        else:
            low = guess
        guess = (low + high) // 2
    return found, taken


def _in_sizes(case: Case, sizes: Sizes) -> Case:
    """Change the sizes at some places; layouts stay."""
    tensors, shapes = [], {}
    for tensor in case.tensors:
        rank, number = len(tensor.shape), sizes.get((tensor.name, _REGIME))
        regime = tensor.regime if number is None else _NUMBER.sub(f"_{number}", tensor.regime)
        shapes[tensor.name] = tuple(sizes.get((tensor.name, dim - rank), size) for dim, size in enumerate(tensor.shape))
        tensors.append(replace(tensor, regime=regime))
    params = {name: sizes.get((name, 0), value) for name, value in case.params.items()}
    return in_shapes(replace(case, tensors=tuple(tensors), params=params), shapes)


def together(place: Place, sizes: Sizes, samples: Sequence[Sizes]) -> Iterator[Places]:
    """Yield sets of places to change with one: those of equal sizes, then with others whose sizes divide it."""

    def equal(one: Place) -> Places:
        """Return the places whose sizes are equal in every sample that has both."""
        known = [other for other in samples[0] if other in sizes]
        return frozenset(o for o in known if all(s[o] == s[one] for s in samples if o in s and one in s))

    def divides(other: Place) -> bool:
        return all(s[other] and s[place] % s[other] == 0 for s in samples if other in s and place in s)

    own = equal(place)
    yield own
    linked = dict.fromkeys(
        equal(other)
        for other, size in sizes.items()
        if size > 1 and other not in own and other[1] != _REGIME and divides(other)
    )
    for count in range(1, _MOST_LINKED + 1):
        for chosen in combinations(linked, count):
            yield own.union(*chosen)


def in_shapes(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> Case:
    """Put tensors in smaller shapes: each in the layout that it had, those of one storage as near to each other."""
    together: dict[str, list[TensorSpec]] = {}
    for tensor in case.tensors:
        together.setdefault(tensor.owner, []).append(tensor)
    placed: dict[str, TensorSpec] = {}
    for own in together.values():
        if len(own) == 1:
            found = [in_shape(tensor, shapes.get(tensor.name, tensor.shape)) for tensor in own]
        else:
            found = _closed_up(own, [shapes.get(tensor.name, tensor.shape) for tensor in own])
        placed |= {tensor.name: tensor for tensor in found}
    return replace(case, tensors=tuple(placed[tensor.name] for tensor in case.tensors))


def _closed_up(tensors: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]]) -> list[TensorSpec]:
    """Put tensors of one storage in smaller shapes, and close the gaps that this leaves; gaps before stay as wide.

    Where the places of a tensor have no strides then, all tensors keep those that they had.
    """
    smaller = [replace(t, shape=s, strides=t.element_strides) for t, s in zip(tensors, shapes, strict=True)]
    if any(0 in shape for shape in shapes) or sum(tensor.numel for tensor in tensors) > _MOST_PLACES:
        return smaller
    before, after = (np.concatenate([_places(t).ravel() for t in own]) for own in (tensors, smaller))
    gone = np.setdiff1d(before, after)  # sorted; a map of the storage would hold its gaps, too
    found = []
    for tensor in smaller:
        places = _places(tensor)
        places = places - np.searchsorted(gone, places)
        origin = int(places[(0,) * places.ndim])
        strides = contiguous_strides(tensor.shape)  # where there is one index
        strides = tuple(
            int(places[(0,) * dim + (1,)].flat[0]) - origin if size > 1 else strides[dim]
            for dim, size in enumerate(tensor.shape)
        )
        found.append(replace(tensor, strides=strides, offset=origin))
        if (_places(found[-1]) != places).any():
            return smaller
    return found


def _places(tensor: TensorSpec) -> np.ndarray:
    """Return the places of the elements of a tensor in its storage."""
    indices = np.indices(tensor.shape, sparse=True)
    parts = (index * stride for index, stride in zip(indices, tensor.element_strides, strict=True))
    return np.broadcast_to(sum(parts, np.int64(tensor.offset)), tensor.shape)


def in_shape(tensor: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """Put a tensor in a smaller shape, in the layout of the same name, or with the same strides if it has no name."""
    for rule in LAYOUTS.values():
        layout = rule(tensor.shape, tensor.dtype)
        if layout is not None and (layout.strides, layout.offset) == (tensor.element_strides, tensor.offset):
            layout = rule(shape, tensor.dtype) or contiguous(shape, tensor.dtype)
            return replace(tensor, shape=shape, strides=layout.strides, offset=layout.offset)
    return replace(tensor, shape=shape, strides=tensor.element_strides)


# Everything else


def _simpler(case: Case, op: Op, trial: _Tries) -> Case:
    """Leave out as much as possible, and make the rest ordinary: all at once, by kind, or one by one."""
    left_out, *ordinary = _changes(case, op)
    kinds = [left_out, *ordinary]
    attempts = chain([list(chain(*kinds))], kinds, ([change] for change in chain(*kinds)), combinations(left_out, 2))
    for changes in attempts:
        simpler = case
        for change in changes:
            simpler = change(simpler)
        if simpler != case and trial.takes(simpler) and trial.fails(simpler):
            case = simpler
    return case


def _changes(case: Case, op: Op) -> Iterator[list[Change]]:
    """Yield simplifications by kind: inputs and parameters to leave out, contiguity, padding, devices, values."""

    def without(case: Case, name: str) -> Case:
        case = case.apart() if any(t.memory == name for t in case.tensors) else case
        tensors = tuple(t for t in case.tensors if t.name != name)
        return replace(case, tensors=tensors, params={n: v for n, v in case.params.items() if n != name})

    def changed(case: Case, name: str, **fields: Any) -> Case:
        return replace(case, tensors=tuple(replace(t, **fields) if t.name == name else t for t in case.tensors))

    def moved(case: Case, name: str, **fields: Any) -> Case:
        return changed(case.apart(), name, **fields)

    def with_simplest_strides(case: Case, name: str) -> Case:
        """Give a strided tensor the simplest strides that are not contiguous."""
        tensor = next((t for t in case.tensors if t.name == name and t.strides is not None), None)
        layout = None if tensor is None else padded(tensor.shape, tensor.dtype)
        return case if layout is None else moved(case, name, strides=layout.strides, offset=layout.offset)

    optional = [t.name for t in case.tensors if t.name in op.optional]
    usual = [name for name in case.params if op.params.get(name, REQUIRED) is not REQUIRED]
    yield [partial(without, name=name) for name in (*optional, *usual)]
    names = [t.name for t in case.tensors]
    yield [*[Case.apart] * case.shares_memory, *(partial(moved, name=name, strides=None, offset=0) for name in names)]
    yield [partial(with_simplest_strides, name=name) for name in names if case[name].strides is not None]
    yield [partial(moved, name=name, device="") for name in names if case[name].device]
    drawn = [t.name for t in case.tensors if t.torch_dtype.is_floating_point and not is_given(t.regime)]
    yield [partial(changed, name=name, regime="normal") for name in drawn]
