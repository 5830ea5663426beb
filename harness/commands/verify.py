"""`lastbit verify` and `lastbit repro`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.case import parse_case
from harness.commands.options import Subparsers, add_device, add_kernel_choice, add_run, config_of
from harness.commands.running import INTERRUPTED, Interrupted, execute
from harness.config import PROFILES, Config
from harness.history.revisions import kernels_at
from harness.result import CaseResult, Verdict
from harness.run import Run
from harness.verify.project import open_project
from reports.changes import compare, names_of, with_base
from reports.changes_terminal import print_changes
from reports.paper import line, make_console
from reports.terminal import print_run


def add_to(commands: Subparsers) -> None:
    """Add both commands."""
    _add_verify(commands)
    repro = commands.add_parser("repro", help="run one case line again, bit for bit")
    repro.set_defaults(command=_repro)
    repro.add_argument("case", help="the line that a report printed, in quotes")
    add_device(repro)
    add_kernel_choice(repro)
    add_run(repro, workers="1")


def _add_verify(commands: Subparsers) -> None:
    verify = commands.add_parser(
        "verify",
        help="check kernels against their rounding contracts",
        description="Check kernels against their rounding contracts. Options that are not listed go to pytest: "
        "-k, -x, --lf, --junitxml and the like.",
    )
    verify.set_defaults(command=_verify, takes_rest=True)
    verify.add_argument("--profile", default="ci", help=f"{', '.join(PROFILES)} (default: ci)")
    verify.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    verify.add_argument("--cases", type=Path, help="run the case lines of this file instead of generated cases")
    verify.add_argument("--cases-per-group", type=int, help="generated cases per kernel and group of cases")
    verify.add_argument("--base", metavar="REVISION", help="verify the kernels of this git revision too, and compare")
    verify.add_argument("--seed", type=int, default=0, help="seed of the generated cases")
    add_device(verify)
    add_kernel_choice(verify)
    add_run(verify)


def _verify(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = config_of(
        options,
        profile=options.profile,
        ops=tuple(options.op),
        seed=options.seed,
        cases=options.cases_per_group,
    )
    arguments = ["-n", options.workers, "--dist", "worksteal", *rest]
    if options.base is None:
        return _run(config, arguments)
    with kernels_at(options.base, open_project(config).kernel_folders) as folder:
        return _run(replace(config, revisions={options.base: str(folder)}), arguments)


def _repro(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = config_of(options, lines=(str(parse_case(options.case)),))
    return _run(config, ["-n", options.workers], show_inputs=True)


def _run(config: Config, arguments: Sequence[str], *, show_inputs: bool = False) -> int:
    """Start the run, show its progress, print and keep its records."""
    console = make_console()
    line(console, str(config.device_plan))
    interrupted = False
    try:
        run = execute(config, arguments)
    except Interrupted as interruption:
        if interruption.run is None:
            raise
        run, interrupted = interruption.run, True
    if show_inputs:
        _print_inputs(run.results, console)
    code = _print(run, console)
    return INTERRUPTED if interrupted else code


def _print(run: Run, console: Console) -> int:
    """Print the run; the exit code is that of this revision, or 1 if it got worse than the other."""
    today, base = with_base(run)
    if base is None:
        print_run(run, console)
        return run.exit_code
    print_run(today, console, stages_of=run)
    changes = compare(base, today, names=names_of(base))
    print_changes(changes, console)
    worse = changes.exit_code() == 1 and today.overall is not Verdict.ERRORED
    return 1 if worse else today.exit_code


def _print_inputs(results: Sequence[CaseResult], console: Console) -> None:
    for device, fingerprint in dict.fromkeys((r.device, r.fingerprint) for r in results if r.fingerprint):
        line(console, f"input bits on {device}: {fingerprint}")
