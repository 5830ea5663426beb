"""A process that runs items of the plan, one after the other, on this machine or on a node of a Ray cluster.

Whatever comes from it is JSON. It makes the plan that all others make, and then runs the items that it is handed.
Kernels run in one thread; another one tells of them, and sees when a case takes too long.
"""

from __future__ import annotations

import gc
import hashlib
import traceback
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lastbit.calibrate import load_premises
from lastbit.config import Config
from lastbit.diagnosing.trace import stages_as_text
from lastbit.errors import LastbitError
from lastbit.files import PACKAGE
from lastbit.isolation.elsewhere import Kernels
from lastbit.kernel import load_kernels
from lastbit.orders.of_kernel import too_deep
from lastbit.reports.records import dump
from lastbit.timing import PLANNING, Clock, listen, timed
from lastbit.trees import MixedTrees, imported
from lastbit.verify.dependencies import Dependencies
from lastbit.verify.isolating import kernels_for
from lastbit.verify.item_run import CaseFailed, Stopped, perform
from lastbit.verify.plan import Plan, later_imports, make_plan
from lastbit.verify.processes import versions
from lastbit.verify.result_recorder import CaseRecorder
from lastbit.verify.worker import prepare

# As Python has them, looking for garbage took 5 % of the time of cases.
_GARBAGE = (10_000, 20, 10)
"""Objects made, and younger collections, after which Python looks for garbage."""


class Actor:
    """Runs items on devices of one type.

    `device` is one of them; the run calls it `called`, if it has another name there and is the only one. `folder` is
    for files by which processes of one machine take turns, and `caches` for what isolated kernels compile. Its
    `recorder` tells what becomes of items.
    """

    def __init__(self, config: Config, device: str, folder: Path, called: str = "", caches: Path | None = None) -> None:
        self._config, self._device, self._called, self._caches = config, device, called, caches
        self._plan: Plan | None = None
        self._kernels: Kernels | None = None
        self._printed: list[tuple[str, str]] = []
        self._dependencies = Dependencies(config) if config.keeps else None
        self.recorder = CaseRecorder(config, dump, folder, called)
        self._thread = ThreadPoolExecutor(1)

    def start(self) -> dict[str, Any]:
        """Make the plan: `items`, `not_run`, what results depend on, what was `printed`; or why it was `refused`."""
        device = torch.device(self._device)
        prepare(device)
        name = ""
        if device.type != "cpu":  # it raises where the device cannot be used
            assert torch.ones(8, device=device).sum().item() == 8.0
            load_premises(device)
            name = str(torch.get_device_module(device).get_device_name(device))
        try:
            self._plan = plan = self._thread.submit(self._planned).result()
        except LastbitError as error:
            return {"refused": refusal(error)}
        gc.freeze()  # what was imported and loaded stays: no item has to look through it for garbage
        if device.type == "cpu":  # where garbage holds no memory of a device
            gc.set_threshold(*_GARBAGE)
        return {
            "items": [{**asdict(item), "device": self._called or item.device} for item in plan.planned],
            "not_run": [asdict(note) for note in plan.not_run],
            "depends": self._dependencies.of(plan) if self._dependencies else [],
            "device": name,
            "premises": load_premises(device).device,
            "versions": {**versions(), "lastbit_code": code_hash()},
            "isolated": str(self._kernels.confinement) if self._kernels else "",
            "printed": self._printed,
        }

    def run(self, place: int, failed: Collection[tuple[str, str]]) -> Iterator[list[list[Any]]]:
        """Perform an item of the plan, and yield its events, in batches."""
        called = self._called
        self.recorder.begin([(k, self._device if called else d) for k, d in failed if d == (called or d)])
        self._thread.submit(self._perform, place)
        yield from self.recorder.batches()

    def _planned(self) -> Plan:
        torch.set_num_threads(1)  # of this thread, in which all kernels run
        listen(Clock())
        device_type = torch.device(self._device).type
        if self._config.isolate:
            self._kernels = kernels_for(self._config, device_type, caches=self._caches)
            self._kernels.printed = lambda *said: self._printed.append(said)
        with timed(PLANNING), self._listening():
            kernels = self._kernels
            load = (kernels.declared, lambda: kernels.imported) if kernels else (load_kernels, imported)
            plan = make_plan(self._config, device_type, *load, refusing=True)
        self._check = later_imports(self._config)
        return plan

    def _listening(self) -> AbstractContextManager[None]:
        return self._dependencies.listening() if self._dependencies else nullcontext()

    def _perform(self, place: int) -> None:
        assert self._plan is not None
        item = self._plan.items[place]
        if self._kernels:
            self._kernels.printed = lambda *said: self.recorder.tell("printed", *said)
        try:
            with suppress(CaseFailed, Stopped), self._listening():
                perform(item, self.recorder, self._kernels, stages_as_text, too_deep)
            if self._dependencies:
                self.recorder.tell("reads", item.id, *self._dependencies.read_by(item.subject.kernel.name))
        except BaseException:
            traceback.print_exc()
        try:
            self._check()
        except LastbitError as error:
            self.recorder.tell("refused", refusal(error))
        finally:
            self.recorder.end()


def refusal(error: LastbitError) -> dict[str, Any]:
    """Return the reason why a run means nothing, as data."""
    return {"reason": str(error), "mixed": isinstance(error, MixedTrees)}


def code_hash() -> str:
    """Hash the code of lastbit that this process runs."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]
