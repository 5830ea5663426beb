"""`lastbit explain`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from lastbit.case import parse_case
from lastbit.commands.options import add_device, add_isolate, add_kernel_choice, add_timeout, config_of
from lastbit.commands.report import STANDARD_OUTPUT, write_text
from lastbit.commands.running import worst_code
from lastbit.diagnosing.explain import Explainer
from lastbit.errors import UsageError
from lastbit.judges.confined import ConfinedExplainer
from lastbit.reports.explanation import as_json, print_explanation
from lastbit.reports.paper import line, make_console


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = (
        "Run a kernel on a case and say why it fails: the line, the arithmetic of the worst element stage by stage, "
        "the rounding that decides it, and what the errors look like."
    )
    parser.set_defaults(command=_explain)
    parser.add_argument("case", help="the line that a report printed, in quotes")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what to print (default: text)")
    add_timeout(parser)
    add_isolate(parser)
    add_device(parser)
    add_kernel_choice(parser)


def _explain(options: argparse.Namespace, rest: Sequence[str]) -> int:
    case = parse_case(options.case)
    config = config_of(options, lines=(str(case),))
    if options.isolate and not config.kernels:
        raise UsageError("--isolate loads no kernel here; name the one that fails: --kernel NAME")
    seconds = options.timeout if options.isolate else math.inf
    console = make_console()
    found = []
    with ConfinedExplainer(config) if options.isolate else Explainer(config) as explainer:
        for item in explainer.planned:
            found.append(explainer.explain(item.kernel, str(case), seconds=seconds).without_vain_test)
            if options.format == "text":
                print_explanation(found[-1], console)
    if options.format == "json":
        write_text(STANDARD_OUTPUT, as_json(found) + "\n")
    elif not found:
        line(console, f"no kernel of {case.op} is here; --kernels says where kernels are")
    return worst_code(one.exit_code for one in found)
