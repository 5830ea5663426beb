"""`lastbit bench FILE`: how fast a kernel is that nobody trusts, beside one of the project and the roof."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lastbit.commands.options import config_of
from lastbit.errors import LastbitError, UsageError

if TYPE_CHECKING:
    from lastbit.bench.samples import Effort
    from lastbit.case import Case
    from lastbit.judges.opening import Desk
    from lastbit.judges.question import JudgeQuestion
    from lastbit.reports.speed import Roof, SpeedBound


def bench_file(options: argparse.Namespace, path: Path) -> int:
    """Time the kernel of a file; 1 if what it gave meanwhile is wrong, 2 if something could not be measured."""
    from lastbit.bench.samples import QUICK, Effort
    from lastbit.judges.opening import open_desk
    from lastbit.judges.question import JudgeQuestion
    from lastbit.reports.bound import Bounds, as_jsonl, page
    from lastbit.reports.paper import line, make_console
    from lastbit.verify.processes import environment_of
    from lastbit.verify.worker import unwatched

    if len(options.op) != 1:
        raise UsageError("name the op that the kernel of the file computes: --op OP")
    if not path.is_file():
        raise UsageError(f"{str(path)!r} is no file")
    config = config_of(options, ops=tuple(options.op))
    desk = open_desk(config, unwatched, lambda result: None)
    question = JudgeQuestion(op=options.op[0], contract=options.contract, function=options.function)
    bench = _Bench(desk, question, QUICK if options.quick else Effort())
    bench.measure(path)
    command = shlex.join(["lastbit", *sys.argv[1:]])
    found = Bounds(bench.roof, tuple(bench.found), tuple(bench.failed), command, environment_of(config))
    line(make_console(), page(found))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{path.stem}.jsonl").write_text(as_jsonl(found), encoding="utf-8")
        (options.out / f"{path.stem}.md").write_text(page(found), encoding="utf-8")
    return 2 if bench.failed else int(any(b.why for b in bench.found))


@dataclass
class _Bench:
    """The measurements so far."""

    desk: Desk
    question: JudgeQuestion
    effort: Effort
    roof: Roof | None = None
    found: list[SpeedBound] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def measure(self, path: Path) -> None:
        """Measure the roof, then on each case the file's kernel and the one beside it."""
        from lastbit.bench.kernel_speed import roof

        self.roof = roof(self.desk, self.effort)
        for case in self._cases():
            for what, bound in (("the kernel", self._of_file), ("beside it", self._beside)):
                try:
                    self.found += bound(path, case)
                except LastbitError as error:
                    self.failed.append(f"{what}, {case}: {error}")

    def _cases(self) -> Iterator[Case]:
        from lastbit.bench.subjects import case_lines
        from lastbit.case import parse_case

        return map(parse_case, case_lines(self.desk, "kernels.txt"))

    def _of_file(self, path: Path, case: Case) -> Iterator[SpeedBound]:
        from lastbit.bench.untrusted import bound_of
        from lastbit.judges.opening import opened
        from lastbit.verify.check import unsupported

        with opened(self.desk, path, self.question) as kernel:
            if reason := unsupported(kernel.subject.kernel, case):
                raise UsageError(reason)
            yield bound_of(kernel.subject, case, self.desk.kernels.server, self.effort)

    def _beside(self, path: Path, case: Case) -> Iterator[SpeedBound]:
        """Yield the time of a kernel of the project, or of one that is named behind the file."""
        from lastbit.judges.call_time import beside

        if (bound := beside(self.desk, self.question, case, self.effort)) is not None:
            yield bound
