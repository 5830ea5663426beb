"""Edges of an op: fixed cases, a line each, for what a kernel may branch on and chance hardly meets.

`cases/edges/OP.txt` has those for every device, and `cases/edges/OP.large.txt` those for an accelerator alone. Lines
that start with `#` are comments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lastbit import Case, parse_case

_FOLDER = Path(__file__).parent / "edges"


def edges(op: str, accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield the edges of `op` that a kernel with the parameters `accepts` can take; `small` omits the large ones."""
    for path in [_FOLDER / f"{op}.txt"] + ([] if small else [_FOLDER / f"{op}.large.txt"]):
        yield from (case for case in cases_in(path) if case.names <= accepts)


def cases_in(path: Path) -> Iterator[Case]:
    """Yield the cases of a file, a line each."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield parse_case(line)
