"""`lastbit verify --cluster`: a run on a Ray cluster, watched and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lastbit.cluster.cluster_run import Cluster, on_cluster
from lastbit.cluster.ray_calls import RayPool
from lastbit.commands.running import Interrupted, import_ahead, kept, with_why
from lastbit.config import Config
from lastbit.reports import records
from lastbit.reports.characters import visible
from lastbit.reports.progress import RunProgress
from lastbit.run import Run

if TYPE_CHECKING:
    from lastbit.cluster.cluster_run import TeamsWork

_AFTERWARDS = ("lastbit.cluster.cluster_run", "pandas", "lastbit.reports.terminal")
"""Modules that a run needs once it is connected, and that take seconds to import."""


def execute_on_cluster(
    config: Config, *, address: str, device: str, workers: int | None, explaining: bool = False
) -> Run:
    """Run what `config` says on the devices of a cluster that --device means, and keep the records in its folder.

    With `explaining`, failures on devices that this machine has, too, are explained.

    Raises:
        UsageError: the cluster lacks the device, or Ray is missing.
        LastbitError: the cluster cannot be used, or the run could not be planned.
        Interrupted: from the keyboard; what was recorded is kept.
    """
    import_ahead(*_AFTERWARDS)
    with on_cluster(config, address, device, workers) as cluster:
        print(visible(str(cluster.config.device_plan), keep="\n"), flush=True)
        worked = _followed(cluster)
    if worked.interrupted and not worked.planned:
        raise Interrupted(None)
    run = kept(worked.run, Path(config.folder))
    if worked.interrupted:
        raise Interrupted(run)
    return with_why(cluster.config, run, elsewhere=_elsewhere(run)) if explaining else run


def _followed(cluster: Cluster) -> TeamsWork:
    """Run the items on the actors of a cluster while showing progress."""
    from lastbit.cluster.cluster_run import work_on

    with RunProgress() as progress, _actors(cluster.config) as pool:
        return work_on(cluster, pool, parse=records.parse, tell=progress.advance, plan=progress.set_total)


@contextmanager
def _actors(config: Config) -> Iterator[RayPool]:
    pool = RayPool(config.devices)
    try:
        yield pool
    finally:
        pool.close()


def _elsewhere(run: Run) -> Mapping[str, str]:
    """Map each device of a run that this machine lacks to the reason why nothing is explained there."""
    devices = dict.fromkeys(result.device for result in run.results if result.device != "cpu")
    names = dict(name.split(": ", 1) for name in run.environment["accelerators"].split(", ") if ": " in name)
    return {
        device: f"the kernel ran on {names.get(device, device)} of the cluster, and this machine has {here}; "
        "`lastbit explain` there says why it fails"
        for device in devices
        if names.get(device) != (here := _name_here(device))
    }


def _name_here(device: str) -> str:
    """Return the name of an accelerator of this machine."""
    import torch

    from lastbit.devices import machine

    has = machine()
    return str(torch.get_device_module(device).get_device_name(device)) if device in has.accelerators else "none"
