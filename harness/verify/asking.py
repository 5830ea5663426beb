"""Questions of `lastbit invariance` about a kernel, and their answers, found in a worker process."""

from __future__ import annotations

from dataclasses import dataclass

from lastbit.case import parse_case
from lastbit.invariance.properties import properties_of
from lastbit.property_result import PropertyResult
from lastbit.verify.anew import anew_for
from lastbit.verify.check import unsupported
from lastbit.verify.inprocess import Workplace
from lastbit.verify.narrowing import groups_of
from lastbit.verify.properties import properties_on
from lastbit.verify.property_cases import asked_cases


@dataclass(frozen=True)
class Asking:
    """The question whether a kernel has a property on a case."""

    case: str
    property: str


def askings(place: Workplace, kernel: str, *, quick: bool) -> tuple[Asking, ...]:
    """List all questions about a kernel: on the configured case lines, or else on its op's cases for properties.

    Of an op that has none, the most ordinary cases are taken. With `quick`, properties that take long are left out.
    """
    subject, config = place.subjects[kernel], place.config
    known = properties_of(subject.op)
    names = [n for n, one in known.items() if (n in config.properties if config.properties else one.quick or not quick)]
    return tuple(Asking(line, name) for line in _lines(place, kernel) for name in names)


def _lines(place: Workplace, kernel: str) -> list[str]:
    subject, config = place.subjects[kernel], place.config
    if config.lines:
        cases = (case for line in config.lines if (case := parse_case(line)).op == subject.op.name)
        return [str(case) for case in cases if not unsupported(subject.kernel, case)]
    groups = groups_of(place.project, subject.kernel, small=config.small)
    return [str(case) for case in asked_cases(subject, groups, count=config.cases_per_group, seed=config.seed)]


def answer(place: Workplace, kernel: str, asking: Asking, *, thorough: bool) -> PropertyResult:
    """Ask whether a kernel has a property on a case.

    Exceptions of the kernel are passed on.
    """
    subject, case = place.subjects[kernel], parse_case(asking.case)
    anew = anew_for(place.config, subject, case) if thorough else None
    with place.watch(f"{asking.case} (property {asking.property})"):
        return properties_on(subject, case, [asking.property], thorough=thorough, anew=anew)[0]
