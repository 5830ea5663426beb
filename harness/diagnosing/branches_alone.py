"""The branches that a kernel takes in a failing case, and hardly ever in the cases most like it that passed.

A kernel that is wrong behind `if n > 8192` fails only where that holds, and may pass even there, where the values hide
it. Which cases took the branch is a fact, whether or not lines can be followed: it is told where no line is found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lastbit.branches.branch_sites import Site, sites_of
from lastbit.branches.taken import watching
from lastbit.calling.performing import returned_by
from lastbit.calling.uses_compile import is_compiled
from lastbit.case import Case, parse_case
from lastbit.inputs import build
from lastbit.interpret.decisions import ALL, MANY, NONE, SOME, Decision
from lastbit.verify.check import Subject
from lastbit.verify.worker import Workplace

# Arbitrary: each is one more call of the kernel; those still less like the failing one say little that is new.
_MOST_PASSED = 40
"""Cases that passed with which a failing one is compared."""
# Arbitrary: with fewer, a branch that only this case took may be taken by most others that nobody looked at.
_LEAST_PASSED = 5
_RARE = 0.1
"""Share of the cases that passed in which a branch may have been taken that is told."""
# Arbitrary: a reader who is told of more is told of another path through the kernel, not of a place in it.
_MOST_TOLD = 2

_LOOP = {0: "ran no round", 1: "ran", 2: "ran two rounds", MANY: "ran three rounds or more"}
_SAID = {
    "if": {0: "was false", 1: "was true"},
    "while": _LOOP,
    "for": _LOOP,
    "case": {0: "did not match", 1: "matched"},
    "except": {0: "caught nothing", 1: "caught it"},
    "mask": {NONE: "was true for no lane", SOME: "was true for some lanes", ALL: "was true for all lanes"},
}
"""Kind of a site → way → what is said where a call went it."""


def branches_alone(place: Workplace, kernel: str, line: str, passed: Sequence[str], *, seconds: float) -> list[str]:
    """Say which branches the kernel takes in the failing case `line`, and hardly ever in those that `passed`.

    The kernel is called once more in each of them, the most alike first, until `seconds` are over.
    """
    subject, failing, latest = place.subjects[kernel], parse_case(line), time.monotonic() + seconds
    alike = sorted(map(parse_case, passed), key=lambda case: _distance(case, failing))[:_MOST_PASSED]
    own, others = _taken(subject, failing), list[set[Decision]]()
    for case in alike:
        others.append(_taken(subject, case))
        if time.monotonic() > latest:
            break
    if len(others) < _LEAST_PASSED:
        return []
    counts = {one: sum(one in other for other in others) for one in own}
    rare = [one for one, count in counts.items() if count <= _RARE * len(others)]
    whole = f"of {len(others)} that passed."
    told = [f"{text} in this case, and in {counts[one] or 'none'} {whole}" for one, text in _told(rare)]
    more = [f"{len(told) - _MOST_TOLD} more branches were taken as rarely."] if len(told) > _MOST_TOLD else []
    return [*told[:_MOST_TOLD], *more]


def _taken(subject: Subject, case: Case) -> set[Decision]:
    """Call the kernel in a case; return the branches that it took, none if somebody else traces this process."""
    file, compiles = Path(subject.kernel.source.rpartition(":")[0]), is_compiled(subject.kernel.call)
    with watching(f"{subject.kernel.name} in {case}", file, compiles=compiles) as taken:
        with suppress(Exception):  # what it raises is told elsewhere
            given = build(case, subject.device).hand_out()
            returned_by(subject.kernel.call, given, case.params, subject.device)
        return taken.decisions() if taken.known else set()


def _distance(case: Case, other: Case) -> tuple[bool, float]:
    """Tell how unlike two cases are: of other dtypes first, then by the number of elements and of columns."""
    own, its = ((t.numel, t.shape[-1] if t.shape else 1) for t in (case.tensors[0], other.tensors[0]))
    return case.dtypes != other.dtypes, sum(abs(math.log((a + 1) / (b + 1))) for a, b in zip(own, its, strict=True))


def _told(decided: Sequence[Decision]) -> Iterator[tuple[Decision, str]]:
    """Yield each decision and what is said of it, conditions of statements before masks, in the order of lines."""
    known: dict[tuple[str, int, int], Site] = {
        (file, site.line, site.column): site for file in {one[0] for one in decided} for site in sites_of(file)
    }
    found = [(known[one[:3]], one) for one in decided if one[:3] in known]
    for site, one in sorted(found, key=lambda pair: (pair[0].kind == "mask", *pair[1])):
        yield one, f"{Path(one[0]).name}:{site.shown} `{site.text}` {_SAID[site.kind][one[3]]}"
