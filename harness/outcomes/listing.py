"""Entries of `lastbit list`: everything that a command line, a case line or a declaration can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """A name, and the facts about it.

    Attributes:
        name: as it is written on the command line, in a case line or in a declaration.
        about: what it is, in a sentence; empty where there is nothing to say.
        facts: label → what is to be known under it.
    """

    name: str
    about: str = ""
    facts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


Listing = Mapping[str, tuple[Entry, ...]]
"""Section, such as `ops`, → its entries."""
