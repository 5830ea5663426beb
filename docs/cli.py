"""Write docs/cli.md from the parsers of the commands: `python docs/cli.py`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# The command line

This page is generated: `python docs/cli.py` writes it from the commands' own `--help`.

```
{overview}```

One syntax holds for every command. Its words may stand in any order, before and behind options:

- A **kernel** is named by a path or by its name. A path is a folder of Python files or one file; behind it `::` names
  one kernel, as with pytest: `my_kernels`, `my_kernels/norms.py`, `my_kernels/norms.py::norm`. A name alone is looked
  up among the kernels of the paths that are given, or of lastbit and of `--project`.
- A **case** is the inputs of a call as a line, in quotes. `lastbit verify` prints it in the commands below a finding,
  and you may [write one](verify.md#a-case-is-one-line). A word with a blank and a `=` is a case.
- What exists here, contains `/` or ends in `.py` is a path. `::NAME` is a name, whatever it looks like.

`lastbit` needs an installation; in a checkout without one, `python3 harness` stands for it.

Exit codes are those of the table, and what a command means by 1 and 3 stands in its section.

| code | meaning |
|---|---|
| 0 | all is well |
| 1 | a finding, or a kernel that is left inconclusive |
| 2 | something is broken: the command line, a file, a kernel that raises, lastbit itself |
| 3 | nothing was verified |
| 130 | interrupted from the keyboard; 143 and 129: ended by SIGTERM or SIGHUP |
"""

CODES = {
    "verify": "1: a kernel fails or is inconclusive, or got worse since `--base`. 3: a kernel was not verified.",
    "judge": "That of the worst file. 1: it fails or is inconclusive. 3: it takes no case.",
    "list": "0, or 2 for a name that means nothing.",
    "explain": "1: the kernel fails on the case. 2: it raises, or nothing can be traced. 3: it does not take the case.",
    "identify": "1: a kernel does not keep what it claims, or that is left open. 3: there was nothing to judge.",
    "order": "1: a declared `depth=` or `order=` does not hold, or two compared orders differ. 3: no tree was found.",
    "invariance": "1: a property that a kernel declares is broken. 3: there was no case that it takes.",
    "agree": "1: some results differ. 3: there was nothing to compare.",
    "report": "0 also for a run with findings: `lastbit verify` has told these. 2: a report could not be written.",
    "diff": "1: something got worse. 3: the runs have nothing in common.",
    "golden": "1: a golden changed in a way that is not fine; `check --exact` allows no change. 3: nothing was run.",
    "bisect": "0: the change was found. 1: it was narrowed down to several.",
    "pin": "0: the case is kept, also where it was already. 3: with `--smallest`, the kernel does not fail on it.",
    "new": "`new reference`: 1 where what was written does not hold for the function.",
    "bench": "1: what a file's kernel gave meanwhile is wrong. 2: something could not be measured.",
    "calibrate": "1: a premise of the error bounds does not hold on the device.",
}
"""Command → what its exit codes mean where the table does not say it."""


def page() -> str:
    """Return the page."""
    from lastbit.cli import COMMANDS, GROUPS, make_parser

    parser = make_parser()
    [commands] = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    parts = [HEAD.format(overview=parser.format_help())]
    for task, names in GROUPS.items():
        parts.append(f"## {task}\n")
        for name in names:
            parts += [*_section(commands[name], "###"), f"Exit codes. {CODES[name]}\n"]
            parts.append(f"    lastbit {name} {COMMANDS[name][1]}\n")
    return "\n".join(parts)


def _section(parser: argparse.ArgumentParser, mark: str) -> Iterator[str]:
    """Yield what the page says of a command, and then of its actions."""
    yield f"{mark} {parser.prog}\n"
    yield f"```\n{_usage(parser)}\n```\n"
    if parser.description:
        yield f"{_text(parser.description)}\n"
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS and action.dest != "help"]
    plain = [action for action in shown if not isinstance(action, argparse._SubParsersAction)]
    if lines := [f"- {_named(action)}: {_explained(action)}" for action in plain]:
        yield "\n".join(lines) + "\n"
    for action in shown:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _section(below, f"{mark}#")


def _usage(parser: argparse.ArgumentParser) -> str:
    words = parser.format_usage().removeprefix("usage: ").split()
    return re.sub(r" \[-h\]", "", " ".join(words))


def _named(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = ""
    if action.nargs != 0:
        name = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
        value = " " + (" ".join([str(name)] * action.nargs) if isinstance(action.nargs, int) else str(name))
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _explained(action: argparse.Action) -> str:
    """Return the help of an option, with its default where the help does not say it."""
    told = _text(action.help or "")
    if action.required and action.option_strings:
        return f"{told} (required)"
    silent = action.default is False or action.default in (None, [], "", argparse.SUPPRESS) or "default" in told
    return told if silent else f"{told} (default: {action.default})"


def _text(text: str) -> str:
    """Return text whose words that Markdown would take for marks are shown as they are."""
    marked = r"(?<![\w`/.-])(--[a-z][\w-]*|-[a-z]\b|\w+=\w*|\.?\w[\w.]*/(?:[\w.:/]*\w/?)?|[A-Za-z]+@[A-Z]+)"
    return re.sub(marked, r"`\1`", text.replace("%%", "%"))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    PAGE.write_text(page(), encoding="utf-8")
