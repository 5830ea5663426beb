"""A tree, found by asking whether one term lies within the smallest node that holds two others.

Seen from a term p, the other terms stand in an order: by the node in which they meet p. The question compares two of
them, so a quicksort ranks them, and the terms of one rank are a tree of their own. What is asked for independent parts
is asked together, so that few calls of a kernel answer it all. About 2 N log² N questions find a balanced tree or a
chain of N terms. FPRev (Xie, Gao, Yang, arXiv:2411.00442) finds trees from the same masking, by counting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lastbit.reports.order import SumTree

Indices = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]


@dataclass(eq=False)
class TreeNode:
    """A node while a tree is being found: a term, or what is added in it.

    Attributes:
        term: its first term.
    """

    term: int
    children: list[TreeNode] = field(default_factory=list)

    @classmethod
    def of(cls, children: list[TreeNode]) -> TreeNode:
        return cls(min(child.term for child in children), children)


def numbered(root: TreeNode) -> SumTree:
    """Assign numbers to the nodes of a tree, in the order that `SumTree` prescribes."""
    nodes = [root]
    for node in nodes:  # grows while it is read: each after its parent
        nodes.extend(node.children)
    sizes: dict[int, int] = {}
    for node in reversed(nodes):
        sizes[id(node)] = sum(sizes[id(child)] for child in node.children) if node.children else 1
    adding = sorted((n for n in nodes if n.children), key=lambda node: (sizes[id(node)], node.term))
    terms = len(nodes) - len(adding)
    numbers = {id(n): n.term for n in nodes if not n.children} | {id(n): terms + i for i, n in enumerate(adding)}
    parents = [0] * (len(nodes) - 1)
    for node in adding:
        for child in node.children:
            parents[numbers[id(child)]] = numbers[id(node)]
    return SumTree(terms, tuple(parents))


def common(tree: SumTree, a: Indices, b: Indices) -> Indices:
    """Return the smallest common ancestor of each pair of nodes."""
    above = np.array([*tree.parents, tree.nodes - 1])
    a, b = a.copy(), b.copy()
    while (apart := a != b).any():
        lower = apart & (a < b)  # a parent has a higher number than its child
        upper = apart & ~lower
        a[lower], b[upper] = above[a[lower]], above[b[upper]]
    return a


def within(tree: SumTree, inner: Indices, left: Indices, right: Indices) -> Truths:
    """Check for each triple whether `inner` is in the smallest node that holds `left` and `right`."""
    node = common(tree, left, right)
    held: Truths = common(tree, node, inner) == node
    return held


def prefixes(tree: SumTree) -> frozenset[int]:
    """Return all b for which a node is the sum of the first b terms."""
    return frozenset(last + 1 for last, size in zip(tree.lasts, tree.sizes, strict=True) if last + 1 == size)


def added(tree: SumTree, terms: Tensor) -> Tensor:
    """Add terms [..., N] as the tree says, each sum rounded to their dtype; sums of several terms are rounded once."""
    values: list[Tensor] = list(terms.unbind(-1))
    for node in range(tree.terms, tree.nodes):
        summands = [values[child] for child in tree.children[node]]
        if len(summands) == 2:
            values.append(summands[0] + summands[1])
        else:
            values.append(torch.stack(summands).double().sum(0).to(terms.dtype))
    return values[-1]


Ask = Callable[[Indices], Truths]
"""Triples (i, j, k) of columns [Q, 3] → whether i lies in the smallest node that holds j and k."""

T = TypeVar("T")
Asking = Generator[Indices, Truths, T]
"""Yields triples, is sent the answers, and returns what it found."""

_SAMPLED = 48
"""Triples of terms that all meet one term in one node: if no two of them meet first, all count as added at once.

