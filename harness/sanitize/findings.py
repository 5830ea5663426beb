"""Reports of compute-sanitizer as findings: which GPU kernel, where, and which tensor it missed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from lastbit.result import Finding
from lastbit.sanitize.call import NamedAllocation
from lastbit.sanitize.report import Nearest, Report
from lastbit.sanitize.tool import MOST_REPORTS


def findings(tool: str, reports: Sequence[Report], memory: Sequence[NamedAllocation]) -> list[Finding]:
    """Merge reports of a tool on one case into findings; reports that differ in thread and address alone are one."""
    first: dict[object, Report] = {}
    count = Counter[object]()
    for report in reports:
        key = report.what, report.place, report.accesses, _name(report, memory)
        first.setdefault(key, report)
        count[key] += 1
    cut = " or more" * (len(reports) >= MOST_REPORTS)
    return [
        Finding(tool, _name(report, memory), _sentence(tool, report, memory, f"{count[key]:,}{cut}"), report.warning)
        for key, report in first.items()
    ]


def _sentence(tool: str, report: Report, memory: Sequence[NamedAllocation], count: str) -> str:
    by = f", by {report.thread}" if report.thread else ""
    more = f" ({count} such accesses)" if count != "1" else ""
    if report.accesses:
        return f"{tool}: {report.what}: {' and '.join(report.accesses)}{by}{more}."
    return f"{tool}: {report.what} in {report.place}{by}{_where(report, memory)}{more}."


def _where(report: Report, memory: Sequence[NamedAllocation]) -> str:
    """Describe in words the allocation that the access missed, or the place of its byte."""
    if report.nearest is not None:
        found = next((m for m in memory if m.start == report.nearest.start), None)
        of = f"{found.name}, an allocation" if found else "the nearest allocation,"
        return f": {_plural(report.nearest)} {of} of {report.nearest.size:,} bytes"
    found = _inside(report, memory)
    if found is None or report.address is None:
        return ""
    return f": byte {report.address - found.start:,} of {found.name}, an allocation of {found.size:,} bytes"


def _plural(nearest: Nearest) -> str:
    """Write `1 byte after` where compute-sanitizer writes `1 bytes after`."""
    return re.sub(r"^1 bytes\b", "1 byte", nearest.distance)


def _name(report: Report, memory: Sequence[NamedAllocation]) -> str:
    """Name the tensor of the allocation that an access missed or lies in; empty for memory without a name."""
    start = None if report.nearest is None else report.nearest.start
    found = next((m for m in memory if m.start == start), None) or _inside(report, memory)
    return found.name if found else ""


def _inside(report: Report, memory: Sequence[NamedAllocation]) -> NamedAllocation | None:
    address = report.address
    return None if address is None else next((m for m in memory if m.start <= address < m.start + m.size), None)
