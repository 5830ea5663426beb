"""Reports of compute-sanitizer, read from its text, and as findings: which GPU kernel, where, which tensor it missed.

========= Invalid __global__ read of size 4 bytes
=========     at copy_kernel+0x1d0 in norms.py:12
=========     by thread (104,0,0) in block (3,0,0)
=========     Access to 0x7f2b9aa00fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2b9aa00000 of size 4,000 bytes
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lastbit.result import Finding
from lastbit.sanitize.tool import MOST_REPORTS

_PREFIX = "========="
_HAZARD = re.compile(
    r"(?P<level>Error|Warning): (?P<what>.* hazard) detected at (?P<memory>\w+) .* in (?P<block>block \(.*\))"
)
_ACCESS = re.compile(r"(?P<kind>Read|Write) Thread (?P<thread>\(.*?\)) at (?P<place>.*)")
_PLACE = re.compile(r"(?P<symbol>.*?)(\+0x[0-9a-f]+)?( in (?P<file>[^ ]+):(?P<line>\d+))?$")
_OLD_PLACE = re.compile(r"0x[0-9a-f]+ in ((?P<file>[^ ]+):(?P<line>\d+):)?(?P<symbol>.*)")  # before 2024
_THREAD = re.compile(r"by (thread \(.*\) in block \(.*\))")
_ADDRESS = re.compile(r"(?:Access to|Access at|Address) (0x[0-9a-f]+)")
_NEAREST = re.compile(
    r"and is (?P<distance>.*?) the nearest allocation at (?P<start>0x[0-9a-f]+) of size (?P<size>[\d,]+)"
)


@dataclass(frozen=True)
class InstructionPlace:
    """The source line of an instruction of a GPU kernel; `file` is empty where nothing says it."""

    symbol: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.symbol} ({self.file}:{self.line})" if self.file else self.symbol


@dataclass(frozen=True)
class Nearest:
    """The allocation that an access missed, and how: `1 bytes after`."""

    distance: str
    start: int
    size: int


@dataclass(frozen=True)
class Report:
    """A report of compute-sanitizer about one access.

    Attributes:
        what: `Invalid __global__ read of size 4 bytes`.
        place: of the access, or of the first of those that race.
        accesses: `write in KERNEL (FILE:LINE)` of those that race; empty for one access.
        thread: `thread (104,0,0) in block (3,0,0)`, or the threads that race; empty where nothing says which.
        address: of the access; None where nothing says it.
        warning: compute-sanitizer does not call it an error.
    """

    what: str
    place: InstructionPlace
    accesses: tuple[str, ...] = ()
    thread: str = ""
    address: int | None = None
    nearest: Nearest | None = None
    warning: bool = False


def reports(text: str) -> list[Report]:
    """Parse the output of compute-sanitizer; reports that are not about an access in a GPU kernel are left out."""
    return [report for block in _blocks(text.splitlines()) if (report := _report(block)) is not None]


def remarks(text: str) -> list[str]:
    """Return the first lines of all other output, such as why it could not start."""
    heads = [block[0] for block in _blocks(text.splitlines()) if _report(block) is None]
    return [head for head in heads if head != "COMPUTE-SANITIZER" and "SUMMARY:" not in head]


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield blocks of lines without their prefix: one that is not indented, and the indented ones below it."""
    block: list[str] = []
    for line in lines:
        if not line.startswith(_PREFIX) or not (said := line.removeprefix(_PREFIX)).strip():
            continue
        if not said.startswith("     ") and block:
            yield block
            block = []
        block.append(said.strip())
    if block:
        yield block


def _report(block: list[str]) -> Report | None:
    if hazard := _HAZARD.match(block[0]):
        return _hazard(hazard, block[1:])
    at = next((line.removeprefix("at ") for line in block[1:] if line.startswith("at ")), None)
    if at is None:
        return None
    nearest = None
    if missed := next(filter(None, map(_NEAREST.match, block)), None):
        nearest = Nearest(missed["distance"], int(missed["start"], 16), int(missed["size"].replace(",", "")))
    return Report(
        what=block[0],
        place=_place(at),
        thread=next((found[1] for line in block if (found := _THREAD.match(line))), ""),
        address=next((int(found[1], 16) for line in block if (found := _ADDRESS.match(line))), None),
        nearest=nearest,
    )


def _hazard(hazard: re.Match[str], lines: list[str]) -> Report | None:
    """Read a race of two threads of a block, whose accesses have a line each."""
    accesses = [match for line in lines if (match := _ACCESS.match(line)) is not None]
    if not accesses:
        return None
    return Report(
        what=f"{hazard['what']} in {hazard['memory']} memory",
        place=_place(accesses[0]["place"]),
        accesses=tuple(f"{match['kind'].lower()} in {_place(match['place'])}" for match in accesses),
        thread=f"threads {' and '.join(match['thread'] for match in accesses)} in {hazard['block']}",
        warning=hazard["level"] == "Warning",
    )


def _place(text: str) -> InstructionPlace:
    match = _OLD_PLACE.fullmatch(text) or _PLACE.fullmatch(text)
    assert match is not None
    return InstructionPlace(match["symbol"], match["file"] or "", int(match["line"] or 0))


@dataclass(frozen=True)
class NamedAllocation:
    """A named allocation: that of an input, or of something that the kernel returned."""

    name: str
    start: int
    size: int


def findings(tool: str, reports: Sequence[Report], memory: Sequence[NamedAllocation]) -> list[Finding]:
    """Merge reports of a tool on one case into findings; reports that differ in thread and address alone are one."""
    alike: dict[object, list[Report]] = {}
    for report in reports:
        alike.setdefault((report.what, report.place, report.accesses, _name(report, memory)), []).append(report)
    cut = " or more" * (len(reports) >= MOST_REPORTS)
    found = []
    for report, *others in alike.values():
        by, number = f", by {report.thread}" if report.thread else "", f"{1 + len(others):,}{cut}"
        more = f" ({number} such accesses)" if number != "1" else ""
        where = f": {' and '.join(report.accesses)}{by}" if report.accesses else f" in {report.place}{by}"
        where += "" if report.accesses else _where(report, memory)
        sentence = f"{tool}: {report.what}{where}{more}."
        found.append(Finding(tool, _name(report, memory), sentence, report.warning))
    return found


def _where(report: Report, memory: Sequence[NamedAllocation]) -> str:
    """Describe in words the allocation that the access missed, or the place of its byte."""
    if report.nearest is not None:
        found = next((m for m in memory if m.start == report.nearest.start), None)
        of = f"{found.name}, an allocation" if found else "the nearest allocation,"
        distance = re.sub(r"^1 bytes\b", "1 byte", report.nearest.distance)  # compute-sanitizer writes `1 bytes after`
        return f": {distance} {of} of {report.nearest.size:,} bytes"
    found = _inside(report, memory)
    if found is None or report.address is None:
        return ""
    return f": byte {report.address - found.start:,} of {found.name}, an allocation of {found.size:,} bytes"


def _name(report: Report, memory: Sequence[NamedAllocation]) -> str:
    """Name the tensor of the allocation that an access missed or lies in; empty for memory without a name."""
    start = None if report.nearest is None else report.nearest.start
    found = next((m for m in memory if m.start == start), None) or _inside(report, memory)
    return found.name if found else ""


def _inside(report: Report, memory: Sequence[NamedAllocation]) -> NamedAllocation | None:
    address = report.address
    return None if address is None else next((m for m in memory if m.start <= address < m.start + m.size), None)
