"""`lastbit pin`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from harness.case import Case, parse_case
from harness.commands.options import add_device, add_folders, add_timeout, config_of
from harness.commands.running import NOTHING_RUN
from harness.diagnosing.smallest import smallest_of
from harness.errors import UsageError, unknown
from harness.files import BUILT_IN
from harness.inputs.values import check_regime
from harness.kernel import Kernel
from harness.op import check_arguments
from harness.verify.case_files import add_case
from harness.verify.check import unsupported
from harness.verify.inprocess import one_device, prepare
from harness.verify.project import Project, open_project
from harness.verify.worker import Worker
from reports.paper import line, make_console

_FOLDERS = ("references", "cases", "kernels")


def add_pin(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = (
        "Keep a case that a kernel failed: its line goes into cases/regressions/ of a project, with where it comes "
        "from, and runs first ever after, for every kernel of the op that takes it."
    )
    parser.set_defaults(command=_pin)
    parser.add_argument("case", help="the line that a report printed, in quotes")
    parser.add_argument("--kernel", required=True, help="the kernel that failed the case")
    parser.add_argument(
        "--reason", required=True, metavar="TEXT", help="what was wrong, for whoever sees it fail again"
    )
    parser.add_argument("--smallest", action="store_true", help="keep the smallest tensors that fail in place of it")
    parser.add_argument("--seconds", type=float, default=60.0, help="that these are searched for (default: 60)")
    add_timeout(parser)
    add_device(parser)
    add_folders(parser)


def _pin(options: argparse.Namespace, rest: Sequence[str]) -> int:
    console, folder = make_console(), _folder(options.project)
    case, projects = parse_case(options.case), tuple(options.project or [str(folder)])
    config = config_of(options, kernels=(options.kernel,), projects=projects, lines=(str(case),))
    device = one_device(config)
    project = open_project(config)
    op = project.op(case.op)
    check_arguments(op, [tensor.name for tensor in case.tensors], case.params)
    for tensor in case.tensors:
        check_regime(tensor)
    kernel = _kernel(project, options.kernel, case)
    if options.smallest:
        with Worker(config) as worker:
            small = worker.do(smallest_of, kernel.name, str(case), seconds=options.seconds)
        if small is None:
            line(console, f"{kernel.name} does not fail like this with the values of the case in its line: not pinned")
            return NOTHING_RUN
        case = small
    path = folder / "cases" / "regressions" / f"{case.op}.txt"
    added = add_case(path, case, f"{_origin(kernel, str(op.contract(kernel.contract)), device)}: {options.reason}")
    line(console, f"{'pinned in' if added else 'it is there already:'} {path}")
    line(console, f"  {case}")
    line(console, f"lastbit verify --project {folder} runs it first")
    return 0


def _folder(given: Sequence[str]) -> Path:
    """The project that the case is kept in: the first that is named, or that of the working directory.

    Raises:
        UsageError: there is none, or it is the folder in which lastbit is installed.
    """
    folder = Path(given[0]) if given else Path.cwd()
    if not folder.is_dir():
        raise UsageError(f"project folder {str(folder)!r} does not exist or is not a folder")
    if not given and not any((folder / name).is_dir() for name in _FOLDERS):
        names = ", ".join(f"{name}/" for name in _FOLDERS)
        raise UsageError(f"there is no project here: {str(folder)!r} has none of {names}; --project DIR names one")
    if folder.resolve() == BUILT_IN and not (BUILT_IN / "kernels").is_dir():
        raise UsageError(f"{str(folder)!r} is where lastbit is installed; --project DIR names a folder of yours")
    return folder


def _kernel(project: Project, name: str, case: Case) -> Kernel:
    """The kernel of that name.

    Raises:
        UsageError: there is none, or it cannot take the case, which would then never run for it.
    """
    prepare(torch.device("cpu"))  # before a kernel's file imports Triton
    kernels = {kernel.name: kernel for kernel in project.kernels()}
    if name not in kernels:
        raise unknown("kernel", name, kernels)
    kernel = kernels[name]
    if kernel.op != case.op:
        raise UsageError(f"kernel {name!r} is one of {kernel.op}, and the case one of {case.op}")
    if reason := unsupported(kernel, case):
        raise UsageError(f"kernel {name!r} cannot run the case: {reason}")
    return kernel


def _origin(kernel: Kernel, contract: str, device: str) -> str:
    """Where a case comes from, which is the same whenever it is asked for."""
    versions = ", ".join(f"{package} {_version(package)}" for package in ("torch", "triton"))
    return f"{kernel.name} ({contract}) on {device}, {versions}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
