"""The ways that interpreted programs go at conditions and loops.

Python sees each of them once: a tape remembers what was decided while Python ran its programs, and a launch that runs
from the tape goes the same ways.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from lastbit.interpret.watching import Setting

if TYPE_CHECKING:  # it imports Triton, which must not be imported before somebody has asked for the interpreter
    from lastbit.interpret.numpy_formats import Array

Decision = tuple[str, int, int, int]
"""File, line and column of a condition or of what a loop runs over, and the way that was gone.

It is 0 or 1 for a condition, and for a loop how often it ran, `MANY` for every larger number. Of the mask of an access
to memory it is `NONE`, `SOME` or `ALL` of its lanes, in one program.
"""

MANY = 3
NONE, SOME, ALL = 10, 11, 12

_taken: Setting[set[Decision] | None] = Setting(None)
_watcher: Setting[Callable[[Iterable[Decision]], object] | None] = Setting(None)
_tracer: Setting[object] = Setting(None)


def decisions_watched(watcher: Callable[[Iterable[Decision]], object]) -> AbstractContextManager[object]:
    """Let `watcher` be told the decisions of every launch within."""
    return _watcher.within(watcher)


@contextmanager
def decisions_of(taken: set[Decision]) -> Iterator[Set[Decision]]:
    """Add to `taken` what is decided within, in one launch, and tell all of it at the end."""
    try:
        with _taken.within(taken):
            yield taken
    finally:
        if _watcher.now is not None:
            _watcher.now(taken)


def hiding_from(tracer: object) -> AbstractContextManager[object]:
    """Let Python's `tracer` see nothing of what is `unseen` within."""
    return _tracer.within(tracer)


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide calls of a function from the tracer that is to see nothing of it; others, such as a debugger, see them.

    The tracer is taken away and put back in one frame, because it counts frames.
    """

    @wraps(function)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        tracer = sys.gettrace()
        if tracer is None or tracer is not _tracer.now:
            return function(*args, **kwargs)
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return hidden


def decided(place: tuple[str, int, int] | None, way: int) -> None:
    """Note the way that was gone at a place."""
    if _taken.now is not None and place is not None:
        _taken.now.add((*place, way))


def counted(values: Iterable[Any], place: tuple[str, int, int]) -> Iterator[Any]:
    """Yield the values of a loop, and note how often it ran."""
    count = 0
    for value in values:
        count += 1
        yield value
    decided(place, min(count, MANY))


def mask_seen(place: Any, mask: Array, lanes: int, rank: int) -> None:
    """Note how many lanes a mask lets through, of which `lanes` are true; with an axis more than `rank`, per program.

    Only who watches launches is told, since every program has masks of its own, also one that runs from a tape.
    """
    if _watcher.now is None or place is None:
        return
    each = [lanes]
    if 0 < lanes < mask.size and mask.ndim > rank:
        each = np.unique(np.count_nonzero(mask.reshape(len(mask), -1), axis=1)).tolist()
    most = mask.size if len(each) == 1 and each[0] == lanes else mask.size // len(mask)
    for count in each:
        decided((place.file, place.line, place.column), NONE if not count else ALL if count == most else SOME)


def put_places(tree: ast.AST, file: str, helpers: Iterable[str]) -> None:
    """Pass to each call of the helpers the place of its argument, as the last one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers:
            constants = (ast.Constant(part) for part in (file, node.lineno, node.col_offset))
            place = ast.Tuple([ast.copy_location(constant, node) for constant in constants], ast.Load())
            node.args.append(ast.copy_location(place, node))
