"""Accesses to memory beside a dictionary of bytes: what is loaded, stored, updated, and which lanes are astray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from triton._C.libtriton import interpreter, ir

from lastbit.errors import InterpreterError
from lastbit.interpret.address_ranges import given
from lastbit.interpret.coalescing import OffsetAddresses
from lastbit.interpret.faults import collected
from lastbit.interpret.memory import Access, LaunchMemory
from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.places import Place
from lastbit.interpret.speculation import Conflict, Speculation

ARENA = torch.zeros(160, dtype=torch.uint8)  # all tensors of these tests lie here; what none of them has is not touched
START = ARENA.data_ptr()
U = np.uint64
PLACE = Place("kernel.py", 7, 4, 7, 20, "kernel")


def tensors(blank: int | None = None, **more: Tensor) -> list[Any]:
    """Return a contiguous tensor, one with gaps in two axes, and one with a byte in front of its first element."""
    ARENA.copy_(torch.arange(len(ARENA)) % 251)
    shorts = ARENA[16:32].view(torch.int16)
    rows = ARENA[40:88].view(torch.int32).as_strided((2, 2), (6, 2), 10)
    chars = ARENA[101:109]  # no words begin at its first byte
    named = {"shorts": shorts, "rows": rows, "chars": chars, **more}
    return given(named.items(), lambda tensor: blank)


def owned(found: list[Any]) -> set[int]:
    """Return the offsets of the bytes of all elements."""
    bytes_of = set()
    for each in found:
        places = torch.arange(len(ARENA)).view(-1)  # of bytes
        size, offset = each.tensor.element_size(), each.start - START
        strides = [stride * size for stride in each.tensor.stride()]
        for first in places.as_strided(each.tensor.shape, strides, offset).flatten().tolist():
            bytes_of |= set(range(first, first + size))
    return bytes_of


def access(memory: LaunchMemory, kind: str, width: int, rank: int = 1, **more: Any) -> Access:
    return Access(SimpleNamespace(memory=memory), kind, np.dtype(f"i{width}"), rank, PLACE, **more)


@dataclass
class Lanes:
    """What one access is asked, and where its lanes are, counted from the arena's first byte."""

    where: OffsetAddresses
    offsets: list[int]
    mask: Array | None
    shape: tuple[int, ...]

    @property
    def live(self) -> list[bool]:
        mask = np.ones(self.shape, bool) if self.mask is None else np.broadcast_to(self.mask, self.shape)
        return [bool(x) for x in mask.reshape(-1)]


@st.composite
def lanes(draw: Callable[..., Any], width: int, owners: list[int]) -> Lanes:
    """Draw addresses near those of tensors: as runs of neighbours, of whole rows or of columns, or anywhere."""
    begin = draw(st.sampled_from(owners) | st.integers(0, 130))
    along = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(("run", "rows", "columns", "any", "none")))
    if kind == "run":
        base, count = np.array([START + begin], U), np.arange(along, dtype=np.int32)
    elif kind == "any":
        places = draw(st.lists(st.sampled_from(owners) | st.integers(8, 130), min_size=along, max_size=along))
        base, count = np.array([START + place for place in places], U), np.array([draw(st.integers(-1, 1))], np.int32)
    elif kind == "none":
        base, count = np.array([START + begin], U), None
    else:
        gap = draw(st.integers(0, 24))
        base = np.array([[START + begin], [START + begin + gap]], U)
        count = np.arange(along, dtype=np.int32)[None]
        if kind == "columns":
            base, count = base.T, count.T
    base[:] = base // width * width  # a GPU takes no others
    where = OffsetAddresses(base, count, width)
    shape = where.all.shape
    mask = draw(st.none() | st.lists(st.booleans(), min_size=where.all.size, max_size=where.all.size))
    heads = draw(st.booleans()) and mask is not None and len(shape) == 2  # every row begins with as many
    made = None if mask is None else np.array(mask).reshape(shape)
    if heads:
        made = np.broadcast_to(np.arange(shape[1]) < draw(st.integers(0, shape[1])), shape)
    return Lanes(where, [int(x) - START for x in where.all.reshape(-1)], made, shape)


def bytes_at(offset: int, width: int) -> int:
    return int.from_bytes(bytes(ARENA[offset : offset + width].tolist()), "little", signed=True)


