"""Where a fault is in the text of a kernel: its planted lines."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

from tests.faults.plant import Fault, Sources, mutated

Line = tuple[str, int]
"""Name of a file and number of a line, from 1."""


@dataclass(frozen=True)
class Planted:
    """What a fault changes in the files of a kernel.

    Attributes:
        sources: file name → text with the fault.
        lines: lines that the edits changed or added; where they only delete, the two lines around it.
    """

    sources: Sources
    lines: frozenset[Line]


def planted_lines(fault: Fault, sources: Sources) -> Planted:
    """Return what `fault` changes in `sources`."""
    changed = mutated(fault, sources)
    lines: set[Line] = set()
    for file, text in changed.items():
        old, new = sources[file].splitlines(), text.splitlines()
        for kind, _, _, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if kind in ("replace", "insert"):
                lines.update((file, number) for number in range(j1 + 1, j2 + 1))
            if kind == "delete":
                lines.update((file, number) for number in (j1, j1 + 1) if 1 <= number <= len(new))
    return Planted({**sources, **changed}, frozenset(lines))
