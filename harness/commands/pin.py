"""`lastbit pin`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from lastbit.case import Case, parse_case
from lastbit.command_line import kernel_words, read_words
from lastbit.commands.options import config_of
from lastbit.commands.running import NOTHING_RUN
from lastbit.config import Config
from lastbit.errors import MOST_NAMES, UsageError, no_kernel
from lastbit.files import BUILT_IN, PACKAGE
from lastbit.inputs.values import check_regime
from lastbit.kernel import Kernel
from lastbit.ops import check_arguments
from lastbit.reports.characters import visible
from lastbit.reports.paper import line, make_console
from lastbit.result import Verdict
from lastbit.shrinking.smallest import judged, smallest_of
from lastbit.verify.case_files import add_case
from lastbit.verify.check import unsupported
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import Worker, one_device, prepare

_FOLDERS = ("references", "cases", "kernels")


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    console, folder = make_console(), _folder(options.project)
    if not (reason := visible(" ".join(options.reason.split()))):  # on one line, without controls of a terminal
        raise UsageError("--reason is empty; say what was wrong, for whoever sees the case fail again")
    asked, projects = read_words(options.words), tuple(options.project or [str(folder)])
    case = parse_case(asked.case("pin"))
    if not options.words[1:]:
        raise UsageError(f"name the kernel that failed it, too: lastbit pin KERNEL {str(case)!r}")
    config = config_of(options, projects=projects)
    kernel, contract = _kernel(open_project(config), asked.kernels, case)
    config = replace(config, kernels=(kernel.name,))
    kept, how = _smallest(config, kernel, case, options.seconds) if options.smallest else (case, "")
    if kept is None:
        line(console, f"{kernel.name} {how}: not pinned")
        return NOTHING_RUN
    path = folder / "cases" / "regressions" / f"{case.op}.txt"
    added = add_case(path, kept, f"{_origin(kernel, contract, one_device(config))}: {reason}")
    line(console, f"{'pinned in' if added else 'it is there already:'} {path}")
    line(console, f"  {kept}")
    if how:
        line(console, f"{kernel.name} {how}")
    words = ["lastbit", "verify", *kernel_words(asked.paths, [kernel.name]), "--project", str(folder)]
    line(console, f"it runs first in\n  {shlex.join(words)}")
    return 0


def _smallest(config: Config, kernel: Kernel, case: Case, seconds: float) -> tuple[Case | None, str]:
    """Find the smallest tensors that fail as the case does, or None; say what happened if no value is wrong."""
    if kernel.devices and one_device(config).partition(":")[0] not in kernel.devices:
        raise UsageError(f"kernel {kernel.name!r} is declared for {', '.join(kernel.devices)} only; see --device")
    with Worker(config) as worker:
        result = worker.do(judged, kernel.name, str(case))
        if result.verdict is Verdict.PASSED:
            return None, "passes the case"
        found = worker.do(smallest_of, kernel.name, str(case), seconds=seconds)
    if found is None:
        return None, "does not fail like this with the values of the case in its line"
    return found, f"raises on the case: {result.reason}" if result.verdict is Verdict.ERRORED else ""


def _folder(given: Sequence[str]) -> Path:
    """Return the project folder that keeps the case: the first that is named, or that of the working directory.

    Raises:
        UsageError: there is none, or it is the folder in which lastbit is installed.
    """
    folder = Path(given[0]) if given else Path.cwd()
    if not folder.is_dir():
        raise UsageError(f"project folder {str(folder)!r} does not exist or is not a folder")
    if not given and not any((folder / name).is_dir() for name in _FOLDERS):
        names = ", ".join(f"{name}/" for name in _FOLDERS)
        raise UsageError(f"there is no project here: {str(folder)!r} has none of {names}; --project . makes it one")
    if folder.resolve() == BUILT_IN == PACKAGE:
        raise UsageError(f"{str(folder)!r} is where lastbit is installed; --project DIR names a folder of yours")
    return folder


def _kernel(project: Project, names: Sequence[str], case: Case) -> tuple[Kernel, str]:
    """Return the kernel of that name, or without any name the one of the op that is there, and its contract.

    Raises:
        UsageError: there is none, or more than one, or the case means nothing to its op, or the kernel cannot take it.
    """
    op = project.op(case.op)
    check_arguments(op, [tensor.name for tensor in case.tensors], case.params)
    for tensor in case.tensors:
        check_regime(tensor)
    prepare(torch.device("cpu"))  # before a kernel's file imports Triton
    kernels = {kernel.name: kernel for kernel in project.kernels()}
    names = names or [name for name, kernel in kernels.items() if kernel.op == case.op]
    if len(names) != 1:
        given = ", ".join(names[:MOST_NAMES]) or "none"
        raise UsageError(f"pin takes one kernel of {case.op}, not {given}; name it: PATH::NAME")
    [name] = names
    if name not in kernels:
        raise no_kernel(name, kernels)
    kernel = kernels[name]
    if kernel.op != case.op:
        raise UsageError(f"kernel {name!r} is one of {kernel.op}, and the case one of {case.op}")
    if reason := unsupported(kernel, case):
        raise UsageError(f"kernel {name!r} cannot run the case: {reason}")
    return kernel, str(op.contract(kernel.contract))


def _origin(kernel: Kernel, contract: str, device: str) -> str:
    """Describe the origin of a case, in words that do not depend on when it is pinned."""
    versions = ", ".join(f"{package} {_version(package)}" for package in ("torch", "triton"))
    return f"{kernel.name} ({contract}) on {device}, {versions}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
