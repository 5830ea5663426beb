"""Sums over rows: which rows had no part, or took part twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.words import ordinal
from lastbit.diagnosing.patterns.wrong import ENOUGH, Ends, Wrong, upto

_MOST = 64  # rows or parts of rows that are evaluated by themselves


def row_sums(wrong: Wrong) -> Iterator[str]:
    """Of a sum over rows, the first way found to get the kernel's values from the parts of it."""
    if wrong.trace.stages[wrong.stage].of_all_rows and wrong.seen.count > 1:
        yield from itertools.islice(_explained(wrong), 1)


def _explained(wrong: Wrong) -> Iterator[str]:
    rows = wrong.seen.count
    spans = _spans(rows)
    parts = _parts(wrong, spans)
    for words, chosen in _choices(spans, rows) if len(parts) == len(spans) else ():
        total = parts[chosen].sum(0)
        room = wrong.room + wrong.coarsest * parts[chosen].abs().sum(0) / 4
        if wrong.fit(Ends(total - room, total + room)).holds(ENOUGH):
            yield f"As if {words} of the {rows:,} rows: that gives all {wrong.count:,} wrong elements."


def _spans(rows: int) -> list[range]:
    """The rows in up to 64 parts, the last row by itself."""
    size = -(-rows // _MOST)
    return [range(start, min(start + size, rows - 1)) for start in range(0, rows - 1, size)] + [range(rows - 1, rows)]


def _parts(wrong: Wrong, spans: Sequence[range]) -> Tensor:
    """The sums over some rows each, stacked; nothing where some rows are no problem of the op."""
    found = []
    for span in spans:
        part = wrong.seen.only(torch.tensor(span, device=wrong.problem.main.device)).problem
        if (trace := upto(part, {}, wrong.stage)) is None:
            return wrong.exact.new_empty(0)
        found.append(trace.stages[wrong.stage].finished.value)
    return torch.stack(found)


def _choices(spans: Sequence[range], rows: int) -> Iterator[tuple[str, list[int]]]:
    """Words, and the parts that are added."""
    parts, every = len(spans), list(range(len(spans)))
    for one, span in enumerate(spans):
        which = f"row {span[0]}" if len(span) == 1 else f"rows {span[0]} to {span[-1]}"
        yield f"the sum were over all but {which}", [n for n in every if n != one]
        yield f"the sum counted {which} twice,", [*every, one]
    for end in range(1, parts):
        yield f"the sum were over the first {spans[end][0]:,}", every[:end]
        yield f"the sum were over the last {rows - spans[end][0]:,}", every[end:]
    for step in (2, 4, 8, 16, 32):
        for start in range(step if step < parts == rows else 0):
            yield f"the sum were over every {ordinal(step)}, from {start} on,", every[start::step]
