"""A function in a confined process of its own, for tests: what it returned, and how the process ended."""

import faulthandler
import gc
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lastbit.isolation.confinement import Confinement, confine
from lastbit.isolation.limits import GB, Limits

SMALL = Limits(memory=2 * GB, processes=64, file_size=1 << 20, seconds=60)
PATIENCE = 20.0


@dataclass
class Process:
    """A confined process: its guardian, what holds, and the pipe through which it answers."""

    guardian: int
    pipe: int
    confinement: Confinement
    _read: bytes = b""

    def line(self) -> str:
        """Return the next line; empty once all that can write have ended. Fails where that takes too long."""
        limit = time.monotonic() + PATIENCE
        while b"\n" not in self._read:
            assert select.select([self.pipe], [], [], max(0, limit - time.monotonic()))[0], "it says nothing"
            if not (piece := os.read(self.pipe, 1 << 16)):
                break
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def answer(self) -> Any:
        """Return what the function returned, or `{"raised": …}`."""
        return json.loads(self.line())

    def ended(self) -> int:
        """Return the exit code of the guardian, below 0 for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.guardian, 0)[1])


@contextmanager
def confined(
    folder: Path,
    function: Callable[[int], Any],
    limits: Limits = SMALL,
    *,
    readable: Sequence[Path] = (),
    before: Callable[[], object] = lambda: None,
    **options: Any,
) -> Iterator[Process]:
    """Confine a process and call `function` in it, with the descriptor that its answer goes to."""
    read, write = os.pipe()
    folder.mkdir(exist_ok=True)
    guardian = os.fork()
    if not guardian:
        os.close(read)
        _run(write, folder, function, limits, readable, before, options)
    os.close(write)
    process = Process(guardian, read, Confinement())
    try:
        process.confinement = Confinement.from_json(process.answer())
        yield process
    finally:
        os.close(read)
        _end(guardian)


def _run(
    write: int,
    folder: Path,
    function: Callable[[int], Any],
    limits: Limits,
    readable: Sequence[Path],
    before: Callable[[], object],
    options: dict[str, Any],
) -> None:
    try:
        faulthandler.disable()
        gc.freeze()  # a process of pytest has had many tests: what they left stays, and is no measure of this one
        gc.disable()
        before()
        limits = replace(limits, memory=limits.memory + _data())
        held = confine(limits, folder, readable, options.pop("device_type", "cpu"), **options)
        os.write(write, json.dumps(held.as_json).encode() + b"\n")
        try:
            answer = function(write)
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": str(error)}
        os.write(write, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _data() -> int:
    """Bytes of data that this process has, which the limit on its memory counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def _end(guardian: int) -> None:
    try:
        os.kill(guardian, signal.SIGTERM)
        os.waitpid(guardian, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def outcome(folder: Path, function: Callable[[int], Any], *needs: str, **options: Any) -> Any:
    """Call a function in a confined process; skips the test where the system lacks what it needs."""
    with confined(folder, function, options.pop("limits", SMALL), **options) as process:
        for name in needs:
            if not process.confinement.has(name):
                pytest.skip(f"this system cannot keep it from that: {process.confinement.lacks}")
        return process.answer()


def raised(answer: Any) -> str:
    """Return the name of the exception that a function ended with."""
    assert isinstance(answer, dict) and "raised" in answer, f"nothing kept it from: {answer}"
    return str(answer["raised"])


def limited(**changes: int) -> Limits:
    """Return the small limits, but for these."""
    return replace(SMALL, **changes)
