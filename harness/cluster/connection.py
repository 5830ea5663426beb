"""A cluster that is connected, and what of it a run uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lastbit.cluster.pool import LOCAL, connected
from lastbit.cluster.resources import ANY, ClusterNode, DeviceKind, chosen, device_plan, kinds_of, side_by_side
from lastbit.cluster.travel import packed
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.run import NotRun
from lastbit.verify.processes import workers_for


@dataclass(frozen=True)
class Cluster:
    """A cluster that is connected, and its kinds of devices that a run uses.

    Attributes:
        config: with the devices of the cluster.
        lacking: what was asked for by --device any, and is not there.
    """

    address: str
    config: Config
    kinds: tuple[DeviceKind, ...]
    nodes: tuple[ClusterNode, ...]
    lacking: tuple[NotRun, ...]


@contextmanager
def on_cluster(config: Config, address: str, device: str, workers: int | None) -> Iterator[Cluster]:
    """Connect to the cluster at an address, or start one here, and plan a configuration's run on the given devices.

    Raises:
        UsageError: the cluster lacks the device, or Ray is missing.
        LastbitError: the cluster cannot be used.
    """
    with packed(config) as folder, connected(address, workers, folder) as nodes:
        most = workers_for("cpu", replace(config, device_plan=DevicePlan())) if address == LOCAL else None
        has = kinds_of(nodes, workers, most)
        kinds = side_by_side(chosen(device, has), sum(node.cpus for node in nodes))
        own = replace(config, device_plan=device_plan(device, kinds))
        yield Cluster(address, own, tuple(kinds), tuple(nodes), tuple(_lacking(device, has, nodes)))


def _lacking(device: str, has: Sequence[DeviceKind], nodes: Sequence[ClusterNode]) -> Iterator[NotRun]:
    """Yield the devices that a cluster lacks, or has without lastbit being able to ask for them."""
    if all(kind.type == "cpu" for kind in has):
        yield NotRun("every kernel on an accelerator", "the cluster has none; the CPU runs Triton interpreted")
    if device == ANY and all(kind.type != "cpu" for kind in has):
        yield NotRun("every kernel on the CPU", "the cluster has no core for it")
    for other in dict.fromkeys(name for node in nodes for name in node.others):
        yield NotRun(f"every kernel on {other}", "lastbit asks a cluster for what it calls CPU and GPU")
