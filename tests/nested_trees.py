"""Trees of sums, written as nested sequences of columns: ((0, 1), (2, 3))."""

from typing import Any

from lastbit.orders.search import TreeNode, numbered
from lastbit.reports.order import SumTree


def tree_of(nested: Any) -> SumTree:
    """Make the tree without recursion, as a chain is as deep as it has terms; three in a sequence are added at once."""
    root = TreeNode(0)
    made, left, terms = [(root, nested)], [(root, nested)], []
    while left:
        node, content = left.pop()
        if isinstance(content, int):
            node.term = content
            terms.append(content)
            continue
        parts = [(TreeNode(0), part) for part in content]
        node.children.extend(part for part, _ in parts)
        made += parts
        left += parts
    if sorted(terms) != list(range(len(terms))):
        raise ValueError(f"the columns of a tree must be 0, 1, …, each once; these are {sorted(terms)}")
    for node, _ in reversed(made):
        node.term = min((child.term for child in node.children), default=node.term)
    return numbered(root)
