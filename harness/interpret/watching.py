"""Watchers of interpreted kernels: they see every launch, and every operation that is composed of others.

A watcher puts a builder of its own in the place of the interpreter's while a launch runs. Programs are run one by one
then, each by Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.program_order import one_by_one


class Watcher(Protocol):
    """A watcher of launches and of composed operations."""

    def launch(self, function: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Return the context in which the programs of a launch run; `arguments` are the kernel's, as it sees them."""

    def chosen(self, programs: Array) -> Array:
        """Choose the programs of a launch that run, of their indices [N, 3]."""

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, an operation of the language that is composed of several others."""


_watcher: Watcher | None = None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` see every launch within."""
    global _watcher
    outer, _watcher = _watcher, watcher
    try:
        with one_by_one():
            yield
    finally:
        _watcher = outer


def watched_launch(function: Any, arguments: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[object]:
    """Return the context in which the programs of a launch are to run."""
    return nullcontext() if _watcher is None else _watcher.launch(function, arguments())


def chosen(programs: Array) -> Array:
    """Choose the programs of a launch that run, of their indices [N, 3]."""
    return programs if _watcher is None else _watcher.chosen(programs)


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, an operation of the language, such that the watcher sees it as one."""

    @wraps(function)
    def operation(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _watcher is None else _watcher.operation(function, args, kwargs)

    return operation


Bound = Mapping[str, Any]
Grid = tuple[int, ...]
Perform = Callable[[Bound, Grid], None]
"""Runs a launch with these arguments on this grid."""

_launcher: Callable[[Any, Bound, Grid, Perform], None] | None = None


@contextmanager
def launched_by(launcher: Callable[[Any, Bound, Grid, Perform], None]) -> Iterator[None]:
    """Let `launcher` do every launch within: it may change what a function is passed, or leave the launch out."""
    global _launcher
    outer, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = outer


def launch(function: Any, bound: Bound, grid: Grid, perform: Perform) -> None:
    """Perform a launch, by the launcher if there is one."""
    if _launcher is None:
        perform(bound, grid)
    else:
        _launcher(function, bound, grid, perform)
