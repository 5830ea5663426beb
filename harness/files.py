"""Where lastbit's own files are, and files that are old or complete, whenever the process is stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BUILT_IN = PACKAGE.parent
"""The folder with references/, cases/ and reports/ of lastbit itself."""


def replace_file(path: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write beside `path`, and put the whole file in its place; OSError if that cannot be done."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
