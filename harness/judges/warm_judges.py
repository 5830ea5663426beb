"""A pool of judges that stay warm: processes with references loaded, each of which judges one file after the other.

A judge loads no kernel: that of a file runs in kernel processes. Threads of the process that asked hand the files out.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from lastbit.config import LONGEST_TIMEOUT, Config
from lastbit.devices import DevicePlan, plan_devices
from lastbit.errors import UsageError
from lastbit.judges.judge_file import judge_file, ready, unjudged
from lastbit.judges.opening import open_desk
from lastbit.judges.question import JudgeQuestion
from lastbit.reports.judged import FileVerdict
from lastbit.result import Verdict
from lastbit.verify.processes import workers_for
from lastbit.verify.worker import Worker, WorkerEnded

# A file that ends two judges is what ends them; a third would cost as much again.
_TRIES = 2
"""How often a file is given to a judge: one that ends may have ended for another reason than the file."""


class Judges:
    """Judges that wait for files, as a context manager.

        with lastbit.Judges(op="OP", contract="OPTION", fail_fast=True) as judges:
            futures = [judges.judge(path) for path in paths]
            for future in futures:
                print(future.result().verdict)

    Args:
        workers: processes; by default as many as `lastbit verify` has, or one for each device if it asks for `speed`.
        device: of the kernels; several, joined by commas, are shared out among the judges.
        projects: folders with references/ and cases/ of your own ops.
        asked: fields of a `JudgeQuestion` that hold for every file unless its own call says otherwise. With an op,
            judges evaluate some of its cases before the first file comes.
    """

    def __init__(
        self, workers: int | None = None, *, device: str = "cpu", projects: Sequence[str | Path] = (), **asked: Any
    ) -> None:
        devices = plan_devices(device).devices
        count = default_count(devices, speed=bool(asked.get("speed"))) if workers is None else workers
        configs = _configs(devices, tuple(map(str, projects)), count)
        self._asked, self._closed = asked, False
        self._usual = JudgeQuestion(**asked) if "op" in asked else None
        self._turns = TemporaryDirectory(prefix="judges-")
        opening = partial(open_desk, turns=self._turns.name)
        self._workers = {worker: one.devices[0] for one in configs for worker in [Worker(one, opening=opening)]}
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._threads = ThreadPoolExecutor(max_workers=len(configs), thread_name_prefix="judge")

    def __enter__(self) -> Judges:
        for worker in self._workers:
            self._threads.submit(self._warm, worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=error is not None)
        for worker in self._workers:
            worker.__exit__(kind, error, trace)
        self._turns.cleanup()

    def judge(self, path: str | Path, **asked: Any) -> Future[FileVerdict]:
        """Judge the kernel of a file, in the future; see `JudgeQuestion` for what can be asked.

        The future raises `UsageError` where the question means nothing, such as an op that there is not. Whatever is
        wrong with the file is its verdict.
        """
        question = JudgeQuestion(**{**self._asked, **asked})
        return self._threads.submit(self._judged, str(path), question)

    def _warm(self, worker: Worker) -> None:
        """Let a judge begin before the first file comes; a failure here repeats when a file comes."""
        try:
            worker.do(ready, self._usual)
        finally:
            self._idle.put(worker)

    def _judged(self, path: str, question: JudgeQuestion) -> FileVerdict:
        """Judge a file with an idle judge; if that judge ends, with the one that takes its place."""
        worker, reason = self._idle.get(), ""
        try:
            for _ in range(_TRIES):
                if not self._closed:
                    try:
                        return worker.do(judge_file, path, question)
                    except WorkerEnded as ended:
                        reason = str(ended)
            return unjudged(path, question, self._workers[worker], verdict=Verdict.ERRORED, reason=reason)
        finally:
            self._idle.put(worker)


def _configs(devices: Sequence[str], projects: tuple[str, ...], count: int) -> list[Config]:
    """Configure each judge for one device, all devices in turn; a kernel's own process has a limit of its own."""
    plans = [DevicePlan((device,), ("of the judge",)) for device in devices]
    configs = [Config(folder="", device_plan=plan, projects=projects, timeout=LONGEST_TIMEOUT) for plan in plans]
    if count < 1:
        raise UsageError(f"{count} judges judge nothing; give 1 or more")
    return [configs[number % len(configs)] for number in range(count)]


def default_count(devices: Sequence[str], *, speed: bool = False) -> int:
    """Choose the default number of judges for devices: as many as a run has workers.

    Where times are taken, no two judges share a device.
    """
    if speed:
        return len(devices)
    plan = DevicePlan(tuple(devices), ("of the judges",) * len(devices))
    return max(len(devices), *(workers_for(type_, Config(folder="", device_plan=plan)) for type_ in plan.types))


def judge(path: str | Path, *, device: str = "cpu", projects: Sequence[str | Path] = (), **asked: Any) -> FileVerdict:
    """Judge the kernel of one file; a program that has several files keeps `Judges`, which start once.

        verdict = lastbit.judge("kernel.py", op="OP", contract="OPTION")

    Args:
        path: the file.
        device: the one device that it is judged on.
        projects: folders with references/ and cases/ of your own ops.
        asked: see `lastbit.judges.question.JudgeQuestion`.

    Raises:
        UsageError: the question means nothing, such as an op that there is not.
    """
    with Judges(1, device=device, projects=projects, **asked) as judges:
        return judges.judge(path).result()
