"""Contexts around launches: the order in which programs run, and who watches them or runs launches in another way.

A GPU promises no order. A kernel whose programs write to the same place gives another result in another order: here it
is ascending, or within a context descending, one by one, or watched for races. A watcher sees every launch, and every
operation that is composed of others: it puts a builder of its own in the place of the interpreter's while a launch
runs. Programs are run one by one then, each by Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:  # it imports Triton, which must not be imported before somebody has asked for the interpreter
    from lastbit.interpret.numpy_formats import Array

T = TypeVar("T")


class Setting(Generic[T]):
    """A value of this process, in place of which contexts have others."""

    def __init__(self, value: T) -> None:
        self.now = value

    @contextmanager
    def within(self, value: T) -> Iterator[T]:
        """Have this value within."""
        outer, self.now = self.now, value
        try:
            yield value
        finally:
            self.now = outer


@dataclass
class Descent:
    """A context in which programs run in descending order.

    Attributes:
        seen: a launch of several programs has run.
    """

    seen: bool = False


_descent: Setting[Descent | None] = Setting(None)
_races, _by_python = Setting(False), Setting(False)


@contextmanager
def descending() -> Iterator[Descent]:
    """Run the programs of every launch within from the last to the first; of interpreted kernels alone."""
    descent = Descent()
    with _descent.within(descent):
        yield descent


def programs(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return the indices of the programs of a launch, in the order in which they are to run."""
    if _descent.now is None:
        return np.ndindex(*grid)
    _descent.now.seen |= max(grid) > 1
    last = [size - 1 for size in grid]
    return (tuple(n - i for n, i in zip(last, index, strict=True)) for index in np.ndindex(*grid))


def races() -> AbstractContextManager[object]:
    """Look for races between programs, and for lanes that are masked and used, in interpreted launches within."""
    return _races.within(True)


def watching_races() -> bool:
    """Return whether this is within `races`."""
    return _races.now


def one_by_one() -> AbstractContextManager[object]:
    """Let Python run every program of every launch within from its first line: the definition of what a launch does."""
    return _by_python.within(True)


def is_one_by_one() -> bool:
    """Return whether this is within `one_by_one`."""
    return _by_python.now


class Watcher(Protocol):
    """A watcher of launches and of composed operations."""

    def launch(self, function: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Return the context in which the programs of a launch run; `arguments` are the kernel's, as it sees them."""

    def chosen(self, programs: Array) -> Array:
        """Choose the programs of a launch that run, of their indices [N, 3]."""

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, an operation of the language that is composed of several others."""


_watcher: Setting[Watcher | None] = Setting(None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` see every launch within."""
    with _watcher.within(watcher), one_by_one():
        yield


def watched_launch(function: Any, arguments: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[object]:
    """Return the context in which the programs of a launch are to run."""
    return nullcontext() if _watcher.now is None else _watcher.now.launch(function, arguments())


def chosen(programs: Array) -> Array:
    """Choose the programs of a launch that run, of their indices [N, 3]."""
    return programs if _watcher.now is None else _watcher.now.chosen(programs)


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, an operation of the language, such that the watcher sees it as one."""

    @wraps(function)
    def operation(*args: Any, **kwargs: Any) -> Any:
        watcher = _watcher.now
        return function(*args, **kwargs) if watcher is None else watcher.operation(function, args, kwargs)

    return operation


Bound = Mapping[str, Any]
Grid = tuple[int, ...]
Perform = Callable[[Bound, Grid], None]
"""Runs a launch with these arguments on this grid."""

_launcher: Setting[Callable[[Any, Bound, Grid, Perform], None] | None] = Setting(None)


def launched_by(launcher: Callable[[Any, Bound, Grid, Perform], None]) -> AbstractContextManager[object]:
    """Let `launcher` do every launch within: it may change what a function is passed, or leave the launch out."""
    return _launcher.within(launcher)


def launch(function: Any, bound: Bound, grid: Grid, perform: Perform) -> None:
    """Perform a launch, by the launcher if there is one."""
    if _launcher.now is None:
        perform(bound, grid)
    else:
        _launcher.now(function, bound, grid, perform)
