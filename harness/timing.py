"""Seconds of lastbit's own time by part, counted by a clock, if one listens.

    with listening(Clock()) as clock:
        ...
    clock.seconds  # {"references": 3.1, "kernel calls": 4.8, …}

Every moment counts for one part: the innermost one, unless that is part of a purpose. What the row check evaluates and
compares is time of the row check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

PLANNING = "planning"
INPUTS = "building inputs"
KERNEL = "kernel calls"
GUARDS = "guards"
REFERENCES = "references"
COMPARING = "comparing"
ROWS = "row check"
OTHERS = "other contracts"
POWER = "power"
PROPERTIES = "properties"
FORMULAS = "formulas"
REST = "the rest"

PARTS = (PLANNING, INPUTS, KERNEL, GUARDS, REFERENCES, COMPARING, ROWS, OTHERS, POWER, PROPERTIES, FORMULAS, REST)
_PURPOSES = frozenset({PLANNING, ROWS, OTHERS, POWER, PROPERTIES, FORMULAS})


class Clock:
    """Counts seconds by part; `now` gives seconds, of a device too if it waits for that."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._part, self._since = now, REST, now()
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> Mapping[str, float]:
        """Part → seconds until now, without parts that never began."""
        self._turn(self._part)
        return dict(self._seconds)

    def enter(self, part: str) -> str:
        """Count for `part` from now on, within a purpose for that; returns the part that was counted for before."""
        before = self._part
        if before not in _PURPOSES:
            self._turn(part)
        return before

    def leave(self, before: str) -> None:
        """Count again for the part that `enter` returned."""
        if before != self._part:
            self._turn(before)

    def _turn(self, part: str) -> None:
        now = self._now()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


def listen(clock: Clock) -> None:
    """Let `clock` count from now on."""
    _clock.set(clock)


@contextmanager
def listening(clock: Clock) -> Iterator[Clock]:
    """Let `clock` count within the context, and no other."""
    token = _clock.set(clock)
    try:
        yield clock
    finally:
        _clock.reset(token)


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Time within the context, or in the calls of a function that this decorates, is time of `part`."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    before = clock.enter(part)
    try:
        yield
    finally:
        clock.leave(before)


def seconds_so_far() -> Mapping[str, float]:
    """Return the seconds of each part that the listening clock has counted; nothing without a clock."""
    clock = _clock.get()
    return {} if clock is None else clock.seconds
