"""The command line `lastbit`, whose commands are the modules of `harness.commands`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType

from harness.commands import bisect, calibrate, diff, golden, identify, report, stages, verify
from harness.commands.running import INTERRUPTED
from harness.errors import LastbitError

COMMANDS: tuple[ModuleType, ...] = (verify, report, diff, golden, bisect, stages, identify, calibrate)
BROKEN = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 all passed, 1 findings or an inconclusive kernel, 2 something broken, 3 nothing to run, 130 interrupted.
    """
    parser = make_parser()
    options, rest = parser.parse_known_args(argv)
    if rest and not vars(options).get("takes_rest"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with _terminable():
            return int(options.command(options, rest))
    except LastbitError as error:
        print(f"lastbit: {error}", file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def _terminable() -> Iterator[None]:
    """Within the context SIGTERM, by which CI cancels a job, interrupts like Ctrl-C: temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _terminated(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice, and the second must not stop the removal
    raise KeyboardInterrupt  # SystemExit would be taken for a kernel's own


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all commands."""
    parser = argparse.ArgumentParser(prog="lastbit", description="Verify numerical kernels to the last bit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_to(commands)
    return parser
