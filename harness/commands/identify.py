"""`lastbit identify`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from harness.case import Case, parse_case
from harness.commands.options import Subparsers, add_device, add_folders, config_of
from harness.commands.running import worst_code
from harness.config import Config
from harness.verify.check import Subject
from harness.verify.identify import identify
from harness.verify.inprocess import draw, plan_for, prepare
from harness.verify.project import Project, open_project
from reports.identification import print_identification, print_overview
from reports.paper import line, make_console


def add_to(commands: Subparsers) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "identify",
        help="find out which contracts a kernel keeps",
        description="Try every contract of its op on what a kernel gives, and where none fits, every combination of "
        "rounding points. What the kernel claims plays no part.",
    )
    parser.set_defaults(command=_identify)
    parser.add_argument("kernel", nargs="*", help="names of kernels (default: all)")
    parser.add_argument("--op", action="append", default=[], help="only kernels of this op (repeatable)")
    parser.add_argument("--cases", type=Path, help="take the case lines of this file instead of generated cases")
    parser.add_argument("--cases-per-group", type=int, default=3, help="generated cases per group (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated cases")
    parser.add_argument("--combinations", type=int, default=5000, help="most combinations to try (default: 5000)")
    parser.add_argument("--all", action="store_true", help="show every contract, not only the nearest")
    add_device(parser)
    add_folders(parser)


def _identify(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config = config_of(
        options,
        kernels=tuple(options.kernel),
        ops=tuple(options.op),
        seed=options.seed,
        cases=options.cases_per_group,
    )
    prepare(torch.device(config.devices[0]))
    project = open_project(config)
    console = make_console()
    found = []
    subjects = {item.subject.kernel.name: item.subject for item in plan_for(config).items}
    if not subjects:
        line(console, "no kernel of these ops is here; --kernels says where kernels are")
    for subject in subjects.values():
        found.append(identify(subject, _cases(subject, project, config), project, most=options.combinations))
        print_identification(found[-1], console, every=options.all)
    if len(found) > 1:
        print_overview(found, console)
    return worst_code(one.exit_code for one in found)


def _cases(subject: Subject, project: Project, config: Config) -> Iterator[Case]:
    """The lines of the configuration, or generated cases: as large as for a CPU on every device."""
    kernel = subject.kernel
    if config.lines:
        yield from (case for line in config.lines if (case := parse_case(line)).op == kernel.op)
        return
    for group in project.groups(kernel.op, kernel.accepts, small=True):
        yield from draw(group, config.cases_per_group, config.seed)
