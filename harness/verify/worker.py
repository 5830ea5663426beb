"""Kernels run in this process or in a worker process, for commands that need their results and not only records.

A kernel may end its process, or hang where only the end of the process stops it. The process that asks for the work
goes on: it learns which case was under way, and starts another process for the next work. The two send each other
pickled objects through a channel: work and its arguments one way, results and exceptions the other.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from lastbit.case import parse_case
from lastbit.children.channel import Channel
from lastbit.children.child import ChildProcess, next_message, too_long
from lastbit.config import Config
from lastbit.errors import DeviceLost, LastbitError, UsageError
from lastbit.interpret import install
from lastbit.result import CaseResult
from lastbit.verify.check import Subject, first_line
from lastbit.verify.device_memory import is_lost
from lastbit.verify.notes import Planned
from lastbit.verify.plan import Plan, later_imports, make_plan
from lastbit.verify.processes import child_for
from lastbit.verify.project import Project, open_project

P = ParamSpec("P")
T = TypeVar("T")
Watch = Callable[[object], AbstractContextManager[object]]
"""Makes the context in which a case runs, so that something may be done about one that hangs or ends its process."""

Tick = Callable[[CaseResult], None]
"""Takes note of a result, for a display of progress."""


def unwatched(case: object) -> AbstractContextManager[object]:
    """Run a case without protection: if it hangs or ends its process, nothing intervenes."""
    return nullcontext()


@dataclass(frozen=True)
class Workplace:
    """The configuration, project and plan at hand in a process that runs kernels."""

    config: Config
    project: Project
    plan: Plan
    watch: Watch = unwatched
    tick: Tick = lambda result: None

    @property
    def subjects(self) -> dict[str, Subject]:
        """The kernels of the plan by name, in order."""
        return {item.subject.kernel.name: item.subject for item in self.plan.items}


def open_workplace(config: Config, watch: Watch, tick: Tick) -> Workplace:
    """Make this process one that runs the kernels of a configuration with one device, and load them.

    Raises:
        UsageError: there are several devices, or a name or case line means nothing.
        LastbitError: Triton was imported before, and decided otherwise.
    """
    prepare(torch.device(one_device(config)))
    project = open_project(config)
    return Workplace(config, project, plan_for(config, project), watch, tick)


def planned(place: Workplace) -> tuple[Planned, ...]:
    """Return the items of the plan as data."""
    return place.plan.planned


def on_case(place: Workplace, work: Callable[..., T], kernel: str, line: str, /, **options: Any) -> T:
    """Do work on a kernel and the case of a line; the process that started this one watches how long it takes."""
    return work(place.subjects[kernel], parse_case(line), watch=place.watch, **options)


def prepare(device: torch.device) -> None:
    """Make this process run Triton kernels on `device`: interpreted on the CPU, compiled elsewhere.

    Raises:
        LastbitError: Triton was imported before, and decided otherwise.
    """
    mode = "1" if device.type == "cpu" else "0"
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET", "0") != mode:
        raise LastbitError(
            f"triton was imported before TRITON_INTERPRET={mode}, which {device} needs; set it and retry"
        )
    os.environ["TRITON_INTERPRET"] = mode
    torch.set_num_threads(1)  # sums in PyTorch's kernels depend on it, and processes share the cores
    if device.type == "cpu":
        install()


def plan_for(config: Config, project: Project | None = None) -> Plan:
    """Make the plan of a configuration with one device; `prepare` must have been called in this process.

    `project` is that of the configuration, if it is open already.

    Raises:
        UsageError: there are several devices, or a name or case line means nothing.
    """
    return make_plan(config, torch.device(one_device(config)).type, project=project)


def one_device(config: Config) -> str:
    """Return the name of the only device of a configuration.

    Raises:
        UsageError: there are several.
    """
    if len(config.devices) != 1:
        raise UsageError(f"--device {','.join(config.devices)}: this command takes one device; run it once for each")
    return config.devices[0]


Opening = Callable[[Config, Watch, Tick], Workplace]
"""Makes a process one that does work for a configuration."""

LOG = "worker.log"
"""The file in the folder of a run that takes what the processes of its commands print."""

# Arbitrary: only what is said between two looks waits for it.
_PAUSE = 0.5  # seconds between two looks at a process that says nothing
# A worker stops a case at the limit itself; what takes longer is in a C function that does not return.
_GRACE = 5.0  # seconds that a process has to end itself


class WorkerEnded(LastbitError):
    """The process ended in the middle of its work.

    Attributes:
        case: the case that was under way; empty if none was.
    """

    def __init__(self, reason: str, case: str = "") -> None:
        super().__init__(f"{reason}, in {case}" if case else reason)
        self.case = case


class Worker:
    """A process that runs the kernels of a configuration with one device, as a context manager.

    It is started for the first work, and once more after it has ended or lost its device. `tick` is told each result
    that the work tells. `launcher` stands before the command that starts it, and `environ` is added to its environment.
    `opening`, a function of a module, makes its `Workplace`. What it prints goes to a file in the folder of the
    configuration, if that has one.
    """

    def __init__(
        self,
        config: Config,
        tick: Tick = lambda result: None,
        *,
        launcher: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
        opening: Opening = open_workplace,
    ) -> None:
        self._config, self._tick, self._launcher, self._environ = config, tick, launcher, environ
        self._opening = opening
        self._device_type = one_device(config).partition(":")[0]
        self._child: ChildProcess | None = None
        self._case, self._began = "", 0.0

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(0.0 if error else _GRACE)

    def do(self, work: Callable[Concatenate[Workplace, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, a function of a module, in the process, and return its result.

        Raises:
            WorkerEnded: the process ended, or had to be ended because a case took too long.
            DeviceLost: the work raised; the process cannot use its device any more, and is ended.
            LastbitError: the work raised.
        """
        self.open()
        self._send((work, args, kwargs))
        result: T = self._outcome()
        return result

    def open(self) -> None:
        """Start the process, unless it runs.

        Raises:
            LastbitError: its opening raised, or ended it.
        """
        if self._child is not None:
            return
        folder = self._config.folder
        with Path(folder, LOG).open("ab") if folder else nullcontext() as log:
            self._child = child_for(
                self._config, self._device_type, serve, log, self._launcher, self._environ, written=pickled
            )
        self._send((self._config, self._opening))
        self._outcome()

    def kill(self) -> None:
        """End the process at once, for another thread: work that is under way there raises `WorkerEnded`."""
        if (child := self._child) is not None:
            child.kill()

    def _send(self, content: object) -> None:
        assert self._child is not None
        try:
            self._child.channel.send(content)
        except OSError:  # it ended while it had nothing to do
            raise self._ended() from None

    def _outcome(self) -> Any:
        """Return the outcome of the work, after the messages about its cases and their results."""
        assert self._child is not None
        while True:
            try:
                while (message := next_message(self._child.channel, _PAUSE)) is None:
                    if self._case and time.monotonic() > self._began + self._config.timeout + _GRACE:
                        self._child.kill()  # a kernel may have stopped the clock
                    if self._child.silent:
                        raise self._ended()
            except EOFError:
                raise self._ended() from None
            kind, content = pickle.loads(message)
            match kind:
                case "begins":
                    self._case, self._began = content, time.monotonic()
                case "over":
                    self._case = ""
                case "tick":
                    self._tick(content)
                case "raised":
                    if isinstance(content, DeviceLost):
                        self._end(0.0)
                    raise content
                case _:
                    return content

    def _ended(self) -> WorkerEnded:
        case, took = self._case, time.monotonic() - self._began
        code = self._end(_GRACE)
        if not case:
            return WorkerEnded(f"the process that ran kernels ended outside of a case, with exit code {code}")
        if took >= self._config.timeout:
            return WorkerEnded(too_long(self._config.timeout), case)
        return WorkerEnded("the process died without an exception", case)

    def _end(self, patience: float) -> int | None:
        """Let the process end, kill it if it does not in time, and return its exit code."""
        child, self._child, self._case = self._child, None, ""
        return None if child is None else child.end(patience)


