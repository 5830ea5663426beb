"""What is wrong with each kernel, what was not run, and what the run was blind to, on a console."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from harness.result import CaseResult, Run, StageResult, Verdict
from reports.paper import line, paragraph, verdict_word
from reports.summary import (
    Problem,
    listed,
    plural,
    problems,
    repro_line,
    share,
    shown_path,
    signed,
    ulp_bins,
)

MOST_PROBLEMS = 10
MOST_SENTENCES = 5
MOST_LINES = 12
MOST_NAMES = 4
MOST_PAIRS = 2

ADVICE = (
    "→ Such a kernel may keep either contract, so it is INCONCLUSIVE unless it fails. Verify it on more cases "
    "(--cases-per-group), or on regimes and shapes for which the two contracts round differently."
)


def print_findings(run: Run, console: Console) -> None:
    """One block per kernel and stage that went wrong, and how many were left out."""
    found = problems(run)
    if not found:
        return
    line(console, "Findings", "bold")
    for problem in found[:MOST_PROBLEMS]:
        _print_problem(problem, console, run.environment.get("options", ""))
    if rest := found[MOST_PROBLEMS:]:
        kernels = dict.fromkeys(problem.smallest.kernel for problem in rest)
        more = f"and {plural(len(rest), 'more finding')} in {listed(kernels, MOST_NAMES)}; the records have them all"
        paragraph(console, Text(more))
        line(console)


def _print_problem(problem: Problem, console: Console, options: str) -> None:
    result = problem.smallest
    names = listed(problem.groups, MOST_NAMES)
    group = f", group{'s' * (len(problem.groups) > 1)} {names}" if names else ""
    line(console, Text.assemble(verdict_word(result.verdict), "  ", (result.kernel, "bold"), group))
    _field(console, "contract", f"{result.contract} of {result.op}")
    if result.verdict is Verdict.ERRORED:
        _field(console, "error", result.reason)
    else:
        _print_failure(problem, console)
    _field(console, "cases", _extent(problem))
    line(console, f"  {'source':<12} {shown_path(result.source)}")
    line(console, f"  {'smallest case':<12}")
    line(console, f"    {repro_line(result, options)}")
    line(console)


def _print_failure(problem: Problem, console: Console) -> None:
    result = problem.smallest
    failing = result.failing_stage
    if failing is not None:
        seen = ", given its own earlier stages" if failing.isolated.outside else ", given the inputs"
        _field(
            console, "first wrong", f"stage {failing.name} ({failing.dtype}){seen if len(result.stages) > 1 else ''}"
        )
    for number, finding in enumerate(result.findings[:MOST_SENTENCES]):
        _field(console, "" if number else "finding", finding.sentence)
    if len(result.findings) > MOST_SENTENCES:
        _field(console, "", f"and {plural(len(result.findings) - MOST_SENTENCES, 'more sentence')} in the records")
    if stage := failing or _named_stage(result):
        _field(console, "statistics", _statistics(result, stage))
    if explanation := _explanation(problem):
        _field(console, "explained by", explanation)


def _field(console: Console, label: str, text: str) -> None:
    paragraph(console, Text(text), label=f"  {label:<12} ", label_style="dim")


def _named_stage(result: CaseResult) -> StageResult | None:
    """The stage that a finding names, or else the last result."""
    named = {finding.stage for finding in result.findings}
    stages = [s for s in result.stages if s.name in named] or [s for s in result.stages if s.result]
    return stages[-1] if stages else None


def _statistics(result: CaseResult, stage: StageResult) -> str:
    seen = stage.isolated if stage.isolated.outside else stage.cumulative
    mismatch = f"{share(seen.mismatched, seen.numel)} of {plural(seen.numel, 'element')} mismatched"
    parts = [f"{stage.name}: bias {signed(seen.bias)} ulp", f"{mismatch} ({ulp_bins(seen.ulp_histogram)})"]
    if result.rows is not None:
        parts.append(
            f"{result.rows.explained:,} of {plural(result.rows.rows, 'row')} explained by one {result.rows.stage}"
        )
    return "; ".join(parts)


def _explanation(problem: Problem) -> str:
    failed = [r for r in problem.bad if r.verdict is Verdict.FAILED]
    if problem.explained_by:
        extent = f"all {len(failed):,} failed results" if len(failed) > 1 else "the failed result"
        return f"{' or '.join(problem.explained_by)}: that contract of the op allows every bit of {extent}"
    if own := problem.smallest.explained_by:
        return f"{' or '.join(own)} in the smallest case, but no contract of the op allows every failed result"
    return ""


def _extent(problem: Problem) -> str:
    """How many cases went wrong, where, and why those that raised did."""
    counts = [(problem.counted(verdict), verdict.value.lower()) for verdict in (Verdict.FAILED, Verdict.ERRORED)]
    wrong = " and ".join(f"{count:,} {word}" for count, word in counts if count) or "none"
    devices = listed(dict.fromkeys(r.device for r in problem.bad), MOST_NAMES)
    text = f"{wrong} of {problem.cases:,}, on {devices}"
    errored = next((r for r in problem.bad if r.verdict is Verdict.ERRORED), None)
    if errored is not None and problem.smallest.verdict is not Verdict.ERRORED:
        text += f"; an errored one: {errored.reason}"
    return text


def print_not_run(run: Run, console: Console) -> None:
    """What was asked for and not run, and the cases that kernels turned down, by reason."""
    turned_down = [r for r in run.results if r.counted and r.verdict in (Verdict.UNSUPPORTED, Verdict.SKIPPED)]
    lines = [f"{what}: {reason}" for reason, what in _grouped((n.reason, n.what) for n in run.not_run)]
    _print_list(console, "Not run", [*lines[:MOST_LINES], *_more(lines), *_by_reason(turned_down)])


def _by_reason(results: Iterable[CaseResult]) -> list[str]:
    """One line for each verdict and reason: how many cases, and of which kernels."""
    together: dict[tuple[str, str], list[str]] = {}
    for result in results:
        together.setdefault((result.verdict.value.lower(), result.reason), []).append(result.kernel)
    lines = [
        f"{plural(len(kernels), 'case')} {word}: {reason} ({listed(dict.fromkeys(kernels), MOST_NAMES)})"
        for (word, reason), kernels in together.items()
    ]
    return [*lines[:MOST_LINES], *_more(lines)]


def _more(lines: Sequence[str]) -> list[str]:
    """What stands for the lines beyond `MOST_LINES`."""
    return [f"and {plural(len(lines) - MOST_LINES, 'more line')}, in the records"] if len(lines) > MOST_LINES else []


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each first item with the second items that it came with, in order of appearance."""
    together: dict[str, list[str]] = {}
    for key, item in pairs:
        together.setdefault(key, []).append(item)
    return [(key, listed(dict.fromkeys(items), MOST_NAMES)) for key, items in together.items()]


