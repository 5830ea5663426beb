"""Progress of a run: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from lastbit.reports.characters import visible
from lastbit.reports.paper import line, make_console
from lastbit.reports.summary import plural
from lastbit.result import BAD, CaseResult, Verdict


class RunProgress:
    """Counts of passed and failed cases while a run goes on, as a context manager.

    Only counted results move the bar; those tried while a failure is shrunk show as `shrinking`. Without a terminal it
    prints a line when the first result comes and then at most one every `interval` seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        total: int | None = None,
        interval: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or make_console(stderr=True)
        self._total, self._interval, self._clock = total, interval, clock
        self._done = self._passed = self._bad = 0
        self._last_line: float | None = None
        self._bar = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, counts="")

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def set_total(self, n: int) -> None:
        """Say how many counted results there will be."""
        self._total = n
        self._bar.update(self._task, total=n)

    def advance(self, result: CaseResult) -> None:
        """Take note of one more result."""
        if result.counted:
            self._done += 1
            self._passed += result.verdict is Verdict.PASSED
            self._bad += result.verdict in BAD
        if self._total is not None and self._done > self._total:  # cases are added where contracts are not told apart
            self.set_total(self._done)
        now = visible(result.kernel if result.counted else f"shrinking a failure of {result.kernel}")
        counts = f"{self._passed:,} passed, {self._bad:,} failed"
        self._bar.update(self._task, completed=self._done, counts=counts, description=now)
        if self._console.is_terminal:
            return
        at = self._clock()
        if self._last_line is None or at - self._last_line >= self._interval:
            self._last_line, of = at, plural(self._total or 0, "case")
            some = plural(self._done, "case") if self._total is None else f"{self._done:,} of {of}"
            line(self._console, f"{some}: {counts}; {now}")


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what is under way, on a terminal for as long as it is."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        line(console, what)
        yield
        return
    with console.status(Text(visible(what))):
        yield
