"""`lastbit golden record`, `check`, `approve` and `diff`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lastbit.command_line import read_words
from lastbit.commands.options import config_of
from lastbit.commands.parsers import GOLDENS
from lastbit.commands.running import NOTHING_RUN
from lastbit.errors import LastbitError, UsageError
from lastbit.history.golden_check import (
    Proposal,
    broken,
    difference,
    left_over,
    load,
    propose_fresh,
    propose_held,
    settle,
)
from lastbit.history.golden_file import path_of
from lastbit.history.golden_provenance import kind_of
from lastbit.reports.golden import COMPARED, RECORDED, REFUSED, GoldenReport, KernelOutcome, Status, print_goldens
from lastbit.reports.paper import line, make_console
from lastbit.reports.progress import RunProgress
from lastbit.reports.summary import plural
from lastbit.verify.processes import options_of
from lastbit.verify.worker import Worker, planned


def record(options: argparse.Namespace, rest: Sequence[str]) -> int:
    def outcome(worker: Worker, kernel: str, path: Path) -> KernelOutcome:
        if path.exists():
            golden = load(path, kernel, path.parent.name)
            reason = (
                f"has a golden of {plural(len(golden.cases), 'case')}; `lastbit golden approve` brings it up to "
                "date, with the same cases; to choose cases anew, delete the file"
            )
            return KernelOutcome(kernel, str(path), own=Status.SAME, reason=reason)
        proposal = _fresh(worker, kernel, path, options)
        if proposal.open:
            settle(proposal)
        return proposal.outcome

    report, _ = _report(options, outcome, left=False)
    print_goldens(report, make_console(), RECORDED)
    return report.exit_code({Status.SAME, Status.SKIPPED, Status.NEW})


def check(options: argparse.Namespace, rest: Sequence[str]) -> int:
    def outcome(worker: Worker, kernel: str, path: Path) -> KernelOutcome:
        if not path.exists():
            return KernelOutcome(kernel, str(path), own=Status.NEW)
        return worker.do(propose_held, kernel, path.parent).outcome

    report, _ = _report(options, outcome)
    print_goldens(report, make_console())
    if all(kernel.status is Status.NEW for kernel in report.kernels):
        return NOTHING_RUN
    return report.exit_code({Status.SAME, Status.NEW} | (set() if options.exact else {Status.CHANGED}))


def approve(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if not options.yes and not sys.stdin.isatty():
        raise UsageError(
            "approve asks before it writes, but there is no terminal; see `lastbit golden check`, then --yes"
        )
    proposals: list[Proposal] = []

    def outcome(worker: Worker, kernel: str, path: Path) -> KernelOutcome:
        if path.exists():
            proposals.append(worker.do(propose_held, kernel, path.parent, anew=True))
        else:
            proposals.append(_fresh(worker, kernel, path, options))
        return proposals[-1].outcome

    report, gone = _report(options, outcome)
    console = make_console()
    print_goldens(report, console)
    pending = [proposal for proposal in (*proposals, *map(Proposal, gone)) if proposal.open]
    if pending and not options.yes:
        try:
            said = input(f"Write or remove {len(pending)} goldens? [y/N] ")
        except EOFError:  # Ctrl-D
            said = ""
        if said.strip().lower() not in ("y", "yes"):
            return 1
    for proposal in pending:
        settle(proposal)
    line(console, f"{len(pending)} written or removed, {len(report.kernels) - len(pending)} left as they are")
    return report.exit_code(frozenset(Status) - REFUSED)


def _fresh(worker: Worker, kernel: str, path: Path, options: argparse.Namespace) -> Proposal:
    drawn, most = options.cases_per_group, options.most_elements
    return worker.do(propose_fresh, kernel, path.parent, drawn=drawn, most=most)


def _report(
    options: argparse.Namespace, outcome: Callable[[Worker, str, Path], KernelOutcome], *, left: bool = True
) -> tuple[GoldenReport, list[KernelOutcome]]:
    """Report the outcome of each kernel, and of goldens that are `left` over; return these, too.

    A broken file is an outcome. Goldens whose kernels no longer exist are not looked for if only some were asked for.
    The folder for this kind of device is below --folder, or beside the kernels or the project.
    """
    read_words(options.words).without_case("golden")
    config = config_of(options, seed=options.seed) if "seed" in options else config_of(options)
    kernels = map(Path, config.kernel_folders)
    homes = [(path if path.is_dir() else path.parent) / "golden" for path in kernels]
    homes += [Path(folder) / GOLDENS for folder in config.projects]
    [device, *_] = config.devices
    folder = (options.folder or (homes[0] if homes else GOLDENS)) / kind_of(torch.device(device))
    outcomes, gone = list[KernelOutcome](), list[KernelOutcome]()
    with RunProgress() as progress, Worker(config, progress.advance) as worker:
        for kernel in dict.fromkeys(item.kernel for item in worker.do(planned)):
            path = path_of(kernel, folder)
            try:
                outcomes.append(outcome(worker, kernel, path))
            except LastbitError as error:
                outcomes.append(broken(kernel, path, error))
    if left and not config.kernels:
        gone += left_over(folder, [Path(kernel.path) for kernel in outcomes], device)
    return GoldenReport(f"{device}, in {folder}", (*outcomes, *gone), options_of(config)), gone


def diff(options: argparse.Namespace, rest: Sequence[str]) -> int:
    report = GoldenReport(f"{options.before} and {options.after}", tuple(difference(options.before, options.after)))
    print_goldens(report, make_console(), COMPARED)
    return report.exit_code({Status.SAME})