Where half of the pairs or more meet first, all of them are missed with a chance below 2**-48. Rarer ones are left to
the check of the whole tree.
"""


def search(terms: int, ask: Ask, seed: int = 0) -> SumTree:
    """Find the tree of so many terms, at least 2; if no tree explains all answers, one that explains some of them."""
    random = np.random.default_rng(seed)
    asking, answers = _tree(np.arange(terms), random), None
    while True:
        try:
            answers = ask(asking.send(answers))  # type: ignore[arg-type]  # None begins it
        except StopIteration as ended:
            return numbered(ended.value)


def kind_of(answers: Truths) -> Indices:
    """Tell which term comes last from three answers about a triple, one with each term in front [..., 3].

    3 stands for none: all three meet in one node. -1 is what no tree answers.
    """
    outside = (~answers).sum(-1)
    kinds = np.where(outside == 1, (~answers).argmax(-1), -1)
    found: Indices = np.where((outside == 0) | (outside == 3), 3, kinds)
    return found


def around(triples: Indices) -> Indices:
    """Put each term of each triple [Q, 3] in front once: [3 Q, 3]."""
    turns = triples[:, [[0, 1, 2], [1, 0, 2], [2, 0, 1]]]
    return turns.reshape(-1, 3)


def _together(askings: Iterable[Asking[T]]) -> Asking[list[T]]:
    """Run several searches side by side, joining their questions into one; return their results in order."""
    live, found = dict(enumerate(askings)), {}
    answers: dict[int, Truths | None] = dict.fromkeys(live)
    while live:
        waiting: dict[int, Indices] = {}
        for number, asking in list(live.items()):
            try:
                waiting[number] = asking.send(answers[number])  # type: ignore[arg-type]  # None begins it
            except StopIteration as ended:
                found[number] = ended.value
                del live[number]
        if waiting:
            sent = yield np.concatenate(list(waiting.values()))
            ends = np.cumsum([len(triples) for triples in waiting.values()])[:-1]
            answers = dict(zip(waiting, np.split(sent, ends), strict=True))
    return [found[number] for number in sorted(found)]


def _tree(terms: Indices, random: np.random.Generator) -> Asking[TreeNode]:
    """Find the tree of these terms, which are all or some of the terms of one node."""
    if len(terms) == 1:
        return TreeNode(int(terms[0]))
    pivot = int(random.choice(terms))
    ranks = yield from _ranked(pivot, terms[terms != pivot], random)
    if len(ranks) == 1 and len(terms) > 2 and (yield from _at_once(terms, random)):
        return TreeNode.of([TreeNode(int(term)) for term in terms])
    parts = yield from _together([_tree(rank, random) for rank in ranks])
    joined = yield from _joined(pivot, parts)
    node = TreeNode(pivot)
    for part, one in zip(parts, joined, strict=True):
        node = TreeNode.of([node, *(part.children if one else [part])])
    return node


def _ranked(pivot: int, others: Indices, random: np.random.Generator) -> Asking[list[Indices]]:
    """Rank the other terms by the node in which they meet the pivot, the smallest node first."""
    ranks: list[tuple[bool, Indices]] = [(len(others) == 1, others)]
    while not all(done for done, _ in ranks):
        splitters = [None if done else int(random.choice(rank)) for done, rank in ranks]
        open_ones = [(s, rank[rank != s]) for s, (_, rank) in zip(splitters, ranks, strict=True) if s is not None]
        rest = np.concatenate([rank for _, rank in open_ones])
        against = np.repeat([s for s, _ in open_ones], [len(rank) for _, rank in open_ones])
        pivots = np.full_like(rest, pivot)
        answers = yield np.concatenate([np.stack([rest, pivots, against], -1), np.stack([against, pivots, rest], -1)])
        below, above = np.split(answers, 2)
        ends = np.cumsum([len(rank) for _, rank in open_ones])[:-1]
        places, split = iter(np.split(above.astype(np.int64) - below, ends)), list[tuple[bool, Indices]]()
        for splitter, (done, rank) in zip(splitters, ranks, strict=True):
            if splitter is None:
                split.append((done, rank))
                continue
            at, rest = next(places), rank[rank != splitter]
            parts = [rest[at < 0], np.append(rest[at == 0], splitter), rest[at > 0]]  # below, beside, above it
            split += [(number == 1 or len(part) == 1, part) for number, part in enumerate(parts) if len(part)]
        ranks = split
    return [rank for _, rank in ranks]


def _at_once(terms: Indices, random: np.random.Generator) -> Asking[bool]:
    drawn = np.array([random.choice(terms, 3, replace=False) for _ in range(_SAMPLED)])
    answers = yield around(np.unique(np.sort(drawn), axis=0))
    return bool((kind_of(answers.reshape(-1, 3)) == 3).all())


def _joined(pivot: int, parts: list[TreeNode]) -> Asking[list[bool]]:
    """Ask for each part whether its summands are added to the pivot at once, in the same node."""
    several = [number for number, part in enumerate(parts) if part.children]
    joined = [False] * len(parts)
    if several:
        triples = np.array([[pivot, *(child.term for child in parts[n].children[:2])] for n in several])
        answers = yield around(triples)
        for number, kind in zip(several, kind_of(answers.reshape(-1, 3)), strict=True):
            joined[number] = kind == 3
    return joined
