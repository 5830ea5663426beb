"""Things that an op says are independent, such as tokens: looked at as rows are."""

from __future__ import annotations

import re
from dataclasses import replace

from harness.inputs import Inputs
from harness.invariance import rows
from harness.invariance.basis import Basis
from harness.invariance.property import Pairs, Property
from harness.relation import Independent, NotApplicable, Tensors


def of_independent(things: Independent) -> Property:
    """The property that each of them has the same bits alone, in any batch and at any place in it."""

    def show(basis: Basis, pairs: Pairs) -> None:
        rows.show(as_rows(basis, things), pairs)
        pairs.where = worded(pairs.where, things.name)
        if pairs.first is not None:
            pairs.first = replace(pairs.first, second=worded(pairs.first.second, things.name))

    return Property(things.name, things.promise, show)


def as_rows(basis: Basis, things: Independent) -> Basis:
    """The same call, of an op with these things as rows, and their results alone, a row for each."""
    if basis.op.rows:
        raise NotApplicable(f"{basis.op.name} has rows, which are looked at as such")

    def call(inputs: Inputs) -> Tensors:
        return matrices(basis.call(inputs), things)

    def allows(inputs: Inputs, _: Tensors) -> bool:
        return basis.allows(inputs, basis.call(inputs))  # once more: the contract is one of all results

    op = replace(basis.op, rows=frozenset(things.inputs))
    return replace(basis, op=op, results=matrices(basis.results, things), call=call, allows=allows)


def matrices(results: Tensors, things: Independent) -> Tensors:
    """The results that have a part for each of the things, as rows."""
    return {name: tensor.reshape(len(tensor), -1) for name, tensor in results.items() if name in things.results}


def worded(text: str, name: str) -> str:
    """A sentence about rows as one about these things; what follows or precedes no number stays."""
    one = name.removesuffix("s")
    text = re.sub(r"\brow(s?) (?=\d)", rf"{one}\1 ", text)
    return re.sub(r"(?<=\d )row(s?)\b", rf"{one}\1", text)
