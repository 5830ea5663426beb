"""Recorded operations that are replayed, some of them changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lastbit.interpret.numpy_formats import Array
from lastbit.numerics.residues import Residues
from lastbit.tracing import redo as module
from lastbit.tracing.ancestry import Ancestry
from lastbit.tracing.events import Event, Log, Made, Operand
from lastbit.tracing.lanes import everything, of_array, pointwise, where
from lastbit.tracing.redo import Redo, Unrepeatable, Values

SAME = pointwise((3,), (3,))
ADDRESSES = (0, 4, 8)


def array(*values: float) -> Array:
    return np.array(values, np.float32)


def followed(*values: float) -> Made:
    return Made(array(*values), Residues.of(torch.tensor(values)))


def gives(*values: float, residues: bool = False) -> Any:
    """Return a change that gives these values, whatever the operands are."""
    made = followed(*values) if residues else Made(array(*values))
    return lambda redo, event, given: made


class Program:
    """Stores x, loads it with its first element left out, and adds it to another value."""

    def __init__(self) -> None:
        self.log = Log()
        self.x = self.add("input x", array(1, 2, 3))
        self.stored = self.add("store", array(1, 2, 3), Operand(SAME, event=self.x), self.pointer())
        self.log.written(self.stored, np.array(ADDRESSES), None, 4)
        self.load = self.add("load", array(9, 2, 3), self.pointer(), self.read(chosen=(False, True, True)))
        self.out = self.add(
            "add", array(10, 4, 6), Operand(SAME, event=self.load), Operand(SAME, event=self.x), again=self.added
        )

    def add(self, name: str, values: Array, *operands: Operand, again: Any = None) -> Event:
        residues = Residues.of(torch.from_numpy(values.astype(np.float64))) if values.dtype.kind == "f" else None
        return self.log.add(name, (), values, "fp32", operands, again=again, residues=residues)

    def pointer(self, *at: int) -> Operand:
        values = np.array(at or ADDRESSES)
        return Operand(pointwise(values.shape, values.shape), values=values, address=True)

    def read(self, *at: int, chosen: tuple[bool, ...] | None = None) -> Operand:
        at = at or ADDRESSES
        source = pointwise((len(at),), (len(at),))
        source = source if chosen is None else where(source, np.array(chosen))
        return Operand(source, memory=of_array(np.array(at)))

    def added(self, given: Values) -> Made:
        first, second = (
            event.made if own is None else own for event, own in zip((self.load, self.x), given, strict=True)
        )
        both = first.residues is not None and second.residues is not None
        return Made(first.values + second.values, first.residues + second.residues if both else None)

    def redo(self, *last: Event, follows: bool = False) -> Redo:
        ends = last or (self.out,)
        return Redo(Ancestry.of(self.log, ends, addresses=True), follows)


def told(made: dict[int, Made]) -> dict[int, list[float]]:
    return {number: one.values.tolist() for number, one in made.items()}


def test_a_change_is_handed_on_through_memory() -> None:
    p = Program()
    found = p.redo().run({p.x.number: gives(5, 6, 7)})
    assert told(found) == {
        p.x.number: [5, 6, 7],
        p.stored.number: [5, 6, 7],
        p.load.number: [9, 6, 7],
        p.out.number: [14, 12, 14],
    }
    assert all(one.residues is None for one in found.values())
    assert {one.values.dtype for one in found.values()} == {np.dtype(np.float32)}


def test_what_does_not_change_is_not_returned() -> None:
    p = Program()
    assert p.redo().run({p.x.number: gives(1, 2, 3)}) == {}
    found = p.redo().run({p.stored.number: gives(7, 2, 3)})
    assert told(found) == {p.stored.number: [7, 2, 3]}  # the load leaves the first element out
    assert told(p.redo().run({p.load.number: gives(9, 2, 4)})) == {p.load.number: [9, 2, 4], p.out.number: [10, 4, 7]}
    both = p.redo().run({p.stored.number: gives(1, 8, 3), p.out.number: gives(0, 0, 0)})
    assert told(both) == {p.stored.number: [1, 8, 3], p.load.number: [9, 8, 3], p.out.number: [0, 0, 0]}


def test_a_change_gets_what_its_operands_are_now() -> None:
    p, seen = Program(), []

    def change(redo: Redo, event: Event, given: Values) -> Made:
        seen.append((event, [None if own is None else own.values.tolist() for own in given]))
        return redo.again(event, given)

    assert p.redo().run({p.out.number: change}) == {}
    p.redo().run({p.load.number: gives(9, 2, 4), p.out.number: change})
    p.redo().run({p.x.number: gives(1, 2, 4), p.out.number: change})
    assert seen == [
        (p.out, [None, None]),
        (p.out, [[9, 2, 4], None]),
        (p.out, [[9, 2, 4], [1, 2, 4]]),
    ]


def test_residues_follow_where_they_are_wanted() -> None:
    p = Program()
    found = p.redo(follows=True).run({p.x.number: gives(5, 6, 7, residues=True)})
    wanted = {p.stored: (5, 6, 7), p.load: (9, 6, 7), p.out: (14, 12, 14)}
    for event, values in wanted.items():
        own = found[event.number].residues
        assert own is not None and torch.equal(own.p, followed(*values).residues.p)  # type: ignore[union-attr]
    same_bits = Made(array(1, 2, 3), Residues.of(torch.tensor([1.0, 2.0, 2.5])))
    changed = p.redo(follows=True).run({p.x.number: lambda *_: same_bits})
    assert set(changed) == {p.x.number, p.stored.number, p.load.number, p.out.number}
    assert p.redo().run({p.x.number: lambda *_: Made(array(1, 2, 3))}) == {}
    assert p.redo(follows=True).made(p.x).residues is p.x.residues
    assert p.redo().made(p.x).residues is None


def test_what_an_operation_raises_cannot_be_repeated() -> None:
    p = Program()

    def fails(redo: Redo, event: Event, given: Values) -> Made:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(Unrepeatable, match=r"^by nothing$") as caught:
        p.redo().run({p.x.number: fails})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def cannot(redo: Redo, event: Event, given: Values) -> Made:
        raise Unrepeatable("as it is")

    with pytest.raises(Unrepeatable, match=r"^as it is$") as caught:
        p.redo().run({p.x.number: cannot})
    assert caught.value.__cause__ is None


def test_overflow_on_the_way_warns_of_nothing() -> None:
    p = Program()
    found = p.redo().run({p.x.number: gives(3e38, 3e38, 3e38)})
    assert found[p.out.number].values[1] == np.inf


def test_an_event_that_hands_on_takes_wider_values() -> None:
    """A value that a narrow dtype does not hold is not rounded on the way."""
    p = Program()
    narrow = p.log.add("store", (), np.array([1, 2, 3], np.float16), "fp16", (Operand(SAME, event=p.x),))
    [made] = p.redo(narrow).run({p.x.number: gives(1, 2.0001, 3)}).keys() - {p.x.number}
    found = p.redo(narrow).run({p.x.number: gives(1, 2.0001, 3)})[made]
    assert found.values.dtype == np.float32 and found.values.tolist() == array(1, 2.0001, 3).tolist()


def test_elements_without_a_source_stay() -> None:
    p = Program()
    turned = where(lambda lanes: 2 - lanes[:, None], np.array([True, False, True]))
    event = p.add("select", array(3, 50, 1), Operand(turned, event=p.x))
    assert p.redo(event).run({p.x.number: gives(7, 8, 9)})[event.number].values.tolist() == [9, 50, 7]


# Loads whose addresses change


def other_addresses(p: Program, *at: int, chosen: Sequence[bool] | None = None, other: float | None = None) -> Event:
    """Add a load of the first two addresses, of which pointer and mask are events."""
    p.where = p.log.add("addptr", (), np.array([0, 4]), "int64")
    p.inside = p.log.add("cmp", (), np.array([True, True]), "int1")
    two = pointwise((2,), (2,))
    operands = [Operand(two, event=p.where, address=True), p.read(0, 4), Operand(two, event=p.inside, address=True)]
    if other is not None:
        operands.append(Operand(everything(()), values=np.array(other)))
    return p.add("load", array(1, 2), *operands)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(
    ("at", "chosen", "other", "values"),
    [
        ((4, 8), (True, True), None, [2, 3]),
        ((8, 8), (True, True), 5.0, [3, 3]),
        ((0, 4), (False, True), None, [0, 2]),
        ((0, 4), (True, False), 5.0, [1, 5]),
        ((0, 400), (True, False), 5.0, [1, 5]),
        ((0, 4), (False, False), 5.0, [5, 5]),
    ],
)
def test_a_load_from_elsewhere(
    at: Sequence[int], chosen: Sequence[bool], other: float | None, values: list[float], follows: bool
) -> None:
    p = Program()
    load = other_addresses(p, other=other)
    changes = {
        p.where.number: lambda *_: Made(np.array(at)),
        p.inside.number: lambda *_: Made(np.array(chosen)),
    }
    made = p.redo(load, follows=follows).run(changes)[load.number]
    assert made.values.tolist() == values and made.values.dtype == np.float32
    assert (made.residues is not None) is follows
    if follows:
        assert made.residues is not None and torch.equal(made.residues.p, followed(*values).residues.p)  # type: ignore[union-attr]


def test_a_load_without_a_mask_takes_all_elements() -> None:
    p = Program()
    at = p.log.add("addptr", (), np.array([0, 4]), "int64")
    two = pointwise((2,), (2,))
    load = p.add("load", array(1, 2), Operand(two, event=at, address=True), p.read(0, 4))
    found = p.redo(load).run({at.number: lambda *_: Made(np.array([8, 0]))})
    assert found[load.number].values.tolist() == [3, 1]


def test_a_load_of_integers_has_no_residues() -> None:
    p = Program()
    at = p.log.add("addptr", (), np.array([0, 4]), "int64")
    two = pointwise((2,), (2,))
    operands = Operand(two, event=at, address=True), p.read(0, 4)
    load = p.log.add("load", (), np.array([1, 2], np.int32), "int32", operands)
    made = p.redo(load, follows=True).run({at.number: lambda *_: Made(np.array([8, 0]))})[load.number]
    assert made.values.tolist() == [3, 1] and made.values.dtype == np.int32 and made.residues is None


def test_a_load_from_where_nothing_wrote_cannot_be_repeated() -> None:
    p = Program()
    load = other_addresses(p)
    with pytest.raises(Unrepeatable, match=r"^nothing that was recorded wrote there$"):
        p.redo(load).run({p.where.number: lambda *_: Made(np.array([0, 400]))})
    p.log.written(None, np.array([400]), None, 4)  # of a program that was not wanted
    later = other_addresses(p)
    with pytest.raises(Unrepeatable, match=r"^nothing that was recorded wrote there$"):
        p.redo(later).run({p.where.number: lambda *_: Made(np.array([0, 400]))})


def test_other_operations_than_loads_have_their_addresses() -> None:
    p = Program()
    at = p.log.add("addptr", (), np.array(ADDRESSES), "int64")
    value, pointer = Operand(SAME, event=p.x), Operand(SAME, event=at, address=True)
    stored = p.add("store", array(1, 2, 3), value, pointer)
    loaded = p.add("load", array(1, 2, 3), value, pointer)  # of no memory
    for event in (stored, loaded):
        with pytest.raises(Unrepeatable, match=r"^an address depends on it$"):
            p.redo(event).run({at.number: lambda *_: Made(np.array([4, 8, 12]))})


def test_an_operand_that_nobody_knows() -> None:
    p = Program()
    load = other_addresses(p)
    unknown = replace(load, operands=(replace(load.operands[0]), load.operands[1], Operand(SAME, address=True)))
    given: Values = [Made(np.array([4, 8])), None, None]
    with pytest.raises(Unrepeatable, match=r"^an operand is not known$"):
        p.redo(load).again(unknown, given)


# Operations of PyTorch


def of_torch(p: Program, values: Array | None, *at: int) -> tuple[Event, list[Values]]:
    """Add an operation that doubles a tensor of three elements in memory."""
    seen: list[Values] = []

    def again(given: Values) -> Made:
        seen.append(given)
        assert given[0] is not None
        return Made((given[0].values * 2).astype(np.float32), None)

    tensor = Operand(SAME, memory=of_array(np.array(at or ADDRESSES)), values=values, size=3)
    number = Operand(everything((1,)), values=np.array([2]))
    return p.add("aten.mul", array(2, 4, 6), tensor, number, again=again), seen


def test_an_operation_of_torch_gets_whole_tensors() -> None:
    p = Program()
    event, seen = of_torch(p, None)
    found = p.redo(event).run({p.stored.number: gives(1, 5, 3)})
    assert found[event.number].values.tolist() == [2, 10, 6]
    assert seen[0][0] is not None and seen[0][0].values.tolist() == [1, 5, 3] and seen[0][1] is None


def test_a_tensor_of_which_a_part_was_not_recorded() -> None:
    p = Program()
    event, _ = of_torch(p, None, 0, 4, 400)
    with pytest.raises(Unrepeatable, match=r"^nothing that was recorded wrote there$"):
        p.redo(event).run({p.stored.number: gives(1, 5, 3)})
    event, _ = of_torch(p, array(1, 2, 30), 0, 4, 400)
    found = p.redo(event).run({p.stored.number: gives(1, 5, 3)})
    assert found[event.number].values.tolist() == [2, 10, 60]


def test_a_tensor_that_did_not_change_is_whole_all_the_same() -> None:
    p = Program()
    event, seen = of_torch(p, None)
    redo = p.redo(event, follows=True)
    whole = redo.operand(event, 0)
    assert whole is not None and whole.values.tolist() == [1, 2, 3]
    assert whole.residues is not None and torch.equal(whole.residues.p, followed(1, 2, 3).residues.p)  # type: ignore[union-attr]
    assert redo.again(event, [None, None]).values is event.values and not seen
    made = redo.again(event, [None, Made(np.array([3]))])
    assert made.values.tolist() == [2, 4, 6]
    assert seen[0][0] is not None and seen[0][1] is not None


@pytest.mark.parametrize(
    ("number", "dtype", "wide"),
    [
        (2.5, np.float16, np.float16),
        (np.nan, np.float16, np.float16),
        (2.0001, np.float16, np.float32),
        (2.00000001, np.float32, np.float32),
        (300.0, np.int8, np.float32),
        (1.5, np.int32, np.int32),
    ],
)
def test_narrow_loads_are_wide_enough(number: float, dtype: type, wide: type) -> None:
    p = Program()
    event = p.log.add("load", (), np.array([9, 20, 3], dtype), "", p.load.operands)
    found = p.redo(event).run({p.stored.number: lambda *_: Made(np.array([1, number, 3]))})[event.number]
    assert found.values.dtype == wide
    assert np.array_equal(found.values[1], np.array(number).astype(wide), equal_nan=True)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Made(array(1, 2)), Made(array(1, 2)), True),
        (Made(array(0)), Made(array(-0.0)), False),
        (Made(array(np.nan)), Made(array(np.nan)), True),
        (Made(array(1, 2)), Made(array(1, 2).reshape(2, 1)), False),
        (Made(array(1, 2)), Made(array(1, 3)), False),
        (followed(1, 2), Made(array(1, 2)), True),
        (Made(array(1, 2)), followed(1, 2), True),
        (followed(1, 2), followed(1, 2), True),
        (followed(1, 2), Made(array(1, 2), followed(1, 4).residues), False),
        (followed(1, 2), Made(array(1, 4), followed(1, 2).residues), False),
    ],
)
def test_results_that_are_the_same(one: Made, other: Made, same: bool) -> None:
    assert module._is_same(one, other) is same
