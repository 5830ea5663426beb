"""`lastbit trace`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lastbit.case import parse_case
from lastbit.commands.options import add_kernel_choice, add_timeout, config_of
from lastbit.commands.report import STANDARD_OUTPUT, write_text
from lastbit.commands.running import worst_code
from lastbit.diagnosing.trace import trace_kernel
from lastbit.outcomes.trace import KernelTrace
from lastbit.reports.paper import line, make_console
from lastbit.reports.trace import as_json, print_trace
from lastbit.result import Verdict
from lastbit.verify.inprocess import planned
from lastbit.verify.plan import Planned
from lastbit.verify.worker import Worker, WorkerEnded


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = (
        "Run a kernel on a case on the CPU and show how the worst element of its result came about: every line on its "
        "way from the inputs to the store, with the values."
    )
    parser.set_defaults(command=_trace, device="cpu")
    parser.add_argument("case", help="the line that a report printed, in quotes")
    parser.add_argument("--all", action="store_true", help="every operation of the program that wrote the element")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what to print (default: text)")
    add_timeout(parser)
    add_kernel_choice(parser)


def _trace(options: argparse.Namespace, rest: Sequence[str]) -> int:
    case = parse_case(options.case)
    config = config_of(options, lines=(str(case),))
    console = make_console()
    found = []
    with Worker(config) as worker:
        for item in worker.do(planned):
            found.append(_traced(worker, item, str(case), options.all))
            if options.format == "text":
                print_trace(found[-1], console)
    if options.format == "json":
        write_text(STANDARD_OUTPUT, as_json(found) + "\n")
    elif not found:
        line(console, f"no kernel of {case.op} is here; --kernels says where kernels are")
    return worst_code(one.exit_code for one in found)


def _traced(worker: Worker, item: Planned, line: str, every: bool) -> KernelTrace:
    """What was found, which is nothing but the reason if the kernel ends its process."""
    try:
        return worker.do(trace_kernel, item.kernel, line, every=every)
    except WorkerEnded as ended:
        names = item.kernel, item.op, item.contract, line, item.device
        return KernelTrace(*names, verdict=Verdict.ERRORED, reason=str(ended))
