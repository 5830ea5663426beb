"""Resources of a cluster to run kernels on: nodes, kinds of devices, and how many actors fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lastbit.devices import AUTO, DevicePlan
from lastbit.errors import UsageError
from lastbit.verify.processes import PER_ACCELERATOR

ANY = "any"
"""What --device is to say for each kind of device that a cluster has, once."""

_MODEL = "accelerator_type:"
_OTHERS = ("TPU", "NPU", "HPU", "neuron_cores", "RBLN", "FURIOSA")
_SHARES = 10_000  # parts of a GPU that Ray tells apart


@dataclass(frozen=True)
class ClusterNode:
    """A node of a cluster, by what Ray says of it.

    Attributes:
        model: of its GPUs, as Ray calls it; empty if it does not say.
        others: the names of resources that are accelerators which lastbit cannot ask for.
    """

    id: str
    address: str
    cpus: int
    gpus: int
    model: str = ""
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ClusterNode:
        """Make a node of an entry of `ray.nodes()`."""
        resources = told["Resources"]
        models = [name.removeprefix(_MODEL) for name in resources if name.startswith(_MODEL)]
        return cls(
            id=told["NodeID"],
            address=told["NodeManagerAddress"],
            cpus=int(resources.get("CPU", 0)),
            gpus=int(resources.get("GPU", 0)),
            model=models[0] if models else "",
            others=tuple(name for name in _OTHERS if resources.get(name)),
        )


@dataclass(frozen=True)
class DeviceKind:
    """Devices of a cluster that are alike.

    Attributes:
        device: what the run calls them: `cpu`, `cuda:0` for the first kind of GPU, `cuda:1` for the second.
        model: of a GPU, as Ray calls it.
        count: how many there are; of a CPU the cores.
        actors: how many share them.
    """

    device: str
    model: str
    count: int
    actors: int

    @property
    def type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def here(self) -> str:
        """The name by which an actor knows its device: it sees one GPU."""
        return "cpu" if self.type == "cpu" else f"{self.type}:0"

    @property
    def share(self) -> float:
        """The share of a GPU that an actor takes."""
        if self.type == "cpu":
            return 0.0
        return math.floor(_SHARES / math.ceil(self.actors / self.count)) / _SHARES

    def __str__(self) -> str:
        name = f"core{'s' * (self.count > 1)}" if self.type == "cpu" else f"GPU{'s' * (self.count > 1)}"
        return f"{self.device} ({self.count} {name}{f' of type {self.model}' if self.model else ''})"


def kinds_of(nodes: Sequence[ClusterNode], workers: int | None, most: int | None = None) -> list[DeviceKind]:
    """List every kind of device of these nodes, with `workers` actors each, or as many as the devices call for.

    On a CPU that is one for each core, but at most `most`.
    """
    found: list[DeviceKind] = []
    taken = 0
    for place, model in enumerate(dict.fromkeys(node.model for node in nodes if node.gpus)):
        own = [node for node in nodes if node.gpus and node.model == model]
        fitting = sum(max(min(node.cpus, PER_ACCELERATOR * node.gpus), 1) for node in own)
        actors = min(workers or fitting, fitting)
        found.append(DeviceKind(f"cuda:{place}", model, sum(node.gpus for node in own), actors))
        taken += actors
    if cores := sum(node.cpus for node in nodes):
        found.insert(0, DeviceKind("cpu", "", cores, workers or min(cores, most or cores)))
    return found


def chosen(text: str, has: Sequence[DeviceKind]) -> list[DeviceKind]:
    """Return the kinds that --device means on a cluster that has these.

    A type of device (`cuda`) stands for all kinds of that type, `any` for all kinds, `auto` for the GPUs, or the CPU.

    Raises:
        UsageError: the cluster lacks what is asked for; the message says what it has.
    """
    if text == ANY:
        return list(has)
    if text == AUTO:
        return [kind for kind in has if kind.type != "cpu"] or list(has)
    found: dict[str, DeviceKind] = {}
    for name in text.split(","):
        if not (meant := [kind for kind in has if name in (kind.device, kind.type)]):
            listed = ", ".join(map(str, has)) or "no device that lastbit can use"
            raise UsageError(f"device {name!r} was asked for, but the cluster has {listed}")
        found |= {kind.device: kind for kind in meant}
    return list(found.values())


def side_by_side(kinds: Sequence[DeviceKind], cores: int) -> list[DeviceKind]:
    """Limit each kind's actors so that all together fit the cores, but at least one each; GPUs are served first."""
    free = cores - sum(kind.type == "cpu" for kind in kinds)
    found: dict[str, DeviceKind] = {}
    for kind in sorted(kinds, key=lambda kind: kind.type == "cpu"):
        if kind.type == "cpu":
            free += 1
        actors = max(min(kind.actors, free), 1)
        found[kind.device] = replace(kind, actors=actors)
        free -= actors
    return [found[kind.device] for kind in kinds]


def device_plan(text: str, kinds: Sequence[DeviceKind]) -> DevicePlan:
    """Make the device plan of a run on these kinds of devices."""
    why = (
        f"from --device {text} on the cluster: {kind}, {kind.actors} actor{'s' * (kind.actors > 1)}" for kind in kinds
    )
    return DevicePlan(tuple(kind.device for kind in kinds), tuple(why))
