"""The restrictions of a kernel process, and those that this system has no means for: for a reader and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """One restriction of a kernel process.

    Attributes:
        name: in a word or two, such as `network`.
        holds: whether it is.
        how: what keeps it (`own namespace`), or why nothing does.
    """

    name: str
    holds: bool
    how: str


@dataclass(frozen=True)
class Confinement:
    """All measures that were taken before a kernel's code was loaded, whether or not they hold."""

    measures: tuple[Measure, ...] = ()

    @property
    def holds(self) -> str:
        """`files (Landlock 7), network (own namespace)`: what holds, for a header."""
        return ", ".join(f"{measure.name} ({measure.how})" for measure in self.measures if measure.holds)

    @property
    def lacks(self) -> str:
        """`own user (lastbit does not run as root)`: what does not hold, and why; empty if everything does."""
        return ", ".join(f"{measure.name} ({measure.how})" for measure in self.measures if not measure.holds)

    def __str__(self) -> str:
        return self.holds + (f"; not {self.lacks}" if self.lacks else "") or "nothing"

    def has(self, name: str) -> bool:
        """Return whether the measure of that name holds."""
        return any(measure.name == name and measure.holds for measure in self.measures)

    @property
    def as_json(self) -> dict[str, dict[str, bool | str]]:
        """Name of each measure → whether it holds, and how."""
        return {measure.name: {"holds": measure.holds, "how": measure.how} for measure in self.measures}

    @staticmethod
    def from_json(fields: Mapping[str, Mapping[str, bool | str]]) -> Confinement:
        """Return the confinement that `as_json` wrote, in a process that had not loaded a kernel yet."""
        measures = (Measure(name, bool(field["holds"]), str(field["how"])) for name, field in fields.items())
        return Confinement(tuple(measures))