def astray_of(asked: Lanes, width: int, mine: set[int]) -> list[int]:
    """Return the offsets of the lanes that no tensor has."""
    spans = [set(range(x, x + width)) for x in asked.offsets]
    return [x for x, span, live in zip(asked.offsets, spans, asked.live, strict=True) if live and not span <= mine]


def drawn_lanes(data: st.DataObject, width: int) -> tuple[LaunchMemory, Lanes, set[int]]:
    """Draw an access to some tensors; return their memory, the lanes, and the offsets that the tensors have."""
    found = tensors()
    mine = owned(found)
    return LaunchMemory(found, (np.array([3]),)), data.draw(lanes(width, sorted(mine))), mine


def check_faults(faults: dict[Any, Any], did: str, astray: list[int]) -> None:
    assert bool(faults) == bool(astray)
    if astray:
        [fault] = faults.values()
        assert (fault.kind, fault.place) == ("out_of_bounds", PLACE)
        assert fault.address - START in astray  # of a block whose columns are neighbours, the first by columns
        count = "an element" if len(astray) == 1 else f"{len(astray)} elements, the first"
        assert fault.sentence.startswith(f"program [3] {did} {count} ")


@settings(max_examples=60)
@drawn(data=st.data(), width=st.sampled_from((1, 2, 4, 8)), fill=st.none() | st.integers(-100, 100))
def test_lanes_load_the_bytes_of_tensors_and_nothing_else(data: st.DataObject, width: int, fill: int | None) -> None:
    memory, asked, mine = drawn_lanes(data, width)
    filled = None if fill is None else np.full((1,) * len(asked.shape), fill, f"i{width}")
    with collected() as seen:
        loaded = memory.load(access(memory, "load", width, len(asked.shape)), asked.where, asked.mask, filled)
    assert loaded.shape == asked.shape and loaded.dtype == np.dtype(f"i{width}")
    astray = astray_of(asked, width, mine)
    wanted = [
        (-1 if fill is None else fill) if not live else -1 if x in astray else bytes_at(x, width)
        for x, live in zip(asked.offsets, asked.live, strict=True)
    ]
    assert loaded.reshape(-1).tolist() == wanted
    check_faults(seen.faults, "loads", astray)
    assert memory.unfilled == ({PLACE} if fill is None and not all(asked.live) else set())


@settings(max_examples=60)
@drawn(data=st.data(), width=st.sampled_from((1, 2, 4, 8)))
def test_lanes_store_in_their_order_and_nothing_else(data: st.DataObject, width: int) -> None:
    memory, asked, mine = drawn_lanes(data, width)
    before, arena = memory.copies(), ARENA.clone()
    numbers = np.arange(1, len(asked.offsets) + 1).reshape(asked.shape).astype(f"i{width}") * 3
    axis = data.draw(st.integers(-1, len(asked.shape) - 1))  # along which one number is stored everywhere
    value = numbers if axis < 0 else numbers.take([0], axis)
    astray = astray_of(asked, width, mine)
    every = np.broadcast_to(value, asked.shape).reshape(-1).tolist()
    for x, live, new in zip(asked.offsets, asked.live, every, strict=True):
        if live and x not in astray:
            arena[x : x + width] = torch.tensor(list(new.to_bytes(width, "little", signed=True)))
    with collected() as seen:
        memory.store(access(memory, "store", width, len(asked.shape)), asked.where, value, asked.mask)
    assert torch.equal(ARENA, arena)
    check_faults(seen.faults, "stores", astray)
    memory.restore(before)
    assert torch.equal(ARENA, torch.arange(len(ARENA)) % 251) and memory.differing(before) is None


def test_a_tensor_that_was_changed_is_told() -> None:
    found = tensors()
    memory = LaunchMemory(found)
    before = memory.copies()
    ARENA[50] += 1
    assert memory.differing(before) is found[1]
    ARENA[50] -= 1
    ARENA[12] += 1  # in none of them
    assert memory.differing(before) is None


