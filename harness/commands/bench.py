"""`lastbit bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastbit.commands.options import config_of
from lastbit.config import Config
from lastbit.errors import LastbitError, UnsupportedCase, UsageError

if TYPE_CHECKING:
    from lastbit.bench.samples import Effort
    from lastbit.reports.bench import Bench, Speed, SpeedBound

KERNELS = "kernels"


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from lastbit.bench.samples import QUICK, Effort
    from lastbit.reports.bench import Bounds, Speeds
    from lastbit.reports.paper import line, make_console
    from lastbit.verify.processes import environment_of

    first = options.words[0] if options.words else ""
    if first == KERNELS:
        options.words.pop(0)
    of_file = first.endswith(".py")
    path = Path(options.words.pop(0) if of_file else KERNELS)
    if of_file and len(options.op) != 1:
        raise UsageError("name the op that the kernel of the file computes: --op OP")
    if of_file and not path.is_file():
        raise UsageError(f"{str(path)!r} is no file")
    config, interrupted = config_of(options, ops=tuple(options.op)), False
    effort, kind = QUICK if options.quick else Effort(), Bounds if of_file else Speeds
    bench = kind([], [], shlex.join(["lastbit", *sys.argv[1:]]), {})
    with closing((_of_file if of_file else _kernels)(bench, config, effort, options, path)) as steps:
        try:
            _measure(bench, steps, said=not of_file)
        except KeyboardInterrupt:  # what was measured took long enough to be shown
            interrupted = True
            bench.failed.append("the rest: interrupted")
    bench.environment = environment_of(config)
    line(make_console(), page := bench.page)
    if options.out is not None:
        stem = path.stem
        if not of_file:
            import torch

            from lastbit.history.golden_provenance import kind_of

            stem += f"_{kind_of(torch.device(config.devices[0])).replace('-', '_')}"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{stem}.jsonl").write_text(bench.jsonl, encoding="utf-8")
        (options.out / f"{stem}.md").write_text(page, encoding="utf-8")
    if interrupted:
        raise KeyboardInterrupt
    return 2 if bench.failed else int(of_file and any(bound.why for bound in bench.found))


Steps = Generator[tuple[str, Callable[[], Iterable[Any]]], None, None]
"""What is measured, and what measures it."""


def _measure(bench: Bench, steps: Steps, *, said: bool) -> None:
    """Do the steps; note what could not be measured, and go on. Where it is to be `said`, say how it goes."""
    from lastbit.reports.paper import line, make_console

    console = make_console(stderr=True)
    for what, measure in steps:
        try:
            bench.found += (new := list(measure()))
        except LastbitError as error:
            bench.failed.append(f"{what}: {error}")
            sentences, style = [bench.failed[-1]], "bold red"
        else:
            sentences, style = [one.sentence(bench.roof) for one in new if said], "dim"
        for sentence in sentences if said else ():
            line(console, sentence, style)


def _kernels(bench: Bench, config: Config, effort: Effort, options: argparse.Namespace, path: Path) -> Steps:
    """Measure the speed of kernels, beside the roof of the device."""
    from lastbit.bench.case_lines import case_lines
    from lastbit.bench.kernel_speed import roof, speed, takers
    from lastbit.verify.worker import Worker

    with Worker(config) as worker:

        def of_roof() -> tuple[()]:
            bench.roof = worker.do(roof, effort)
            return ()

        def of_kernel(case: str, kernel: str) -> list[Speed]:
            try:
                return [worker.do(speed, case, kernel, effort)]
            except UnsupportedCase as reason:
                if (said := f"{kernel}: {reason}") not in bench.left_out:
                    bench.left_out.append(said)
                return []

        yield "the roof", of_roof
        for case in worker.do(case_lines, "kernels.txt"):
            for kernel in worker.do(takers, case):
                yield f"{kernel}, {case}", partial(of_kernel, case, kernel)


def _of_file(bench: Bench, config: Config, effort: Effort, options: argparse.Namespace, path: Path) -> Steps:
    """Measure a kernel that nobody trusts on each case, and one of the project, or that is named behind the file."""
    import torch

    from lastbit.verify.worker import one_device, prepare, unwatched

    prepare(torch.device(one_device(config)))  # before Triton is imported, which decides then whether it interprets
    from lastbit.bench.case_lines import case_lines
    from lastbit.bench.kernel_speed import roof
    from lastbit.bench.untrusted import bound_of
    from lastbit.case import Case, parse_case
    from lastbit.judges.call_time import beside
    from lastbit.judges.opening import open_desk, opened
    from lastbit.judges.question import JudgeQuestion
    from lastbit.verify.check import unsupported

    desk = open_desk(config, unwatched, lambda result: None)
    question = JudgeQuestion(op=options.op[0], contract=options.contract, function=options.function)

    def of_file(case: Case) -> list[SpeedBound]:
        with opened(desk, path, question) as kernel:
            if reason := unsupported(kernel.subject.kernel, case):
                raise UsageError(reason)
            return [bound_of(kernel.subject, case, desk.kernels.server, effort)]

    def of_another(case: Case) -> list[SpeedBound]:
        bound = beside(desk, question, case, effort)
        return [] if bound is None else [bound]

    bench.roof = roof(desk, effort)
    for case in map(parse_case, case_lines(desk, "kernels.txt")):
        yield f"the kernel, {case}", partial(of_file, case)
        yield f"beside it, {case}", partial(of_another, case)
