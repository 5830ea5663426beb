"""What interpreted programs do to memory that no result need show: each planted fault with its line and its tensor."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl

from lastbit.calling.performing import returned_by
from lastbit.case import parse_case
from lastbit.inputs.of_case import build
from lastbit.interpret import descending, install, races
from lastbit.interpret.faults import Fault, collected

if triton.knobs.runtime.interpret:
    install()

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


def found(kernel, grid, *args, blank=lambda tensor: None, **constants) -> list[Fault]:
    with collected(blank) as seen:
        kernel[grid](*args, **constants)
    return list(seen.faults.values())


def the_only(faults: list[Fault], kind: str, tensor: str, line: str) -> str:
    """Return the sentence of the only fault, after a look at where it is."""
    assert [(f.kind, f.tensor) for f in faults] == [(kind, tensor)], faults
    place = faults[0].place
    assert linecache.getline(place.file, place.line).strip() == line
    return faults[0].sentence


@triton.jit
def copy_rows(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n if TAIL else columns < BLOCK
    x = tl.load(x_ptr + row * stride + columns, mask=mask)
    tl.store(y_ptr + row * n + columns, x, mask=columns < n)


@pytest.mark.parametrize("loaded", ["x", "up"])
def test_a_fault_beside_a_view_is_of_the_tensor_that_was_loaded_from(loaded: str):
    """Each view lies in the other's gaps, where neither has elements."""
    case = parse_case("op x=fp32[2,4]@16,1 up=fp32[2,4]@16,1+6&x seed=1")

    def call(**tensors):
        copy_rows[(2,)](tensors[loaded], torch.zeros(2, 5), 16, 5, BLOCK=8, TAIL=True)

    findings = []
    for order in (nullcontext(), descending()):
        with order:
            findings += returned_by(call, build(case, "cpu").hand_out(), {}, torch.device("cpu"))[1]
    assert [finding.stage for finding in findings] == [loaded, loaded]
    assert "in a gap of x_ptr" in findings[0].sentence and "behind the end of x_ptr" in findings[1].sentence
    assert not any("was not given" in finding.sentence for finding in findings)


def test_last_row_past_the_end():
    x, y = torch.ones(3, 8), torch.zeros(4, 8)
    sentence = the_only(
        found(copy_rows, (4,), x, y, 8, 8, BLOCK=8, TAIL=True),
        "out_of_bounds", "x_ptr", "x = tl.load(x_ptr + row * stride + columns, mask=mask)",
    )  # fmt: skip
    assert sentence.startswith("program [3, 0, 0] loads 8 elements, the first 1 element behind the end of x_ptr")
    assert "`tl.load(x_ptr + row * stride + columns, mask=mask)`" in sentence
    assert y[3].isnan().all() and (y[:3] == 1).all()


def test_a_store_outside_changes_nothing():
    memory = torch.zeros(40)
    y = memory[4:28].view(3, 8)
    sentence = the_only(
        found(copy_rows, (4,), torch.ones(4, 8), y, 8, 8, BLOCK=8, TAIL=True),
        "out_of_bounds", "y_ptr", "tl.store(y_ptr + row * n + columns, x, mask=columns < n)",
    )  # fmt: skip
    assert "stores 8 elements" in sentence
    assert memory[28:].eq(0).all() and memory[4:28].eq(1).all()


def test_row_stride_ignored():
    x = torch.arange(40.0).view(4, 10)[:, :8]
    line = "x = tl.load(x_ptr + row * stride + columns, mask=mask)"
    sentence = the_only(
        found(copy_rows, (4,), x, torch.zeros(4, 8), 8, 8, BLOCK=8, TAIL=True), "out_of_bounds", "x_ptr", line
    )
    assert "program [1, 0, 0] loads 2 elements" in sentence
    assert "in a gap of x_ptr (float32 [4, 8], strides [10, 1]), 1 element behind the end of row [0]" in sentence


def test_tail_unmasked():
    x = torch.ones(4, 6)
    line = "x = tl.load(x_ptr + row * stride + columns, mask=mask)"
    faults = found(copy_rows, (4,), x, torch.zeros(4, 6), 6, 6, BLOCK=8, TAIL=False)
    assert "program [3, 0, 0] loads 2 elements" in the_only(faults, "out_of_bounds", "x_ptr", line)


