"""`lastbit agree`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from lastbit.command_line import read_words
from lastbit.commands.options import config_of
from lastbit.errors import MOST_NAMES, UsageError
from lastbit.history.revisions import kernels_at
from lastbit.identifying.bitwise_agreement import agree_kernels
from lastbit.kernel import REVISION_MARK
from lastbit.reports.agreement import Agreement, KernelSide, as_json, print_agreement
from lastbit.reports.paper import make_console
from lastbit.verify.processes import options_of
from lastbit.verify.project import kernel_folders
from lastbit.verify.worker import Worker, WorkerEnded, planned


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    names = read_words(options.words).kernels
    chosen = {"profile": options.profile, "cases": options.cases_per_group, "seed": options.seed}
    today = tuple(dict.fromkeys(name.partition(REVISION_MARK)[0] for name in names))
    config = config_of(options, kernels=today, **chosen)
    labels = dict.fromkeys(label for name in names if (label := name.partition(REVISION_MARK)[2]))
    with ExitStack() as stack:  # it removes the folders of the revisions
        folders = kernel_folders(config)
        places = {label: stack.enter_context(kernels_at(label, folders, asked=f"@{label}")) for label in labels}
        config = replace(config, revisions={label: place.kernels for label, place in places.items()})
        with Worker(config) as worker:
            names = names or tuple(dict.fromkeys(item.kernel for item in worker.do(planned)))
            if len(names) != 2:
                given = ", ".join(names[:MOST_NAMES]) or "none"
                raise UsageError(f"agree takes two kernels, not {given}; name two: PATH::A PATH::B")
            if names[0] == names[1]:
                other = f"give two kernels, or one of another revision as {names[0]}@REVISION"
                raise UsageError(f"{names[0]} agrees with itself; {other}")
            found = _compared(worker, config.devices[0], *names, most=options.combinations)
    if options.json:
        print(as_json(found))
    else:
        print_agreement(found, make_console(), options_of(config))
    return found.exit_code


def _compared(worker: Worker, device: str, first: str, second: str, most: int) -> Agreement:
    """Compare two kernels in the worker; a kernel that ends the process makes an agreement with an error."""
    try:
        return worker.do(agree_kernels, first, second, most=most)
    except WorkerEnded as ended:
        sides = KernelSide(first, "", errors=(str(ended),)), KernelSide(second, "")
        return Agreement("", device, sides)
