"""The syntax of the command line: what words mean, and how a command is written that somebody is to type.

    lastbit verify my_kernels
    lastbit explain my_kernels/norms.py::norm 'rms_norm x=bf16[1,70] weight=bf16[70] eps=1e-06 seed=11'

A word is a path of kernels, behind which `::` names one of them; or the name of a kernel; or the line of a case. All
commands read them in any order, and everything that prints a command writes them so.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from lastbit.errors import UsageError

BEHIND_PATH = "::"
_BEHIND_NAME = "@"
"""What stands between the name of a kernel and a git revision, whose own name may hold a slash."""

_EXAMPLE = "'OP x=bf16[1,70] weight=bf16[70] seed=11'"


@dataclass(frozen=True)
class Asked:
    """The paths, names and case that the words of a command line give.

    Attributes:
        paths: files and folders of kernels, each once.
        kernels: names of kernels.
        cases: lines of cases, not yet parsed.
    """

    paths: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()

    def case(self, command: str) -> str:
        """Return the one case of a command that takes one.

        Raises:
            UsageError: there is none, or there are several.
        """
        if len(self.cases) == 1:
            return self.cases[0]
        said = f"takes one case, and was given {len(self.cases)}" if self.cases else "needs a case"
        where = "give its line, in quotes, as verify prints it with a finding or as you write it"
        raise UsageError(f"{command} {said}; {where}: {_EXAMPLE}")

    def without_case(self, command: str) -> Asked:
        """Return this, of a command that takes no case.

        Raises:
            UsageError: there is one.
        """
        if self.cases:
            raise UsageError(f"{command} takes kernels and no case, as which {self.cases[0]!r} was read")
        return self


def read_words(words: Iterable[str]) -> Asked:
    """Return what words name: paths, kernels and cases.

    Raises:
        UsageError: a word is empty or a part of a case, or one path has the name of a kernel behind it and another has
            not.
    """
    paths, kernels, cases, whole = dict[str, str](), list[str](), list[str](), list[str]()
    for word in words:
        if not word.strip():
            raise UsageError(f"{word!r} names no kernel and no case; a variable of the shell may be empty")
        first, *rest = word.split(maxsplit=1)
        if not rest and re.match(r"\w+=", word) and not os.path.exists(word):
            raise UsageError(f"{word!r} is a part of a case; put quotes around all of its line, as in {_EXAMPLE}")
        is_case = rest and "=" in word and "/" not in first and BEHIND_PATH not in first
        if is_case and not os.path.exists(word):
            cases.append(word)
            continue
        path, mark, name = word.partition(BEHIND_PATH)
        if not mark:
            own = word.partition(_BEHIND_NAME)[0]
            is_path = "/" in own or own.endswith(".py") or os.path.exists(word)
            path, name = (word, "") if is_path else ("", word)
        if path:
            paths.setdefault(path, word)
            whole += [path] * (not name)
        if name:
            kernels.append(name)
    if whole and (named := [word for path, word in paths.items() if path not in whole]):
        raise UsageError(
            f"{named[0]!r} names one kernel and {whole[0]!r} all that are there; name those of the other path, too, as "
            f"in {whole[0]}{BEHIND_PATH}NAME"
        )
    return Asked(tuple(paths), tuple(kernels), tuple(cases))


def command(name: str, kernel: str = "", case: str = "", options: str = "") -> str:
    """Return a command as a shell takes it, which asks for a kernel and a case.

    `options` follow as they are, except for paths of kernels, which they give as `--kernels PATH`: one stands before
    the name of the kernel.
    """
    words, paths = list[str](), list[str]()
    given = iter(shlex.split(options))
    for word in given:
        if word == "--kernels":
            paths.append(next(given, ""))
        else:
            words.append(word)
    return shlex.join(["lastbit", name, *kernel_words(paths, [kernel] if kernel else []), *[case] * bool(case), *words])


def kernel_words(paths: Iterable[str], kernels: Iterable[str]) -> list[str]:
    """Return the words by which `read_words` finds these paths, and these kernels in them."""
    paths, kernels = [path.rstrip("/") or path for path in paths], list(kernels)
    if len(paths) == 1 and kernels:
        return [f"{paths[0]}{BEHIND_PATH}{name}" for name in kernels]
    return [
        *(path if re.fullmatch(r"[\w.-]+", path) or _alone(path).paths else f"./{path}" for path in paths),
        *(name if _alone(name).kernels == (name,) else f"{BEHIND_PATH}{name}" for name in kernels),
    ]


def _alone(word: str) -> Asked:
    """Return what a word is taken for where it stands alone."""
    try:
        return Asked() if word.startswith("-") else read_words([word])
    except UsageError:
        return Asked()
