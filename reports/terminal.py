"""A run on a terminal or in a log: what was measured, what is wrong, and what could not be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from lastbit.reports import wording
from lastbit.reports.coverage import COVERAGE_HEADERS, MEANING, coverage_tables
from lastbit.reports.findings import first_lines, print_blind_spots, print_findings, print_not_run, print_notices
from lastbit.reports.paper import STYLES, line, make_console, paragraph, verdict_word
from lastbit.reports.progress import RunProgress
from lastbit.reports.properties import broken, found_in, held
from lastbit.reports.stage_summary import (
    STAGE_HEADERS,
    StageSummary,
    beside_values,
    extremes,
    stage_cells,
    stage_order,
    stage_summaries,
)
from lastbit.reports.summary import plural, shown_path, tally
from lastbit.reports.traced import traced_cells, traced_stages
from lastbit.result import Verdict
from lastbit.run import Run

__all__ = ["RunProgress", "make_console", "print_run"]

LEFT = frozenset({"stage", "dtype", "values"})


def print_run(run: Run, console: Console | None = None, *, stages_of: Run | None = None) -> None:
    """Print everything that a reader of a run needs, in the order of reading: numbers, findings, notices, gaps.

    The numbers are those of `stages_of`, which may have kernels of another revision besides.
    """
    console = console or make_console()
    _print_stages(stages_of or run, console)
    _print_properties(run, console)
    print_findings(run, console)
    print_notices(run, console)
    print_not_run(run, console)
    print_blind_spots(run, console)
    _print_coverage(run, console)
    _print_agreement(run, console)
    _print_summary(run, console)


@dataclass(frozen=True)
class _Section:
    """One kernel on one device, ready to be laid out; `extremes` is empty if there are none."""

    head: list[Text]
    cells: list[tuple[Text, ...]]
    extremes: str


def _print_stages(run: Run, console: Console) -> None:
    devices = dict.fromkeys(device for _, device in run.subjects())
    for device in devices:
        sections = [_section(run, kernel, device) for kernel, d in run.subjects() if d == device]
        widths = [max(map(len, column)) for column in zip(STAGE_HEADERS, *_rows(sections), strict=True)]
        line(console, f"Stages on {device}", "bold")
        line(console, _laid_out([Text(h) for h in STAGE_HEADERS], widths), "dim")
        for section in sections:
            for text in section.head:
                line(console, text)
            for cells in section.cells:
                line(console, _laid_out(cells, widths))
            if section.extremes:
                paragraph(console, Text(section.extremes, "dim"), label="  extreme: ", label_style="dim")
        line(console)
    if devices:
        for name, meaning in wording.legend(run):
            paragraph(console, Text(meaning, "dim"), label=f"{name:<12} ", label_style="dim")
        line(console)


def _rows(sections: Sequence[_Section]) -> list[list[str]]:
    return [[cell.plain for cell in cells] for section in sections for cells in section.cells]


def _section(run: Run, kernel: str, device: str) -> _Section:
    results = run.of(kernel, device)
    order = stage_order(r for r in run.results if r.op == results[0].op) if results else []
    any_result = next(r for r in run.results if (r.kernel, r.device) == (kernel, device))
    title = Text.assemble((kernel, "bold"), " on ", device, "  ", verdict_word(run.verdict(kernel, device)))
    title.append(wording.on_cases(run, (kernel, device)), "yellow")
    about = Text(f"  contract {any_result.contract} of {any_result.op}", "dim")
    if any_result.source:
        title.append(f"  {shown_path(any_result.source)}", "dim")
    about.append(f"  {plural(len(results), 'case')}: {tally(r.verdict for r in results)}")
    head = [title, about]
    if beside := beside_values(results):
        head.append(Text(f"  beside the values below, {beside}", STYLES[Verdict.FAILED]))
    cells = [_cells(stage) for stage in stage_summaries(results, order)]
    cells += [_dim(traced_cells(stage)) for stage in traced_stages(run, kernel, device)]
    return _Section(head, cells, extremes(results))


def _cells(stage: StageSummary) -> tuple[Text, ...]:
    *first, outside, bias, _ = map(Text, stage_cells(stage))
    outside.style = STYLES[Verdict.FAILED] if stage.outside else ""
    return Text("  ").append_text(first[0]), *first[1:], outside, bias, verdict_word(stage.verdict)


def _dim(cells: Sequence[str]) -> tuple[Text, ...]:
    """The cells of a stage that decides nothing."""
    first, *others = (Text(cell, "dim") for cell in cells)
    return Text("  ").append_text(first), *others


def _laid_out(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    row = Text()
    for name, cell, width in zip(STAGE_HEADERS, cells, widths, strict=True):
        padded = cell.copy()
        padded.align("left" if name in LEFT else "right", width)
        row.append_text(padded).append("  ")
    row.rstrip()
    return row


def _print_properties(run: Run, console: Console) -> None:
    """What each kernel that was asked keeps, and what is broken."""
    found = found_in(run)
    if found:
        line(console, "Properties of the bits", "bold")
    for one in found:
        paragraph(console, Text("; ".join(held(one)) or "nothing holds"), label=f"  {one.kernel} on {one.device}: ")
        for text, fails in broken(one):
            paragraph(
                console, Text(text, STYLES[Verdict.FAILED] if fails else STYLES[Verdict.INCONCLUSIVE]), label="    "
            )
    if found:
        line(console)


def _print_coverage(run: Run, console: Console) -> None:
    """A table per op and device, and what was never judged below it."""
    tables = coverage_tables(run)
    for table in tables:
        widths = [max(map(len, column)) for column in zip(COVERAGE_HEADERS, *table.rows, strict=True)]
        line(console, f"Coverage of {table.op} on {table.device}", "bold")
        line(console, "  " + _aligned(COVERAGE_HEADERS, widths), "dim")
        for cells in table.rows:
            line(console, "  " + _aligned(cells, widths))
        for gap in first_lines(table.gaps):
            paragraph(console, Text(gap), label="  ")
        line(console)
    if tables:
        paragraph(console, Text(MEANING, "dim"), label="coverage   ", label_style="dim")
        line(console)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _print_agreement(run: Run, console: Console) -> None:
    """Devices that gave the same bits, in one line; the stages that differ, one line per kernel."""
    for devices in dict.fromkeys(a.devices for a in run.agreement):
        entries = [a for a in run.agreement if a.devices == devices]
        line(console, f"Bits on {devices[0]} and {devices[1]}", "bold")
        tensors, equal = sum(a.tensors for a in entries), sum(a.equal for a in entries)
        line(console, f"  {equal:,} of {plural(tensors, 'tensor')} are equal to the last bit")
        for kernel in dict.fromkeys(a.kernel for a in entries):
            parts = [
                f"{a.stage} {a.equal:,}/{a.tensors:,}" for a in entries if a.kernel == kernel and a.equal < a.tensors
            ]
            if parts:
                paragraph(console, Text(f"{kernel}: {', '.join(parts)} equal"), label="  ")
        line(console)


def _print_summary(run: Run, console: Console) -> None:
    if premises := run.environment.get("premises"):
        line(console, f"Error bounds: {premises}", "dim")
    if isolated := run.environment.get("isolated"):
        line(console, f"Kernels in processes of their own, which were kept from: {isolated}", "dim")
    if sanitized := run.environment.get("sanitized"):
        line(console, f"Sanitized: {sanitized}", "dim")
    if spent := wording.time_spent(run):
        line(console, f"Time: {spent}", "dim")
    if run.broken:
        line(console, f"The run did not come to its end: {run.broken}", "bold red")
    if unverified := wording.unverified(run):
        paragraph(console, Text(unverified, "bold yellow"))
    verdict = run.overall
    counted = [r for r in run.results if r.counted]
    text = verdict_word(verdict) if verdict else Text("NOTHING VERIFIED", "bold yellow")
    text.append(wording.on_cases(run, *run.subjects()), "yellow")
    text.append(f"  kernels: {tally(run.verdict(*subject) for subject in run.subjects())}", "")
    text.append(f" · cases: {tally(r.verdict for r in counted)}", "")
    text.append(f" · {sum(r.seconds for r in run.results):,.1f} s in cases", "")
    if folder := run.environment.get("records"):
        text.append(f" · records in {shown_path(folder)}", "")
    line(console, text)
