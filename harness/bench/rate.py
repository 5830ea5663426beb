"""Rate of verifying: cases of an op per second, beside plain tests of the same cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from lastbit.bench.plain import Request, plain, plain_under_stock_interpreter, seconds_of
from lastbit.bench.samples import Effort, now
from lastbit.bench.subjects import eager_for
from lastbit.case import Case, Group
from lastbit.devices import made_current
from lastbit.outcomes.bench import RATE, Measurement, Sample
from lastbit.result import TURNED_DOWN, CaseResult
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.drawing import draw
from lastbit.verify.item_run import Explorer
from lastbit.verify.narrowing import groups_of
from lastbit.verify.plan import Item
from lastbit.verify.worker import Workplace

_UNIT = "cases/s"


def rate(place: Workplace, op: str, effort: Effort) -> list[Measurement]:
    """Measure cases per second of the op's first kernel, warm, beside plain tests and the stock interpreter."""
    subject = next(subject for subject in place.subjects.values() if subject.op.name == op)
    drawn = _drawn(place, subject, effort)
    eager = next((eager_for(place, subject, case) for group in drawn for case in group.examples), None)
    with made_current(subject.device):
        groups = _accepted(subject, eager, drawn)
        cases = [case for group in groups for case in group.examples]
        seconds = seconds_of([partial(_verify, subject, group) for group in groups], effort.rounds, now(subject.device))
        own, name = Sample.of(seconds).rate(len(cases)), subject.kernel.name
        bases = [] if eager is None else list(_bases(place, subject, eager, cases, effort))
    alone = Measurement(RATE, op, name, _UNIT, own)
    return [replace(alone, against=against, base=base) for against, base in bases] or [alone]


def _drawn(place: Workplace, subject: Subject, effort: Effort) -> list[Group]:
    """Choose groups spread over those that the op generates, and draw the first cases of each."""
    kernel = subject.kernel
    made = groups_of(place.project, kernel, small=place.config.small)
    generated = [replace(group, examples=()) for group in made if group.strategy is not None]
    step = max(1, len(generated) // effort.groups)
    chosen = islice(generated, 0, step * effort.groups, step)
    return [Group(group.name, examples=tuple(draw(group, effort.cases))) for group in chosen]


def _accepted(subject: Subject, eager: Subject | None, groups: Iterable[Group]) -> list[Group]:
    """Drop cases that a kernel does not take; all others are verified once, as a warm-up."""
    kernels = [s.kernel for s in (subject, eager) if s is not None]
    kept = []
    for group in groups:
        fitting = tuple(case for case in group.examples if not any(unsupported(kernel, case) for kernel in kernels))
        declined = {r.case for r in _verify(subject, replace(group, examples=fitting)) if r.verdict in TURNED_DOWN}
        kept.append(replace(group, examples=tuple(case for case in fitting if str(case) not in declined)))
    return kept


def _verify(subject: Subject, group: Group) -> list[CaseResult]:
    """Verify the cases of a group as a run does."""
    explorer = Explorer(Item(subject, group), record=lambda result: None, started=lambda item, case, counted: None)
    return [explorer.run(case) for case in group.examples]


def _bases(
    place: Workplace, subject: Subject, eager: Subject, cases: Sequence[Case], effort: Effort
) -> Iterator[tuple[str, Sample]]:
    """Yield the rates of plain tests: in this process, and on the CPU under Triton's own interpreter."""
    own, other, device = subject.kernel, eager.kernel, subject.device
    found = {f"plain test with {other.name}": plain(own, other, cases, device, effort.rounds)}
    if device.type == "cpu":
        request = Request(place.config, own.name, other.name, tuple(map(str, cases)), effort.rounds)
        found["plain test, stock interpreter"] = plain_under_stock_interpreter(request)
    for name, tests in found.items():
        raised = f" ({len(tests.raised)} of {len(cases)} raise)" if tests.raised else ""
        if tests.count:
            yield name + raised, Sample.of(tests.seconds).rate(tests.count)
