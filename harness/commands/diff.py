"""`lastbit diff`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lastbit.commands.report import STANDARD_OUTPUT, add_run_argument, read_run, write_text
from lastbit.reports.changes import DRIFT, compare, with_base
from lastbit.reports.changes_json import as_json
from lastbit.reports.changes_terminal import print_changes


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Make a parser that of the command."""
    parser.description = (
        "Say what got better or worse from run BEFORE to run AFTER, per kernel and stage, on the cases "
        "that both have. Exit code 1: a verdict got worse, or elements outside rose, or a new kernel fails."
    )
    parser.set_defaults(command=_diff)
    add_run_argument(parser, "before", help="the folder of a run")
    add_run_argument(parser, "after", help="the folder of the run to compare with it")
    parser.add_argument(
        "--drift",
        type=_factor,
        metavar="F",
        default=DRIFT,
        help=f"factor beyond which a figure has drifted (default: {DRIFT})",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 also for worse figures and kernels gone")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not factor >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no factor from 1 on")
    return factor


def _diff(options: argparse.Namespace, rest: Sequence[str]) -> int:
    names = str(options.before), str(options.after)
    before, after = (with_base(read_run(path))[0] for path in (options.before, options.after))
    changes = compare(before, after, names=names, drift=options.drift)
    if options.json:
        write_text(STANDARD_OUTPUT, as_json(changes, strict=options.strict) + "\n")
    else:
        print_changes(changes, strict=options.strict)
    return changes.exit_code(strict=options.strict)