class _Pickler(pickle.Pickler):
    """Pickler that sends 8-bit floats as bytes: torch 2.13 cannot read its own pickles of them."""

    def reducer_override(self, sent: object) -> Any:
        if isinstance(sent, torch.Tensor) and sent.is_floating_point() and sent.itemsize == 1:
            return methodcaller("view", sent.dtype), (sent.view(torch.uint8),)
        return NotImplemented


def pickled(content: object) -> bytes:
    """Pickle an object so that `pickle.loads` can restore it in another process."""
    into = io.BytesIO()
    _Pickler(into).dump(content)
    return into.getvalue()


def serve(descriptor: int) -> None:
    """Do the work that comes through the channel until the sender closes it, or this process is interrupted."""
    channel = Channel(socket.socket(fileno=descriptor), written=pickled)

    def say(kind: str, content: object = None) -> None:
        channel.send((kind, content))

    def told() -> Any:
        while (message := channel.arrived()) is None:
            pass
        return pickle.loads(message)

    def answer(place: Workplace, work: Any, args: Any, kwargs: Any) -> tuple[str, object]:
        """Do some work; what it returns or raises holds tensors of a device, and is let go with the answer."""
        kind, content = _tried(work, place, *args, **kwargs)
        if kind == "returned" and (failed := _tried(check))[0] == "raised":
            return failed
        if kind == "raised" and is_lost(torch.device(one_device(place.config))):
            lost = f"{content}; its process cannot use the device any more, and another one goes on"
            return kind, DeviceLost(lost)
        return kind, content

    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        config, opening = told()
        kind, place = _tried(opening, config, _watch(config.timeout, say), partial(say, "tick"))
        say(kind, None if isinstance(place, Workplace) else place)
        check = later_imports(config)
        while isinstance(place, Workplace):
            say(*answer(place, *told()))
            sys.stdout.flush()


def _watch(limit: float, say: Callable[[str, object], None]) -> Watch:
    """Make contexts that announce the case under way, and end the process if it takes too long.

    Nothing else stops a kernel that hangs in native code: faulthandler needs neither its thread nor the interpreter.
    """

    @contextmanager
    def watch(case: object) -> Iterator[None]:
        say("begins", str(case))
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            say("over", None)

    return watch


def _tried(work: Callable[..., object], *args: object, **kwargs: object) -> tuple[str, Any]:
    """Call a function; return "returned" and its result, or "raised" and a `LastbitError`."""
    try:
        return "returned", work(*args, **kwargs)
    except LastbitError as error:
        return "raised", error
    except Exception as error:
        traceback.print_exc()
        return "raised", LastbitError(first_line(error))
