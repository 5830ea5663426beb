"""What a run says about places in source files: one notice per problem, with the line of the kernel that has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.result import CaseResult, Run, Verdict
from reports import wording
from reports.summary import Problem, problems, repro_line

ERRORED, INCONCLUSIVE = "errored", "inconclusive"
"""Kinds of notices besides those of findings."""


@dataclass(frozen=True)
class Place:
    """A line of a file.

    Attributes:
        path: relative to the root of the repository if it is below it, otherwise absolute; empty if it is not known.
        line: from 1 on.
    """

    path: str = ""
    line: int = 1


@dataclass(frozen=True)
class Notice:
    """One thing that is wrong with a kernel.

    Attributes:
        kind: of the first finding, or `errored` or `inconclusive`.
        fault: the kernel has to answer for it; otherwise it was not decided.
        key: op, kernel, kind and stage: the same for the same problem in every run.
        title: for a headline.
        text: everything there is to say; the last line runs the smallest case again, if there is one.
    """

    kind: str
    fault: bool
    key: tuple[str, str, str, str]
    title: str
    text: str
    place: Place


def notices(run: Run) -> list[Notice]:
    """One notice per problem, in their order, and one per kernel that the run left inconclusive."""
    root = _repository_root()
    options = run.environment.get("options", "")
    return [*(_of_problem(problem, options, root) for problem in problems(run)), *_undecided(run, root)]


def doubts(run: Run, kernel: str, device: str) -> list[str]:
    """Why the run left a kernel inconclusive, and what to do about it."""
    own = replace(
        run,
        results=tuple(r for r in run.results if (r.kernel, r.device) == (kernel, device)),
        power=tuple(p for p in run.power if (p.kernel, p.device) == (kernel, device)),
    )
    missing = wording.never_told_apart(own)
    return [*missing, *wording.undecided(own), *([wording.ADVICE] if missing else [])]


def _of_problem(problem: Problem, options: str, root: Path) -> Notice:
    result = problem.smallest
    errored = result.verdict is Verdict.ERRORED or not result.findings
    kind, stage = (ERRORED, "") if errored else (result.findings[0].kind, result.findings[0].stage)
    fields = [f"{label}: {text}" if label else text for label, text in wording.problem_fields(problem)]
    return Notice(
        kind=kind,
        fault=True,
        key=(result.op, result.kernel, kind, stage),
        title=f"{result.verdict.value} {result.kernel}" + (f": {stage}" if stage else ""),
        text="\n".join([*fields, repro_line(result, options)]),
        place=_place(result, root),
    )


def _undecided(run: Run, root: Path) -> Iterator[Notice]:
    for kernel, device in run.subjects():
        if run.verdict(kernel, device) is not Verdict.INCONCLUSIVE:
            continue
        result = next(r for r in run.results if (r.kernel, r.device) == (kernel, device))
        yield Notice(
            kind=INCONCLUSIVE,
            fault=False,
            key=(result.op, kernel, INCONCLUSIVE, device),
            title=f"{Verdict.INCONCLUSIVE.value} {kernel} on {device}",
            text="\n".join(doubts(run, kernel, device)),
            place=_place(result, root),
        )


def _place(result: CaseResult, root: Path) -> Place:
    path, _, line = result.source.rpartition(":")
    if not path:
        return Place(result.source)
    number = int(line) if line.isdecimal() and int(line) > 0 else 1
    resolved = Path(path).resolve()
    return Place(resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path, number)


def _repository_root() -> Path:
    """The folder that holds `.git`, from the working directory up; without one, the working directory."""
    here = Path.cwd().resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
