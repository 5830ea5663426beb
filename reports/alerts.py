"""What a run says about places in source files: one alert per problem, with the line of the kernel that has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.result import CaseResult, Verdict
from harness.run import Run
from reports import wording
from reports.noticed import noticed
from reports.summary import Problem, problems, repro_line

ERRORED, INCONCLUSIVE = "errored", "inconclusive"
"""Kinds of alerts besides those of findings."""


@dataclass(frozen=True)
class Location:
    """A line of a file.

    Attributes:
        path: relative to the root of the repository if it is below it, otherwise absolute; empty if it is not known.
        line: from 1 on.
    """

    path: str = ""
    line: int = 1


@dataclass(frozen=True)
class Alert:
    """One thing about a kernel.

    Attributes:
        kind: of the first finding, or `errored` or `inconclusive`.
        level: `error` if the kernel has to answer for it, `warning` if it was not decided, `note` for a notice.
        key: op, kernel, kind and stage: the same for the same problem in every run.
        title: for a headline.
        text: everything there is to say; the last line runs the smallest case again, if there is one.
    """

    kind: str
    level: str
    key: tuple[str, str, str, str]
    title: str
    text: str
    place: Location


def alerts(run: Run) -> list[Alert]:
    """One per problem, in their order, one per kernel that the run left inconclusive, and what it noticed."""
    root = _repository_root()
    options = run.environment.get("options", "")
    found = (_of_problem(problem, options, root) for problem in problems(run))
    return [*found, *_undecided(run, root), *_noticed(run, root)]


def doubts(run: Run, kernel: str, device: str) -> list[str]:
    """Why the run left a kernel inconclusive, and what to do about it."""
    own = replace(
        run,
        results=tuple(r for r in run.results if (r.kernel, r.device) == (kernel, device)),
        power=tuple(p for p in run.power if (p.kernel, p.device) == (kernel, device)),
    )
    missing = wording.never_told_apart(own)
    return [*missing, *wording.undecided(own), *([wording.ADVICE] if missing else [])]


def _of_problem(problem: Problem, options: str, root: Path) -> Alert:
    result = problem.smallest
    errored = result.verdict is Verdict.ERRORED or not result.faults
    kind, stage = (ERRORED, "") if errored else (result.faults[0].kind, result.faults[0].stage)
    fields = [f"{label}: {text}" if label else text for label, text in wording.problem_fields(problem)]
    return Alert(
        kind=kind,
        level="error",
        key=(result.op, result.kernel, kind, stage),
        title=f"{result.verdict.value} {result.kernel}" + (f": {stage}" if stage else ""),
        text="\n".join([*fields, repro_line(result, options)]),
        place=_place(result, root),
    )


def _undecided(run: Run, root: Path) -> Iterator[Alert]:
    for kernel, device in run.subjects():
        if run.verdict(kernel, device) is not Verdict.INCONCLUSIVE:
            continue
        result = next(r for r in run.results if (r.kernel, r.device) == (kernel, device))
        yield Alert(
            kind=INCONCLUSIVE,
            level="warning",
            key=(result.op, kernel, INCONCLUSIVE, device),
            title=f"{Verdict.INCONCLUSIVE.value} {kernel} on {device}",
            text="\n".join(doubts(run, kernel, device)),
            place=_place(result, root),
        )


def _noticed(run: Run, root: Path) -> Iterator[Alert]:
    for entry in noticed(run):
        result = entry.smallest
        yield Alert(
            kind=entry.kind,
            level="note",
            key=(result.op, result.kernel, entry.kind, result.device),
            title=f"Notice: {result.kernel} on {result.device}",
            text=f"{entry.sentence}\n{entry.repro(run.environment.get('options', ''))}",
            place=_place(result, root),
        )


def _place(result: CaseResult, root: Path) -> Location:
    path, _, line = result.source.rpartition(":")
    if not path:
        return Location(result.source)
    number = int(line) if line.isdecimal() and int(line) > 0 else 1
    resolved = Path(path).resolve()
    return Location(resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path, number)


def _repository_root() -> Path:
    """The folder that holds `.git`, from the working directory up; without one, the working directory."""
    here = Path.cwd().resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
