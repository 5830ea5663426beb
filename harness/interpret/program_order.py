"""The order in which the programs of a launch run: ascending, or within a context descending, one by one, or watched.

A GPU promises no order. A kernel whose programs write to the same place gives another result in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np


@dataclass
class Descent:
    """A context in which programs run in descending order.

    Attributes:
        seen: a launch of several programs has run.
    """

    seen: bool = False


_descent: Descent | None = None


@contextmanager
def descending() -> Iterator[Descent]:
    """Run the programs of every launch within from the last to the first; of interpreted kernels alone."""
    global _descent
    outer, _descent = _descent, Descent()
    try:
        yield _descent
    finally:
        _descent = outer


def programs(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return the indices of the programs of a launch, in the order in which they are to run."""
    if _descent is None:
        return np.ndindex(*grid)
    _descent.seen |= max(grid) > 1
    last = [size - 1 for size in grid]
    return (tuple(n - i for n, i in zip(last, index, strict=True)) for index in np.ndindex(*grid))


_races = False


@contextmanager
def races() -> Iterator[None]:
    """Look for races between programs, and for lanes that are masked and used, in interpreted launches within."""
    global _races
    outer, _races = _races, True
    try:
        yield
    finally:
        _races = outer


def watching_races() -> bool:
    """Return whether this is within `races`."""
    return _races


_by_python = False


@contextmanager
def one_by_one() -> Iterator[None]:
    """Let Python run every program of every launch within from its first line: the definition of what a launch does."""
    global _by_python
    outer, _by_python = _by_python, True
    try:
        yield
    finally:
        _by_python = outer


def is_one_by_one() -> bool:
    """Return whether this is within `one_by_one`."""
    return _by_python
