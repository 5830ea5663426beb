"""Characters that must not reach a terminal or a file as they are: controls, marks of direction, lone surrogates."""

from __future__ import annotations


def visible(text: str, *, keep: str = "") -> str:
    r"""Replace by an escape such as `\x1b` every character of `text` that cannot be printed, except those of `keep`.

    Names and messages come from kernels, cases and files. A control character in one would command the terminal, and
    half of a surrogate pair cannot be written at all.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
