"""Regular forms of a tree: chains, pairs over levels, operations of several terms, and where their parts begin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lastbit.reports.order import TERM, Form, SumTree


def form_of(tree: SumTree) -> Form:
    """Return the form of a tree; trees of one form with `strides` at every level are equal."""
    return _Forms(tree).of_node(tree.nodes - 1)


@dataclass(eq=False)
class _Row:
    """Parts of one form that are added one after the other, `width` at a time, while they are being collected."""

    part: Form
    starts: list[int]
    width: int


@dataclass(eq=False)
class _Forms:
    """The forms of all nodes of a tree; equal ones are one object.

    A row that goes on in the node above is not yet a form, so that a chain of n terms takes n steps and not n².
    """

    tree: SumTree
    _known: dict[object, Form] = field(default_factory=dict)
    _found: list[Form | _Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        tree = self.tree
        self._found = [TERM] * tree.terms
        for node in range(tree.terms, tree.nodes):
            self._found.append(self._joined(node))

    def of_node(self, node: int) -> Form:
        found = self._found[node]
        if isinstance(found, _Row):
            kind, (first, second, *rest) = "chain" if found.width == 1 else "steps", found.starts
            strides = progression(found.starts) or progression([second, first, *rest])  # these two are added alike
            found = self._made(node, kind, strides, ((len(found.starts), found.part),), found.width)
            self._found[node] = found
        return found

    def _made(
        self,
        node: int,
        kind: str,
        strides: tuple[tuple[int, int], ...],
        parts: tuple[tuple[int, Form], ...],
        width: int = 1,
    ) -> Form:
        terms, span = self.tree.sizes[node], self.tree.lasts[node] - self.tree.firsts[node] + 1
        key = kind, terms, span, strides, tuple((count, id(part)) for count, part in parts), width
        return self._known.setdefault(key, Form(kind, terms, span, strides, parts, width))

    def _joined(self, node: int) -> Form | _Row:
        """Derive the form of a node from the forms of its children."""
        children = self.tree.children[node]
        largest = max(children, key=self.tree.sizes.__getitem__)
        if (row := self._longer(largest, [child for child in children if child != largest])) is not None:
            return row
        forms = [self.of_node(child) for child in children]
        starts = [self.tree.firsts[child] for child in children]
        form = forms[0]
        if len({id(form) for form in forms}) == 1 and len(children) == 2:
            levels, part = (form.strides, form.part) if form.kind == "pairs" else ((), form)
            return self._made(node, "pairs", (*levels, (2, starts[1] - starts[0])), ((2 ** (len(levels) + 1), part),))
        if len({id(form) for form in forms}) == 1:
            return self._made(node, "at once", progression(starts), ((len(starts), form),))
        if len(children) > 2:
            return self._made(node, "other", (), _counted([(1, form) for form in forms]))
        # A part of another form is appended to the larger child's row, or both become a row.
        before, other = (
            self.of_node(child) for child in sorted(children, key=self.tree.sizes.__getitem__, reverse=True)
        )
        parts = before.parts if before.kind in ("row", "chain") else ((1, before),)
        return self._made(node, "row", (), _counted([*parts, (1, other)]))

    def _longer(self, child: int, others: Sequence[int]) -> _Row | None:
        """Extend by the others the row that a child is, or begins with its children; None if they are no parts."""
        part, width = self.of_node(others[0]), len(others)
        if any(self.of_node(other) is not part for other in others):
            return None
        row = self._found[child]
        if not isinstance(row, _Row):
            children = self.tree.children[child]
            if len(children) != max(2, width) or any(self.of_node(one) is not part for one in children):
                return None
            row = _Row(part, [self.tree.firsts[one] for one in children], width)
        elif row.part is not part or row.width != width:
            return None
        row.starts += [self.tree.firsts[other] for other in others]
        return row


def _counted(parts: Sequence[tuple[int, Form]]) -> tuple[tuple[int, Form], ...]:
    """Count how many parts of each form stand in a row."""
    runs = (list(run) for _, run in itertools.groupby(parts, key=lambda part: id(part[1])))
    return tuple((sum(count for count, _ in run), run[0][1]) for run in runs)


def progression(starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Write numbers as (count, distance), the innermost first: 0, 1, 8, 9 are two at distance 1, twice at distance 8.

    Empty where no such rule holds.
    """
    left, found = [start - starts[0] for start in starts], []
    while len(left) > 1:
        distance = left[1]
        count = next((n for n, start in enumerate(left) if start != n * distance), len(left))
        if len(left) % count:
            count = math.gcd(len(left), count)
        blocks = [left[i : i + count] for i in range(0, len(left), count)]
        if count == 1 or any([start - block[0] for start in block] != blocks[0] for block in blocks):
            return ()
        found.append((count, distance))
        left = [block[0] for block in blocks]
    return tuple(found)
