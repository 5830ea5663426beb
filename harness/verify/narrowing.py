"""What a kernel takes: groups of cases narrowed to it before anything is chosen or drawn, and advice on declaring it.

An example with other strides than the kernel declares becomes contiguous and stays; what else is beyond is left out.
Advice is for a kernel that fails a case and passes the same case placed or sized otherwise: a stranger's first kernel
meets strides, tensors without elements, and widths, which it may not be meant for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from lastbit.case import Case, Chosen, Group, Option, TensorSpec
from lastbit.inputs.choices import DRAWN, Residue
from lastbit.inputs.combinations import Accepted
from lastbit.inputs.layouts import LAYOUTS
from lastbit.kernel import Kernel
from lastbit.ops import REQUIRED, Op
from lastbit.run import NotRun
from lastbit.takes import TENSORS, WORDS, options_of, placed_inside, sizes_of, told, words_of
from lastbit.verify.check import unsupported
from lastbit.verify.drawing import drawing, free
from lastbit.verify.project import Project

# A kernel that takes one case in ten is missed with 1 of 1,000 (0.9^64).
_TRIES = 64
"""Cases that are drawn for one that the kernel takes."""

# Of 80, a kernel that takes one case in twenty is missed with 2 of 100 (0.95^80).
_PROBES = (3, 80)
"""Cases of a group, of which the kernel must take one for the group to be its: a few first, which nearly always do."""

_SHAPES = ((64,), (2, 64), (2, 2, 64))  # of tensors, to ask what a layout is


def takes_less(kernel: Kernel, op: Op) -> bool:
    """Return whether there may be cases of the op, with what the kernel's signature has, that it does not take."""
    needed = {n for n in op.inputs if n not in op.optional} | {n for n, value in op.params.items() if value is REQUIRED}
    return bool(kernel.takes or kernel.held or kernel.requires - needed)


def narrowed(groups: Iterable[Group], kernel: Kernel, op: Op) -> list[Group]:
    """Return the groups with the cases that the kernel takes; those with none are left out."""
    if not takes_less(kernel, op):
        return list(groups)
    found = []
    for group in groups:
        fit = (fitted(kernel, example) for example in group.examples)
        examples = tuple(dict.fromkeys(case for case in fit if case is not None))
        choices = {choice: _options(choice, options, kernel) for choice, options in group.choices.items()}
        own, strategy = replace(group, examples=examples, choices=choices), group.strategy
        if strategy is not None and all(choices.values()) and _takes_of(kernel, own):
            within = partial(_chosen_within, kernel, strategy) if choices else _within(kernel, strategy)
            found.append(replace(own, strategy=within))
        elif examples:
            found.append(replace(own, strategy=None, choices={}))
    return found


def _takes_of(kernel: Kernel, group: Group) -> bool:
    """Return whether a kernel takes a case that the group draws."""
    for count in _PROBES:
        drawn: list[Case] = []
        drawing(free(group), drawn.append, count=count, seed_=0)
        if any(fitted(kernel, case) for case in drawn):
            return True
    return False


def _chosen_within(kernel: Kernel, strategy: Any, chosen: Chosen) -> Any:
    return _within(kernel, strategy(chosen))


def groups_of(project: Project, kernel: Kernel, *, small: bool, strength: int = 2) -> list[Group]:
    """Return the groups of cases of the kernel's op, those of `Project.groups`, with the cases that it takes.

    So many options at least meet, as `combinations` has it.
    """
    accepted = Accepted.of(kernel.accepts, kernel.requires, kernel.takes, strength)
    return narrowed(project.groups(kernel.op, accepted, small=small), kernel, project.op(kernel.op))


def not_asked(kernel: Kernel, op: Op, groups: Iterable[Group], own: Iterable[Group]) -> Iterator[NotRun]:
    """Yield one note for a kernel that declares what it takes, with the groups of which that leaves nothing.

    A group of which its signature takes nothing is none of these, as one without the residual that it requires; nor is
    one of a combination, in place of which there are others.
    """
    if kernel.takes:
        kept, by_signature = {group.name for group in own}, replace(kernel, takes={})
        lost = [group for group in groups if group.name not in kept and not group.combination]
        names = [group.name for group in narrowed(lost, by_signature, op)]
        none = f" (no case of {', '.join(names)})" if names else ""
        yield NotRun(f"{kernel.name}{none}", f"declares {told(kernel.takes)}, and gets no other cases")


def fitted(kernel: Kernel, case: Case) -> Case | None:
    """Return the case with its tensors placed as the kernel takes them, None if it does not take that either."""
    placed = placed_inside(_with_held(kernel), case)
    return None if unsupported(kernel, placed) else placed


