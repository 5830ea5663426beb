"""Runs, on this machine or on a cluster: started, watched and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import MappingProxyType

from lastbit.config import Config
from lastbit.files import lines_in
from lastbit.reports import records
from lastbit.reports.characters import visible
from lastbit.reports.encoding import decoded
from lastbit.reports.why import KernelTrace
from lastbit.run import Run
from lastbit.sanitize.tool import TOOLS, Sanitizer, sanitizer_for
from lastbit.verify import processes as runs
from lastbit.verify.notes import STAGES

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


def execute(config: Config, arguments: Sequence[str] = (), *, quiet: bool = False, explaining: bool = False) -> Run:
    """Run what `config` says and keep the records in its folder; `arguments` go to pytest.

    With `explaining`, failures are explained.

    Raises:
        LastbitError: the run could not be planned, as when a kernel's file raises, or lacks what --sanitize needs.
        Interrupted: from the keyboard; what was recorded is kept.
    """
    sanitizer = sanitizer_for(config)
    children: Sequence[runs.Child] = ()
    results, interrupted = runs.RunResults(config, records.parse), False
    try:
        with runs.processes(config, arguments) as children:
            import_ahead("lastbit.verify.assemble", *_AFTERWARDS)
            _follow(children, results, quiet)
    except KeyboardInterrupt:
        interrupted, results = True, runs.RunResults(config, records.parse)  # it may have been reading some
    results.new()
    if interrupted and runs.planned(children) is None:
        raise Interrupted(None)
    from lastbit.verify.assemble import INTERRUPTED, collect

    run = collect(config, children, results.all, interrupted=interrupted)
    run = kept(with_stages(run, lines_in(Path(config.folder), STAGES)), Path(config.folder))
    if run.broken.endswith(INTERRUPTED):
        raise Interrupted(run)
    if sanitizer is not None:
        run = _sanitized(config, sanitizer, run, quiet)
    return with_why(config, run) if explaining else run


def _sanitized(config: Config, sanitizer: Sanitizer, run: Run, quiet: bool) -> Run:
    """Run the cases again under compute-sanitizer and add its findings to the run."""
    from lastbit.reports.progress import RunProgress
    from lastbit.sanitize.looking import chosen_of, sanitized
    from lastbit.verify.assemble import INTERRUPTED

    with RunProgress(total=len(chosen_of(run)) * len(TOOLS)) as progress:
        run = sanitized(config, sanitizer, run, (lambda result: None) if quiet else progress.advance)
    run = kept(run, Path(config.folder))
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
    import_ahead(*_AFTERWARDS)
    from lastbit.cluster.cluster_run import on_cluster, work_on
    from lastbit.cluster.ray_calls import RayPool
    from lastbit.reports.progress import RunProgress

    with on_cluster(config, address, device, workers) as cluster:
        print(visible(str(cluster.config.device_plan), keep="\n"), flush=True)
        with RunProgress() as progress, closing(RayPool(cluster.config.devices)) as pool:
            worked = work_on(cluster, pool, parse=records.parse, tell=progress.advance, plan=progress.set_total)
    if worked.interrupted and not worked.planned:
        raise Interrupted(None)
    run = kept(with_stages(worked.run, worked.stages), Path(config.folder))
    if worked.interrupted:
        raise Interrupted(run)
    return with_why(cluster.config, run, elsewhere=_elsewhere(run)) if explaining else run


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


def _follow(children: Sequence[runs.Child], results: runs.RunResults, quiet: bool) -> None:
    """Show how far the processes have come, until they end."""
    from lastbit.reports.progress import RunProgress

    total: int | None = None
    with RunProgress() as progress:

        def tick() -> None:
            nonlocal total
            new = results.new()
            if quiet:
                return
            if total is None and (total := runs.planned(children)) is not None:
                progress.set_total(total)
            for result in new:
                progress.advance(result)

        runs.wait(children, tick)


def kept(run: Run, folder: Path, write: Callable[[Run, Path], None] = records.write) -> Run:
    """Write the records to `folder`, and return the run; marked as broken if they cannot be written."""
    try:
        write(run, folder)
    except OSError as error:
        reason = f"the records cannot be written to {folder}: {error.strerror or error}"
        return replace(run, broken="; ".join(filter(None, (run.broken, reason))))
    return run
