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
        if len({id(form) for form in forms}) == 1:
            alike = self._pairs if len(children) == 2 else self._at_once
            return alike(node, forms[0], starts)
        if len(children) > 2:
            return self._made(node, "other", (), _counted([(1, form) for form in forms]))
        return self._row_of_several(node, *sorted(children, key=self.tree.sizes.__getitem__, reverse=True))

    def _row_of_several(self, node: int, largest: int, other: int) -> Form:
        """Append a part of another form to the larger child's row, or put both into a row."""
        before = self.of_node(largest)
        parts = before.parts if before.kind in ("row", "chain") else ((1, before),)
        return self._made(node, "row", (), _counted([*parts, (1, self.of_node(other))]))

    def _pairs(self, node: int, form: Form, starts: Sequence[int]) -> Form:
        levels = form.strides if form.kind == "pairs" else ()
        part = form.part if form.kind == "pairs" else form
        return self._made(node, "pairs", (*levels, (2, starts[1] - starts[0])), ((2 ** (len(levels) + 1), part),))

    def _at_once(self, node: int, form: Form, starts: Sequence[int]) -> Form:
        return self._made(node, "at once", progression(starts), ((len(starts), form),))

    def _longer(self, child: int, others: Sequence[int]) -> _Row | None:
        """Extend the row that a child begins by the others; None if they are no parts of it."""
        part = self.of_node(others[0])
        if any(self.of_node(other) is not part for other in others):
            return None
        row = self._row(child, part, len(others))
        if row is not None:
            row.starts += [self.tree.firsts[other] for other in others]
        return row

    def _row(self, node: int, part: Form, width: int) -> _Row | None:
        """Return the row of such parts that a node is, or begins with its children; None if it is none."""
        found = self._found[node]
        if isinstance(found, _Row):
            return found if found.part is part and found.width == width else None
        children = self.tree.children[node]
        if len(children) == max(2, width) and all(self.of_node(child) is part for child in children):
            return _Row(part, [self.tree.firsts[child] for child in children], width)
        return None


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
