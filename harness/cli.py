"""The command line `lastbit`, whose commands are the modules of `lastbit.commands`."""

from __future__ import annotations

import argparse
import gc
import io
import os
import pkgutil
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from types import FrameType
from typing import Any

from lastbit import __version__
from lastbit.command_line import read_words
from lastbit.commands import former
from lastbit.errors import LastbitError, UsageError, nearest
from lastbit.reports.characters import visible

GROUPS = {
    "Check": {
        "verify": (
            "check kernels against their contracts; a 'CASE' bit for bit",
            "my_kernels --profile smoke",
        ),
        "judge": ("judge kernel files that nobody trusts, for programs", "norms.py::norm --op OP --json"),
        "list": ("list ops and contracts, kernels, regimes, layouts and properties", "kernels my_kernels"),
    },
    "Explain": {
        "explain": (
            "say why a kernel fails on a case; --stages and --trace go deeper",
            "my_kernels/norms.py::norm 'CASE' --stages",
        ),
        "identify": ("find out which contracts a kernel keeps", "my_kernels/norms.py::norm"),
        "order": (
            "find out in which order a kernel adds the terms of a sum",
            "my_kernels/norms.py::norm --device cuda",
        ),
        "invariance": (
            "find out what the bits depend on: rows, layout, the run",
            "my_kernels --property rows",
        ),
        "agree": (
            "say whether two kernels give the same bits, and where they part",
            "my_kernels/norms.py::norm my_kernels/norms.py::norm@main",
        ),
    },
    "Before you merge": {
        "report": ("write what a run found: HTML, Markdown, JUnit, SARIF, annotations", "--html report.html"),
        "diff": ("say what got better or worse from one run to another", "runs/before runs/after"),
        "golden": ("keep what kernels give, and see what changes", "check my_kernels"),
        "bisect": (
            "find the commit, or version of a package, that changed a result",
            "my_kernels::norm 'CASE' --good v1.0 --bad main",
        ),
        "pin": (
            "keep a case that failed, so that it runs first ever after",
            "my_kernels/norms.py::norm 'CASE' --reason 'wrong mean'",
        ),
    },
    "Write": {
        "new": ("write a new op, or its reference from a PyTorch function", "op softcap"),
    },
    "Measure": {
        "bench": ("measure how fast kernels are, and whether they are right", "my_kernels --device cuda"),
        "calibrate": ("measure on a device what the error bounds rest on", "--device cuda"),
    },
}
"""Task → command → what it does, and an example; `add_COMMAND` of `lastbit.commands.parsers` adds its options."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

_OF_KERNELS = ("verify", *GROUPS["Explain"], "golden", "pin")
"""Commands whose words before any option are kernels and cases of today; `golden diff` takes files."""

_OVERVIEW = """\
usage: lastbit COMMAND [KERNEL …] ['CASE' …] [--OPTION …]

Verify numerical kernels to the last bit.

{groups}

KERNEL  its path (my_kernels, my_kernels/norms.py::norm) or its name (norm)
'CASE'  the inputs of a call as a line, in quotes, which verify prints with a
        finding, or you write: 'OP x=bf16[1,70] eps=1e-06 seed=11'