@settings(max_examples=60)
@drawn(data=st.data(), width=st.sampled_from((4, 8)))
def test_updates_are_done_one_after_the_other(data: st.DataObject, width: int) -> None:
    memory, asked, mine = drawn_lanes(data, width)
    arena, added = ARENA.clone(), np.arange(2, len(asked.offsets) + 2).reshape(asked.shape).astype(f"i{width}")
    astray, wanted = astray_of(asked, width, mine), []
    for x, live, add in zip(asked.offsets, asked.live, added.reshape(-1).tolist(), strict=True):
        if live and x not in astray:
            old = int.from_bytes(bytes(arena[x : x + width].tolist()), "little")
            wanted.append(old)
            new = (old + add) % 256**width
            arena[x : x + width] = torch.tensor(list(new.to_bytes(width, "little")))
        else:
            wanted.append(256**width - 1)
    mask = np.ones(asked.shape, bool) if asked.mask is None else asked.mask
    adding = (ir.ATOMIC_OP.ADD, interpreter.RMW_OP.ADD, interpreter.MEM_SEMANTIC.RELAXED)
    update = access(memory, "update", width, operation=adding)
    with collected() as seen:
        old = memory.update(update, asked.where, added, mask)
    assert old.view(f"u{width}").reshape(-1).tolist() == wanted and torch.equal(ARENA, arena)
    assert not memory.unfilled  # nobody may use what a masked lane gives
    check_faults(seen.faults, "updates", astray)


@settings(max_examples=60)
@drawn(data=st.data(), width=st.sampled_from((4, 8)))
def test_values_are_exchanged_where_they_are_as_expected(data: st.DataObject, width: int) -> None:
    memory, asked, mine = drawn_lanes(data, width)
    astray = [x for x in asked.offsets if not set(range(x, x + width)) <= mine]
    value = np.arange(1, len(asked.offsets) + 1).reshape(asked.shape).astype(f"i{width}")
    right = data.draw(st.lists(st.booleans(), min_size=value.size, max_size=value.size))
    expected = np.array([bytes_at(x, width) - (not y) for x, y in zip(asked.offsets, right, strict=True)], f"i{width}")
    arena, wanted = ARENA.clone(), []
    for x, hoped, new in zip(asked.offsets, expected.tolist(), value.reshape(-1).tolist(), strict=True):
        was = bytes(arena[x : x + width].tolist())
        wanted.append(0 if x in astray else int.from_bytes(was, "little", signed=True))
        if x not in astray and wanted[-1] == hoped:
            arena[x : x + width] = torch.tensor(list(new.to_bytes(width, "little")))
    exchange = access(memory, "exchange", width, operation=interpreter.MEM_SEMANTIC.RELAXED)
    with collected() as seen:
        old = memory.exchange(exchange, asked.where, expected.reshape(asked.shape), value)
    assert old.reshape(-1).tolist() == wanted and torch.equal(ARENA, arena)
    check_faults(seen.faults, "updates", astray)


def halves(*numbers: float) -> tuple[Tensor, LaunchMemory]:
    tensor = torch.tensor(numbers, dtype=torch.float16)
    return tensor, LaunchMemory(given([("x", tensor)], lambda tensor: None), (np.array([3]),))


@pytest.mark.parametrize(("operation", "after"), [("FADD", [1.5, 3.5, 3.0]), ("XCHG", [0.5, 1.0, 3.0])])
def test_halves_are_updated_one_after_the_other(operation: str, after: list[float]) -> None:
    tensor, memory = halves(1, 2, 3)
    where = OffsetAddresses(np.array([tensor.data_ptr()], U), np.array([0, 1, 1, 2], np.int32), 2)
    atomic = (getattr(ir.ATOMIC_OP, operation), None, None)
    update = Access(SimpleNamespace(memory=memory), "update", np.dtype(np.float16), 1, PLACE, operation=atomic)
    old = memory.update(update, where, np.array([0.5, 0.5, 1, 9], np.float16), np.array([True, True, True, False]))
    assert old[:3].tolist() == [1, 2, 2.5 if operation == "FADD" else 0.5] and np.isnan(old[3])
    assert tensor.tolist() == after


