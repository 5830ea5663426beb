"""Programs that run together do what they do one after the other, and how that is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from lastbit.interpret import descending, install, one_by_one

if triton.knobs.runtime.interpret:
    install()
    from lastbit.interpret import launch
    from lastbit.interpret.tape import Tape, Tapes, Trust

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 was not set")


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    fresh = Tapes(limit=1 << 30)
    monkeypatch.setattr(launch, "_tapes", fresh)
    return fresh


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many programs ran together, batch by batch."""
    sizes: list[int] = []
    together = launch.Launch._together

    def counted(self: launch.Launch, grid_indices: launch.Array) -> bool:
        sizes.append(len(grid_indices))
        return together(self, grid_indices)

    monkeypatch.setattr(launch.Launch, "_together", counted)
    return sizes


def the_tape(tapes: Tapes) -> Tape:
    [tape] = tapes._tapes.values()
    return tape


def assert_as_one_by_one(run: Callable[[torch.Tensor], None], size: int) -> torch.Tensor:
    """Check for the same bytes in memory, twice and in both directions, as if every program ran by Python."""
    start = torch.arange(size, dtype=torch.float32)
    for _ in range(2):
        expected, actual = start.clone(), start.clone()
        with one_by_one():
            run(expected)
        run(actual)
        assert torch.equal(actual, expected)
    backward = start.clone()
    with descending():
        with one_by_one():
            run(expected := start.clone())
        run(backward)
    assert torch.equal(backward, expected)
    return actual


@triton.jit
def doubled(x_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)


def test_rows_in_place(tapes, batches):
    assert_as_one_by_one(lambda x: doubled[(8,)](x, N=4), 32)
    assert the_tape(tapes).trust is Trust.RANGES
    assert batches == [7, 8, 8]  # the first program of the first launch was recorded


@triton.jit
def columns_doubled(x_ptr, rows, programs, N: tl.constexpr):
    for row in range(0, rows):
        i = row * programs * N + tl.program_id(0) * N + tl.arange(0, N)
        tl.store(x_ptr + i, tl.load(x_ptr + i) * 2 + row)


def test_columns_in_place_are_told_apart_byte_by_byte(tapes, batches):
    assert_as_one_by_one(lambda x: columns_doubled[(4,)](x, 3, 4, N=4), 48)
    assert the_tape(tapes).trust is Trust.BYTES
    assert batches == [3, 3, 4, 4]


@triton.jit
def added_to_the_next(x_ptr):
    i = tl.program_id(0)
    tl.store(x_ptr + i + 1, tl.load(x_ptr + i) + tl.load(x_ptr + i + 1))


def test_what_one_program_stores_the_next_one_loads(tapes):
    result = assert_as_one_by_one(lambda x: added_to_the_next[(8,)](x), 9)
    assert result.tolist() == torch.arange(9).cumsum(0).tolist()
    assert the_tape(tapes).trust is Trust.NEVER


@triton.jit
def to_one_place(x_ptr, TWICE: tl.constexpr):
    i = tl.program_id(0)
    if TWICE:
        tl.store(x_ptr, i * 1.0)
    tl.store(x_ptr, i + 0.5)


@pytest.mark.parametrize(("twice", "trust"), [(False, 0), (True, 2)])
def test_the_last_store_stays(tapes, twice, trust):
    assert assert_as_one_by_one(lambda x: to_one_place[(5,)](x, TWICE=twice), 1).tolist() == [4.5]
    assert the_tape(tapes).trust == trust


@triton.jit
def queued(x_ptr, count_ptr):
    place = tl.atomic_add(count_ptr, 1)
    tl.store(x_ptr + place, tl.program_id(0) * 1.0)


def test_atomics_keep_the_order_of_programs(tapes, batches):
    result = assert_as_one_by_one(lambda x: queued[(8,)](x, torch.zeros(1, dtype=torch.int32)), 8)
    assert result.tolist() == list(range(8))
    assert the_tape(tapes).trust is Trust.RANGES
    assert batches


