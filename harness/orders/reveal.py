"""The order of a sum, revealed: read, searched and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.orders.probing import NotRevealed, NotVisible, ProbeReading, Probes, signed_reading, squared_reading
from lastbit.orders.search import Indices, Truths, added, around, kind_of, search, within
from lastbit.reports.order import SumTree

# A tree that is wrong in one triple of a hundred passes with 8 of 100, but for late ones, which are asked as well.
_CHECKED = 256
"""Triples that a tree is checked on which are drawn at random, and as many of terms that meet late."""

_NONE_LOST = "no small term is ever lost: the sum is held in more bits than fp32 has, or added at once"
_SHOWN, _ROWS = 3, 32
_QUESTIONS = 20  # per term and bit of their number; chains, the dearest of those that were tried, take 2.5
# Near the 24 bits of fp32: a sum then loses bits in nearly every step, and so depends on its order.
_BINADES = 20  # over which random terms are spread, as sums of few bits are exact in every order
_RATIOS = {2.0**20: "fewer bits than fp32 has", 2.0**30: "more bits than fp32 has"}
"""Large over small term: what a sum in fp32 keeps, and what it loses."""


@dataclass(frozen=True)
class Revealed:
    """The findings about the order of a sum.

    Attributes:
        tree: None where there is none.
        reason: why there is none.
        result: dtype of what was read.
        visible: whether results show lost terms.
        triples, asked, calls, checked, contradicted, notes: as in `Order`.
    """

    tree: SumTree | None
    reason: str
    result: str
    asked: int
    calls: int
    visible: bool = True
    checked: int = 0
    contradicted: int = 0
    triples: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def reveal(
    sum_of: Callable[..., Tensor],
    terms: int,
    *,
    rows: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    squares: bool = False,
    tuned: bool = False,
    seed: int = 0,
) -> Revealed:
    """Reveal the tree by which a function adds the terms of each row.

    Args:
        sum_of: rows of terms [rows, terms] → results [rows, …], a function of the sum of each row; it is called with
            rows of this number and dtype only. The result at the column of a term may depend on that term, too.
        squares: what is added are squares of what the function is given.
        tuned: the function also takes a number from 0 to 1 and lets something follow it, so that results round
            elsewhere: an ulp of a sum of squares is visible in a narrow result only for some numbers.

    Raises:
        UsageError: there are fewer than three terms, or no rows.
    """
    if terms < 3 or rows < 1:
        raise UsageError(f"{terms} terms in {rows} rows: give 3 terms, as two have one order, and 1 row, or more")
    call = sum_of if tuned else lambda given, tuning: sum_of(given)
    probes = Probes(call, terms, rows, dtype, torch.device(device))
    random = np.random.default_rng(seed)
    try:
        reading = (squared_reading if squares else signed_reading)(probes, random)
        steady = _unsteady(reading, random)
        left = 10_000 + _QUESTIONS * terms * terms.bit_length()

        def ask(triples: Indices) -> Truths:
            """Ask no more than a tree needs, as answers that no tree explains can lead anywhere."""
            nonlocal left
            left -= len(triples)
            if left < 0:
                raise NotRevealed("no tree explains what the probes say: the search for one does not end")
            return reading.ask(triples)

        tree = search(terms, ask, seed)
        return _checked(reading, tree, random, squares, steady)
    except NotRevealed as error:
        visible = not isinstance(error, NotVisible)
        return Revealed(None, str(error), probes.result, probes.asked, probes.calls, visible)


def _unsteady(reading: ProbeReading, random: np.random.Generator) -> tuple[str, ...]:
    """Say what results depend on besides their row; if it is the place of a row, read only the first from then on."""
    probes, terms = reading.probes, reading.probes.terms
    some = _drawn(terms, 8, random)
    first, again = (_bits(reading, some) for _ in range(2))
    if not torch.equal(first, again):
        return ("equal calls give different results",)
    if probes.rows == 1:
        return ()
    moved = np.concatenate([_drawn(terms, probes.places // 2, random), some[::-1]])[-probes.places :]
    count = min(len(some), probes.places)
    if torch.equal(_bits(reading, moved)[-count:].flip(0), first[:count]):
        return ()
    probes.places = 1
    return ("the results of a row depend on its place in the call or on other rows; only the first row was used",)


def _bits(reading: ProbeReading, triples: Indices) -> Tensor:
    return reading.probes.bits(reading.probes.placed(triples, reading.values), reading.values.tuning)


def _checked(
    reading: ProbeReading, tree: SumTree, random: np.random.Generator, squares: bool, notes: tuple[str, ...]
) -> Revealed:
    """Accept the tree if further random triples agree with it."""
    probes = reading.probes
    triples = np.concatenate([_drawn(tree.terms, _CHECKED, random), _late(tree, random)])
    turns = around(triples)
    answers = reading.ask(turns)
    kinds = kind_of(answers.reshape(-1, 3))
    expected = kind_of(within(tree, *turns.T).reshape(-1, 3))
    wrong = np.flatnonzero(kinds != expected)
    found = Revealed(
        tree=tree,
        reason="",
        result=probes.result,
        asked=probes.asked,
        calls=probes.calls,
        checked=len(triples),
        contradicted=len(wrong),
        triples=tuple(_sentence(triples[n], int(kinds[n])) for n in wrong[:_SHOWN]),
        notes=notes,
    )
    if len(wrong):
        return replace(found, tree=None, reason="no tree explains what the probes say")
    if not answers.any():
        return replace(found, tree=None, reason=_NONE_LOST)
    if squares:
        return found
    held = _held(reading, triples)
    odd = "" if held else _unlike(reading, tree, random)
    return replace(found, tree=None if odd else tree, reason=odd, notes=(*notes, *held))


def _held(reading: ProbeReading, triples: Indices) -> tuple[str, ...]:
    """Say in what a sum of signed terms is held, if not in fp32."""
    values = reading.values
    large = values.pair[0] / values.asked
    notes = []
    answers = reading.ask(triples)
    for ratio, held in _RATIOS.items():
        size = values.asked * ratio
        if ratio >= large:
            continue
        lost = reading.with_values(replace(values, pair=(size, -size))).ask(triples)
        if lost.any() if ratio < 2.0**24 else (lost != answers).any():
            notes.append(f"the sum is held in {held}")
    return tuple(notes)


def _unlike(reading: ProbeReading, tree: SumTree, random: np.random.Generator) -> str:
    """Say why the tree does not explain sums of random terms, if results are the sum itself or 2^k times it.

    A compensated sum keeps what a single small term cannot show.
    """
    probes = reading.probes
    if reading.values.filler or probes.result != "float32" or max(map(len, tree.children)) > 2:
        return ""
    numbers = random.standard_normal((_ROWS, tree.terms)) * 2.0 ** random.integers(-_BINADES, 1, (_ROWS, tree.terms))
    drawn = torch.from_numpy(numbers).to(probes.device, probes.dtype)
    one = torch.zeros(1, tree.terms, device=probes.device, dtype=probes.dtype)
    one[0, 0] = 1.0
    found = probes.bits(torch.cat([one, drawn]), reading.values.tuning)[:, -1].view(torch.float32)
    share = float(found[0])
    if share <= 0 or math.frexp(share)[0] != 0.5:
        return ""
    expected = added(tree, drawn.float()) * share
    if (wrong := int((found[1:] != expected).sum())) == 0:
        return ""
    return f"sums of random terms in this order differ from the kernel's in {wrong} of {_ROWS} rows: it is not all"


def _sentence(triple: Indices, kind: int) -> str:
    columns = [int(column) for column in triple]
    if kind == 3:
        return f"columns {columns[0]}, {columns[1]} and {columns[2]} meet at once"
    if kind < 0:
        return f"columns {columns[0]}, {columns[1]} and {columns[2]}: two of them meet outside of each other's node"
    last = columns.pop(kind)
    return f"columns {columns[0]} and {columns[1]} meet before {last}"


def _drawn(terms: int, count: int, random: np.random.Generator) -> Indices:
    if not count:
        return np.empty((0, 3), dtype=np.int64)
    return np.array([random.choice(terms, 3, replace=False) for _ in range(count)], dtype=np.int64)


def _late(tree: SumTree, random: np.random.Generator) -> Indices:
    """Draw triples of terms that meet in small nodes: two from a node, and one that is added to it."""
    found = []
    for node in random.integers(tree.terms, tree.nodes, _CHECKED).tolist():
        a, b = random.choice(tree.children[node], 2, replace=False)
        inner = [child for child in tree.children[node] if tree.children[child]]
        if not inner:
            continue
        c = int(random.choice(inner))
        a = next(int(n) for n in (a, b) if n != c)
        b, c = random.choice(tree.children[c], 2, replace=False)
        drawn = []
        for inside in (int(a), int(b), int(c)):
            while tree.children[inside]:
                inside = int(random.choice(tree.children[inside]))
            drawn.append(inside)
        found.append(drawn)
    return np.array(found, dtype=np.int64).reshape(-1, 3)
