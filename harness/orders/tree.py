"""Trees of sums: made of nodes, asked for common nodes, and used to add."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lastbit.errors import UsageError
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
    nodes = _descendants(root)
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


def _descendants(root: TreeNode) -> list[TreeNode]:
    """List the node and all nodes below it, each after its parent."""
    found = [root]
    for node in found:
        found.extend(node.children)
    return found


def tree_of(nested: Any) -> SumTree:
    """Make a tree of nested sequences of columns, as `((0, 1), (2, 3))`; three in a sequence are added at once.

    Raises:
        UsageError: the columns are not 0, 1, …, each once.
    """
    root = _node(nested)
    terms = sorted(node.term for node in _descendants(root) if not node.children)
    if terms != list(range(len(terms))):
        raise UsageError(f"the columns of a tree must be 0, 1, …, each once; these are {terms}")
    return numbered(root)


def _node(nested: Any) -> TreeNode:
    """Make nodes of nested sequences without recursion: a chain is as deep as it has terms."""
    root = TreeNode(0)
    made, left = [(root, nested)], [(root, nested)]
    while left:
        node, content = left.pop()
        if isinstance(content, int):
            node.term = content
            continue
        parts = [(TreeNode(0), part) for part in content]
        node.children.extend(part for part, _ in parts)
        made += parts
        left += parts
    for node, _ in reversed(made):
        node.term = min((child.term for child in node.children), default=node.term)
    return root


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
