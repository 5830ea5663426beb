"""Results of `lastbit order`: the tree by which a kernel adds the terms of a sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class SumTree:
    """Groups in which terms are added; the order of two summands is no part of it, as it changes no bit.

    Attributes:
        terms: how many; they are the nodes 0, 1, …, in the order of their columns.
        parents: node → the node in which it is added to others; the last node, the root, has none. Nodes that add are
            numbered after the terms, those of fewer terms first, then those whose first term comes first: equal trees
            have equal parents.
    """

    terms: int
    parents: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents) + 1

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Node → what it adds, those first whose first term comes first; nothing of a term."""
        found: list[list[int]] = [[] for _ in range(self.nodes)]
        for node, parent in enumerate(self.parents):
            found[parent].append(node)
        return tuple(tuple(sorted(own, key=self.firsts.__getitem__)) for own in found)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Node → its first term."""
        firsts = [*range(self.terms), *[self.terms] * (self.nodes - self.terms)]
        for node, parent in enumerate(self.parents):
            firsts[parent] = min(firsts[parent], firsts[node])
        return tuple(firsts)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Node → how many terms it is the sum of."""
        sizes = [1] * self.terms + [0] * (self.nodes - self.terms)
        for node, parent in enumerate(self.parents):
            sizes[parent] += sizes[node]
        return tuple(sizes)

    @cached_property
    def height(self) -> int:
        """The most additions that a term passes through; one addition of several terms counts once."""
        heights = [0] * self.nodes
        for node, parent in enumerate(self.parents):
            heights[parent] = max(heights[parent], heights[node] + 1)
        return heights[-1]

    @property
    def digest(self) -> str:
        """12 hex digits that equal trees share."""
        text = f"{self.terms}:{','.join(map(str, self.parents))}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Form:
    """The form of a tree or a part of it: the same wherever it begins.

    Attributes:
        kind: `term`; `chain`: parts are added one after the other to the sum of those before; `pairs`: two parts of one
            form are added, these sums again, and so on; `at once`: parts are added in one operation; `steps`: `width`
            parts at a time are added in one operation to the sum of those before; `row`: as a chain, but of parts of
            several forms; `other`: such parts in one operation.
        terms: how many.
        span: columns from the first to the last, both counted.
        strides: where the parts begin, as (count, distance), the innermost first: there are as many parts as the
            product of the counts. Of `pairs` these are the levels, in the order of the additions. Empty of parts
            without such a rule.
        parts: the forms of the parts, each with how many of it stand in a row.
        width: of `steps`, how many parts are added to the sum at a time.
    """

    kind: str
    terms: int = 1
    span: int = 1
    strides: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[int, Form], ...] = ()
    width: int = 1

    @property
    def part(self) -> Form:
        """The first part."""
        return self.parts[0][1]

    @property
    def count(self) -> int:
        """The number of parts."""
        return sum(count for count, _ in self.parts)


TERM = Form("term")


@dataclass(frozen=True)
class Declared:
    """A kernel's declaration about its sums, against the tree.

    Attributes:
        what: `depth` or `order`.
        kept: whether the tree keeps it.
        said: the declaration, and what the tree has instead if it is not kept.
    """

    what: str
    kept: bool
    said: str


@dataclass(frozen=True)
class Order:
    """The order of one sum of a kernel, for one number of terms.

    Attributes:
        sum, about: name of the sum among those of its op, and what is added.
        terms, rows: how many terms there are, and how many sums in each call.
        dtype: of the terms.
        read: what told whether a small term was lost, as in `output (bf16)`.
        tree, form: what was found; None where no tree was.
        reason: why there is none.
        triples: what contradicts every tree: for some columns, what the probes say of them.
        asked, calls: probes, and calls of the kernel.
        checked, contradicted: how many more triples of columns were asked, and of how many the tree says otherwise.
        notes: what else a reader must know.
        declared: declarations of the kernel that concern the sum.
        environment: versions and device.
    """

    kernel: str
    op: str
    contract: str
    device: str
    sum: str
    about: str
    terms: int
    rows: int
    dtype: str
    read: str = ""
    tree: SumTree | None = None
    form: Form | None = None
    reason: str = ""
    triples: tuple[str, ...] = ()
    asked: int = 0
    calls: int = 0
    checked: int = 0
    contradicted: int = 0
    notes: tuple[str, ...] = ()
    declared: tuple[Declared, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 a tree was found, and keeps what is declared; 1 it does not; 3 there is none."""
        if self.tree is None:
            return 3
        return int(any(not d.kept for d in self.declared))