def test_floats_and_words_are_updated_as_such() -> None:
    tensor = torch.tensor([1.5, 2.5])
    memory = LaunchMemory(given([("x", tensor)], lambda tensor: None), (np.array([3]),))
    where = OffsetAddresses(np.array([tensor.data_ptr()], U), np.array([0, 0], np.int32), 4)
    value, both = np.array([0.25, 7], np.float32), np.ones(2, bool)

    def updated(name: str) -> list[float]:
        operation = (getattr(ir.ATOMIC_OP, name), getattr(interpreter.RMW_OP, name), interpreter.MEM_SEMANTIC.RELAXED)
        update = Access(SimpleNamespace(memory=memory), "update", value.dtype, 1, PLACE, operation=operation)
        found: list[float] = memory.update(update, where, value, both).tolist()
        return found

    assert updated("FADD") == [1.5, 1.75] and tensor.tolist() == [8.75, 2.5]
    assert updated("XCHG") == [8.75, 0.25] and tensor.tolist() == [7, 2.5]


def test_what_no_gpu_does_with_halves_is_refused() -> None:
    tensor, memory = halves(1)
    where = OffsetAddresses(np.array([tensor.data_ptr()], U), None, 2)
    atomic = (ir.ATOMIC_OP.ADD, None, None)
    update = Access(SimpleNamespace(memory=memory), "update", np.dtype(np.float16), 1, PLACE, operation=atomic)
    with pytest.raises(NotImplementedError, match="has an atomic"):
        memory.update(update, where, np.ones(1, np.float16), np.ones(1, bool))


def at(offset: int, *counts: int, width: int = 2) -> OffsetAddresses:
    return OffsetAddresses(np.array([START + offset], U), np.array(counts, np.int32), width)


def test_memory_that_nothing_was_written_to_is_told_where_a_lane_loads_it() -> None:
    found = tensors(blank=0x1312)  # the second of the shorts, 16 bits, and nothing of other widths
    memory = LaunchMemory(found, (np.array([3]),))

    def faults(where: OffsetAddresses, width: int, mask: Array | None = None) -> list[str]:
        with collected() as seen:
            memory.load(access(memory, "load", width), where, mask)
        return [f"{fault.kind} {fault.sentence}" for fault in seen.faults.values()]

    [told] = faults(at(16, 0, 1, 2), 2)
    assert told.startswith("uninitialised program [3] loads an element at 1 of shorts ")
    assert faults(at(16, 2, 3), 2) == [] and faults(at(18, 0, width=1), 1) == []
    assert faults(at(16, 0, 1, 2), 2, np.array([True, False, True])) == []
    assert len(faults(at(16, 0, 1, 2), 2, np.array([False, True, True]))) == 1
    memory.speculation = Speculation(1, True, np.zeros(1, np.int64))
    with pytest.raises(Conflict):
        faults(at(16, 0, 1, 2), 2)


def test_lanes_that_a_mask_leaves_undefined_hold_ones_or_are_filled_again() -> None:
    memory = LaunchMemory(tensors(), (np.array([3]),))
    mask = np.array([True, False])
    load = access(memory, "load", 2)
    assert memory.load(load, at(16, 0, 1), np.array([True, True])).tolist() == [0x1110, 0x1312]
    assert not memory.unfilled
    assert memory.load(load, at(16, 0, 1), mask, np.array([9], np.int16)).tolist() == [0x1110, 9]
    assert not memory.unfilled
    assert memory.load(load, at(16, 0, 1), mask).tolist() == [0x1110, -1] and memory.unfilled == {PLACE}
    memory.refilled = PLACE
    assert memory.load(load, at(16, 0, 1), mask).tolist() == [0x1110, 0]
    memory.refilled = Place("kernel.py", 8, 0, 8, 1, "kernel")
    assert memory.load(load, at(16, 0, 1), mask).tolist() == [0x1110, -1]
    nowhere = Access(load.owner, "load", load.dtype, 1, None)
    memory.refilled = None
    assert memory.load(nowhere, at(16, 0, 1), mask).tolist() == [0x1110, -1] and memory.unfilled == {PLACE, None}


def test_addresses_from_numbers_may_be_of_anything() -> None:
    memory = LaunchMemory(tensors(), (np.array([3]),), foreign=True)
    with collected() as seen:
        assert memory.load(access(memory, "load", 2), at(0, 0, 8)).tolist() == [0x0100, 0x1110]
        assert memory.load(access(memory, "load", 2), at(17, 0)).tolist() == [0x1211]
        memory.store(access(memory, "store", 2), at(0, 0), np.array([-1], np.int16))
    assert not seen.faults and ARENA[:3].tolist() == [255, 255, 2]


