"""Advice to declare what a kernel takes, where it fails a case and passes the same one placed otherwise.

A stranger's first kernel meets strides and tensors without elements, which it may not be meant for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lastbit.case import Case
from lastbit.inputs.layouts import LAYOUTS
from lastbit.takes import TENSORS, WORDS, told

_OF_LAYOUT: tuple[tuple[str, ...], ...] = (
    ("aligned",),
    ("distinct",),
    ("contiguous rows",),
    ("contiguous rows", "aligned"),
    ("contiguous",),
    ("contiguous", "aligned"),
)
"""Words for the layout of tensors that a kernel may declare, those that leave most to it first."""


def advice_for(case: Case, passes: Callable[[Case], bool]) -> str:
    """Return what a kernel may declare so that it need not take a case that it fails; empty if nothing is sure.

    `passes` says whether it passes another case. It must pass this one in every layout that the declaration leaves.
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
    return ""


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
