"""`lastbit bisect`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lastbit.case import parse_case
from lastbit.command_line import read_words
from lastbit.commands.options import config_of, workers_of
from lastbit.commands.running import execute
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.history.bisection import BisectQuestion, bisect
from lastbit.history.packages import Versions, open_versions
from lastbit.history.revisions import Revisions, open_revisions
from lastbit.reports.bisection import print_bisection, print_extent, print_step
from lastbit.reports.paper import make_console
from lastbit.run import Run
from lastbit.verify.project import open_project


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    asked, of_commits = read_words(options.words), options.package is None
    question = BisectQuestion(_one(asked.kernels, ""), options.stage, options.metric, options.drift)
    case = parse_case(asked.case("bisect"))
    # Checked before the first run; the kernels of commits need not be here.
    config = config_of(options, **({"kernel_folders": ()} if of_commits else {}))
    if len(config.devices) != 1:
        raise UsageError(f"--device {options.device}: a search follows one device; choose one of {config.devices}")
    open_project(config).op(case.op)
    config, console = config.anywhere, make_console()

    def measure(name: str, changes: Mapping[str, Any]) -> Run:
        here = replace(config, folder=str(Path(config.folder, name)), **changes)
        return execute(here, workers=workers_of(options), quiet=True)

    with _space(options, config) as space:
        print_extent(space.what, len(space.candidates()), options.good, options.bad, console)
        found = bisect(space, question, measure, partial(print_step, console=console))
        last = found.culprit or found.after.point  # with the difference that it made, and commands to get at it again
        found = replace(found, recipe=space.recipe(last.name))
        if not isinstance(space, Versions):
            found = replace(found, log=space.log(), change=space.change(last.name) if found.culprit else "")
    # A run of one case finds its ops by these, and the kernels of a search through versions.
    folders = [("--kernels", path) for path in asked.paths if not of_commits]
    folders += [("--project", folder) for folder in options.project]
    print_bisection(found, console, " ".join(f"{option} {shlex.quote(folder)}" for option, folder in folders))
    return 0 if found.culprit else 1


@contextmanager
def _space(options: argparse.Namespace, config: Config) -> Iterator[Revisions | Versions]:
    """Yield the revisions or versions to search; their folders last as long as the context."""
    if options.package is None:
        folder = options.repository or Path()
        kernels = _one(read_words(options.words).paths, "kernels")
        with open_revisions(folder, options.good, options.bad, kernels=kernels, build=options.build) as revisions:
            yield revisions
        return
    for name, value in (("--repository", options.repository), ("--build", options.build)):
        if value:
            raise UsageError(f"{name} {value} has no meaning with --package, which takes kernels as they are now")
    yield open_versions(options.package, options.good, options.bad, device_type=config.device_plan.types[0])


def _one(given: Sequence[str], otherwise: str) -> str:
    if len(given) > 1:
        raise UsageError(f"{', '.join(given)}: a search follows one kernel; give one, as in my_kernels::norm")
    return given[0] if given else otherwise
