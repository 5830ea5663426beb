"""`lastbit verify`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lastbit.command_line import read_words
from lastbit.commands.options import config_of, kernel_folders_here, kernels_here, workers_of
from lastbit.commands.running import Interrupted, execute, execute_on_cluster, kept
from lastbit.config import Config
from lastbit.errors import LastbitError, UsageError
from lastbit.reports.characters import visible
from lastbit.result import Verdict
from lastbit.run import NotRun, Run
from lastbit.trees import MixedTrees, folders_of_package

KEPT = str(Path(".lastbit", "cache", "verdicts"))
"""Where verdicts are kept from run to run, below the working directory."""


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    rest = [*rest, *options.for_pytest]
    given_cases = bool(read_words(options.words).cases)
    if given_cases and options.workers is None:
        options.workers = "1"
    if options.cluster is not None and rest:
        asked = f"--cluster runs no pytest, which {shlex.join(rest)} is for"
        raise UsageError(f"{asked}; choose what runs by kernels, cases and --op")
    if options.cluster is not None and options.sanitize:
        raise UsageError("--sanitize looks at processes of this machine; run it without --cluster")
    given: int | None = vars(options).get("seed", None if options.isolate else 0)
    for package in options.watch:
        folders_of_package(package)
    config = config_of(
        options,
        profile=options.profile or ("smoke" if options.sanitize else "ci"),
        ops=tuple(options.op),
        seed=given or 0,
        random=given is None,
        cases=options.cases_per_group,
        keep_going=options.keep_going or options.base is not None,  # two revisions are compared on common cases
        watched=tuple(options.watch),
        kept=KEPT if options.cluster is None else "",
        fresh=options.fresh,
    )
    if options.build and options.base is None:
        raise UsageError(f"--build {options.build} builds the revision of --base, and none is given")
    here = kernels_here(options)
    if here is None:
        near = min(kernel_folders_here() - {"references", "cases"}, default="my_kernels")
        said = "no word says which kernels, and no folder kernels/ here has any"
        raise UsageError(f"{said}; name a file or folder: lastbit verify {near}")
    config = replace(config, **here)
    how = {"verbose": options.verbose, "uncovered": options.uncovered, "show_inputs": given_cases}
    workers = workers_of(options)
    if options.base is None and options.cluster is None:
        return _run(config, rest, workers=workers, **how)
    run: Callable[..., Run] = partial(execute, arguments=rest, workers=workers)
    if options.cluster is not None:
        run = partial(execute_on_cluster, address=options.cluster, device=options.device, workers=workers)
    if options.base is None:
        return _shown(lambda: run(config, explaining=True), **how)
    from lastbit.history.revisions import kernels_at
    from lastbit.verify.project import kernel_folders

    if options.cluster is None:
        print(visible(str(config.device_plan), keep="\n"), flush=True)
    with kernels_at(options.base, kernel_folders(config), build=options.build) as place:
        folder = str(Path(config.folder, "base").absolute())
        before = replace(config.anywhere, folder=folder, revision=options.base, **place.settings)
        return _shown(lambda: _with_base(run, config, before), **how)


def _run(config: Config, arguments: Sequence[str], *, workers: int | None, **how: Any) -> int:
    print(visible(str(config.device_plan), keep="\n"), flush=True)
    return _shown(lambda: execute(config, arguments, workers=workers, explaining=True), **how)


def _with_base(run: Callable[..., Run], config: Config, before: Config) -> Run:
    """Run today's kernels, then those of the revision of `before`, and keep both as one run.

    Raises:
        MixedTrees: the other revision would run today's code; what there is of today is printed.
        Interrupted: from the keyboard; what was recorded is kept.
    """
    from lastbit.verify.notes import INTERRUPTED

    today = run(config, explaining=True)
    interrupted = False
    try:
        base = run(before)
    except Interrupted as interruption:
        base, interrupted = interruption.run or Run((), broken=INTERRUPTED), True
    except MixedTrees:
        _print(today)
        raise
    except LastbitError as error:
        reason = str(error).replace(f"{before.tree}/", "")
        base = Run((), not_run=(NotRun(f"the kernels of {before.revision}", reason),))
    both = replace(
        today,
        results=today.results + base.results,
        power=today.power + base.power,
        undecidable=today.undecidable + base.undecidable,
        not_run=tuple(dict.fromkeys(today.not_run + base.not_run)),
        agreement=today.agreement + base.agreement,
        environment={**today.environment, "base": before.revision},
        broken="; ".join(dict.fromkeys(filter(None, (today.broken, base.broken)))),
        spent=today.spent + base.spent,
        coverage=today.coverage + base.coverage,
    )
    both = kept(both, Path(config.folder))
    if interrupted:
        raise Interrupted(both)
    return both


def _shown(execute: Callable[[], Run], **how: Any) -> int:
    """Print what comes of a run, even if it is interrupted; `how` are options of `_print`."""
    try:
        return _print(execute(), **how)
    except Interrupted as interruption:
        if interruption.run is not None:
            _print(interruption.run, **how)
        raise


def _print(run: Run, *, verbose: int = 0, uncovered: bool = False, show_inputs: bool = False) -> int:
    """Print the run; the exit code is that of this revision, or 1 if it got worse than the other."""
    from lastbit.reports.changes import compare, names_of, print_changes, with_base
    from lastbit.reports.paper import line, make_console
    from lastbit.reports.terminal import print_run

    console = make_console()
    for device, fingerprint in dict.fromkeys((r.device, r.fingerprint) for r in run.results if r.fingerprint):
        if show_inputs:
            line(console, f"input bits on {device}: {fingerprint}")
    today, base = with_base(run)
    if base is None:
        print_run(run, console, verbose=verbose, uncovered=uncovered)
        return run.exit_code
    print_run(today, console, verbose=verbose, stages_of=run, uncovered=uncovered)
    changes = compare(base, today, names=names_of(base))
    print_changes(changes, console)
    worse = changes.exit_code() == 1 and today.overall is not Verdict.ERRORED
    return 1 if worse else today.exit_code