def test_a_fault_is_of_the_tensor_that_addresses_came_from() -> None:
    memory = LaunchMemory(tensors(), (np.array([3]),))

    def named(origin: str) -> tuple[str, str]:
        with collected() as seen:
            memory.load(access(memory, "load", 2, origin=origin), at(34, 0))
        [fault] = seen.faults.values()
        return fault.tensor, fault.sentence

    assert named("")[0] == "shorts" and "2 elements behind the end of shorts" in named("")[1]
    assert named("rows")[0] == "rows" and "4 bytes" not in named("rows")[1]
    assert named("a parameter that is no tensor")[0] == "shorts"
    with pytest.raises(InterpreterError, match="behind the end of shorts"):
        memory.load(access(memory, "load", 2), at(34, 0))


def test_an_access_is_advanced_by_elements() -> None:
    memory = LaunchMemory(tensors(), (np.array([3]), np.array([5])))
    load = access(memory, "load", 2)
    assert memory.program == (3, 5)
    assert load(np.array([START + 16], U)).tolist() == [0x1110]
    assert load.advanced(np.array([START + 16], U), np.array([2])).tolist() == [0x1514]
    assert (load.raw, load.highest, load.shift) == (np.dtype(np.uint16), 0xFFFF, 1)
    assert [access(memory, "load", width).shift for width in (1, 4, 8)] == [0, 2, 3]


@dataclass
class Watched:
    """Stands in place of `Races`: the calls that it gets."""

    calls: list[tuple[Any, ...]]

    def loads(self, program: tuple[int, ...], place: Place, tensor: Any, offset: Array) -> None:
        self.calls.append((program, place, tensor.name, offset.tolist()))

    def stores(
        self, program: tuple[int, ...], place: Place, tensor: Any, offset: Array, new: Array, atomic: bool
    ) -> None:
        self.calls.append((program, place, tensor.name, offset.tolist(), new.tolist(), atomic))


@pytest.mark.parametrize("mask", [None, [True, True, False], [True, False, True]])
def test_races_are_told_which_bytes_are_used(mask: list[bool] | None) -> None:
    calls: list[tuple[Any, ...]] = []
    memory = LaunchMemory(tensors(), (np.array([3]),), races=Watched(calls))  # type: ignore[arg-type]
    which = None if mask is None else np.array(mask)
    elements = [n for n in (1, 2, 3) if mask is None or mask[n - 1]]
    offsets = [2 * n + byte for n in elements for byte in (0, 1)]
    memory.load(access(memory, "load", 2), at(16, 1, 2, 3), which)
    assert calls.pop() == ((3,), PLACE, "shorts", offsets)
    memory.store(access(memory, "store", 2), at(16, 1, 2, 3), np.array([5, 6, 7], np.int16), which)
    assert calls.pop() == ((3,), PLACE, "shorts", offsets, [x for n in elements for x in (4 + n, 0)], False)
    memory.store(access(memory, "store", 2), at(16, 1, 2, 3), np.array([5], np.int16), which)
    assert calls.pop() == ((3,), PLACE, "shorts", offsets, [x for n in elements for x in (5, 0)], False)
    exchange = access(memory, "exchange", 4, operation=interpreter.MEM_SEMANTIC.RELAXED)
    memory.exchange(exchange, at(16, 1, width=4), np.array([0], np.int32), np.array([1], np.int32))
    assert calls.pop() == ((3,), PLACE, "shorts", [4, 5, 6, 7], [], True)
    with collected():
        memory.load(access(memory, "load", 2), at(34, 0))
    assert not calls


ELEMENTS = st.lists(st.integers(0, 7), min_size=2, max_size=2)
# Operations of two programs: what they do, how wide, and from which of the shorts on.
TOGETHER = st.lists(
    st.tuples(st.sampled_from(("load", "store")), st.sampled_from((1, 2, 4)), ELEMENTS, st.booleans())
    | st.tuples(st.just("exchange"), st.just(4), ELEMENTS, st.booleans()),
    min_size=1,
    max_size=4,
)


