"""A process on a node of a Ray cluster that runs items of the plan, one after the other.

Whatever comes from it is JSON. It says which device it has, makes the plan that all others make, and then runs the
items that it is handed. Kernels run in one thread; another one tells of them, and sees when a case takes too long.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import socket
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastbit.cluster.travel import Travelled, unpacked
from lastbit.files import PACKAGE

if TYPE_CHECKING:
    from lastbit.isolation.elsewhere import Kernels
    from lastbit.verify.plan import Plan
    from lastbit.verify.power import Separable


class Actor:
    """Runs items on one device, which this process calls `cuda:0` if it is an accelerator, and the run `called`."""

    def __init__(self, devices: list[str], called: str, run: str) -> None:
        self._devices, self._called, self._run = devices, called, run
        self._device = devices[-1]
        self._asked: Travelled | None = None
        self._plan: Plan | None = None
        self._kernels: Kernels | None = None
        self._separable: Separable | None = None
        self._printed: list[tuple[str, str]] = []
        self._files = Path.cwd()
        self._thread = ThreadPoolExecutor(1)

    def where(self) -> str:
        """Return node, process and accelerator, as Ray calls them, in JSON."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        accelerator = ",".join(gpus) if self._device != "cpu" else ""
        self._files = Path.cwd() / f"{self._run}-{accelerator}"  # of those that share it, gone with what Ray has sent
        return json.dumps(
            {
                "node": context.get_node_id(),
                "host": socket.gethostname(),
                "address": ray.util.get_node_ip_address(),
                "pid": os.getpid(),
                "accelerator": accelerator,
            }
        )

    def start(self) -> str:
        """Make the plan: `items`, `not_run`, what results depend on, what was `printed`; or why it was `refused`."""
        import torch

        from lastbit.calibrate import load_premises
        from lastbit.errors import LastbitError
        from lastbit.trees import MixedTrees
        from lastbit.verify.processes import versions
        from lastbit.verify.worker import prepare

        self._asked = asked = unpacked(Path.cwd(), self._devices)
        device = torch.device(self._device)
        prepare(device)
        name = _tried(device)
        try:
            self._plan = plan = self._thread.submit(self._planned).result()
        except LastbitError as error:
            return json.dumps({"refused": asked.at_home(str(error)), "mixed": isinstance(error, MixedTrees)})
        gc.freeze()  # what was imported and loaded stays: no item has to look through it for garbage
        told = {
            "items": [{**asdict(item), "device": self._called} for item in plan.planned],
            "not_run": [asdict(note) for note in plan.not_run],
            "device": name,
            "premises": load_premises(device).device,
            "versions": {**versions(), "lastbit_code": code_hash()},
            "isolated": str(self._kernels.confinement) if self._kernels else "",
            "printed": self._printed,
        }
        return asked.at_home(json.dumps(told))

    def run(self, place: int, failed: list[tuple[str, str]]) -> Iterator[str]:
        """Perform an item of the plan, and yield its events, in batches."""
        from lastbit.cluster.stream import Stream
        from lastbit.reports.records import dump
        from lastbit.verify.power import Separable

        assert self._asked is not None and self._plan is not None
        known = [(kernel, self._device) for kernel, device in failed if device == self._called]
        self._separable = self._separable or Separable()
        stream = Stream(self._asked.config, self._called, dump, self._files, known, self._separable)
        self._thread.submit(self._perform, place, stream)
        for batch in stream.batches():
            yield self._asked.at_home(json.dumps(batch))

    def _planned(self) -> Plan:
        import torch

        from lastbit.kernel import load_kernels
        from lastbit.timing import PLANNING, Clock, listening, timed
        from lastbit.trees import imported
        from lastbit.verify.isolating import kernels_for
        from lastbit.verify.plan import make_plan

        torch.set_num_threads(1)  # of this thread, in which all kernels run
        assert self._asked is not None
        self._listening = listening(Clock())
        self._listening.__enter__()
        config, device_type = self._asked.config, torch.device(self._device).type
        if config.isolate:
            self._files.mkdir(exist_ok=True)
            self._kernels = kernels_for(config, device_type, caches=self._files / "compiled")
            self._kernels.printed = lambda *said: self._printed.append(said)
        with timed(PLANNING):
            kernels = self._kernels
            load = (kernels.declared, lambda: kernels.imported) if kernels else (load_kernels, imported)
            return make_plan(config, device_type, *load)

    def _perform(self, place: int, stream: Any) -> None:
        from lastbit.diagnosing.trace import stages_as_text
        from lastbit.orders.declared_depth import too_deep
        from lastbit.verify.item_run import CaseFailed, Stopped, perform

        assert self._plan is not None
        if self._kernels:
            self._kernels.printed = stream.printed
        try:
            with suppress(CaseFailed, Stopped):
                perform(self._plan.items[place], stream, self._kernels, stages_as_text, too_deep)
        except BaseException:
            traceback.print_exc()
        finally:
            stream.end()


def _tried(device: Any) -> str:
    """Compute on the device and return its name; raise if it cannot be used."""
    import torch

    from lastbit.calibrate import load_premises

    if device.type == "cpu":
        return ""
    assert torch.ones(8, device=device).sum().item() == 8.0
    load_premises(device)
    return str(torch.get_device_module(device).get_device_name(device))


def code_hash() -> str:
    """Hash the code of lastbit that this process runs."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]
