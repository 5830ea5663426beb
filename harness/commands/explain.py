"""`lastbit explain`, whose options --stages and --trace go deeper."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console

from lastbit.case import Case, parse_case
from lastbit.command_line import Asked, kernel_words, read_words
from lastbit.commands.options import NO_KERNEL, config_of
from lastbit.commands.running import worst_code
from lastbit.config import Config
from lastbit.diagnosing.explainer import Explainer
from lastbit.diagnosing.handover import search_stages
from lastbit.diagnosing.trace import trace_case
from lastbit.errors import UsageError
from lastbit.reports.explanation import as_json, print_explanation, print_trace
from lastbit.reports.paper import STANDARD_OUTPUT, line, make_console, write_text
from lastbit.reports.stages import StageSearch, print_legend, print_stages
from lastbit.reports.why import Explanation, KernelTrace
from lastbit.result import Verdict
from lastbit.verify.worker import Worker, WorkerEnded, on_case, planned

Outcome = TypeVar("Outcome", StageSearch, KernelTrace)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    asked = read_words(options.words)
    case = parse_case(asked.case("explain"))
    _check(options, asked, case)
    found, console, config = list[Any](), make_console(), config_of(options)
    results: Iterator[Any]
    show: Callable[[Any, Console], None] = print_explanation
    if options.stages:
        results, show = _asked(config, search_stages, StageSearch), print_stages
    elif options.trace:
        results, show = _asked(config, trace_case, KernelTrace, every=options.all), print_trace
    else:
        results = _reasons(config, options)
    for one in results:
        found.append(one)
        if options.format == "text":
            show(one, console)
    if options.format == "json":
        write_text(STANDARD_OUTPUT, as_json(found) + "\n")
    elif not found:
        line(console, NO_KERNEL.format(case.op))
    elif options.stages:
        print_legend(console)
    return worst_code(one.exit_code for one in found)


def _check(options: argparse.Namespace, asked: Asked, case: Case) -> None:
    """Raise `UsageError` for options that mean nothing together."""
    deeper = "--stages" if options.stages else "--trace" if options.trace else ""
    if options.isolate and deeper:
        raise UsageError(f"{deeper} looks into a kernel, which --isolate forbids; give one of them")
    if options.isolate and not asked.kernels:
        words = ["lastbit", "explain", *kernel_words(asked.paths, ["NAME"]), str(case), "--isolate"]
        raise UsageError(f"--isolate loads no kernel here; name the one that fails, as verify did: {shlex.join(words)}")
    if options.trace and options.device != "cpu":
        raise UsageError(f"--trace runs the kernel on the CPU, and not on {options.device}; leave --device away")
    if options.all and not options.trace:
        raise UsageError("--all goes with --trace")
    if options.stages and options.format != "text":
        raise UsageError("--stages prints text alone; leave --format away")


def _reasons(config: Config, options: argparse.Namespace) -> Iterator[Explanation]:
    [case] = config.lines
    seconds = options.timeout if options.isolate else math.inf
    if options.isolate:
        from lastbit.judges.confined_explanations import ConfinedExplainer  # and with it all that runs judges

        explainer: ConfinedExplainer | Explainer = ConfinedExplainer(config)
    else:
        explainer = Explainer(config)
    with explainer:
        for item in explainer.planned:
            yield explainer.explain(item.kernel, case, seconds=seconds).without_vain_test


def _asked(
    config: Config, work: Callable[..., Outcome], outcome: Callable[..., Outcome], **options: bool
) -> Iterator[Outcome]:
    """Do work for each kernel on the case; of one that ends its process the outcome is the reason alone."""
    [case] = config.lines
    with Worker(config) as worker:
        for item in worker.do(planned):
            try:
                yield worker.do(on_case, work, item.kernel, case, **options)
            except WorkerEnded as ended:
                names = item.kernel, item.op, item.contract, case, item.device
                yield outcome(*names, verdict=Verdict.ERRORED, reason=str(ended))