lastbit COMMAND --help shows the options of a command, lastbit --version which
lastbit this is.
"""

BROKEN = 2
_ENDS = (signal.SIGTERM, signal.SIGHUP)

INTERRUPTED = 130
"""Exit code of a command that was interrupted from the keyboard: 128 and the number of the signal, as a shell says."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 all passed, 1 findings or an inconclusive kernel, 2 something broken, 3 nothing verified, 130 interrupted, 143 or
    129 ended by SIGTERM or SIGHUP. Nothing that goes wrong ends with 1, which stands for findings: an error of the
    system and a bug of lastbit end with 2.
    """
    for stream in (sys.stdout, sys.stderr):  # a character that their encoding lacks is shown by its escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] in (["explain"], ["verify"]):  # in a process of its own, which runs no kernel itself
        for variable in ("TRITON_INTERPRET", "OPENBLAS_NUM_THREADS"):  # so that a fork of it can, on the CPU
            os.environ.setdefault(variable, "1")
    if not words:
        make_parser(()).print_help()
        return BROKEN
    if told := _wrong_command(words):
        _say(told)
        return BROKEN
    if argv is None:
        gc.disable()
    parser = make_parser(words)
    options, rest = parser.parse_known_args(words)
    if "words" in options:  # those that stand behind an option, which argparse leaves
        options.words += [word for word in rest if word[:1] != "-"]
        rest = [word for word in rest if word[:1] == "-"]
    if wrong := _not_taken(rest, vars(options)):
        parser.error(f"unrecognized arguments: {wrong}")
    command = pkgutil.resolve_name(options.command)
    if argv is None:
        _keep()
    code = _guarded(lambda: int(command(options, rest)))
    if argv is None:  # Python looks for garbage once more when it ends
        _keep()
    return code


def _wrong_command(words: Sequence[str]) -> str:
    """Return what is wrong with the words as a command, and what to type; it imports no torch, which takes seconds."""
    if (now := former.modern(words)) != words:
        return f"this is written differently now; type\n\n    {shlex.join(['lastbit', *now])}\n"
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        return f"{words[0]!r} is no command{nearest(words[0], COMMANDS)} `lastbit --help` lists them"
    if words[0] in _OF_KERNELS and words[1:2] != ["diff"]:
        from lastbit.config import Config

        try:
            asked = read_words(takewhile(lambda word: word[:1] != "-", words[1:]))
            Config(folder="", kernel_folders=asked.paths).check_places()
        except UsageError as error:
            return str(error)
    return ""


def _not_taken(rest: Sequence[str], options: Mapping[str, object]) -> str:
    """Return the words that the parser did not take; those for pytest are wrong if they shorten an option of ours."""
    own = [f"--{name.replace('_', '-')}" for name in options if name != "words"]
    if options.get("takes_rest"):
        rest = [word for word in rest if word[:2] == "--" and any(o.startswith(word.partition("=")[0]) for o in own)]
    if not rest:
        return ""
    first = rest[0].partition("=")[0]
    return f"{' '.join(rest)}{nearest(first, {*own} - {first})}"  # there it names no option


def _keep() -> None:
    """Keep what is there from being searched for garbage: in torch alone that takes as long as half of its import."""
    gc.freeze()
    gc.enable()


def _guarded(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, whatever it raises."""
    received: list[int] = []
    try:
        with _terminable(received):
            code = command()
            sys.stdout.flush()  # here, where an error is still seen
            return code
    except KeyboardInterrupt:
        return 128 + received[0] if received else INTERRUPTED
    except LastbitError as error:
        _say(str(error))
    except BrokenPipeError:  # whoever reads has read enough, as in `lastbit report | head`
        _forget_output()
    except Exception as error:
        if isinstance(error, OSError):
            _forget_output()
        if isinstance(error, OSError) and error.errno is not None:  # without a number, no system refused anything
            place = "" if error.filename is None else f"{os.fspath(error.filename)!r}: "
            _say(f"{place}{error.strerror or error}")
        else:
            trace = "".join(traceback.format_exception(error))
            what = "this is a bug of lastbit, and says nothing about a kernel. Please report it with"
            _say(f"{what}\n{trace}".rstrip())
    return BROKEN


def _say(text: str) -> None:
    print(f"lastbit: {visible(text, keep=chr(10))}", file=sys.stderr)


def _forget_output() -> None:
    """Discard what standard output still holds: at its end Python would try to write it, and fail once more."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _terminable(received: list[int]) -> Iterator[None]:
    """Let the signals that end a process interrupt like Ctrl-C, so that temporary files are removed; note which came.

    CI cancels a job by SIGTERM, and a terminal that is closed sends SIGHUP, unless `nohup` lets it be ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return

    def terminated(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice, and the second must not stop the removal
        received.append(number)
        raise KeyboardInterrupt  # SystemExit would be taken for a kernel's own

    before = {number: handler for number in _ENDS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _Parser(argparse.ArgumentParser):
    """A parser, also of a command and of its actions, for which the beginning of an option is another option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})


class _Overview(_Parser):
    """The parser of all commands, whose help shows them by task."""

    def format_help(self) -> str:
        groups = (
            "\n".join([task, *(f"  {name:<11} {what}" for name, (what, _) in commands.items())])
            for task, commands in GROUPS.items()
        )
        return _OVERVIEW.format(groups="\n\n".join(groups))


def make_parser(words: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Make the parser of a command line of these words; commands that they do not name get no options.

    `lastbit --help` needs none.
    """
    parser = _Overview(prog="lastbit", usage="lastbit COMMAND [KERNEL …] ['CASE' …] [--OPTION …]")
    parser.add_argument("--version", action="version", version=f"lastbit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="lastbit", parser_class=_Parser)
    for name, (what, example) in COMMANDS.items():
        command = commands.add_parser(name, help=what, epilog=f"Example: lastbit {name} {example}")
        if name in words:
            from lastbit.commands import parsers

            getattr(parsers, f"add_{name}")(command)
    return parser