def _with_held(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel's `takes`, with distinct elements required of tensors that hold a result afterwards."""
    return {**kernel.takes, **{f"{n} layout": (*words_of(kernel.takes, n), "distinct") for n in kernel.held}}


def _options(choice: str, options: tuple[Option, ...], kernel: Kernel) -> tuple[Option, ...]:
    """Return the options of a choice that the kernel takes."""
    name, _, what = choice.partition(" ")
    taken = options_of(_with_held(kernel), choice)
    if what == "layout":  # one that is what the words say, for a tensor of some number of dimensions
        words, found = words_of(_with_held(kernel), name), []
        for option in options:
            placed = ((shape, LAYOUTS[str(option)](shape, "bf16")) for shape in _SHAPES)
            tensors = [TensorSpec("x", "bf16", s, own.strides, own.offset) for s, own in placed if own is not None]
            found += [option] if any(all(WORDS[word](tensor) for word in words) for tensor in tensors) else []
        return tuple(found)
    if what.startswith("columns %"):  # the residues that its sizes leave, those of a group's with the sizes of both
        sizes, modulus = options_of(kernel.takes, f"{name} columns"), int(what.rpartition(" ")[2])
        if sizes is None:
            return options
        left = {int(size or 0) % modulus for size in islice(sizes, modulus if isinstance(sizes, range) else None)}
        own = (o.among(sizes) if isinstance(o, Residue) else o if o in left else None for o in options)
        return tuple(option for option in own if option is not None)
    if not what and name in kernel.requires:
        options = tuple(option for option in options if option is not None)
    return tuple(option for option in options if taken is None or option in taken or option == DRAWN)


@st.composite
def _within(draw: st.DrawFn, kernel: Kernel, strategy: Any) -> Case:
    """Draw a case of a strategy that the kernel takes."""
    cases = (fitted(kernel, draw(strategy)) for _ in range(_TRIES))
    found = next((case for case in cases if case is not None), None)
    return reject() if found is None else found


_OF_LAYOUT: tuple[tuple[str, ...], ...] = (
    ("aligned",),
    ("distinct",),
    ("contiguous rows",),
    ("contiguous rows", "aligned"),
    ("contiguous",),
    ("contiguous", "aligned"),
)
"""Words for the layout of tensors that a kernel may declare, those that leave most to it first."""


# Arbitrary: kernels that demand more demand a power of two, which is tried as well.
_WIDTHS = 128
"""Columns of which a kernel may need a multiple."""


def advice_for(case: Case, passes: Callable[[Case], bool], *, raised: bool = False) -> str:
    """Return a declaration by which a kernel need not take a case that it fails, as advice; empty if none is sure.

    `passes` tells whether the kernel passes another case. It must pass this one in every layout that the declaration
    leaves; there is no advice where tensors share a storage. If the kernel `raised`, other rows and columns are tried,
    too: wrong numbers for some widths are a fault.
    """

    def if_alone(words: tuple[str, ...]) -> str:
        return f"if it is meant for such tensors alone, write @kernel(…, {told({TENSORS: words})})."

    def placed(names: set[str], words: tuple[str, ...]) -> Iterator[Case]:
        """Yield the case with these tensors in each layout that fits, contiguous where a layout means nothing."""
        for rule in LAYOUTS.values():
            tensors = []
            for tensor in case.tensors:
                layout = rule(tensor.shape, tensor.dtype)
                there = tensor if layout is None else replace(tensor, strides=layout.strides, offset=layout.offset)
                contiguous = replace(tensor, strides=None, offset=0)
                fits = layout is not None and all(WORDS[word](there) for word in words)
                tensors.append(tensor if tensor.name not in names else there if fits else contiguous)
            yield replace(case, tensors=tuple(tensors))

    if case.shares_memory:
        return ""
    if any(tensor.numel == 0 for tensor in case.tensors):
        filled = replace(case, tensors=tuple(replace(t, shape=tuple(n or 1 for n in t.shape)) for t in case.tensors))
        said = f"It passes the case with a size of 1 in place of 0: {if_alone(('non-empty',))}"
        return said if passes(filled) else ""
    for words in _OF_LAYOUT:
        wrong = {t.name for t in case.tensors if not all(WORDS[word](t) for word in words)}
        others = dict.fromkeys(placed(wrong, words)) if wrong else ()
        if others and all(map(passes, others)):
            return f"It passes the case with {' and '.join(words)} tensors: {if_alone(words)}"
    if not raised:
        return ""
    name, (*rows, width) = case.tensors[0].name, case.tensors[0].shape or (1,)
    if len(rows) != 1 and passes(resized(case, (*rows, width), (math.prod(rows), width))):
        flat = f"{name} = {name}.reshape(-1, {name}.shape[-1])"
        return f"It passes the case with all rows along one dimension: begin with {flat}, and give back {name}'s shape."
    for columns in (1 << (width - 1).bit_length(), -(-width // _WIDTHS) * _WIDTHS):
        if columns != width and passes(resized(case, (width,), (columns,))):
            said = f"It passes the case with {columns} columns of {name} in place of {width}"
            return f"{said}: if it is meant for some widths alone, name them, as in @kernel(…, {told(sizes_of(name))})."
    return ""


def resized(case: Case, last: tuple[int, ...], instead: tuple[int, ...]) -> Case:
    """Replace trailing dimensions `last` of all tensors by `instead`, and make those tensors contiguous and apart.

    A regime that names the size, such as `labels_300` of 300 classes, names the new one.
    """
    own, new, case = f"_{last[-1]}", f"_{instead[-1]}", case.apart()
    tensors = (
        replace(t, shape=t.shape[: -len(last)] + instead, strides=None) if t.shape[-len(last) :] == last else t
        for t in case.tensors
    )
    named = (replace(t, regime=t.regime.removesuffix(own) + new) if t.regime.endswith(own) else t for t in tensors)
    return replace(case, tensors=tuple(named))