def operate(memory: LaunchMemory, kind: str, width: int, elements: list[int], run: bool) -> list[int]:
    """Let the programs of these elements load, store or exchange one lane each, or two neighbours."""
    base = np.array([[START + 16 + 2 * element // width * width] for element in elements], U)
    where = OffsetAddresses(base, np.arange(1 + run, dtype=np.int32)[None], width)
    value = np.array([[10 * element + 1 + lane for lane in range(1 + run)] for element in elements], f"i{width}")
    if kind == "load":
        return list(memory.load(access(memory, kind, width), where).reshape(-1).tolist())
    if kind == "store":
        memory.store(access(memory, kind, width), where, value)
        return []
    exchange = access(memory, "exchange", width, operation=interpreter.MEM_SEMANTIC.RELAXED)
    first = np.array([[int.from_bytes(bytes(range(16, 16 + width)), "little")]], f"i{width}")
    return list(memory.exchange(exchange, where, first, value).reshape(-1).tolist())


@settings(max_examples=60)
@drawn(operations=TOGETHER, exact=st.booleans(), stored=st.booleans())
def test_programs_that_run_together_give_what_they_give_one_after_the_other(
    operations: list[tuple[str, int, list[int], bool]], exact: bool, stored: bool
) -> None:
    ARENA.copy_(torch.arange(len(ARENA)) % 251)
    found = given([("shorts", ARENA[16:36].view(torch.int16))], lambda tensor: None)
    memory = LaunchMemory(found, (np.array([[0], [1]]),), stored={0} if stored else set())
    memory.speculation = Speculation(2, exact, np.arange(2))
    together: list[list[int]] = []
    touched: list[set[int]] = [set(), set()]
    try:
        for kind, width, elements, run in operations:
            for program, element in enumerate(elements):
                first = 16 + 2 * element // width * width
                touched[program] |= {unit // 2 for unit in range(first, first + width * (1 + run))}
            together.append(operate(memory, kind, width, elements, run))
    except Conflict:
        memory.speculation.undo()
        assert torch.equal(ARENA, torch.arange(len(ARENA)) % 251)
        shared = touched[0] & touched[1]
        if not exact:
            shared = set(range(min(touched[0]), max(touched[0]) + 1)) & set(range(min(touched[1]), max(touched[1]) + 1))
        assert shared or not stored or width == 1  # parts of units are not told apart
        return
    arena = ARENA.clone()
    ARENA.copy_(torch.arange(len(ARENA)) % 251)
    alone = LaunchMemory(found, (np.array([0]),))
    apart = [
        [operate(alone, kind, width, [elements[program]], run) for kind, width, elements, run in operations]
        for program in range(2)
    ]
    assert together == [a + b for a, b in zip(*apart, strict=True)] and torch.equal(ARENA, arena)


def test_views_of_one_tensor_are_found_by_the_address_of_one() -> None:
    """As far as they are told: what lies between them, and views that the kernel itself made, are none of its own."""
    base: Any = torch.arange(30, dtype=torch.int16)
    gate, up = base.as_strided((3, 4), (10, 1), 0), base.as_strided((3, 4), (10, 1), 5)
    alone = given([("gate", gate)], lambda tensor: None)
    base.views = {"x": ((3, 4), (10, 1), 0), "up": ((3, 4), (10, 1), 5)}
    both = given([("gate", gate)], lambda tensor: None)
    assert [x.name for x in alone] == ["gate"] and [x.name for x in both] == ["gate", "up"]
    assert both[1].start == up.data_ptr() and both[0].region == both[1].region
    assert [x.name for x in given([("up", up), ("gate", gate)], lambda tensor: None)] == ["up", "gate"]
    for found, held in ((alone, {*range(4)}), (both, {*range(4), *range(5, 9)})):
        memory = LaunchMemory(found, ids=(np.array([0]),))
        where = np.array([gate.data_ptr() + 2 * x for x in range(10)], U)
        with collected() as seen:
            loaded = memory.load(access(memory, "load", 2), OffsetAddresses(where, None, 2))
        assert loaded.tolist() == [x if x in held else -1 for x in range(10)]
        [fault] = seen.faults.values()
        assert fault.kind == "out_of_bounds" and fault.address == int(where[4])
