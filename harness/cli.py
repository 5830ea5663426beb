"""The command line `lastbit`, whose commands are the modules of `lastbit.commands`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

from lastbit import __version__
from lastbit.errors import LastbitError, nearest
from lastbit.reports.characters import visible

COMMANDS = {
    "verify": ("verify", "check kernels against their rounding contracts"),
    "repro": ("verify", "run one case line again, bit for bit"),
    "judge": ("judge", "judge kernel files that nobody trusts, for a program that asks often"),
    "report": ("report", "write what a run found as HTML, Markdown, JUnit, SARIF or annotations"),
    "diff": ("diff", "say what got better or worse from one run to another"),
    "golden": ("golden", "keep what kernels give, and see what changes"),
    "bisect": ("bisect", "find the commit, or the version of a package, that changed a kernel's result"),
    "explain": ("explain", "say why a kernel fails on a case: the line, and arithmetic to check by hand"),
    "stages": ("stages", "find the first stage of a kernel that goes wrong on a case"),
    "trace": ("trace", "show line by line how the worst element of a kernel's result came about"),
    "pin": ("pin", "keep a case that failed, so that it runs first ever after"),
    "identify": ("identify", "find out which contracts a kernel keeps"),
    "invariance": ("invariance", "find out what the bits of kernels depend on: rows, layout, the run"),
    "order": ("order", "find out in which order a kernel adds the terms of a sum"),
    "agree": ("agree", "say whether two kernels give the same bits, and where they part"),
    "new": ("new", "write the files of a new op, which run at once"),
    "reference": ("reference", "write the reference of an op from a PyTorch function"),
    "list": ("listing", "list ops and their contracts, kernels, regimes, layouts and properties"),
    "bench": ("bench", "measure what verifying costs, or how fast kernels are, side by side with others"),
    "calibrate": ("calibrate", "measure on a device what the error bounds rest on"),
}
"""Command → its module in `lastbit.commands`, whose function `add_COMMAND` adds its options, and what it does."""

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
    _write_what_cannot_be_encoded()
    parser = make_parser(sys.argv[1:] if argv is None else argv)
    options, rest = parser.parse_known_args(argv)
    if unknown := _unknown(rest, vars(options)):
        parser.error(unknown)
    return _guarded(lambda: int(options.command(options, rest)))


def _unknown(rest: Sequence[str], options: Mapping[str, object]) -> str:
    """Return what is wrong with words that the parser did not take; those for pytest are wrong if they shorten ours."""
    own = [f"--{name.replace('_', '-')}" for name in options]
    if options.get("takes_rest"):
        rest = [word for word in rest if word[:2] == "--" and any(o.startswith(word.partition("=")[0]) for o in own)]
    if not rest:
        return ""
    first = rest[0].partition("=")[0]
    return f"unrecognized arguments: {' '.join(rest)}{nearest(first, {*own} - {first})}"  # there it names no option


def _guarded(command: Callable[[], int]) -> int:
    """The exit code of a command, whatever it raises."""
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
    except OSError as error:
        _forget_output()
        _say(_of_system(error))
    except Exception as error:
        _say(_of_lastbit(error))
    return BROKEN


def _say(text: str) -> None:
    print(f"lastbit: {visible(text, keep=chr(10))}", file=sys.stderr)


def _of_system(error: OSError) -> str:
    """What the operating system refused, and on which file, if it says so."""
    if error.errno is None:  # raised by Python code, which no system refused anything
        return _of_lastbit(error)
    place = "" if error.filename is None else f"{os.fspath(error.filename)!r}: "
    return f"{place}{error.strerror or error}"


def _of_lastbit(error: Exception) -> str:
    trace = "".join(traceback.format_exception(error))
    return f"this is a bug of lastbit, and says nothing about a kernel. Please report it with\n{trace}".rstrip()


def _write_what_cannot_be_encoded() -> None:
    """Let the standard streams show the escape of a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _forget_output() -> None:
    """Send what standard output still holds nowhere: at its end Python would try to write it, and fail once more."""
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


def make_parser(words: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of a command line of these words: of the commands that it does not name, it knows nothing more.

    So only the module of the command that runs is imported, and what that imports.
    """
    parser = _Parser(prog="lastbit", description="Verify numerical kernels to the last bit.")
    parser.add_argument("--version", action="version", version=f"lastbit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        if name in words:
            getattr(import_module(f"lastbit.commands.{module}"), f"add_{name}")(command)
    return parser
