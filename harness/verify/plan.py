"""The plan of a run: which kernel runs which group of cases on which device, and what does not run, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from harness.calibrate import load_premises
from harness.case import Group, parse_case
from harness.config import Config
from harness.errors import UsageError, unknown
from harness.kernel import Kernel
from harness.result import NotRun
from harness.verify.check import Subject
from harness.verify.project import Project, open_project


@dataclass(frozen=True)
class Item:
    """One kernel on one device with one group of cases."""

    subject: Subject
    group: Group

    @property
    def id(self) -> str:
        return f"{self.subject.kernel.op}-{self.subject.kernel.name}-{self.subject.device}-{self.group.name}"


@dataclass(frozen=True)
class Plan:
    """Items in order, and what is left out."""

    items: tuple[Item, ...]
    not_run: tuple[NotRun, ...]
    cases_per_group: int

    @property
    def cases(self) -> int:
        """Number of cases that the items will run unless they fail early."""
        return sum(len(i.group.examples) + self.cases_per_group * (i.group.strategy is not None) for i in self.items)


def make_plan(config: Config, device_type: str) -> Plan:
    """The plan for the devices of one type, `cpu` or an accelerator's.

    Raises:
        UsageError: an op, kernel, device, contract or case line is unknown or malformed.
    """
    project = open_project(config)
    kernels = _selected(project, config)
    devices = [d for d in map(parse_device, dict.fromkeys(config.devices)) if d.type == device_type]
    items: list[Item] = []
    not_run: list[NotRun] = []
    for device in devices:
        for kernel in kernels:
            if kernel.devices and device.type not in kernel.devices:
                not_run.append(NotRun(f"{kernel.name} on {device}", f"declared for {', '.join(kernel.devices)} only"))
                continue
            premises = replace(load_premises(device), depth=kernel.depth)
            subject = Subject(kernel, project.op(kernel.op), device, premises)
            items += [Item(subject, group) for group in _groups(project, kernel, config)]
    return Plan(tuple(items), tuple(not_run), config.cases_per_group)


def parse_device(name: str) -> torch.device:
    """The torch device of that name.

    Raises:
        UsageError: there is no such device on this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; write cpu, cuda or cuda:1") from None
    if device.type == "cpu":
        return device
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        present = "only cpu" if here is None else f"cpu and {here.type}"
        raise UsageError(f"device {name!r} was asked for, but this machine has {present}")
    if ":" in name and device.index >= (count := torch.accelerator.device_count()):
        raise UsageError(f"device {name!r} was asked for, but this machine has {count} of them, counted from 0")
    return device


def _selected(project: Project, config: Config) -> list[Kernel]:
    kernels = project.kernels()
    for name in config.ops:
        project.op(name)
    for name in config.kernels:
        if name not in {k.name for k in kernels}:
            raise unknown("kernel", name, (k.name for k in kernels))
    return [
        k
        for k in kernels
        if (not config.ops or k.op in config.ops) and (not config.kernels or k.name in config.kernels)
    ]


def _groups(project: Project, kernel: Kernel, config: Config) -> Iterator[Group]:
    if config.lines:
        cases = [parse_case(line) for line in config.lines]
        for case in cases:
            project.op(case.op)
        if own := tuple(case for case in cases if case.op == kernel.op):
            yield Group("lines", examples=own)
    else:
        yield from project.groups(kernel.op, kernel.accepts, small=config.small)
