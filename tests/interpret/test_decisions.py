"""The ways that are gone at conditions, loops and masks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

import numpy as np
import pytest

from lastbit.interpret.decisions import (
    ALL,
    MANY,
    NONE,
    SOME,
    Decision,
    counted,
    decided,
    decisions_of,
    decisions_watched,
    hiding_from,
    mask_seen,
    put_places,
    unseen,
)
from lastbit.interpret.places import Place

PLACE = Place("kernel.py", 7, 4, 7, 20, "kernel")
HERE = ("kernel.py", 7, 4)


def ways(mask: list[list[bool]] | list[bool], rank: int) -> set[int]:
    """Return which ways the programs of a mask went."""
    told: list[Decision] = []
    array = np.array(mask)
    with decisions_watched(told.extend), decisions_of(set()):
        mask_seen(PLACE, array, int(np.count_nonzero(array)), rank)
    assert all(decision[:3] == HERE for decision in told)
    return {decision[3] for decision in told}


@pytest.mark.parametrize(
    ("mask", "rank", "gone"),
    [
        ([True, True], 1, {ALL}),
        ([True, False], 1, {SOME}),
        ([False, False], 1, {NONE}),
        ([[True, True], [False, False]], 2, {SOME}),  # of one program
        ([[True, True], [False, False]], 1, {ALL, NONE}),  # of two
        ([[True, True], [True, False]], 1, {ALL, SOME}),
        ([[True, False], [False, True]], 1, {SOME}),
        ([[True, False], [False, False]], 1, {SOME, NONE}),
        ([[True, True], [True, True]], 1, {ALL}),
        ([[False, False], [False, False]], 1, {NONE}),
        ([[True], [False]], 1, {ALL, NONE}),
    ],
)
def test_masks_let_all_lanes_of_a_program_through_or_some_or_none(
    mask: list[list[bool]] | list[bool], rank: int, gone: set[int]
) -> None:
    assert ways(mask, rank) == gone


def test_masks_are_told_to_who_watches_alone() -> None:
    with decisions_of(set()) as taken:
        mask_seen(PLACE, np.ones(2, bool), 2, 1)
    assert not taken
    with decisions_watched(lambda found: None), decisions_of(set()) as taken:
        mask_seen(None, np.ones(2, bool), 2, 1)
    assert not taken


def test_loops_are_counted_up_to_many() -> None:
    with decisions_of(set()) as taken:
        for count in range(6):
            assert list(counted(range(count), ("kernel.py", count, 0))) == list(range(count))
        decided(HERE, 1)
        decided(None, 1)
    assert taken == {("kernel.py", count, 0, min(count, MANY)) for count in range(6)} | {(*HERE, 1)}
    decided(HERE, 1)  # nobody asks


def test_a_watcher_is_told_at_the_end_also_of_what_was_taken_before() -> None:
    told: list[set[Decision]] = []
    before: set[Decision] = {("kernel.py", 1, 2, 0)}

    def note(found: Iterable[Decision]) -> None:
        told.append(set(found))

    with decisions_watched(note):
        with pytest.raises(ZeroDivisionError), decisions_of(before):
            decided(HERE, 0)
            raise ZeroDivisionError
        assert told == [{("kernel.py", 1, 2, 0), (*HERE, 0)}]
    with decisions_of(set()):
        decided(HERE, 1)
    assert len(told) == 1


def test_places_are_passed_to_helpers() -> None:
    tree = ast.parse("a = decide(x > 1)\nother(x)\nmodule.decide(x)")
    put_places(tree, "kernel.py", ("decide",))
    assert ast.unparse(tree) == "a = decide(x > 1, ('kernel.py', 1, 4))\nother(x)\nmodule.decide(x)"


def test_only_the_tracer_that_is_hidden_from_sees_nothing() -> None:
    def tracer(*_: object) -> None: ...

    def other(*_: object) -> None: ...

    before = sys.gettrace()
    seen = unseen(lambda: sys.gettrace())
    try:
        with hiding_from(tracer):
            sys.settrace(tracer)
            hidden, after = seen(), sys.gettrace()
            sys.settrace(other)
            kept = seen()
            sys.settrace(None)
            nothing = seen()
    finally:
        sys.settrace(before)
    assert (hidden, after, kept, nothing) == (None, tracer, other, None)
