"""Text as Markdown that GitHub and GitLab show as it stands: escaped, clipped, and put together to a given size."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lastbit.reports.characters import visible
from lastbit.reports.summary import plural

# Arbitrary: some fifteen lines of a comment.
MOST_CHARACTERS = 1500
"""Longest text that is not clipped; the message of an exception can hold the source of a kernel."""

# Above the longest such sentence, which names a number and the report.
_TAIL = 500  # bytes for the sentence that says what was left out
_LAYOUT = "\n\t"  # control characters that only lay text out
_NOTHING = "\u200b"  # of no width; keeps a name after @ from being notified and a number after # from becoming a link


@dataclass(frozen=True)
class MarkdownBlock:
    """A piece of a page that is there as a whole or not at all.

    Attributes:
        what: what to call it where it was left out, in the singular.
        important: to be kept before all blocks that are not.
    """

    text: str
    what: str
    important: bool = False


def joined(blocks: Sequence[MarkdownBlock], limit: int) -> str:
    """Join the blocks, in order, in at most `limit` bytes of UTF-8; a last line counts those left out."""
    room = limit - _TAIL
    kept: set[int] = set()
    for number in sorted(range(len(blocks)), key=lambda number: not blocks[number].important):
        size = len(_encodable(blocks[number].text).encode()) + 2
        if size <= room:
            room -= size
            kept.add(number)
    texts = [block.text for number, block in enumerate(blocks) if number in kept]
    left_out = Counter(block.what for number, block in enumerate(blocks) if number not in kept)
    if left_out:
        parts = ", ".join(plural(count, what) for what, count in left_out.items())
        texts.append(f"**Left out** to stay below {limit // 1024} KiB: {parts}. `lastbit report` shows all of them.")
    return _encodable("\n\n".join(texts) + "\n")


def plain(text: str) -> str:
    """Put `text` on one line, showing every character as it is, outside of code."""
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(_clipped(text), quote=False))
    return re.sub(r"([@#])(?=\w)", rf"\1{_NOTHING}", escaped)


def code(text: str) -> str:
    """Put `text` on one line as code, also within a table."""
    shown = _clipped(text).replace("|", r"\|")
    fence = "`" * (_longest_run(shown) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}" if shown else ""


def block_of_code(text: str) -> str:
    """Write `text` as a block of code, to be copied: it is never clipped."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}sh\n{visible(text, keep=_LAYOUT)}\n{fence}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Write a table of Markdown cells; the first `left` columns are left-aligned, the others right-aligned."""
    rule = [":--" if number < left else "--:" for number in range(len(headers))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, rule, *rows))


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def folded(summary: str, body: str) -> str:
    """Fold `body` behind a line to click on; `summary` is plain text."""
    return f"<details><summary>{html.escape(_clipped(summary))}</summary>\n\n{body}\n\n</details>"


def _clipped(text: str) -> str:
    """Put `text` on one line, without characters that control a terminal, cut to `MOST_CHARACTERS`."""
    line = visible(" ".join(text.split()))
    rest = len(line) - MOST_CHARACTERS
    return f"{line[:MOST_CHARACTERS]}… ({rest:,} more characters)" if rest > 0 else line


def _encodable(text: str) -> str:
    """Replace in `text` half of a surrogate pair, which UTF-8 cannot write, by a question mark."""
    return text.encode(errors="replace").decode()


def _longest_run(text: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
