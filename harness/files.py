"""Places of lastbit's own files, and files that are whole, or else lines, whenever the process is stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = PACKAGE / "checkout"
BUILT_IN = PACKAGE.parent if _CHECKOUT.is_dir() else PACKAGE
"""The folder with references/, cases/ and reports/ of lastbit itself: in a checkout they stand beside harness/."""
KERNELS = BUILT_IN / ("kernels" if _CHECKOUT.is_dir() else "_kernels")
IMPORTED_FROM = _CHECKOUT if _CHECKOUT.is_dir() else PACKAGE.parent
"""The folder that makes `import lastbit` this lastbit, where it comes first on sys.path."""


def replace_file(path: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write beside `path`, and put the whole file in its place; OSError if that cannot be done."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines that nothing depends on to a file: where it cannot be written, they are lost."""
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
