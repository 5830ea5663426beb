"""Programs that run from a tape do what Python does."""

import struct
import traceback
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from lastbit.interpret import descending, install

if triton.knobs.runtime.interpret:
    install()
    from lastbit.interpret import launch, recorder, tape
    from lastbit.interpret.arguments import constant_key

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 was not set")


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> "tape.Tapes":
    """No tape of an earlier test."""
    fresh = tape.Tapes(limit=1 << 27)
    monkeypatch.setattr(launch, "_tapes", fresh)
    return fresh


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Note an element for every program that Python ran."""
    ran: list[int] = []
    entered = recorder.Recorder.finish
    monkeypatch.setattr(recorder.Recorder, "finish", lambda self: (ran.append(1), entered(self)))
    yield ran


SCALE = tl.constexpr(2.0)


@triton.jit
def scaled(x):
    return x * SCALE


@triton.jit
def scale_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, scaled(tl.load(x_ptr + i)))


def test_one_program_of_a_launch_and_none_of_later_ones_is_run_by_python(by_python: list[int]) -> None:
    x = torch.arange(32.0)
    for factor in (1, 3):
        out = torch.empty(32)
        scale_kernel[(8,)](x * factor, out, N=4)
        assert torch.equal(out, x * factor * 2)
    assert len(by_python) == 1


def test_other_constants_and_types_have_their_own_tapes(by_python: list[int]) -> None:
    for dtype, width in ((torch.float32, 4), (torch.float32, 8), (torch.bfloat16, 8)):
        x, out = torch.arange(32.0).to(dtype), torch.empty(32)
        scale_kernel[(32 // width,)](x, out, N=width)
        assert torch.equal(out, x.float() * 2)
    assert len(by_python) == 3


def test_a_global_name_with_a_new_meaning_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.ones(4), torch.empty(4)
    scale_kernel[(1,)](x, out, N=4)
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(5.0))
    scale_kernel[(1,)](x, out, N=4)
    assert out.tolist() == [5.0] * 4


class Settings(ModuleType):
    """A module that computes an attribute."""

    found = 1

    @property
    def factor(self) -> int:
        return self.found


settings, plain = Settings("settings"), ModuleType("plain")
plain.factor = 1  # type: ignore[attr-defined]


@triton.jit
def configured_kernel(out_ptr):
    tl.store(out_ptr, settings.factor * 10 + plain.factor)


def test_an_attribute_of_a_module_with_a_new_meaning_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    for owner, name in ((Settings, "found"), (plain, "factor")):
        configured_kernel[(1,)](out)
        monkeypatch.setattr(owner, name, 2)
        configured_kernel[(1,)](out)
        assert out.item() == settings.factor * 10 + plain.factor


@triton.jit
def branching_kernel(x_ptr, out_ptr, turn_ptr, limit, N: tl.constexpr):
    """Store before a branch, so that a store done twice, or an atomic update, would show."""
    p = tl.program_id(0)
    turn = tl.atomic_add(turn_ptr, 1)
    tl.store(out_ptr + 2 * p, turn)
    total = tl.load(x_ptr + p)
    if total > limit:
        for _ in range(0, tl.load(x_ptr + p) - limit):
            total += tl.atomic_add(turn_ptr, 100)
    elif p == N - 1:
        total = -total
    tl.store(out_ptr + 2 * p + 1, total)


def branching(x: list[int], limit: int) -> tuple[list[int], int]:
    out, turn = torch.zeros(len(x), 2, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
    branching_kernel[(len(x),)](torch.tensor(x, dtype=torch.int32), out, turn, limit, N=len(x))
    return out.flatten().tolist(), turn.item()


def branching_by_hand(x: list[int], limit: int, order: Iterator[int]) -> tuple[list[int], int]:
    out, turn = [0] * (2 * len(x)), 0
    for p in order:
        out[2 * p], total = turn, x[p]
        turn += 1
        for _ in range(x[p] - limit):
            total += turn
            turn += 100
        out[2 * p + 1] = -total if x[p] <= limit and p == len(x) - 1 else total
    return out, turn


@pytest.mark.parametrize("down", [False, True])
def test_branches_loops_and_atomics_go_on_where_the_tape_ends(down: bool, by_python: list[int]) -> None:
    x = [1, 5, 2, 7, 5, 1, 7, 3]
    order = range(len(x))
    for limit in (4, 2, 4):
        expected = branching_by_hand(x, limit, reversed(order) if down else iter(order))
        if down:
            with descending():
                assert branching(x, limit) == expected
        else:
            assert branching(x, limit) == expected
    assert 0 < len(by_python) < 12  # of 24


@triton.jit
def printing_kernel(x_ptr):
    print("program", tl.load(x_ptr + tl.program_id(0)))


def test_a_kernel_that_prints_is_always_run_by_python(capsys: pytest.CaptureFixture[str], tapes: "tape.Tapes") -> None:
    printing_kernel[(3,)](torch.tensor([4, 5, 6]))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["program"] * 3
    assert all(found.refused for found in tapes._tapes.values())


@triton.jit
def assuming_kernel(x_ptr, out_ptr):
    p = tl.program_id(0)
    tl.atomic_add(out_ptr, 1)
    tl.assume(tl.load(x_ptr + p) > 0)
    tl.atomic_add(out_ptr, 10)


def test_an_error_of_a_step_is_raised_in_the_kernel_and_nothing_is_done_twice() -> None:
    out = torch.zeros((), dtype=torch.int32)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="Assume failed") as caught:
        assuming_kernel[(3,)](torch.tensor([1, 1, -1], dtype=torch.int32), out)
    assert out.item() == 23
    assert caught.value.__cause__ is not None
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert "assuming_kernel" in [frame.name for frame in frames]


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def reducing_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.store(out_ptr + tl.program_id(0) * 2, tl.reduce(x, 0, larger))
    tl.store(out_ptr + tl.program_id(0) * 2 + 1, tl.sum(tl.associative_scan(x, 0, larger)))


def test_reductions_by_functions_of_the_kernel_run_from_a_tape(by_python: list[int]) -> None:
    x, out = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.empty(16, 2)
    reducing_kernel[(16,)](x, out, N=8)
    assert torch.equal(out[:, 0], x.amax(1))
    assert torch.allclose(out[:, 1], x.cummax(1).values.sum(1))
    assert len(by_python) == 1


def test_a_program_with_too_much_to_keep_is_run_by_python(monkeypatch: pytest.MonkeyPatch, tapes: "tape.Tapes") -> None:
    monkeypatch.setattr(recorder, "LARGEST", 100)
    x, out = torch.arange(32.0), torch.empty(32)
    scale_kernel[(2,)](x, out, N=16)
    assert torch.equal(out, x * 2)
    assert [found.refused for found in tapes._tapes.values()] == [True]


def test_constants_that_a_kernel_can_tell_apart_have_different_keys() -> None:
    nan = struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0]
    values = [0, 0.0, -0.0, False, None, "0", (0,), (0.0,), tl.constexpr(0), tl.float32, tl.int32, nan, np.float64(0)]
    keys = [constant_key(value) for value in values]
    assert None not in keys and len(set(keys)) == len(values)
    assert constant_key(object()) is None


def test_tapes_used_longest_ago_are_forgotten() -> None:
    tapes = tape.Tapes(limit=1000)
    first = tapes.find("a", [])
    first.register(None, None)
    assert tapes.find("a", []) is first
    for key in "bc":
        tapes.find(key, []).bytes = 900
    assert tapes.find("a", []) is not first
