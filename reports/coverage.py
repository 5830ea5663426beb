"""Coverage of a run: options of its cases that were judged, as a table per op and device, and branches never taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lastbit.reports.summary import grouped, listed, plural, shown_path
from lastbit.result import BAD
from lastbit.run import COMBINATIONS, DEVICE, ERROR, REFUSAL, Coverage, Run, Unreached

COVERAGE_HEADERS = ("of", "dtype", "regimes", "layouts", "values")
"""Columns of a table of coverage."""

MEANING = (
    "options of regime, layout and value that cases choose from: how many of them every kernel was judged on that "
    "takes them and did not fail, of how many there are; combinations: every two dtypes and options that go together"
)

# As in changes.py.
_MOST_NAMES = 4
_MOST_PAIRS = 8
_COLUMNS = {"regime": 0, "layout": 1}
_VALUES = 2


@dataclass(frozen=True)
class CoverageTable:
    """The coverage of one op on one device.

    Attributes:
        rows: cells under `COVERAGE_HEADERS`.
        gaps: a line for each choice of which something was not judged.
    """

    op: str
    device: str
    rows: tuple[tuple[str, ...], ...]
    gaps: tuple[str, ...]


def coverage_tables(run: Run) -> list[CoverageTable]:
    """Make one table per op and device with a kernel that did not fail, in the order of the run."""
    ops = {result.kernel: result.op for result in run.results}
    sound = {subject for subject in run.subjects() if run.verdict(*subject) not in BAD}
    entries = (entry for entry in run.coverage if (entry.kernel, entry.device) in sound)
    together = grouped(((ops[entry.kernel], entry.device), entry) for entry in entries)
    return [CoverageTable(*key, tuple(_rows(entries)), tuple(_gaps(entries))) for key, entries in together.items()]


def _rows(entries: Sequence[Coverage]) -> Iterator[tuple[str, ...]]:
    """Yield a row per tensor and dtypes that are alike, then one per parameter.

    A cell such as `15/16` counts options on which every kernel was judged that takes them, of those that some take.
    """
    cells: dict[tuple[str, str], list[str]] = {}
    for (choice, dtype), found in _by_choice(entries).items():
        name, _, what = choice.partition(" ")
        column = _COLUMNS.get(what, _VALUES)
        missing = {option for entry in found for option in entry.missing}
        taken = {option for entry in found for option in entry.judged} | missing
        row = cells.setdefault((name if column < _VALUES else choice, dtype), [""] * (_VALUES + 1))
        row[column] = f"{len(taken - missing)}/{len(taken)}"
    alike = grouped(((name, *row), dtype) for (name, dtype), row in cells.items())
    names = list(dict.fromkeys(name for name, *_ in alike))
    order = sorted(alike, key=lambda key: (bool(key[-1]), names.index(key[0])))
    yield from ((key[0], " ".join(alike[key]), *key[1:]) for key in order)


def _gaps(entries: Sequence[Coverage]) -> Iterator[str]:
    """Yield the options of each choice that were never judged, or turned down by a kernel that takes others."""
    for (choice, dtype), found in _by_choice(entries).items():
        together = choice == COMBINATIONS
        never, declined = ("without a case in this run", "not taken") if together else ("never judged", "turned down")
        kernels = grouped(
            ((why, options), entry.kernel)
            for entry in found
            for why, options in ((never, entry.missing), (declined, entry.declined))
            if options and (entry.judged or entry.missing)
        )
        for (why, options), names in kernels.items():
            common = len(names) == len(found) > 1
            whose = f"all {len(names)} kernels" if common else listed(names, _MOST_NAMES)
            said = listed(options, _MOST_PAIRS if together else len(options))
            yield f"{choice}{f' in {dtype}' if dtype else ''}: {said} {why} ({whose})"


def _by_choice(entries: Sequence[Coverage]) -> dict[tuple[str, str], list[Coverage]]:
    """Group the kernels' entries by choice and dtype; the entries of one choice may be with and without dtype."""
    return grouped(((entry.choice, entry.dtype), entry) for entry in entries)


# Branches of kernels that no case took


HEADING = "What no case reached"

UNKNOWN = (
    "Which branches of the kernels no case reached is not known: kernels ran in processes of their own or on a "
    "cluster, or another tracer was there, such as that of a debugger or of coverage.py, or the run is of an older "
    "lastbit."
)

_WHY = {
    REFUSAL: "a refusal, not tried",
    ERROR: "an error leads there, not tried",
    DEVICE: "behind a fallback for another device",
}


def said(one: Unreached) -> str:
    """Write ``norms.py:41 `if n > 8192` was never true (12 cases)``, and what is known of why."""
    why = f"; {_WHY[one.why]}" if one.why in _WHY else ""
    verb = "never" if one.never.startswith(("ran", "matched")) else "was never"
    place = f"{shown_path(one.file)}:{one.line}"
    return f"{place} `{one.text}` {verb} {one.never} ({plural(one.cases, 'case')}){why}"


def telling(run: Run) -> list[Unreached]:
    """List the branches that handle inputs: those of which nothing says why no case takes them."""
    return [one for one in run.unreached or () if not one.why]


def reaching(one: Unreached) -> str:
    """Say of a branch which case would reach it: what is said, and `a case with n > 8192 would`."""
    comma = "," if ", where " in one.wanted else ""
    case = f"a case with {one.wanted}{comma} would" if one.wanted else "no condition says which case would"
    return f"{said(one)}; {case}"


def every_line(run: Run) -> Sequence[str]:
    """Return a line for each branch, those that handle inputs first; one line where nothing is known."""
    if run.unreached is None:
        return [UNKNOWN]
    return [said(one) for one in sorted(run.unreached, key=lambda one: bool(one.why))]
