"""What is wrong with each kernel, what was not run, and what the run was blind to, on a console."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lastbit.outcomes.explanation import Explanation
from lastbit.reports import wording
from lastbit.reports.explained import explanation_fields, explanation_of
from lastbit.reports.noticed import noticed
from lastbit.reports.paper import line, paragraph, verdict_word
from lastbit.reports.summary import ORDER, Problem, listed, plural, problems, repro_line
from lastbit.run import Run

MOST_PROBLEMS = 10
MOST_SENTENCES = 5
MOST_LINES = 12

_TO_COPY = frozenset({"source", "line", "smallest", "see more"})
"""Labels of what is not wrapped: paths to click, and lines to copy."""


def print_findings(run: Run, console: Console) -> None:
    """One block per kernel and stage that went wrong, and how many were left out."""
    found = problems(run)
    if not found:
        return
    line(console, "Findings", "bold")
    if len(found) > 1:
        paragraph(console, Text(ORDER, "dim"))
    for problem in found[:MOST_PROBLEMS]:
        _print_problem(problem, explanation_of(run, problem), console, run.environment.get("options", ""))
    if rest := found[MOST_PROBLEMS:]:
        kernels = dict.fromkeys(problem.smallest.kernel for problem in rest)
        names = listed(kernels, wording.MOST_NAMES)
        paragraph(console, Text(f"and {plural(len(rest), 'more finding')} in {names}; the records have them all"))
        line(console)


def _print_problem(problem: Problem, explanation: Explanation | None, console: Console, options: str) -> None:
    result = problem.smallest
    groups = f", {names}" if (names := wording.problem_groups(problem)) else ""
    line(console, Text.assemble(verdict_word(result.verdict), "  ", (result.kernel, "bold"), groups))
    for label, text in wording.problem_fields(problem, most_sentences=MOST_SENTENCES):
        _field(console, label, text)
    for label, text in explanation_fields(explanation, options):
        _field(console, label, text)
    line(console, "  run again")
    line(console, f"    {repro_line(result, options)}")
    line(console)


def _field(console: Console, label: str, text: str) -> None:
    if label in _TO_COPY:
        line(console, f"  {label:<12} {text}")
    else:
        paragraph(console, Text(text), label=f"  {label:<12} ", label_style="dim")


def print_notices(run: Run, console: Console) -> None:
    """What was noticed and fails nothing, with a case to repeat for each."""
    if found := noticed(run):
        line(console, "Notices", "bold")
        for entry in found[:MOST_LINES]:
            paragraph(console, Text(entry.sentence), label="  ")
            line(console, f"    {entry.repro(run.environment.get('options', ''))}")
        if rest := found[MOST_LINES:]:
            line(console, f"  and {plural(len(rest), 'more notice')}; the records have them all")
        line(console)


def print_not_run(run: Run, console: Console) -> None:
    """What was asked for and not run, and the cases that kernels turned down, by reason."""
    _print_list(console, "Not run", [*first_lines(wording.not_run(run)), *first_lines(wording.turned_down(run))])


def print_blind_spots(run: Run, console: Console) -> None:
    """Contracts that the run did not, or could not, tell from a kernel's own, and cases that decided nothing."""
    missing = wording.never_told_apart(run)
    lines = [*first_lines(missing), *[wording.ADVICE] * bool(missing), *filter(None, [wording.coinciding(run)])]
    _print_list(console, "What this run could not have seen", [*lines, *first_lines(wording.undecided(run))])


def first_lines(lines: Sequence[str]) -> list[str]:
    """The first `MOST_LINES`, and how many more there are."""
    rest = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], *([f"and {plural(rest, 'more line')}, in the records"] if rest > 0 else [])]


def _print_list(console: Console, heading: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    line(console, heading, "bold")
    for text in lines:
        paragraph(console, Text(text), label="  ")
    line(console)
