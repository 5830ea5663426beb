"""`lastbit agree`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from lastbit.command_line import read_words
from lastbit.commands.options import KERNEL, add_device, add_timeout, add_tried, add_words, config_of
from lastbit.config import PROFILES, Config
from lastbit.errors import MOST_NAMES, UsageError
from lastbit.history.revisions import kernels_at
from lastbit.identifying.bitwise_agreement import agree_kernels
from lastbit.kernel import REVISION_MARK
from lastbit.reports.agreement import Agreement, KernelSide, as_json, print_agreement
from lastbit.reports.paper import make_console
from lastbit.verify.processes import options_of
from lastbit.verify.project import kernel_folders
from lastbit.verify.worker import Worker, WorkerEnded, planned


def add_agree(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = (
        "Run two kernels of one op on the same cases and compare their results bit by bit. Where they differ, say "
        "which contracts they keep and at which stage these part. NAME@REVISION is the kernel of a git revision."
    )
    parser.set_defaults(command=_agree)
    add_words(parser, "A B", f"two kernels: {KERNEL}; NAME@REVISION is one of a git revision")
    add_tried(parser, None)
    parser.add_argument("--profile", default="smoke", choices=tuple(PROFILES), help="how many cases (default: smoke)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    add_timeout(parser)
    add_device(parser)


def _agree(options: argparse.Namespace, rest: Sequence[str]) -> int:
    asked = read_words(options.words)
    names = tuple(dict.fromkeys(name.partition(REVISION_MARK)[0] for name in asked.kernels))
    chosen = {"profile": options.profile, "cases": options.cases_per_group, "seed": options.seed}
    config = config_of(options, kernels=names, **chosen)
    with ExitStack() as stack:
        config = _with_revisions(config, asked.kernels, stack)
        with Worker(config) as worker:
            first, second = _two(asked.kernels or _planned(worker))
            found = _compared(worker, config.devices[0], first, second, options.combinations)
    if options.json:
        print(as_json(found))
    else:
        print_agreement(found, make_console(), options_of(config))
    return found.exit_code


def _planned(worker: Worker) -> tuple[str, ...]:
    """Return the names of the kernels of the paths that were given, in their order."""
    return tuple(dict.fromkeys(item.kernel for item in worker.do(planned)))


def _two(names: Sequence[str]) -> tuple[str, str]:
    if len(names) != 2:
        given = ", ".join(names[:MOST_NAMES]) or "none"
        raise UsageError(f"agree takes two kernels, not {given}; name two: PATH::A PATH::B")
    first, second = names
    if first == second:
        raise UsageError(
            f"{first} agrees with itself; give two kernels, or one of another revision as {first}@REVISION"
        )
    return first, second


def _with_revisions(config: Config, names: Sequence[str], stack: ExitStack) -> Config:
    """Add the revisions that the names ask for to the configuration; the stack removes their folders when it closes."""
    labels = dict.fromkeys(label for name in names if (label := name.partition(REVISION_MARK)[2]))
    folders = kernel_folders(config)
    where = {label: stack.enter_context(kernels_at(label, folders, asked=f"@{label}")) for label in labels}
    return replace(config, revisions={label: place.kernels for label, place in where.items()})


def _compared(worker: Worker, device: str, first: str, second: str, most: int) -> Agreement:
    """Compare two kernels in the worker; a kernel that ends the process makes an agreement with an error."""
    try:
        return worker.do(agree_kernels, first, second, most=most)
    except WorkerEnded as ended:
        sides = KernelSide(first, "", errors=(str(ended),)), KernelSide(second, "")
        return Agreement("", device, sides)
