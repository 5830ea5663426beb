"""Sums over rows: which rows had no part, or took part twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.diagnosing.patterns.wrong import Ends, Wrong, upto
from harness.errors import UsageError

_MOST = 64  # rows or parts of rows that are evaluated by themselves
_ENOUGH = 24.0  # bits of evidence


def row_sums(wrong: Wrong) -> Iterator[str]:
    """Of a sum over rows, the first way found to get the kernel's values from the parts of it."""
    if wrong.trace.stages[wrong.stage].of_all_rows and not wrong.given:
        yield from itertools.islice(_explained(wrong), 1)


def _explained(wrong: Wrong) -> Iterator[str]:
    parts = _parts(wrong)
    rows = wrong.seen.count
    size = -(-rows // max(1, len(parts)))
    for words, chosen in _choices(len(parts), size, rows):
        total = parts[chosen].sum(0)
        room = wrong.room + 4 * wrong.coarsest * parts[chosen].abs().sum(0) * 2.0**-4
        if wrong.fit(Ends(total - room, total + room)).holds(_ENOUGH):
            yield f"As if {words} of the {rows:,} rows: that gives all {wrong.count:,} wrong elements."


def _parts(wrong: Wrong) -> Tensor:
    """The sums over some rows each, in order, stacked."""
    rows = wrong.seen.count
    size = -(-rows // _MOST)
    found = []
    for start in range(0, rows, size):
        part = wrong.seen.only(torch.arange(start, min(rows, start + size), device=wrong.problem.main.device)).problem
        try:
            found.append(upto(part, {}, wrong.stage).stages[wrong.stage].finished.value)
        except UsageError:  # rows are no longer what the op asks for
            return wrong.exact[None]
    return torch.stack(found) if found else wrong.exact[None]


def _choices(parts: int, size: int, rows: int) -> Iterator[tuple[str, list[int]]]:
    """Words, and the parts that are added."""
    every = list(range(parts))
    for one in every:
        first, last = one * size, min(rows, (one + 1) * size) - 1
        which = f"row {first}" if size == 1 else f"rows {first} to {last}"
        yield f"the sum were over all but {which}", [n for n in every if n != one]
        yield f"the sum counted {which} twice,", [*every, one]
    for end in range(1, parts):
        yield f"the sum were over the first {end * size:,}", every[:end]
        yield f"the sum were over the last {rows - end * size:,}", every[end:]
    for step in (2, 4, 8, 16, 32):
        for start in range(step if step < parts else 0):
            yield f"the sum were over every {step}th part of {size:,}, from {start} on,", every[start::step]
