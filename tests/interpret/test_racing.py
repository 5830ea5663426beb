"""Races between programs, beside a record of who used every byte."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from lastbit.interpret.address_ranges import Given, given
from lastbit.interpret.faults import Fault
from lastbit.interpret.places import Place
from lastbit.interpret.racing import Races

MEMORY = torch.zeros(16, dtype=torch.uint8)
ELEMENTS = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
# A use: which of two overlapping tensors of 16-bit numbers, what is done, to which elements, with which byte.
USES = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(("load", "store", "atomic")), ELEMENTS, st.integers(0, 1)), max_size=3
)


def overlapping() -> list[Given]:
    """Return two tensors of four elements; the second begins one element behind the first."""
    MEMORY.zero_()
    shorts = MEMORY.view(torch.int16)
    return given([("a", shorts[1:5]), ("b", shorts[2:6])], lambda tensor: None)


def place(line: int) -> Place:
    return Place("kernel.py", line, 0, line, 1, "kernel")


@dataclass
class Bytes:
    """Who loaded a byte first and last, stored it last, changed it last; uses are (program, line)."""

    loaded: list[tuple[int, int]] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)
    changed: list[tuple[int, int]] = field(default_factory=list)


@settings(max_examples=60)
@drawn(programs=st.lists(USES, min_size=2, max_size=4))
def test_a_byte_that_one_program_changes_and_another_one_uses_is_a_race(
    programs: list[list[tuple[int, str, list[int], int]]],
) -> None:
    tensors, faults = overlapping(), list[Fault]()
    races = Races(faults.append)
    record = [Bytes() for _ in MEMORY]
    atomics: dict[int, list[int]] = {}
    before: dict[int, set[int]] = {}
    line = 0
    for program, uses in enumerate(programs):
        for which, what, elements, value in uses:
            line += 1
            tensor, use = tensors[which], (program, line)
            offset = np.array([2 * x + byte for x in elements for byte in (0, 1)])
            where = (offset + (tensor.start - MEMORY.data_ptr())).tolist()
            earlier = before.get(program, set()) | {program}
            wanted, seen = set(), len(faults)
            if what == "load":
                races.loads((program, 0), place(line), tensor, offset)
                wanted = {("stores what", x) for n in where for x in record[n].changed[-1:] if x[0] not in earlier}
                for n in where:
                    record[n].loaded.append(use)
            elif what == "store":
                new = np.full(len(offset), value, np.uint8)
                races.stores((program, 0), place(line), tensor, offset, new, False)
                changed = [n for n in where if int(MEMORY[n]) != value]
                wanted = {
                    (did, x)
                    for n in changed
                    for did, uses_of in (
                        ("loads what", record[n].loaded),
                        ("stores something else where", record[n].stored),
                    )
                    for x in (uses_of[-1:] if did.startswith("stores") else [*uses_of[:1], *uses_of[-1:]])
                    if x[0] not in earlier
                }
                for n in where:
                    MEMORY[n] = value
                    record[n].stored.append(use)
                for n in changed:
                    record[n].changed.append(use)
            else:
                races.stores((program, 0), place(line), tensor, offset, np.zeros(0, np.uint8), True)
                for word in {(MEMORY.data_ptr() + n) // 4 for n in where}:
                    others = atomics.setdefault(word, [])
                    before.setdefault(program, set()).update(others, *(before.get(x, set()) for x in others))
                    others.append(program)
            told = faults[seen:]
            assert bool(told) == bool(wanted)
            does = "loads" if what == "load" else "stores"
            for fault in told:
                assert fault.kind == "race" and fault.place == place(line) and fault.tensor == tensor.name
                assert any(
                    fault.sentence.startswith(
                        f"program [{x}, 0] {did} program [{program}, 0] {does}, in no promised order: element "
                    )
                    and fault.sentence.endswith(f"of {tensor}; {place(there)} and {place(line)}")
                    for did, (x, there) in wanted
                )
                assert fault.address - MEMORY.data_ptr() in where and fault.start == tensor.start
                element = (fault.address - tensor.start) // 2
                assert f": element {element:,} of " in fault.sentence


def told(*uses: tuple[int, str, int]) -> list[str]:
    """Return the beginnings of what is told of uses: a program, what it does, and the element that it does it to."""
    tensor, faults = overlapping()[0], list[Fault]()
    races = Races(faults.append)
    for program, what, element in uses:
        offset = np.array([2 * element, 2 * element + 1])
        if what == "load":
            races.loads((program,), place(1), tensor, offset)
        else:
            new = np.ones(2, np.uint8) if what == "store" else np.zeros(0, np.uint8)
            races.stores((program,), place(1), tensor, offset, new, what == "atomic")
    return [fault.sentence.partition(",")[0] for fault in faults]


def test_the_first_program_that_loaded_is_remembered_and_the_last() -> None:
    assert told((0, "load", 0), (1, "load", 0), (1, "store", 0)) == ["program [0] loads what program [1] stores"]
    assert told((0, "load", 0), (1, "load", 0), (0, "store", 0)) == ["program [1] loads what program [0] stores"]
    assert told((0, "load", 0), (0, "load", 0), (0, "store", 0)) == []
    assert told((0, "load", 1), (1, "store", 0)) == []


def test_atomic_operations_on_one_word_order_programs() -> None:
    race = ["program [0] stores what program [1] loads"]
    store, load = (0, "store", 0), (1, "load", 0)
    words = [(overlapping()[0].start + 2 * element) // 4 for element in range(4)]
    for mine in range(4):
        for theirs in range(4):
            ordered = words[mine] == words[theirs]
            assert told(store, (0, "atomic", mine), (1, "atomic", theirs), load) == ([] if ordered else race)
    assert told(store, (1, "atomic", 3), (0, "atomic", 3), load) == race  # which counts as earlier
    assert told(store, (0, "atomic", 3), (2, "atomic", 3), (2, "atomic", 0), (1, "atomic", 0), load) == []
