"""Places of lastbit's own files, states of any, and files that are whole, or lines, whenever the process is stopped."""

from __future__ import annotations

import hashlib
import os
import stat
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

ABSENT = "absent"
"""The state of a path at which there is nothing."""


def hash_of(value: object) -> str:
    """Hash what the representation of a value says."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def state_of(path: str) -> str:
    """Hash the content of a file or the names in a folder; `ABSENT` where there is nothing."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            names = sorted(os.fsencode(name) for name in os.listdir(path) if name != "__pycache__")
            return f"folder {hashlib.sha256(bytes(1).join(names)).hexdigest()[:32]}"
        if not stat.S_ISREG(mode):
            return "no file"
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        return f"unreadable: {error.strerror}"


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
