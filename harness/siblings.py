"""The files beside a kernel's: it imports them by name, and nobody else does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_LOADED = "__siblings__"
"""In the globals of each file: the modules of its load by name, so that they live as long as its functions."""


@contextmanager
def siblings(folder: Path) -> Iterator[None]:
    """Let the files of `folder` import each other by name, and forget those names afterwards."""
    names = {path.stem for path in folder.glob("*.py")} - set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        loaded = _forgotten(names)
        for module in loaded.values():
            vars(module)[_LOADED] = loaded


@contextmanager
def in_reach(function: Callable[..., Any]) -> Iterator[None]:
    """Let the files beside that of a function be found by name once more, as they were while it was loaded.

    Who looks modules up by the names that their functions have, as dynamo does, finds none without this.
    """
    own = getattr(inspect.unwrap(function), "__globals__", {})
    others = (getattr(value, "__globals__", None) for value in list(own.values()))  # of what its file imports
    known = (scope[_LOADED] for scope in (own, *others) if isinstance(scope, dict) and _LOADED in scope)
    lent = {name: module for name, module in next(known, {}).items() if name not in sys.modules}
    sys.modules.update(lent)
    try:
        yield
    finally:
        _forgotten(set(lent))


def _forgotten(names: set[str]) -> dict[str, ModuleType]:
    return {name: module for name in names if (module := sys.modules.pop(name, None)) is not None}
