"""Things that an op says are independent, such as tokens: looked at as rows are."""

from __future__ import annotations

import re
from dataclasses import replace

from lastbit.inputs import Inputs
from lastbit.invariance import rows
from lastbit.invariance.basis import Basis
from lastbit.invariance.property import Broken, Pairs, Property
from lastbit.relations import Independent, Tensors


def of_independent(things: Independent) -> Property:
    """Make the property that each of these things has the same bits alone, in any batch and at any place in it."""

    def show(basis: Basis, pairs: Pairs) -> None:
        rows.show(as_rows(basis, things), pairs)
        pairs.where = worded(pairs.where, things.name)
        pairs.untried[:] = [worded(said, things.name) for said in pairs.untried]
        pairs.first, pairs.most = _worded(pairs.first, things.name), _worded(pairs.most, things.name)

    return Property(things.name, things.promise, show)


def as_rows(basis: Basis, things: Independent) -> Basis:
    """Treat these things as the rows of the op, and keep only their results."""

    def call(inputs: Inputs) -> Tensors:
        return _of(things, basis.call(inputs))

    def allows(inputs: Inputs, _: Tensors) -> bool:
        return basis.allows(inputs, basis.call(inputs))  # once more: the contract is one of all results

    op = replace(basis.op, rows=frozenset(things.inputs))
    return replace(basis, op=op, results=_of(things, basis.results), call=call, allows=allows)


def worded(text: str, name: str) -> str:
    """Rewrite a sentence about rows as one about these things; regimes and names in case lines stay."""
    one = name.removesuffix("s")
    return re.sub(r"(?<![\w:=])row(s?)(?![\w=\[(])", rf"{one}\1", text)


def _of(things: Independent, results: Tensors) -> Tensors:
    return {name: tensor for name, tensor in results.items() if name in things.results}


def _worded(broken: Broken | None, name: str) -> Broken | None:
    return None if broken is None else replace(broken, second=worded(broken.second, name))
