"""Files of case lines."""

from __future__ import annotations

from pathlib import Path

from harness.case import Case, parse_case
from harness.errors import UsageError


def read_cases(path: Path) -> list[Case]:
    """The cases of a file with one line each; blank lines and lines that start with # are left out."""
    if not path.is_file():
        raise UsageError(f"case file {str(path)!r} does not exist")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"case file {str(path)!r} cannot be read: {error}") from error
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    cases = [_case(line, f"{path}, line {number}") for number, line in lines if line and not line.startswith("#")]
    if not cases:
        raise UsageError(f"case file {str(path)!r} holds no case line")
    return cases


def _case(line: str, where: str) -> Case:
    try:
        return parse_case(line)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
