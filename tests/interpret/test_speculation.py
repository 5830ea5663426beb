"""Programs that run together: conflicts beside a record of every unit of memory, and memory that is put back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from lastbit.interpret.address_ranges import Given, given
from lastbit.interpret.speculation import Conflict, Speculation

MEMORY = torch.zeros(12, dtype=torch.int16)
PROGRAMS = 3

# An operation: which of two overlapping tensors, whether it stores, and (program, element) of its lanes, in order.
LANES = st.lists(st.tuples(st.integers(0, PROGRAMS - 1), st.integers(0, 2)), min_size=1, max_size=4)
OPERATIONS = st.lists(st.tuples(st.integers(0, 1), st.booleans(), LANES), min_size=1, max_size=6)


def overlapping() -> list[Given]:
    """Return two tensors of six elements; the second begins two elements behind the first."""
    return given([("a", MEMORY[:6]), ("b", MEMORY[2:8])], lambda tensor: None)


def conflicting(speculation: Speculation, tensor: Given, writes: bool, lanes: list[tuple[int, int]]) -> bool:
    """Let an operation of the programs `now` touch elements of a tensor: whether it is a conflict."""
    now = speculation.now.tolist()
    lanes = sorted(lane for lane in lanes if lane[0] in now)  # within an operation, programs keep their order
    of_each = [[element for program, element in lanes if program == one] for one in now]
    low = np.array([min((2 * x for x in each), default=1) for each in of_each])
    high = np.array([max((2 * x + 1 for x in each), default=-1) for each in of_each])
    units = (np.array([element for _, element in lanes], int), np.array([program for program, _ in lanes], int))
    try:
        speculation.touch(tensor, low, high, lambda: units, writes)
    except Conflict:
        return True
    return False


@settings(max_examples=60)
@drawn(operations=OPERATIONS, now=st.sampled_from(([0, 1, 2], [0, 2])))
def test_units_that_programs_share_conflict_where_one_of_them_stores(
    operations: list[tuple[int, bool, list[tuple[int, int]]]], now: list[int]
) -> None:
    tensors, speculation = overlapping(), Speculation(PROGRAMS, True, np.array(now))
    readers: dict[int, set[int]] = {}
    writer: dict[int, int] = {}
    for which, writes, lanes in operations:
        touched = [(program, 2 * which + element) for program, element in sorted(lanes) if program in now]
        wanted = any(
            writer.get(unit, program) != program or (writes and readers.get(unit, set()) - {program})
            for program, unit in touched
        )
        assert conflicting(speculation, tensors[which], writes, lanes) == wanted
        if wanted:
            return
        for program, unit in touched:
            if writes:
                writer[unit] = program
            else:
                readers.setdefault(unit, set()).add(program)


@settings(max_examples=60)
@drawn(operations=OPERATIONS)
def test_ranges_that_overlap_conflict_once_something_was_stored(
    operations: list[tuple[int, bool, list[tuple[int, int]]]],
) -> None:
    tensors, speculation = overlapping(), Speculation(PROGRAMS, False, np.arange(PROGRAMS))
    touched: dict[int, list[int]] = {}
    stored = False
    for number, (which, writes, lanes) in enumerate(operations):
        stored |= writes
        for program, element in lanes:
            touched.setdefault(program, []).append(2 * which + element)
        ranges = [(min(units), max(units)) for units in touched.values()]
        overlap = any(
            a is not b and a[0] <= b[1] and b[0] <= a[1] for n, a in enumerate(ranges) for b in ranges[n + 1 :]
        )
        wanted = stored and number > 0 and overlap
        assert conflicting(speculation, tensors[which], writes, lanes) == wanted
        if wanted:
            return


@pytest.mark.parametrize("exact", [False, True])
def test_regions_are_apart(exact: bool) -> None:
    tensors = given([("a", MEMORY[:4]), ("b", MEMORY[4:10])], lambda tensor: None)
    speculation = Speculation(PROGRAMS, exact, np.arange(PROGRAMS))
    assert not conflicting(speculation, tensors[0], True, [(0, 0)])
    assert not conflicting(speculation, tensors[1], True, [(1, 0)])
    assert not conflicting(speculation, tensors[1], True, [(1, 1)])
    assert conflicting(speculation, tensors[0], False, [(1, 0)])


def test_a_single_byte_is_a_range() -> None:
    [tensor] = given([("a", MEMORY.view(torch.uint8)[1:4])], lambda tensor: None)
    speculation = Speculation(2, False, np.arange(2))
    nothing = np.zeros(0, int), np.zeros(0, int)
    speculation.touch(tensor, np.array([0, 2]), np.array([0, -1]), lambda: nothing, True)
    speculation.touch(tensor, np.array([1, 1]), np.array([-1, 1]), lambda: nothing, True)
    with pytest.raises(Conflict):
        speculation.touch(tensor, np.array([1, 0]), np.array([-1, 0]), lambda: nothing, False)


def test_memory_is_put_back_in_the_order_in_which_it_was_saved() -> None:
    memory = np.arange(6)
    speculation = Speculation(1, True, np.zeros(1, int))
    for index, value in (([1, 2], 10), ([2, 3], 20)):
        speculation.save(memory, np.array(index))
        memory[index] = value
    assert memory.tolist() == [0, 10, 20, 20, 4, 5]
    speculation.undo()
    assert memory.tolist() == [0, 1, 2, 3, 4, 5]