def test_a_gap_of_a_strided_row():
    x = torch.ones(4, 16)[:, ::2]
    faults = found(copy_rows, (1,), x, torch.zeros(4, 8), 16, 8, BLOCK=8, TAIL=True)
    assert "loads 4 elements, the first in a gap of x_ptr" in the_only(
        faults, "out_of_bounds", "x_ptr", "x = tl.load(x_ptr + row * stride + columns, mask=mask)"
    )


def test_rows_with_gaps_are_right_with_their_stride():
    x, y = torch.arange(40.0).view(4, 10)[:, :8], torch.zeros(4, 8)
    assert not found(copy_rows, (4,), x, y, 10, 8, BLOCK=8, TAIL=True)
    assert torch.equal(x, y)


@triton.jit
def shifted(x_ptr, y_ptr, shift):
    i = tl.program_id(0)
    tl.store(y_ptr + i, tl.load(x_ptr + (i - shift)))


def test_negative_index():
    faults = found(shifted, (4,), torch.ones(4), torch.zeros(4), 1)
    sentence = the_only(faults, "out_of_bounds", "x_ptr", "tl.store(y_ptr + i, tl.load(x_ptr + (i - shift)))")
    assert sentence.startswith("program [0, 0, 0] loads an element 1 element in front of x_ptr (float32 [4])")
    assert sentence.endswith("`tl.load(x_ptr + (i - shift))`")


@triton.jit
def backwards(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + 1 - i))


def test_lanes_that_run_out_in_front():
    faults = found(backwards, (1,), torch.ones(4), torch.zeros(4), 4)
    sentence = the_only(faults, "out_of_bounds", "x_ptr", "tl.store(y_ptr + i, tl.load(x_ptr + 1 - i))")
    assert sentence.startswith("program [0, 0, 0] loads 2 elements, the first 1 element in front of x_ptr (float32 [4]")


@triton.jit
def far(x_ptr, y_ptr, stride):
    row = tl.program_id(0)
    offset = row * stride
    tl.store(y_ptr + row, tl.load(x_ptr + offset))


def test_int32_overflow_of_an_offset():
    x = torch.ones(3).expand(4, 3)  # the address is all that matters: no row is where the stride says
    faults = found(far, (4,), x, torch.zeros(4), 2**30)
    sentence = the_only(faults, "out_of_bounds", "x_ptr", "tl.store(y_ptr + row, tl.load(x_ptr + offset))")
    assert sentence.startswith("program [1, 0, 0] loads an element 1,073,741,822 elements behind the end of x_ptr")


