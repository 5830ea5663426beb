"""Properties of the same inputs under another way of calling: again, on a stream, as a graph, compiled."""

from __future__ import annotations

from harness.invariance.basis import Basis
from harness.invariance.property import Pairs, Property
from harness.relation import same

_AGAIN = 3


def _run_to_run(basis: Basis, pairs: Pairs) -> None:
    for number in range(2, 2 + _AGAIN):
        results = basis.call(basis.inputs)
        pairs.compare(basis, f"call {number} on the same inputs", same(basis.results, results), basis.inputs, results)


WAYS: tuple[Property, ...] = (
    Property("run to run", "the same inputs give the same bits in every call", _run_to_run, unordered=True),
)
