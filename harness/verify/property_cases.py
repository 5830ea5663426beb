"""Cases on which a kernel's properties are asked, also for ops without a group of such cases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lastbit.case import Case, Group, Option
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.drawing import draw

NAME = "properties"
"""Name of the group that is made for such an op."""

_ORDINARY = ("normal", "contiguous")  # a regime, a layout
_DRAWN = 8  # cases of a group, among which one has many rows


def asked_cases(subject: Subject, groups: Sequence[Group], *, count: int = 0, seed: int = 0) -> list[Case]:
    """Return the cases for properties: of groups made for them, or the most ordinary ones of all groups."""
    own = [group for group in groups if group.properties] or [ordinary_group(subject, groups)]
    cases = dict.fromkeys(case for group in own for case in draw(group, count, seed))
    return [case for case in cases if not unsupported(subject.kernel, case)]


def ordinary_group(subject: Subject, groups: Iterable[Group]) -> Group:
    """Return a group of the most ordinary cases that the kernel takes, one per set of dtypes, with the most rows."""
    best: dict[str, Case] = {}
    for case in (case for group in groups for case in _drawn(group)):
        if not case.displaced and not unsupported(subject.kernel, case):
            best[case.dtypes] = max(best.get(case.dtypes, case), case, key=lambda case: _rank(subject, case))
    return Group(NAME, examples=tuple(best.values()), properties=True)


def _drawn(group: Group) -> Iterator[Case]:
    """Draw cases of a group, with ordinary values and layouts where it can choose them."""
    if group.choices and group.strategy is not None:
        chosen = {choice: _ordinary(options) for choice, options in group.choices.items()}
        group = replace(group, designed=(chosen,) * _DRAWN, drawn=0)
    yield from draw(group, _DRAWN)


def _ordinary(options: tuple[Option, ...]) -> Option:
    return next((option for option in _ORDINARY if option in options), options[0])


def _rank(subject: Subject, case: Case) -> tuple[int, int]:
    """Return a sort key: the number of ordinary tensors, then of rows."""
    ordinary = sum(t.regime in _ORDINARY and t.strides is None and not t.offset for t in case.tensors)
    main = case[subject.op.inputs[0]]
    return ordinary - len(case.tensors), math.prod(main.shape[:-1])
