"""The files beside a kernel's: it imports them by name, and nobody else does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_loaded: dict[Path, dict[str, ModuleType]] = {}
"""Folder → name → module, of the last load of the folder."""


@contextmanager
def siblings(folder: Path) -> Iterator[None]:
    """Let the files of `folder` import each other by name, and forget those names afterwards."""
    names = {path.stem for path in folder.glob("*.py")} - set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _loaded.setdefault(folder.resolve(), {}).update(_forgotten(names))


@contextmanager
def in_reach(function: Callable[..., Any]) -> Iterator[None]:
    """Let the files beside that of a function be found by name once more, as they were while it was loaded.

    Who looks modules up by the names that their functions have, as dynamo does, finds none without this.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    known = _loaded.get(Path(code.co_filename).resolve().parent, {}) if code else {}
    lent = {name: module for name, module in known.items() if name not in sys.modules}
    sys.modules.update(lent)
    try:
        yield
    finally:
        _forgotten(set(lent))


def _forgotten(names: set[str]) -> dict[str, ModuleType]:
    return {name: module for name in names if (module := sys.modules.pop(name, None)) is not None}