@triton.jit
def scaled(x_ptr, scale_ptr, y_ptr, N: tl.constexpr, GROUP: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * tl.load(scale_ptr + i // GROUP))


def test_a_scale_read_past_its_end():
    x, scale = torch.ones(4, 8), torch.ones(4)
    faults = found(scaled, (4,), x, scale, torch.zeros(4, 8), N=8, GROUP=4)
    sentence = the_only(
        faults, "out_of_bounds", "scale_ptr",
        "tl.store(y_ptr + i, tl.load(x_ptr + i) * tl.load(scale_ptr + i // GROUP))",
    )  # fmt: skip
    assert "program [2, 0, 0]" in sentence and "`tl.load(scale_ptr + i // GROUP)`" in sentence
    assert not found(scaled, (4,), x, scale, torch.zeros(4, 8), N=8, GROUP=8)


def test_no_watch_no_mercy():
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"behind the end of x_ptr"):
        copy_rows[(4,)](torch.ones(3, 8), torch.zeros(4, 8), 8, 8, BLOCK=8, TAIL=True)


# Uninitialised memory.


def test_a_load_of_memory_that_nothing_was_written_to():
    x = torch.full((2, 8), 1.0)
    x.view(torch.int32)[1, 5:] = 0x7FC01234
    line = "x = tl.load(x_ptr + row * stride + columns, mask=mask)"
    blank = {x.data_ptr(): 0x7FC01234}
    faults = found(
        copy_rows, (2,), x, torch.zeros(2, 8), 8, 8, BLOCK=8, TAIL=True, blank=lambda t: blank.get(t.data_ptr())
    )
    sentence = the_only(faults, "uninitialised", "x_ptr", line)
    assert "program [1, 0, 0] loads 3 elements, the first at 13 of x_ptr" in sentence


def test_masked_lanes_may_be_blank():
    x = torch.ones(2, 8)
    x.view(torch.int32)[:, 6:] = 0x7FC01234
    blank = {x.data_ptr(): 0x7FC01234}
    assert not found(
        copy_rows, (2,), x, torch.zeros(2, 6), 8, 6, BLOCK=8, TAIL=True, blank=lambda t: blank.get(t.data_ptr())
    )


# Races, and masked lanes that are used.


@pytest.fixture
def racing() -> Iterator[None]:
    with races():
        yield


@triton.jit
def one_row(x_ptr, y_ptr, rows, N: tl.constexpr):
    row = tl.program_id(0) % rows
    columns = tl.arange(0, N)
    tl.store(y_ptr + row * N + columns, tl.load(x_ptr + tl.program_id(0) * N + columns))


def test_two_programs_one_row(racing):
    x, y = torch.arange(32.0).view(4, 8), torch.zeros(2, 8)
    line = "tl.store(y_ptr + row * N + columns, tl.load(x_ptr + tl.program_id(0) * N + columns))"
    sentence = the_only(found(one_row, (4,), x, y, 2, N=8), "race", "y_ptr", line)
    assert sentence.startswith("program [0, 0, 0] stores something else where program [2, 0, 0] stores")
    assert "element 0 of y_ptr (float32 [2, 8])" in sentence
    assert sentence.count("`tl.store(") == 2
    assert torch.equal(y, x[2:])


def test_the_same_bytes_are_no_race(racing):
    assert not found(one_row, (4,), torch.ones(4, 8), torch.zeros(2, 8), 2, N=8)
    assert not found(one_row, (4,), torch.arange(32.0), torch.zeros(4, 8), 4, N=8)


@triton.jit
def summed(x_ptr, total_ptr, ATOMIC: tl.constexpr, N: tl.constexpr):
    part = tl.sum(tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N)))
    if ATOMIC:
        tl.atomic_add(total_ptr, part)
    else:
        tl.store(total_ptr, tl.load(total_ptr) + part)


def test_a_missing_atomic(racing):
    x = torch.ones(4, 8)
    faults = found(summed, (4,), x, torch.zeros(1), ATOMIC=False, N=8)
    sentence = the_only(faults[:1], "race", "total_ptr", "tl.store(total_ptr, tl.load(total_ptr) + part)")
    assert sentence.startswith("program [0, 0, 0] stores what program [1, 0, 0] loads")
    assert not found(summed, (4,), x, torch.zeros(1), ATOMIC=True, N=8)


@triton.jit
def last_one_sums(x_ptr, parts_ptr, count_ptr, total_ptr, programs, N: tl.constexpr):
    tl.store(parts_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))))
    if tl.atomic_add(count_ptr, 1) == programs - 1:
        tl.store(total_ptr, tl.sum(tl.load(parts_ptr + tl.arange(0, N))))


def test_an_atomic_counter_orders_programs(racing):
    x, total = torch.ones(8, 8), torch.zeros(1)
    count = torch.zeros(1, dtype=torch.int32)
    assert not found(last_one_sums, (8,), x, torch.zeros(8), count, total, 8, N=8)
    assert total == 64


@triton.jit
def largest(x_ptr, y_ptr, n, FILLED: tl.constexpr, N: tl.constexpr):
    columns = tl.arange(0, N)
    x = tl.load(x_ptr + columns, mask=columns < n, other=0.0) if FILLED else tl.load(x_ptr + columns, mask=columns < n)
    tl.store(y_ptr, tl.sum(x))
    tl.store(y_ptr + 1 + columns, x, mask=columns < n)


def test_a_masked_lane_that_is_used(racing):
    x = torch.ones(6)
    line = (
        "x = tl.load(x_ptr + columns, mask=columns < n, other=0.0) if FILLED "
        "else tl.load(x_ptr + columns, mask=columns < n)"
    )
    sentence = the_only(found(largest, (1,), x, torch.zeros(9), 6, FILLED=False, N=8), "masked", "y_ptr", line)
    assert sentence.endswith("`tl.load(x_ptr + columns, mask=columns < n)`")
    assert not found(largest, (1,), x, torch.zeros(9), 6, FILLED=True, N=8)


def test_a_masked_lane_that_is_not_used(racing):
    assert not found(copy_rows, (2,), torch.ones(2, 6), torch.zeros(2, 6), 6, 6, BLOCK=8, TAIL=True)
