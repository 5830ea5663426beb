"""Branches of kernels that no case of a run took, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from lastbit.reports.summary import plural, shown_path
from lastbit.run import DEVICE, ERROR, REFUSAL, Run, Unreached

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


def place(one: Unreached) -> str:
    """Write `norms.py:41`."""
    return f"{shown_path(one.file)}:{one.line}"


def said(one: Unreached) -> str:
    """Write ``norms.py:41 `if n > 8192` was never true (12 cases)``, and what is known of why."""
    why = f"; {_WHY[one.why]}" if one.why in _WHY else ""
    verb = "never" if one.never.startswith(("ran", "matched")) else "was never"
    return f"{place(one)} `{one.text}` {verb} {one.never} ({plural(one.cases, 'case')}){why}"


def telling(run: Run) -> list[Unreached]:
    """List the branches that handle inputs: those of which nothing says why no case takes them."""
    return [one for one in run.unreached or () if not one.why]


def reaching(one: Unreached) -> str:
    """Say of a branch which case would reach it: what is said, and `a case with n > 8192 would`."""
    comma = "," if ", where " in one.wanted else ""
    case = f"a case with {one.wanted}{comma} would" if one.wanted else "no condition says which case would"
    return f"{said(one)}; {case}"


def counted(run: Run) -> str:
    """Write `3 branches that no case reached`, of those that handle inputs; empty for none."""
    count = len(telling(run))
    return f"{count:,} branch{'' if count == 1 else 'es'} that no case reached" if count else ""


def every_line(run: Run) -> Sequence[str]:
    """Return a line for each branch, those that handle inputs first; one line where nothing is known."""
    if run.unreached is None:
        return [UNKNOWN]
    return [said(one) for one in sorted(run.unreached, key=lambda one: bool(one.why))]
