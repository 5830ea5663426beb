"""Kernels run in this process, for commands that look at results and not only at records."""

from __future__ import annotations

import os
import sys

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from harness.case import Case, Group
from harness.config import Config
from harness.errors import LastbitError, UsageError
from harness.inputs.bits import key_of
from harness.interpret import install
from harness.verify.plan import Plan, make_plan


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
    if device.type == "cpu":
        torch.set_num_threads(1)  # sums in PyTorch's kernels depend on it
        install()


def plan_for(config: Config) -> Plan:
    """The plan of a configuration with one device, in whose process `prepare` was called.

    Raises:
        UsageError: there are several devices, or a name or case line means nothing.
    """
    if len(config.devices) != 1:
        raise UsageError(f"--device {','.join(config.devices)}: this command takes one device; run it once for each")
    return make_plan(config, torch.device(config.devices[0]).type)


def draw(group: Group, count: int, seed_: int = 0) -> list[Case]:
    """The examples of a group, then the first `count` cases of a run with this seed, without those drawn twice."""
    drawn = dict.fromkeys(group.examples)
    if group.strategy is None or not count:
        return list(drawn)

    @seed(key_of(seed_, group.name))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(group.strategy)
    def collect(case: Case) -> None:
        drawn[case] = None

    collect()
    return list(drawn)
