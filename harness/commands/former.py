"""Command lines of lastbit 0.1 and before, as they are written now."""

from __future__ import annotations

from collections.abc import Sequence

from lastbit.command_line import kernel_words

COMMANDS = {
    "repro": ("verify",),
    "stages": ("explain", "--stages"),
    "trace": ("explain", "--trace"),
    "reference": ("new", "reference"),
}
"""A command that there was → the words that begin and end one that does the same; `reference` has both at its begin."""

OPTIONS = ("--kernel", "--kernels", "--case")

_OF_NAMES = ("identify", "order", "invariance", "agree")
"""Commands whose words were names of kernels."""


def modern(words: Sequence[str]) -> list[str]:
    """Return a command line, without `lastbit`, as it is written now: itself unless it was written otherwise."""
    if not words or (words[0] not in COMMANDS and not any(word.partition("=")[0] in OPTIONS for word in words)):
        return list(words)
    name, *rest = words
    if name == "reference":
        return ["new", "reference", *rest[rest[:1] == ["from-torch"] :]]
    given: dict[str, list[str]] = {option: [] for option in OPTIONS}
    others, following = list[str](), iter(rest)
    for word in following:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            given[option].append(value if equals else next(following, ""))
        else:
            others.append(word)
    first = next((place for place, word in enumerate(others) if word.startswith("-")), len(others))
    leading, options = others[:first], others[first:]
    names, cases = given["--kernel"], given["--case"]
    if name in _OF_NAMES:
        names, leading = [*leading, *names], []
    elif name not in ("golden", "bench", "judge", "list"):
        cases, leading = (
            [*(word for word in leading if _is_line(word)), *cases],
            [w for w in leading if not _is_line(w)],
        )
    now, *flags = COMMANDS.get(name, (name,))
    return [now, *leading, *kernel_words(given["--kernels"], names), *cases, *flags, *options]


def _is_line(word: str) -> bool:
    """Check whether a word is a case, or stands for one in a document."""
    return " " in word or word in ("CASE", "…", "...")
