"""`lastbit stages`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lastbit.case import parse_case
from lastbit.commands.options import add_device, add_kernel_choice, add_timeout, config_of
from lastbit.commands.running import worst_code
from lastbit.diagnosing.handover import search_kernel
from lastbit.outcomes.stages import StageSearch
from lastbit.reports.paper import line, make_console
from lastbit.reports.stages import print_legend, print_stages
from lastbit.result import Verdict
from lastbit.verify.inprocess import planned
from lastbit.verify.plan import Planned
from lastbit.verify.worker import Worker, WorkerEnded


def add_stages(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = (
        "Replace the stages of a kernel by the reference's, one after the other, and name the first that "
        "matters. Where a kernel shows no stages, find the one that would explain it, computed otherwise."
    )
    parser.set_defaults(command=_stages)
    parser.add_argument("case", help="the line that a report printed, in quotes")
    add_timeout(parser)
    add_device(parser)
    add_kernel_choice(parser)


def _stages(options: argparse.Namespace, rest: Sequence[str]) -> int:
    case = parse_case(options.case)
    config = config_of(options, lines=(str(case),))
    console = make_console()
    codes = set()
    with Worker(config) as worker:
        for item in worker.do(planned):
            found = _searched(worker, item, str(case))
            print_stages(found, console)
            codes.add(found.exit_code)
    if codes:
        print_legend(console)
    else:
        line(console, f"no kernel of {case.op} is here; --kernels says where kernels are")
    return worst_code(codes)


def _searched(worker: Worker, item: Planned, line: str) -> StageSearch:
    """What was found, which is nothing but the reason if the kernel ends its process."""
    try:
        return worker.do(search_kernel, item.kernel, line)
    except WorkerEnded as ended:
        names = item.kernel, item.op, item.contract, line, item.device
        return StageSearch(*names, verdict=Verdict.ERRORED, reason=str(ended))
