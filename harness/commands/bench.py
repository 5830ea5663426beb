"""`lastbit bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commands.options import add_device, add_kernel_choice, config_of

if TYPE_CHECKING:
    from harness.bench.samples import Effort
    from harness.outcomes.bench import Bench, Measurement
    from harness.verify.worker import Worker


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = "Measure lastbit itself, side by side with what it is compared with, in one run."
    parser.set_defaults(command=_bench)
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--cases", type=Path, help="the case lines of this file instead of those in cases/bench")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it works")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write bench_DEVICE.jsonl and bench_DEVICE.md there")
    add_device(parser)
    add_kernel_choice(parser)


def _bench(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from harness.bench.samples import QUICK, Effort
    from harness.outcomes.bench import Bench
    from harness.verify.run import environment_of
    from harness.verify.worker import Worker
    from reports.bench import page
    from reports.paper import line, make_console

    config = config_of(options, kernels=tuple(options.kernel), ops=tuple(options.op))
    found: list[Measurement] = []
    failed: list[str] = []
    interrupted = False
    try:
        with Worker(config) as worker:
            _measure(worker, QUICK if options.quick else Effort(), found, failed)
    except KeyboardInterrupt:  # what was measured took long enough to be shown
        interrupted = True
        failed.append("the rest: interrupted")
    command = shlex.join(["lastbit", *sys.argv[1:]])
    bench = Bench(tuple(found), tuple(failed), command, environment_of(config))
    line(make_console(), page(bench))
    if options.out is not None:
        _write(bench, options.out, config.devices[0])
    if interrupted:
        raise KeyboardInterrupt
    return 2 if failed else 0


def _measure(worker: Worker, effort: Effort, found: list[Measurement], failed: list[str]) -> None:
    """Measure everything, say how it goes, and add what was measured to `found`, what could not be to `failed`."""
    from harness.bench.cost import cost
    from harness.bench.judging import asserting, comparing
    from harness.bench.rate import rate
    from harness.bench.subjects import case_lines, ops_of
    from harness.errors import LastbitError
    from harness.outcomes.bench import PARTS
    from reports.bench import sentence
    from reports.paper import line, make_console

    work: list[tuple[Callable[..., list[Measurement]], str]] = [(comparing, "")]
    work += [(cost, case) for case in worker.do(case_lines, "verified.txt")]
    work += [(rate, op) for op in worker.do(ops_of)]
    work += [(asserting, case) for case in worker.do(case_lines, "asserted.txt")]
    progress = make_console(stderr=True)
    for measure, of in work:
        try:
            found += (new := worker.do(measure, of, effort))
        except LastbitError as error:
            failed.append(f"{measure.__name__}, {of}: {error}")
            line(progress, failed[-1], "bold red")
        else:
            for measurement in (m for m in new if m.figure != PARTS):
                line(progress, sentence(measurement), "dim")


def _write(bench: Bench, folder: Path, device: str) -> None:
    """Write both files, named by the kind of device."""
    import torch

    from harness.history.golden_provenance import kind_of
    from reports.bench import as_jsonl, page

    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"bench_{kind_of(torch.device(device)).replace('-', '_')}"
    stem.with_suffix(".jsonl").write_text(as_jsonl(bench), encoding="utf-8")
    stem.with_suffix(".md").write_text(page(bench), encoding="utf-8")
