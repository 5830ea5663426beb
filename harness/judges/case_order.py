"""The cases that a kernel of a file is judged on: those of its op that it takes, the cheapest first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lastbit.case import SEED_BITS, Case, Group, parse_case
from lastbit.config import PROFILES
from lastbit.inputs.values import check_regime
from lastbit.judges.question import RANDOM, JudgeQuestion
from lastbit.verify.drawing import designed, draw
from lastbit.verify.item_run import reseeded
from lastbit.verify.project import Project


@dataclass(frozen=True)
class OrderedCase:
    """A case, and the name and cases of the group that it is of."""

    case: Case
    group: str
    alike: Sequence[Case]


@dataclass
class CaseOrder:
    """Makes cases, and keeps what it made: to draw them takes as long as to judge some.

    Attributes:
        small: cases are cut to what the interpreter runs in a moment.
    """

    project: Project
    small: bool
    _known: dict[tuple[object, ...], tuple[OrderedCase, ...]] = field(default_factory=dict)

    def of(self, question: JudgeQuestion, accepts: frozenset[str]) -> tuple[OrderedCase, ...]:
        """List the cases for a kernel that takes `accepts`, by their number of elements.

        Where the seed is random, each case gets one that follows from the number drawn for the question, or for this
        call, unless a line lists its values.

        Raises:
            UsageError: a line is malformed, or of another op.
        """
        if question.lines:
            return _of_lines(question)
        kind, _, number = question.drawn.seed.partition(":")
        key = question.op, accepts, question.profile, kind
        if key not in self._known:
            self._known[key] = tuple(sorted(self._drawn(question, accepts), key=lambda chosen: chosen.case.numel))
        chosen = self._known[key]
        if kind != RANDOM:
            return chosen
        return tuple(replace(one, case=reseeded(one.case, _seed(number, n))) for n, one in enumerate(chosen))

    def _drawn(self, question: JudgeQuestion, accepts: frozenset[str]) -> list[OrderedCase]:
        count = PROFILES[question.profile]
        groups = designed(
            self.project.groups(question.op, accepts, small=self.small), count, whole=count >= PROFILES["ci"]
        )
        seed = 0 if question.seed.startswith(RANDOM) else int(question.seed)
        return [chosen for group in groups for chosen in _of_group(group, count, seed)]


def _seed(number: str, place: int) -> int:
    """Derive the seed of a case, from which nobody finds that of another case."""
    digest = hashlib.sha256(f"{number} {place}".encode()).digest()
    return int.from_bytes(digest) >> (8 * len(digest) - SEED_BITS)


def _of_group(group: Group, count: int, seed: int) -> list[OrderedCase]:
    drawn = tuple(draw(group, count, seed))
    return [OrderedCase(case, group.name, drawn) for case in drawn]


def _of_lines(question: JudgeQuestion) -> tuple[OrderedCase, ...]:
    cases = [parse_case(line) for line in question.lines]
    for case in cases:
        for tensor in case.tensors:
            check_regime(tensor)
    return tuple(OrderedCase(case, "lines", ()) for case in cases)
