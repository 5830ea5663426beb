"""Advice on declaring what a kernel takes, if it fails a case and passes the same case placed or sized otherwise.

A stranger's first kernel meets strides, tensors without elements, and widths, which it may not be meant for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from lastbit.case import Case
from lastbit.inputs.layouts import LAYOUTS
from lastbit.takes import TENSORS, WORDS, sizes_of, told

_OF_LAYOUT: tuple[tuple[str, ...], ...] = (
    ("aligned",),
    ("distinct",),
    ("contiguous rows",),
    ("contiguous rows", "aligned"),
    ("contiguous",),
    ("contiguous", "aligned"),
)
"""Words for the layout of tensors that a kernel may declare, those that leave most to it first."""


_WIDTHS = 128
"""Columns of which a kernel may need a multiple."""


def advice_for(case: Case, passes: Callable[[Case], bool], *, raised: bool = False) -> str:
    """Return a declaration by which a kernel need not take a case that it fails, as advice; empty if none is sure.

    `passes` tells whether the kernel passes another case. It must pass this one in every layout that the declaration
    leaves. If the kernel `raised`, other rows and columns are tried, too: wrong numbers for some widths are a fault.
    """
    if any(tensor.numel == 0 for tensor in case.tensors):
        filled = replace(case, tensors=tuple(replace(t, shape=tuple(n or 1 for n in t.shape)) for t in case.tensors))
        said = f"It passes the case with a size of 1 in place of 0: {_if_alone(('non-empty',))}"
        return said if passes(filled) else ""
    for words in _OF_LAYOUT:
        wrong = {t.name for t in case.tensors if not all(WORDS[word](t) for word in words)}
        others = dict.fromkeys(_placed(case, wrong, words)) if wrong else ()
        if others and all(map(passes, others)):
            return f"It passes the case with {' and '.join(words)} tensors: {_if_alone(words)}"
    return _of_shape(case, passes) if raised else ""


def _of_shape(case: Case, passes: Callable[[Case], bool]) -> str:
    """Return the advice for a kernel that passes the case with rows along one dimension, or with more columns."""
    name, (*rows, width) = case.tensors[0].name, case.tensors[0].shape or (1,)
    if len(rows) != 1 and passes(_resized(case, (*rows, width), (math.prod(rows), width))):
        flat = f"{name} = {name}.reshape(-1, {name}.shape[-1])"
        return f"It passes the case with all rows along one dimension: begin with {flat}, and give back {name}'s shape."
    for columns in (1 << (width - 1).bit_length(), -(-width // _WIDTHS) * _WIDTHS):
        if columns != width and passes(_resized(case, (width,), (columns,))):
            said = f"It passes the case with {columns} columns of {name} in place of {width}"
            return f"{said}: if it is meant for some widths alone, name them, as in @kernel(…, {told(sizes_of(name))})."
    return ""


def _resized(case: Case, last: tuple[int, ...], instead: tuple[int, ...]) -> Case:
    """Replace trailing dimensions `last` of all tensors by `instead`, and make those tensors contiguous."""
    tensors = (
        replace(t, shape=t.shape[: -len(last)] + instead, strides=None) if t.shape[-len(last) :] == last else t
        for t in case.tensors
    )
    return replace(case, tensors=tuple(tensors))


def _if_alone(words: tuple[str, ...]) -> str:
    return f"if it is meant for such tensors alone, write @kernel(…, {told({TENSORS: words})})."


def _placed(case: Case, names: set[str], words: tuple[str, ...]) -> Iterator[Case]:
    """Yield the case with these tensors in each layout that fits the words, contiguous where a layout means nothing."""
    for rule in LAYOUTS.values():
        tensors = []
        for tensor in case.tensors:
            layout = rule(tensor.shape, tensor.dtype)
            placed = tensor if layout is None else replace(tensor, strides=layout.strides, offset=layout.offset)
            contiguous = replace(tensor, strides=None, offset=0)
            fits = layout is not None and all(WORDS[word](placed) for word in words)
            tensors.append(tensor if tensor.name not in names else placed if fits else contiguous)
        yield replace(case, tensors=tuple(tensors))