def _print_list(console: Console, heading: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    line(console, heading, "bold")
    for text in lines:
        paragraph(console, Text(text), label="  ")
    line(console)


def print_blind_spots(run: Run, console: Console) -> None:
    """Contracts that the run did not, or could not, tell from a kernel's own, and cases that decided nothing."""
    missing = _missing(run)
    lines = [*missing[:MOST_LINES], *_more(missing)]
    if missing:
        lines.append(ADVICE)
    if coinciding := _coinciding(run):
        lines.append(f"Contracts that coincide for these dtypes, so that there is nothing to see: {coinciding}.")
    lines += _by_reason([r for r in run.results if r.counted and r.verdict is Verdict.INCONCLUSIVE])
    _print_list(console, "What this run could not have seen", lines)


def _missing(run: Run) -> list[str]:
    """One line per kernel, device and dtypes with the contracts that could have been ruled out and were not."""
    together: dict[str, list[str]] = {}
    for p in run.power:
        if p.missing:
            where = f"{p.kernel} on {p.device} with {p.dtypes}"
            together.setdefault(where, []).append(f"{p.alternative} (in {plural(p.cases, 'case')})")
    return [f"{where} was never told from {listed(others, MOST_NAMES)}" for where, others in together.items()]


def _coinciding(run: Run) -> str:
    """Pairs of contracts that no input can tell apart, with the dtypes for which that is so."""
    own = {result.kernel: result.contract for result in run.results}
    pairs: dict[str, dict[str, None]] = {}
    for p in run.power:
        if not p.separable:
            pair = " = ".join(sorted((own.get(p.kernel, p.kernel), p.alternative)))
            pairs.setdefault(p.dtypes, {})[pair] = None
    alike = _grouped((listed(sorted(contracts), MOST_PAIRS), dtypes) for dtypes, contracts in pairs.items())
    return "; ".join(f"{contracts} ({dtypes})" for contracts, dtypes in alike)
