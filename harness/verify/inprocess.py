"""Kernels run in this process, for commands that need their results and not only records."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lastbit.config import Config
from lastbit.errors import LastbitError, UsageError
from lastbit.interpret import install
from lastbit.result import CaseResult
from lastbit.verify.check import Subject
from lastbit.verify.plan import Plan, Planned, make_plan
from lastbit.verify.project import Project, open_project

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
    return Workplace(config, open_project(config), plan_for(config), watch, tick)


def planned(place: Workplace) -> tuple[Planned, ...]:
    """Return the items of the plan as data."""
    return place.plan.planned


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


def plan_for(config: Config) -> Plan:
    """Make the plan of a configuration with one device; `prepare` must have been called in this process.

    Raises:
        UsageError: there are several devices, or a name or case line means nothing.
    """
    return make_plan(config, torch.device(one_device(config)).type)


def one_device(config: Config) -> str:
    """Return the name of the only device of a configuration.

    Raises:
        UsageError: there are several.
    """
    if len(config.devices) != 1:
        raise UsageError(f"--device {','.join(config.devices)}: this command takes one device; run it once for each")
    return config.devices[0]
