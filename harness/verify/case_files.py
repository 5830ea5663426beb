"""Files of case lines, which commands read before anything imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lastbit.case import Case, parse_case
from lastbit.errors import UsageError
from lastbit.files import replace_file

T = TypeVar("T")


def read_cases(path: Path) -> list[Case]:
    """Read the cases of a file with one per line; blank lines and lines that start with # are skipped."""
    if not path.is_file():
        raise UsageError(f"case file {str(path)!r} does not exist")
    cases = parsed(_text(path), path, parse_case)
    if not cases:
        raise UsageError(f"case file {str(path)!r} holds no case line")
    return cases


def add_case(path: Path, case: Case, comment: str) -> bool:
    """Append a case to a file, below a comment of one line, unless the file has it; return whether it was added.

    The file and its folder are made if they do not exist.
    """
    text = _text(path) if path.exists() else ""
    if case in parsed(text, path, parse_case):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    before = text if not text or text.endswith("\n") else f"{text}\n"
    added = f"{before}# {' '.join(comment.split())}\n{case}\n"
    replace_file(path, lambda target: target.write_text(added, encoding="utf-8"))
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"case file {str(path)!r} cannot be read: {error}") from error


def parsed(text: str, path: Path, parse: Callable[[str], T]) -> list[T]:
    """Parse the lines of a file that are neither blank nor begin with #; an error names the line."""
    found = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            try:
                found.append(parse(line))
            except UsageError as error:
                raise UsageError(f"{path}, line {number}: {error}") from error
    return found
