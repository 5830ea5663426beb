"""`lastbit bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lastbit.commands.options import CASE, KERNEL, add_device, add_words, config_of

if TYPE_CHECKING:
    from lastbit.bench.samples import Effort
    from lastbit.reports.bench import Measurement
    from lastbit.reports.speed import Roof, Speed
    from lastbit.verify.worker import Worker


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = "Measure lastbit, or kernels, side by side with what they are compared with, in one run."
    parser.set_defaults(command=_bench)
    help = (
        "verifying: what it costs (the default); kernels: how fast they are; FILE.py: how fast a kernel is that nobody "
        f"trusts, with --op; then {KERNEL}; and {CASE}"
    )
    add_words(parser, "[verifying | kernels | FILE.py] [KERNEL …] ['CASE' …]", help)
    parser.add_argument("--contract", default="", help="of the kernel of a file (default: the first of each axis)")
    parser.add_argument("--function", default="", help="the kernel of a file, where that does not make it clear")
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument(
        "--cases", type=Path, metavar="FILE", help="the case lines of this file instead of those in cases/bench"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it works")
    help = "write bench_DEVICE.jsonl and .md there, or kernels_DEVICE.jsonl and .md"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=help)
    add_device(parser)


class _Measures(Protocol):
    """The measurements of the command; the results so far are kept, also when it is interrupted."""

    stem: str
    failed: list[str]

    def measure(self, worker: Worker, effort: Effort) -> None:
        """Measure everything, say how it goes, and keep it."""

    def written(self, command: str, environment: Mapping[str, str]) -> tuple[str, str]:
        """Return the measurements as Markdown and as lines of JSON."""


def _bench(options: argparse.Namespace, rest: Sequence[str]) -> int:
    what = "verifying" if not options.words else "kernels"
    if options.words and (options.words[0] in _BENCHES or options.words[0].endswith(".py")):
        what = options.words.pop(0)
    if what not in _BENCHES:
        from lastbit.commands.bench_file import bench_file

        return bench_file(options, Path(what))
    from lastbit.bench.samples import QUICK, Effort
    from lastbit.reports.paper import line, make_console
    from lastbit.verify.processes import environment_of
    from lastbit.verify.worker import Worker

    config = config_of(options, ops=tuple(options.op))
    bench = _BENCHES[what]()
    interrupted = False
    try:
        with Worker(config) as worker:
            bench.measure(worker, QUICK if options.quick else Effort())
    except KeyboardInterrupt:  # what was measured took long enough to be shown
        interrupted = True
        bench.failed.append("the rest: interrupted")
    page, records = bench.written(shlex.join(["lastbit", *sys.argv[1:]]), environment_of(config))
    line(make_console(), page)
    if options.out is not None:
        _write(page, records, options.out, bench.stem, config.devices[0])
    if interrupted:
        raise KeyboardInterrupt
    return 2 if bench.failed else 0


@contextmanager
def _told(what: str, failed: list[str]) -> Iterator[None]:
    """Say that something could not be measured, and go on."""
    from lastbit.errors import LastbitError
    from lastbit.reports.paper import line, make_console

    try:
        yield
    except LastbitError as error:
        failed.append(f"{what}: {error}")
        line(make_console(stderr=True), failed[-1], "bold red")


@dataclass
class _OfLastbit:
    """The measurements of the cost of verifying."""

    stem: str = "bench"
    found: list[Measurement] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def measure(self, worker: Worker, effort: Effort) -> None:
        from lastbit.bench.own_cost import asserting, comparing, cost, rate
        from lastbit.bench.subjects import case_lines, ops_of
        from lastbit.reports.bench import PARTS, sentence
        from lastbit.reports.paper import line, make_console

        work: list[tuple[Callable[..., list[Measurement]], str]] = [(comparing, "")]
        work += [(cost, case) for case in worker.do(case_lines, "verified.txt")]
        work += [(rate, op) for op in worker.do(ops_of)]
        work += [(asserting, case) for case in worker.do(case_lines, "asserted.txt")]
        progress = make_console(stderr=True)
        for measure, of in work:
            with _told(f"{measure.__name__}, {of}", self.failed):
                self.found += (new := worker.do(measure, of, effort))
                for measurement in (m for m in new if m.figure != PARTS):
                    line(progress, sentence(measurement), "dim")

    def written(self, command: str, environment: Mapping[str, str]) -> tuple[str, str]:
        from lastbit.reports.bench import Bench, as_jsonl, page

        bench = Bench(tuple(self.found), tuple(self.failed), command, environment)
        return page(bench), as_jsonl(bench)


@dataclass
class _OfKernels:
    """The measurements of the speed of kernels."""

    stem: str = "kernels"
    roof: Roof | None = None
    found: list[Speed] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def measure(self, worker: Worker, effort: Effort) -> None:
        from lastbit.bench.kernel_speed import roof, takers
        from lastbit.bench.subjects import case_lines

        with _told("the roof", self.failed):
            self.roof = worker.do(roof, effort)
        for case in worker.do(case_lines, "kernels.txt"):
            for kernel in worker.do(takers, case):
                with _told(f"{kernel}, {case}", self.failed):
                    self._add(worker, case, kernel, effort)

    def _add(self, worker: Worker, case: str, kernel: str, effort: Effort) -> None:
        from lastbit.bench.kernel_speed import speed
        from lastbit.errors import UnsupportedCase
        from lastbit.reports.paper import line, make_console
        from lastbit.reports.speed import sentence

        try:
            self.found.append(worker.do(speed, case, kernel, effort))
        except UnsupportedCase as reason:
            self.left_out.append(f"{kernel}: {reason}")
        else:
            line(make_console(stderr=True), sentence(self.found[-1], self.roof), "dim")

    def written(self, command: str, environment: Mapping[str, str]) -> tuple[str, str]:
        from lastbit.reports.speed import Speeds, as_jsonl, page

        left_out = tuple(dict.fromkeys(self.left_out))
        bench = Speeds(self.roof, tuple(self.found), left_out, tuple(self.failed), command, environment)
        return page(bench), as_jsonl(bench)


_BENCHES: Mapping[str, Callable[[], _Measures]] = {"verifying": _OfLastbit, "kernels": _OfKernels}


def _write(page: str, records: str, folder: Path, stem: str, device: str) -> None:
    """Write both files, named by the kind of device."""
    import torch

    from lastbit.history.golden_provenance import kind_of

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}_{kind_of(torch.device(device)).replace('-', '_')}"
    path.with_suffix(".jsonl").write_text(records, encoding="utf-8")
    path.with_suffix(".md").write_text(page, encoding="utf-8")
