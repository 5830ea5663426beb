"""Runs, on this machine or on a cluster: started, watched and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import MappingProxyType

from lastbit.config import Config
from lastbit.crew import pytest_shell
from lastbit.crew.campaign import Campaign, here, on_cluster
from lastbit.crew.local_pool import LocalPool
from lastbit.isolation.confinement import remove
from lastbit.reports import records
from lastbit.reports.characters import visible
from lastbit.reports.encoding import decoded
from lastbit.reports.why import KernelTrace
from lastbit.run import Run
from lastbit.sanitize.tool import TOOLS, sanitizer_for
from lastbit.verify.notes import INTERRUPTED
from lastbit.verify.processes import caches_of

_AFTERWARDS = ("pandas", "lastbit.reports.terminal")
"""Modules that a run needs at its end, and that take seconds to import."""

NOTHING_RUN = 3
"""Exit code of a command of which a kernel was not verified, or that found nothing to run."""


def worst_code(codes: Iterable[int]) -> int:
    """Return the worst exit code of several kernels: 2 before 1 before 0; `NOTHING_RUN` for none."""
    found = {*codes, NOTHING_RUN}
    return next(code for code in (2, 1, 0, NOTHING_RUN) if code in found)


class Interrupted(KeyboardInterrupt):
    """A run that was interrupted; `run` is what was recorded before, or None if nothing had begun."""

    def __init__(self, run: Run | None) -> None:
        super().__init__()
        self.run = run


def execute(
    config: Config,
    arguments: Sequence[str] = (),
    *,
    workers: int | None = None,
    quiet: bool = False,
    explaining: bool = False,
) -> Run:
    """Run what `config` says and keep the records in its folder; `arguments` go to pytest.

    With `explaining`, failures are explained.

    Raises:
        LastbitError: the run could not be planned, as when a kernel's file raises, or lacks what --sanitize needs.
        Interrupted: from the keyboard; what was recorded is kept.
    """
    sanitizer = sanitizer_for(config)
    try:
        with closing(LocalPool(config)) as pool:
            campaign = Campaign(here(config, workers), pool)
            _work(campaign, partial(pytest_shell.work, arguments=arguments), quiet=quiet)
    finally:
        if config.isolate:
            remove(caches_of(config))
    run = _ended(campaign)
    if sanitizer is not None:  # the cases run again under compute-sanitizer
        from lastbit.reports.progress import RunProgress
        from lastbit.sanitize.looking import chosen_of, sanitized

        with RunProgress(total=len(chosen_of(run)) * len(TOOLS)) as progress:
            run = sanitized(config, sanitizer, run, (lambda result: None) if quiet else progress.advance)
        run = kept(run, Path(config.folder))
        if run.broken.endswith(INTERRUPTED):
            raise Interrupted(run)
    return with_why(config, run) if explaining else run


def _work(campaign: Campaign, work: Callable[[Campaign], None] = Campaign.work, *, quiet: bool = False) -> None:
    """Let a campaign work, and show how far it has come; an interruption from the keyboard stops it."""
    from lastbit.reports.progress import RunProgress

    try:
        campaign.open()
        import_ahead("lastbit.verify.assemble", *_AFTERWARDS)
        if quiet:
            return work(campaign)
        with RunProgress() as progress:
            campaign.tell, campaign.plan = progress.advance, progress.set_total
            return work(campaign)
    except KeyboardInterrupt:
        campaign.stop = INTERRUPTED


def _ended(campaign: Campaign) -> Run:
    """Put together and keep what has come of a campaign whose actors have ended.

    Raises:
        Interrupted: from the keyboard; what was recorded is kept.
    """
    interrupted, folder = campaign.stop == INTERRUPTED, Path(campaign.config.folder)
    if interrupted and not campaign.planned:
        raise Interrupted(None)
    run = kept(with_stages(campaign.run, campaign.stages), folder)
    if run.broken.endswith(INTERRUPTED):
        raise Interrupted(run)
    return run


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
    from lastbit.crew.ray_calls import RayPool

    with on_cluster(config, address, device, workers) as cluster:
        print(visible(str(cluster.config.device_plan), keep="\n"), flush=True)
        with closing(RayPool(cluster.config.devices)) as pool:
            campaign = Campaign(cluster, pool)
            _work(campaign)
    run = _ended(campaign)
    return with_why(cluster.config, run, elsewhere=_elsewhere(run)) if explaining else run


def _elsewhere(run: Run) -> Mapping[str, str]:
    """Map each device of a run that this machine lacks to the reason why nothing is explained there."""
    devices = dict.fromkeys(result.device for result in run.results if result.device != "cpu")
    if not devices:
        return {}
    import torch

    from lastbit.devices import machine

    names = dict(name.split(": ", 1) for name in run.environment["accelerators"].split(", ") if ": " in name)
    found = {}
    for device in devices:
        has = device in machine().accelerators
        here = str(torch.get_device_module(device).get_device_name(device)) if has else "none"
        if names.get(device) != here:
            ran = f"the kernel ran on {names.get(device, device)} of the cluster, and this machine has {here}"
            found[device] = f"{ran}; `lastbit explain` there says why it fails"
    return found


def with_why(config: Config, run: Run, *, elsewhere: Mapping[str, str] = MappingProxyType({})) -> Run:
    """Explain the run's failures where possible, and write what was found to its records; see `with_explanations`."""
    from lastbit.commands.explaining import with_explanations

    found = with_explanations(config, run, elsewhere=elsewhere)
    return kept(found, Path(config.folder), records.write_rest) if found.explanations else run


def with_stages(run: Run, found: Iterable[str]) -> Run:
    """Add to a run the stages that were found in its cases, in their order; one of a line that was cut off is lost."""
    places = {(result.kernel, result.case): place for place, result in reversed(list(enumerate(run.results)))}
    traces = []
    for line in dict.fromkeys(found):
        with suppress(ValueError, TypeError):
            traces.append(decoded(KernelTrace, json.loads(line)))
    traces.sort(key=lambda trace: places.get((trace.kernel, trace.case), len(places)))
    return replace(run, traces=tuple(traces))


def import_ahead(*names: str) -> None:
    """Begin to import modules that a run needs later, while other processes work; a failure shows at their use."""

    def import_all() -> None:
        for name in names:
            with suppress(Exception):
                import_module(name)

    Thread(target=import_all, daemon=True).start()


def kept(run: Run, folder: Path, write: Callable[[Run, Path], None] = records.write) -> Run:
    """Write the records to `folder`, and return the run; marked as broken if they cannot be written."""
    try:
        write(run, folder)
    except OSError as error:
        reason = f"the records cannot be written to {folder}: {error.strerror or error}"
        return replace(run, broken="; ".join(filter(None, (run.broken, reason))))
    return run
