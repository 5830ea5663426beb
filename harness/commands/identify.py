"""`lastbit identify`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lastbit.commands.options import NO_KERNEL, config_of
from lastbit.commands.running import worst_code
from lastbit.identifying.kept_contracts import identify_kernel
from lastbit.reports.identification import Identification, print_identification, print_overview
from lastbit.reports.paper import line, make_console
from lastbit.verify.worker import Worker, WorkerEnded, planned


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    chosen = {"ops": tuple(options.op), "seed": options.seed, "cases": options.cases_per_group, "plain": True}
    config, console, found = config_of(options, **chosen), make_console(), []
    with Worker(config) as worker:
        for item in {item.kernel: item for item in worker.do(planned)}.values():
            try:
                one = worker.do(identify_kernel, item.kernel, most=options.combinations)
            except WorkerEnded as ended:
                one = Identification(item.kernel, item.op, item.device, item.contract, errors=(str(ended),))
            found.append(one)
            print_identification(one, console, every=options.all)
    if not found:
        line(console, NO_KERNEL.format("these ops"))
    if len(found) > 1:
        print_overview(found, console)
    return worst_code(one.exit_code for one in found)
