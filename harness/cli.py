"""The command line: `lastbit verify`, `lastbit repro`, `lastbit calibrate`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.case import parse_case
from harness.config import PROFILES, Config
from harness.devices import plan_devices
from harness.errors import LastbitError, UsageError
from harness.result import CaseResult
from harness.verify import run as runs
from harness.verify.project import read_cases
from reports import records
from reports.terminal import RunProgress, make_console, print_run

BROKEN = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 all passed, 1 findings or an inconclusive kernel, 2 something broken, 3 nothing to run, 130 interrupted.
    """
    options, rest = _parser().parse_known_args(argv)
    if rest and options.command is not _verify:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(options.command(options, rest))
    except LastbitError as error:
        print(f"lastbit: {error}", file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lastbit", description="Verify numerical kernels to the last bit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="check kernels against their rounding contracts",
        description="Check kernels against their rounding contracts. Options that are not listed go to pytest: "
        "-k, -x, --lf, --junitxml and the like.",
    )
    verify.set_defaults(command=_verify)
    verify.add_argument("--profile", default="ci", help=f"{', '.join(PROFILES)} (default: ci)")
    verify.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    verify.add_argument("--cases", type=Path, help="run the case lines of this file instead of generated cases")
    verify.add_argument("--cases-per-group", type=int, help="generated cases per kernel and group of cases")
    verify.add_argument("--seed", type=int, default=0, help="seed of the generated cases")
    repro = commands.add_parser("repro", help="run one case line again, bit for bit")
    repro.set_defaults(command=_repro)
    repro.add_argument("case", help="the line that a report printed, in quotes")
    calibrate = commands.add_parser("calibrate", help="measure on a device what the error bounds rest on")
    calibrate.set_defaults(command=_calibrate)
    for command in (verify, repro, calibrate):
        command.add_argument("--device", default="cpu", help="auto, or torch devices as in cpu,cuda:1 (default: cpu)")
    for command in (verify, repro):
        command.add_argument("--kernel", action="append", default=[], help="only this kernel (repeatable)")
        command.add_argument("--kernels", action="append", default=[], metavar="DIR", help="a folder of your kernels")
        command.add_argument(
            "--project", action="append", default=[], metavar="DIR", help="references/, cases/, kernels/"
        )
        command.add_argument("--timeout", type=float, default=120.0, help="seconds that one case may take")
        command.add_argument("--run-folder", type=Path, help="where the records go (default: below .lastbit/runs)")
        workers = _worker_count() if command is verify else "1"
        command.add_argument(
            "-n", dest="workers", type=_workers, default=workers, help="worker processes per device type"
        )
    return parser


def _worker_count() -> str:
    return str(min(os.cpu_count() or 1, 8))


def _workers(text: str) -> str:
    """Workers are processes of their own even if there is one, so that a kernel that kills its process ends nothing."""
    if text not in ("auto", "logical") and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of processes from 1 on nor auto")
    return text


def _verify(options: argparse.Namespace, rest: Sequence[str]) -> int:
    lines = tuple(str(c) for c in read_cases(options.cases)) if options.cases else ()
    device_plan = plan_devices(options.device)
    config = Config(
        folder=str(_run_folder(options)),
        profile=options.profile,
        device_plan=device_plan,
        ops=tuple(options.op),
        kernels=tuple(options.kernel),
        projects=tuple(options.project),
        kernel_folders=tuple(options.kernels),
        lines=lines,
        seed=options.seed,
        cases=options.cases_per_group,
        timeout=options.timeout,
    )
    return _run(config, ["-n", options.workers, "--dist", "worksteal", *rest])


def _repro(options: argparse.Namespace, rest: Sequence[str]) -> int:
    case = parse_case(options.case)
    device_plan = plan_devices(options.device)
    config = Config(
        folder=str(_run_folder(options)),
        device_plan=device_plan,
        kernels=tuple(options.kernel),
        projects=tuple(options.project),
        kernel_folders=tuple(options.kernels),
        lines=(str(case),),
        timeout=options.timeout,
    )
    return _run(config, ["-n", options.workers], show_inputs=True)


def _calibrate(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Measure in processes of their own, because Triton decides at import whether it compiles or interprets."""
    device_plan = plan_devices(options.device)
    _print_plain(str(device_plan), make_console())
    command = [sys.executable, "-m", "harness.calibrate"]
    environments = {device: runs.environment_for(device.partition(":")[0]) for device in device_plan.devices}
    return max(abs(subprocess.run([*command, d], env=e, check=False).returncode) for d, e in environments.items())


def _run_folder(options: argparse.Namespace) -> Path:
    if options.run_folder is not None:
        if options.run_folder.exists() and any(options.run_folder.iterdir()):
            raise UsageError(f"run folder {str(options.run_folder)!r} is not empty; a run needs a folder of its own")
        return Path(options.run_folder)
    runs_folder = Path(".lastbit", "runs")
    runs_folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=runs_folder))


def _run(config: Config, arguments: Sequence[str], *, show_inputs: bool = False) -> int:
    """Start the run, show its progress, print and keep its records."""
    console = make_console()
    _print_plain(str(config.device_plan), console)
    children = runs.start(config, arguments)
    results = runs.Results(config, records.parse)
    with RunProgress() as progress:

        def tick() -> None:
            total = runs.planned(config, children)
            if total is not None:
                progress.set_total(total)
            for result in results.new():
                progress.advance(result)

        interrupted = runs.wait(children, tick)
    if interrupted and runs.planned(config, children) is None:
        return INTERRUPTED  # before anything had begun
    run = runs.collect(config, children, results.all)
    records.write(run, Path(config.folder))
    if show_inputs:
        _print_inputs(run.results, console)
    print_run(run, console)
    return INTERRUPTED if interrupted else run.exit_code


def _print_inputs(results: Sequence[CaseResult], console: Console) -> None:
    for device, fingerprint in dict.fromkeys((r.device, r.fingerprint) for r in results if r.fingerprint):
        _print_plain(f"input bits on {device}: {fingerprint}", console)


def _print_plain(text: str, console: Console) -> None:
    console.print(text, markup=False, highlight=False)
