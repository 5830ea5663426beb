"""Covering designs: combinations of options for the cases of an op, so that nothing is left to chance.

First every option of every choice is taken, each with every dtype of its tensor, then as many pairs of options as the
number of cases allows. It is greedy, as in Cohen et al., The AETG System, IEEE Transactions on Software Engineering 23
(1997): of all groups the one whose next case covers most comes next.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from lastbit.case import Chosen, Group, Option
from lastbit.inputs.choices import Feature, feature, features


def designed(groups: Sequence[Group], cases: int, *, whole: bool = True) -> list[Group]:
    """Return the groups with the choices of their designed cases; together they have `cases` per group.

    A quarter is left for Hypothesis to draw, and what the design does not need. A `whole` design has more cases if
    every option needs more.
    """
    choosing = [n for n, group in enumerate(groups) if group.choices and group.strategy is not None]
    if not choosing or not cases:
        return list(groups)
    design, rows = _Design(), {number: list[Chosen]() for number in choosing}
    for number in choosing * (cases // 2):
        design.add(rows[number], groups[number])
    left = len(choosing) * (cases - max(1, cases // 4)) - sum(map(len, rows.values()))
    queue = [(design.worth(groups[number]), number) for number in choosing]
    heapq.heapify(queue)
    while queue and (left > 0 or (whole and queue[0][0][0] < 0)):  # the next case has a new option
        before, number = heapq.heappop(queue)
        if (worth := design.worth(groups[number])) == before:
            left -= design.add(rows[number], groups[number])
            worth = design.worth(groups[number])
        if worth < (0, 0):
            heapq.heappush(queue, (worth, number))
    drawn = max(1, cases // 4) + max(left, 0) // len(choosing)
    return [
        replace(group, designed=tuple(rows[number]), drawn=drawn) if number in rows else group
        for number, group in enumerate(groups)
    ]


@dataclass
class _Design:
    """The features and pairs of options covered so far."""

    covered: set[Feature] = field(default_factory=set)
    paired: set[Hashable] = field(default_factory=set)
    uses: Counter[tuple[str, Option]] = field(default_factory=Counter)

    def best(self, group: Group) -> Chosen:
        """Choose an option for each choice in turn: a new one, then the one with most new pairs, then the rarest."""
        row: dict[str, Option] = {}
        for choice, options in group.choices.items():
            row[choice] = max(options, key=lambda option: self._preference(row, choice, option))
        return row

    def _preference(self, row: Chosen, choice: str, option: Option) -> tuple[bool, int, int]:
        new = feature(choice, option, {**row, choice: option}) not in self.covered
        pairs = sum((other, (choice, option)) not in self.paired for other in row.items())
        return new, pairs, -self.uses[choice, option]

    def worth(self, group: Group) -> tuple[int, int]:
        """Count the features, and pairs of options, that the group's next case would add; negated, for a heap."""
        return self._worth(self.best(group))

    def _worth(self, row: Chosen) -> tuple[int, int]:
        new = sum(feature not in self.covered for feature in features(row))
        return -new, -sum(pair not in self.paired for pair in _pairs(row))

    def add(self, rows: list[Chosen], group: Group) -> bool:
        """Choose for one more case of the group if it adds anything; return whether it does."""
        row = self.best(group)
        if self._worth(row) == (0, 0):
            return False
        rows.append(row)
        self.covered.update(features(row))
        self.paired.update(_pairs(row))
        self.uses.update(row.items())
        return True


def _pairs(row: Chosen) -> Iterator[Hashable]:
    return combinations(row.items(), 2)
