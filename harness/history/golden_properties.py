"""Properties that the bits of a kernel had when its golden was made, and whether they have them today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lastbit.case import Group, parse_case
from lastbit.history.golden_file import Golden
from lastbit.invariance.properties import properties_of
from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.verify.check import Subject
from lastbit.verify.property_checks import asked_cases, in_a_run, properties_on, sentence_of
from lastbit.verify.worker import Watch

Held = Mapping[str, Sequence[str]]
"""Property → the lines of the cases on which it holds."""

Found = Mapping[str, PropertyResult]
"""Property → what all the cases on which it was asked say of it."""


def asked_of(subject: Subject, groups: Sequence[Group]) -> Held:
    """Return the properties that a new golden asks about, with the lines of the cases."""
    lines = [str(case) for case in asked_cases(subject, groups)]
    return dict.fromkeys(in_a_run(subject), lines) if lines else {}


def found_today(subject: Subject, asked: Held, watch: Watch) -> Found:
    """Ask for properties today, and return what is found; those that nobody knows any more are left out."""
    known = properties_of(subject.op)
    pairs = [(line, name) for name, lines in asked.items() if name in known for line in lines]
    return together(_found(subject, line, name, watch) for line, name in pairs)


def _found(subject: Subject, line: str, name: str, watch: Watch) -> PropertyResult:
    try:
        with watch(line):
            return properties_on(subject, parse_case(line), [name])[0]
    except Exception as error:  # of the kernel: its own case, or `lastbit verify`, says more
        return PropertyResult(name, PropertyOutcome.NOT_APPLICABLE, reason=f"the kernel raised {type(error).__name__}")


def held_of(found: Found, asked: Held) -> Held:
    """Return the properties that hold, for the file of a golden."""
    return {name: tuple(asked[name]) for name, one in found.items() if one.outcome is PropertyOutcome.HOLDS}


def lost(before: Golden, after: Golden, found: Found) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a sentence for each property that held when a golden was made, and does not today or in the other golden.

    The second ones are no loss: on another processor than the golden's, torch and its libraries multiply and add in
    other ways. So a property that the kernel does not declare may hold on one of them alone, within the contract.
    """
    losses: list[str] = []
    elsewhere: list[str] = []
    if before.properties is None or after.properties is None:
        return (), ()
    moved = before.provenance.get("device") != after.provenance.get("device")
    for name in sorted(before.properties.keys() - after.properties.keys()):
        one = found.get(name)
        if one is None:
            losses.append(f"{name} held, and does not any more.")
        elif one.outcome is not PropertyOutcome.BROKEN:
            losses.append(f"{name} held, and cannot be asked any more: {one.reason}.")
        else:
            (elsewhere if moved and not one.fails else losses).append(sentence_of(one))
    return tuple(losses), tuple(elsewhere)