@triton.jit
def locked(x_ptr, lock_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(x_ptr, tl.load(x_ptr) * 3 + tl.program_id(0))
    tl.atomic_xchg(lock_ptr, 0)


def test_a_lock_that_programs_wait_for(tapes):
    assert_as_one_by_one(lambda x: locked[(6,)](x, torch.zeros(1, dtype=torch.int32)), 1)


@triton.jit
def parted(x_ptr, n, N: tl.constexpr):
    i = tl.program_id(0)
    total = tl.zeros([N], tl.float32)
    for step in range(0, i % 3):
        total += tl.load(x_ptr + i * N + tl.arange(0, N)) + step
    if i % 2 == 0:
        if i == n:
            return
        total = -total
    tl.store(x_ptr + i * N + tl.arange(0, N), total)


def test_groups_go_their_own_ways(tapes, batches):
    assert_as_one_by_one(lambda x: parted[(16,)](x, 4, N=4), 64)
    assert the_tape(tapes).trust is Trust.RANGES
    assert max(batches) == 16


@triton.jit
def checked(x_ptr, bad):
    i = tl.program_id(0)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + 100)
    where = tl.full([2], 1, tl.int32) + tl.where(i == bad, 7, 0)
    one = tl.sum(tl.gather(tl.arange(0, 2), where, 0)) // 2
    tl.store(x_ptr + i, tl.load(x_ptr + i) + one)


def test_an_error_leaves_memory_as_the_programs_in_front_of_it_do(tapes):
    checked[(8,)](torch.zeros(8), 9)
    x, expected = torch.zeros(8), torch.zeros(8)
    with pytest.raises(InterpreterError, match="out of bounds"):
        checked[(8,)](x, 5)
    with one_by_one(), pytest.raises(InterpreterError, match="out of bounds"):
        checked[(8,)](expected, 5)
    assert torch.equal(x, expected)
    assert x.tolist() == [101.0] * 5 + [100.0, 0.0, 0.0]


@triton.jit
def shared(x_ptr, w_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    w = tl.exp(tl.load(w_ptr + tl.arange(0, N)))
    tl.store(y_ptr + i, tl.load(x_ptr + i) * w)


def test_what_is_common_is_computed_once(tapes):
    x, w, y = torch.ones(8, 4), torch.zeros(4), torch.zeros(8, 4)
    shared[(8,)](x, w, y, N=4)
    [segment] = the_tape(tapes)._joined.values()
    spread = {step.name for step in segment.steps if step.spread}
    assert "create_exp" not in spread and "create_fmul" in spread
    assert torch.equal(y, x)


@triton.jit
def weighed(x_ptr, w_ptr, rows, N: tl.constexpr):
    i = tl.program_id(0)
    columns = tl.arange(0, N)
    w = tl.load(w_ptr + columns, mask=(i < rows) & (columns < N), other=0.0)  # masks nothing, so all have the same
    if i % 2 == 0:
        w += 1
    tl.store(x_ptr + i * N + columns, tl.load(x_ptr + i * N + columns) * w)


def test_what_turns_out_to_be_common_is_not_taken_apart(tapes, batches):
    w = torch.arange(8.0)
    assert_as_one_by_one(lambda x: weighed[(8,)](x, w, 8, N=8), 64)
    assert the_tape(tapes).trust is Trust.RANGES


def test_a_batch_fits_memory(tapes, batches, monkeypatch):
    monkeypatch.setattr(launch, "BATCH_BYTES", 4000)
    assert_as_one_by_one(lambda x: doubled[(8,)](x, N=64), 512)
    assert 1 < max(batches) < 7


@triton.jit
def turned(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * M * N
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i + columns * M + rows)  # neighbours along the first axis
    tl.store(y_ptr + i + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], x.T + tl.trans(x))


def test_blocks_are_turned_program_by_program(tapes, batches):
    x = torch.randn(6, 4, 8)
    assert_as_one_by_one(lambda y: turned[(6,)](x, y, M=8, N=4), 6 * 4 * 8)
    assert the_tape(tapes).trust is Trust.RANGES and batches


@triton.jit
def talkative(x_ptr, last, DEVICE: tl.constexpr):
    i = tl.program_id(0)
    tl.store(x_ptr + i, 1.0)
    if i >= last:
        if DEVICE:
            tl.device_print("index", i)
        else:
            print("index", i)


@pytest.mark.parametrize("device", [True, False])
def test_what_is_printed_is_printed_once_and_in_order(tapes, capsys, device):
    talkative[(8,)](torch.zeros(8), 6, DEVICE=device)
    said = capsys.readouterr().out
    with one_by_one():
        talkative[(8,)](torch.zeros(8), 6, DEVICE=device)
    assert said == capsys.readouterr().out and said.count("\n") == 2
