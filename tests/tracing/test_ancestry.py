"""Which element of an operation belongs to which cell of a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lastbit.interpret.places import Place
from lastbit.numerics.residues import Residues
from lastbit.tracing import ancestry as module
from lastbit.tracing.ancestry import Ancestry, expressions, merged, residues_of_cells
from lastbit.tracing.events import Event, Log, Made, Operand, Origin
from lastbit.tracing.lanes import along, everything, of_array, pointwise

SAME = pointwise((4,), (4,))
PLACE = Place("kernel.py", 1, 2, 3, 4, "f")


def wrote(log: Log, event: Event, *addresses: int) -> Event:
    log.written(event, np.array(addresses), None, 4)
    return event


class Program:
    """Loads x backwards, adds twice its elements and the sum of their squares; the address is computed, too."""

    def __init__(self) -> None:
        self.log = log = Log()
        x = np.arange(1.0, 5.0)
        self.x = wrote(log, log.add("input x", (), x, "fp32"), 0, 4, 8, 12)
        self.other = wrote(log, log.add("input y", (), x, "fp32"), 16, 20, 24, 28)
        self.pointer = log.add("addptr", (), np.array([12, 8, 4, 0]), "int64", origin=Origin.MEMORY)
        read = Operand(SAME, memory=of_array(np.array([12, 8, 4, 0])))
        own = x[::-1]
        self.load = log.add("load", (), own, "fp32", (Operand(SAME, event=self.pointer, address=True), read))
        by_two = Operand(everything(()), values=np.array(2.0))
        self.twice = log.add("mul", (), own * 2, "fp32", (Operand(SAME, event=self.load), by_two))
        both = (Operand(SAME, event=self.load), Operand(SAME, event=self.load))
        self.square = log.add("mul", (), own * own, "fp32", both)
        self.total = log.add("reduce", (), np.array(30.0), "fp32", (Operand(along((4,), ()), event=self.square),))
        added = (Operand(SAME, event=self.twice), Operand(pointwise((), (4,)), event=self.total))
        self.out = log.add("add", (), own * 2 + 30, "fp32", added)
        self.ancestry = Ancestry.of(log, [self.out])


@pytest.fixture
def program() -> Program:
    return Program()


def test_everything_that_led_to_an_event(program: Program) -> None:
    p = program
    wanted = [p.x, p.load, p.twice, p.square, p.total, p.out]
    assert sorted(p.ancestry.events) == [event.number for event in wanted]
    assert set(Ancestry.of(p.log, [p.out], addresses=True).events) == {*p.ancestry.events, p.pointer.number}
    assert set(Ancestry.of(p.log, [p.twice, p.other]).events) == {
        event.number for event in (p.x, p.load, p.twice, p.other)
    }
    assert p.ancestry.before([p.twice.number]) == {p.x.number, p.load.number, p.twice.number}
    assert p.ancestry.before([p.total.number, p.twice.number]) == {e.number for e in wanted} - {p.out.number}
    assert p.ancestry.before([]) == set()


def test_edges_say_which_elements_they_took(program: Program) -> None:
    p = program

    def edges(event: Event) -> list[tuple[Event, list[int] | None]]:
        found = p.ancestry.edges[event.number]
        return [(edge.event, None if edge.lanes is None else edge.lanes.tolist()) for edge in found]

    assert edges(p.out) == [(p.twice, [0, 1, 2, 3]), (p.total, [0, 0, 0, 0])]
    assert edges(p.total) == [(p.square, None)]
    assert edges(p.load) == [(p.x, [3, 2, 1, 0])]
    assert edges(p.twice) == [(p.load, [0, 1, 2, 3])]
    assert edges(p.x) == []


def test_what_does_not_matter_has_no_edge() -> None:
    log = Log()
    one = log.add("input x", (), np.ones(4), "fp32")
    constant = log.add("splat", (), np.ones(4), "fp32", origin=Origin.CONSTANTS)
    none = Operand(lambda lanes: np.full((len(lanes), 1), -1), event=one)
    event = log.add("add", (), np.ones(4), "fp32", (Operand(SAME, event=constant), none, Operand(SAME, event=one)))
    empty = log.add("add", (), np.ones(0), "fp32", (Operand(pointwise((0,), (0,)), event=one),))
    found = Ancestry.of(log, [event, empty])
    assert [edge.event for edge in found.edges[event.number]] == [one]
    assert found.edges[empty.number] == []


def test_a_reduction_of_memory_has_an_edge_to_each_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    first = wrote(log, log.add("store", (), np.ones(2), "fp32"), 0, 4)
    second = wrote(log, log.add("store", (), np.ones(2), "fp32"), 8, 12)
    memory = of_array(np.array([0, 4, 8, 12]))
    rows = log.add("aten.sum", (), np.full(2, 2.0), "fp32", (Operand(along((2, 2), (1,)), memory=memory, size=4),))

    def writers() -> list[tuple[Event, object]]:
        return [(edge.event, edge.lanes) for edge in Ancestry.of(log, [rows]).edges[rows.number]]

    assert writers() == [(second, None), (first, None)]
    monkeypatch.setattr(module, "_MOST", 4)
    assert writers() == [(second, None), (first, None)]
    monkeypatch.setattr(module, "_MOST", 3)  # then every second element is looked up
    assert writers() == [(first, None)]
    later = log.add(
        "load", (), np.ones(3), "fp32", (Operand(pointwise((3,), (3,)), memory=of_array(np.array([8, 99, 0]))),)
    )
    found = Ancestry.of(log, [later]).edges[later.number]
    assert [(edge.event, edge.lanes.tolist()) for edge in found if edge.lanes is not None] == [
        (second, [0, -1, -1]),
        (first, [-1, -1, 0]),
    ]


def test_origins_follow_elements_one_to_one(program: Program) -> None:
    p = program
    found = {n: {name: at.tolist() for name, at in own.items()} for n, own in p.ancestry.origins().items()}
    backwards = {"x": [3, 2, 1, 0]}
    assert found == {
        p.x.number: {"x": [0, 1, 2, 3]},
        p.load.number: backwards,
        p.twice.number: backwards,
        p.square.number: backwards,
        p.total.number: {},
        p.out.number: backwards,
    }


def cells_of(p: Program, ends: list[int], starts: dict[str, list[int]]) -> dict[Event, list[int]]:
    found = p.ancestry.cells({p.out.number: np.array(ends)}, {name: np.array(at) for name, at in starts.items()})
    return {p.ancestry.events[number]: lanes.tolist() for number, lanes in found.items()}


def test_cells_of_what_led_to_a_result(program: Program) -> None:
    p = program
    assert cells_of(p, [0, 1, 2, 3], {}) == {
        p.out: [0, 1, 2, 3],
        p.total: [0, 0, 0, 0],
        p.square: [-1, -1, -1, -1],  # through a reduction only
        p.twice: [0, 1, 2, 3],
        p.load: [0, 1, 2, 3],
        p.x: [3, 2, 1, 0],
    }
    assert cells_of(p, [3, -1], {})[p.load] == [3, -1]
    assert cells_of(p, [3, -1], {})[p.x] == [0, -1]
    assert cells_of(p, [3, -1], {})[p.total] == [0, -1]


def test_cells_by_the_input_where_a_reduction_is_between(program: Program) -> None:
    p = program
    found = cells_of(p, [0, 1, 2, 3], {"x": [3, 2, 1, 0]})
    assert found[p.square] == found[p.load] == [0, 1, 2, 3]
    found = cells_of(p, [0, 1, 2, 3], {"x": [1, 0, -1, 2]})
    assert found[p.square] == [2, 3, 0, -1]
    assert found[p.load] == [0, 1, 2, 3]  # it led one to one to the result
    assert cells_of(p, [0, 1, 2, 3], {"z": [0, 1, 2, 3]})[p.square] == [-1, -1, -1, -1]


def test_the_first_of_two_maps_counts() -> None:
    second = np.array([5, 6, -1])
    assert merged(None, second) is second
    assert merged(np.array([-1, 0, -1]), second).tolist() == [5, 0, -1]


# Expressions


def test_events_of_one_expression_are_one_in_all_rounds() -> None:
    log, at = Log(), (PLACE,)
    rounds = []
    for _ in range(2):
        log.turn()
        rounds += [log.add(name, at, np.array([10.0, 20.0]), "fp32") for name in ("mul", "add", "mul")]
    cells = {e.number: np.array([-1, -1, -1]) for e in rounds}
    cells[rounds[0].number] = np.array([0, -1, -1])
    cells[rounds[3].number] = np.array([-1, 1, -1])
    found = expressions({e.number: e for e in rounds}, cells)
    assert [[e.number for e in one.events] for one in found] == [[1, 4], [2, 5], [3, 6]]
    first = found[0]
    assert first.values[:2].tolist() == [10.0, 20.0] and np.isnan(first.values[2])
    assert first.known.tolist() == [True, True, False]
    assert (first.number, first.dtype) == (1, "fp32")
    assert [first.event_of(cell).number for cell in range(3)] == [1, 4, 4]
    assert first.residues is None
    assert not found[1].known.any() and np.isnan(found[1].values).all()


def test_other_places_are_other_expressions_and_complex_values_are_not_known() -> None:
    log = Log()
    one = log.add("mul", (PLACE,), np.array([1 + 2j]), "complex64")
    two = log.add("mul", (), np.array([2], np.int32), "int32")
    at = np.array([0])
    found = expressions({2: two, 1: one}, {1: at, 2: at})
    assert [(e.events, e.number, e.dtype) for e in found] == [((one,), 1, "complex64"), ((two,), 2, "int32")]
    assert np.isnan(found[0].values[0]) and found[0].known.tolist() == [False]
    assert found[1].values.tolist() == [2.0] and found[1].values.dtype == np.float64


def test_residues_are_gathered_by_cell() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    one, two = Made(values.numpy(), Residues.of(values)), Made(values.numpy()[0], Residues.of(values[0] * 8))
    found = residues_of_cells({1: one, 2: two}, {1: np.array([3, 0, 0, -1]), 2: np.array([-1, 1, -1, -1])}, 4)
    assert found is not None
    assert found.open.tolist() == [False, False, False, True]
    assert torch.equal(found.p[:3], Residues.of(torch.tensor([4.0, 16.0, 1.0])).p)
    bare = Made(values.numpy())
    assert residues_of_cells({1: one, 2: bare}, {1: np.array([0]), 2: np.array([0])}, 1) is None
