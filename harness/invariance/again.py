"""Run to run: the same inputs in later calls, elsewhere in memory, after other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count, islice

import torch

from lastbit.errors import UnsupportedCase
from lastbit.inputs import Inputs
from lastbit.invariance.basis import Basis, difference
from lastbit.invariance.direct import oddly_elsewhere, other_values
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import Matched, Tensors, same

# `verify` asks for as little as can show something; `lastbit invariance` for what shows rare races as well.
_ROUNDS = 1  # of three calls each
_MANY_ROUNDS = {"cpu": 4}  # where an interpreter adds in one order
# 51 calls: bits that one call in twenty changes are seen with 93 of 100 (1 - 0.95^51).
_MOST_ROUNDS = 17
# An H200 has 50 MB, a B200 126 MB.
_CACHE = 128 << 20  # bytes, more than a level-2 cache holds
# Arbitrary: more than the private caches of a core; writing more takes longer than most calls.
_HOST_CACHE = 8 << 20
_BLOCKS = tuple(1 << power for power in range(9, 24))  # bytes, of every size that a kernel may ask for next


def show(basis: Basis, pairs: Pairs) -> None:
    """Compare later calls; results that the kernel declares as unordered are looked at where all others agree."""
    rounds = _MANY_ROUNDS.get(basis.device.type, _MOST_ROUNDS) if basis.thorough else _ROUNDS
    told: tuple[str, Matched, Tensors] | None = None
    for what, results in chain(islice(_calls(basis), 3 * rounds), _in_a_new_process(basis)):
        ordered, rest = _parted(basis, same(basis.results, results))
        pairs.compare(basis, what, ordered or rest, basis.inputs, results)
        if ordered and told is None and difference(rest):
            told = what, rest, results
    if pairs.first is None and told is not None:
        what, rest, results = told
        pairs.compare(basis, what, rest, basis.inputs, results)


def _parted(basis: Basis, matched: Matched) -> tuple[Matched, Matched]:
    """Split the results into those that must be equal and those that the kernel declares as unordered."""
    rest = {name: pair for name, pair in matched.items() if name in basis.kernel.unordered}
    return {name: pair for name, pair in matched.items() if name not in rest}, rest


def _calls(basis: Basis) -> Iterator[tuple[str, Tensors]]:
    """Yield each call's description and its results."""
    for number in count(2, 3):
        yield f"call {number} on the same inputs", basis.call(basis.inputs)
        held = [torch.empty(size, dtype=torch.uint8, device=basis.device) for size in _BLOCKS]
        moved = oddly_elsewhere(basis)
        yield f"call {number + 1} on the same inputs, elsewhere in memory", basis.call(moved)
        del held
        _disturb(basis, other_values(basis))
        yield f"call {number + 2} on the same inputs, after one on other values", basis.call(basis.inputs)


def _disturb(basis: Basis, others: Inputs) -> None:
    """Call the kernel on other values, and put other data in place of what caches hold."""
    with suppress(UnsupportedCase):
        basis.call(others)
    size = _HOST_CACHE if basis.device.type == "cpu" else _CACHE
    torch.zeros(size, dtype=torch.uint8, device=basis.device).add_(1)


def _in_a_new_process(basis: Basis) -> Iterator[tuple[str, Tensors]]:
    if basis.thorough and basis.direct and basis.anew is not None:
        yield "a call in a new process", basis.anew({})


RUN_TO_RUN = Property("run to run", "the same inputs give the same bits in every call", show, unordered=True)
