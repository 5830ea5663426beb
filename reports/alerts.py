"""Alerts of a run at places in source files: one per problem, at the line that is wrong where it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lastbit.reports import unreached, wording
from lastbit.reports.explanation import explanation_of, problem_and_why
from lastbit.reports.summary import KernelFailure, noticed, problems, repro_line
from lastbit.reports.why import Explanation, Step
from lastbit.result import CaseResult, Verdict
from lastbit.run import Run

ERRORED, INCONCLUSIVE, UNREACHED = "errored", "inconclusive", "unreached"
"""Kinds of alerts besides those of findings."""


@dataclass(frozen=True)
class Location:
    """A line of a file, or an expression in it.

    Attributes:
        path: relative to the root of the repository if it is below it, otherwise absolute; empty if it is not known.
        line, end_line: from 1 on; no end of a line as a whole.
        column, end_column: in characters from 1 on, the end being the first that is not part of it; 0 of a line.
        text, code: the expression, and the whole line without the blanks around it.
    """

    path: str = ""
    line: int = 1
    end_line: int = 0
    column: int = 0
    end_column: int = 0
    text: str = ""
    code: str = ""


@dataclass(frozen=True)
class Alert:
    """A problem, doubt or notice about a kernel.

    Attributes:
        kind: of the first finding, or `errored` or `inconclusive`.
        level: `error` if the kernel has to answer for it, `warning` if it was not decided, `note` for a notice.
        key: op, kernel, kind and stage: the same for the same problem in every run.
        title: for a headline.
        text: everything there is to say; the last line runs the smallest case again, if there is one.
        place: where to look first: the expression that is wrong, or else the kernel.
        others: other places, and what each of them is.
        explanation: why the kernel fails, if the run found that out.
    """

    kind: str
    level: str
    key: tuple[str, str, str, str]
    title: str
    text: str
    place: Location
    others: tuple[tuple[str, Location], ...] = ()
    explanation: Explanation | None = None


def alerts(run: Run) -> list[Alert]:
    """Make an alert per problem, in their order, one per inconclusive kernel, and one per notice."""
    root = repository_root()
    options = run.environment.get("options", "")
    found = (_of_problem(problem, explanation_of(run, problem), options, root) for problem in problems(run))
    return [*found, *_undecided(run, root), *_noticed(run, root)]


def doubts(run: Run, kernel: str, device: str) -> list[str]:
    """List the reasons why the run left a kernel inconclusive, and what to do about them."""
    own = replace(
        run,
        results=tuple(r for r in run.results if (r.kernel, r.device) == (kernel, device)),
        power=tuple(p for p in run.power if (p.kernel, p.device) == (kernel, device)),
        unreached=run.left_out(kernel),
    )
    missing = wording.never_told_apart(own)
    return [*missing, *wording.undecided(own), *([wording.ADVICE] if missing else [])]


def _of_problem(problem: KernelFailure, explanation: Explanation | None, options: str, root: Path) -> Alert:
    result = problem.smallest
    errored = result.verdict is Verdict.ERRORED or not result.faults
    kind, stage = (ERRORED, "") if errored else (result.faults[0].kind, result.faults[0].stage)
    said = problem_and_why(problem, explanation, options)
    fields = [f"{label}: {text}" if label else text for label, text in said]
    place, *others = _places(result, explanation, root)
    at = _stage(explanation) or stage
    return Alert(
        kind=kind,
        level="error",
        key=(result.op, result.kernel, kind, stage),
        title=f"{result.verdict.value} {result.kernel}" + (f": {at}" if at else ""),
        text="\n".join(filter(None, [*fields, repro_line(result, options)])),
        place=place[1],
        others=tuple(others),
        explanation=explanation,
    )


def _stage(explanation: Explanation | None) -> str:
    """Name the stage that the wrong line computes; empty if that is unknown."""
    culprit = explanation.culprit if explanation is not None else None
    return culprit.match.stage if culprit is not None and culprit.match is not None else ""


def _places(result: CaseResult, explanation: Explanation | None, root: Path) -> Iterator[tuple[str, Location]]:
    """Yield the places to look at, the most important first; places in the repository come before others."""
    places = [("the kernel", _place(result, root))]
    if explanation is not None and explanation.culprit is not None:
        places.insert(0, ("the expression that is wrong", place_of(explanation.culprit, root)))
    yield from sorted(places, key=lambda place: Path(place[1].path).is_absolute())
    document = Path("docs", "contracts", f"{result.op}.md")
    if (root / document).is_file():
        line = _mention(root / document, _stage(explanation))
        yield f"the contracts of {result.op}", Location(document.as_posix(), line)


def _mention(document: Path, stage: str) -> int:
    """Return the number of the first line that names a stage, or else 1."""
    lines = document.read_text(encoding="utf-8", errors="replace").splitlines() if stage else []
    return next((number for number, line in enumerate(lines, 1) if f"`{stage}`" in line), 1)


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


def unreached_alerts(run: Run) -> list[Alert]:
    """Make a note for each branch that handles inputs and that no case reached; no annotation shows these."""
    ops, root = {result.kernel: result.op for result in run.results}, repository_root()
    return [
        Alert(
            kind=UNREACHED,
            level="note",
            key=(ops.get(one.kernels[0], ""), one.function, UNREACHED, f"{one.text} {one.never}"),
            title=f"No case reached a branch of {one.function}",
            text=f"{unreached.reaching(one)}\nkernels: {', '.join(one.kernels)}",
            place=Location(_relative(one.file, root), one.line),
        )
        for one in unreached.telling(run)
    ]


def _place(result: CaseResult, root: Path) -> Location:
    path, _, line = result.source.rpartition(":")
    if not path:
        return Location(result.source)
    return Location(_relative(path, root), int(line) if line.isdecimal() and int(line) > 0 else 1)


def place_of(step: Step, root: Path) -> Location:
    """Locate a step in its file."""
    columns = step.column + 1, step.end_column + 1
    return Location(_relative(step.file, root), step.line, step.end_line, *columns, text=step.text, code=step.code)


def _relative(path: str, root: Path) -> str:
    resolved = Path(path).resolve()
    return resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path


def repository_root() -> Path:
    """Return the folder that holds `.git`, from the working directory up; without one, the working directory."""
    here = Path.cwd().resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
