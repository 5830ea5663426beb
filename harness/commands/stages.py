"""`lastbit stages`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from harness.case import parse_case
from harness.commands.options import Subparsers, add_device, add_kernel_choice, config_of
from harness.commands.running import NOTHING_RUN, worst_code
from harness.verify.handover import search_stages
from harness.verify.inprocess import plan_for, prepare
from reports.paper import line, make_console
from reports.stages import print_legend, print_stages


def add_to(commands: Subparsers) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "stages",
        help="find the first stage of a kernel that goes wrong on a case",
        description="Replace the stages of a kernel by the reference's, one after the other, and name the first that "
        "matters. Where a kernel shows no stages, find the one that would explain it, computed otherwise.",
    )
    parser.set_defaults(command=_stages)
    parser.add_argument("case", help="the line that a report printed, in quotes")
    add_device(parser)
    add_kernel_choice(parser)


def _stages(options: argparse.Namespace, rest: Sequence[str]) -> int:
    case = parse_case(options.case)
    config = config_of(options, lines=(str(case),))
    prepare(torch.device(config.devices[0]))
    console = make_console()
    codes = set()
    if not (items := plan_for(config).items):
        line(console, f"no kernel of {case.op} is here; --kernels says where kernels are")
        return NOTHING_RUN
    for item in items:
        found = search_stages(item.subject, case)
        print_stages(found, console)
        codes.add(found.exit_code)
    print_legend(console)
    return worst_code(codes)
