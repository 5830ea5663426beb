"""Cases with which it is looked at what the bits of a kernel depend on: many rows of ordinary values, a line each.

`cases/properties/OP.txt` has those where a CPU takes part, `cases/properties/OP.large.txt` those for an accelerator
alone. Lines that start with `#` are comments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lastbit import Case, Group
from lastbit.cases._edges import cases_in

_FOLDER = Path(__file__).parent / "properties"


def properties(op: str, accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the group of the lines of `op` that a kernel with the parameters `accepts` can take, if any."""
    return group_of(cases_in(_FOLDER / (f"{op}.txt" if small else f"{op}.large.txt")), accepts)


def group_of(cases: Iterable[Case], accepts: frozenset[str]) -> Iterator[Group]:
    """Yield the group of the cases that a kernel with the parameters `accepts` can take, if any."""
    if own := tuple(case for case in cases if case.names <= accepts):
        yield Group("properties", examples=own, properties=True)
