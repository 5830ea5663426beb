"""Runs: started, watched and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from harness.config import Config
from harness.result import CaseResult
from harness.run import Run
from harness.verify import run as runs
from harness.verify.collect import collect
from reports import records
from reports.terminal import RunProgress

INTERRUPTED = 130
"""Exit code of a command that was interrupted from the keyboard."""


NOTHING_RUN = 3
"""Exit code of a command of which a kernel was not verified, or that found nothing to run."""


def worst_code(codes: Iterable[int]) -> int:
    """The exit code for several kernels: something broken, then findings, then all well; `NOTHING_RUN` for none."""
    found = {*codes, NOTHING_RUN}
    return next(code for code in (2, 1, 0, NOTHING_RUN) if code in found)


class Interrupted(KeyboardInterrupt):
    """A run that was interrupted; `run` is what was recorded before, or None if nothing had begun."""

    def __init__(self, run: Run | None) -> None:
        super().__init__()
        self.run = run


def execute(config: Config, arguments: Sequence[str] = (), *, quiet: bool = False) -> Run:
    """Run what `config` says and keep the records in its folder; `arguments` go to pytest.

    Raises:
        LastbitError: the run could not be planned, as when a kernel's file raises.
        Interrupted: from the keyboard; what was recorded is kept.
    """
    children = runs.start(config, arguments)
    results = runs.Results(config, records.parse)
    with RunProgress() as progress:

        def tick() -> None:
            new = results.new()
            if not quiet:
                _show(progress, runs.planned(children), new)

        interrupted = runs.wait(children, tick)
    if interrupted and runs.planned(children) is None:
        raise Interrupted(None)
    run = _kept(collect(config, children, results.all, interrupted=interrupted), Path(config.folder))
    if interrupted:
        raise Interrupted(run)
    return run


def _kept(run: Run, folder: Path) -> Run:
    """The run with its records in `folder`, or broken because they cannot be written."""
    try:
        records.write(run, folder)
    except OSError as error:
        reason = f"the records cannot be written to {folder}: {error.strerror or error}"
        return replace(run, broken="; ".join(filter(None, (run.broken, reason))))
    return run


def _show(progress: RunProgress, total: int | None, results: Sequence[CaseResult]) -> None:
    if total is not None:
        progress.set_total(total)
    for result in results:
        progress.advance(result)
