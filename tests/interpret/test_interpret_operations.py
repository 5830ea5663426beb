"""Operations of the language that are known are not asked for again, and do what the language does."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from lastbit.interpret import install

if triton.knobs.runtime.interpret:
    install()
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpreterOptions, TensorHandle, interpreter_builder

    from lastbit.interpret import launch, operations, tape
    from lastbit.interpret.builder import _dot

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 was not set")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tape and no course of an earlier test, and none for a later one."""
    monkeypatch.setattr(launch, "_tapes", tape.Tapes(limit=1 << 27))
    operations._courses.clear()
    yield
    operations._courses.clear()


def forget_tapes() -> None:
    launch._tapes = tape.Tapes(limit=1 << 27)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the operations that the language was asked for because nothing was known of them."""
    names: list[str] = []
    worked_out = operations._worked_out

    def noted(key: Any, *args: Any) -> Any:
        names.append(key[0].__name__)
        return worked_out(key, *args)

    monkeypatch.setattr(operations, "_worked_out", noted)
    return names


@triton.jit
def mixed_kernel(x_ptr, y_ptr, out_ptr, n, scale, N: tl.constexpr):
    """Pointers, constants on either side, casts, one tensor twice, reductions, branches and a loop."""
    p = tl.program_id(0)
    i = tl.arange(0, N)
    offset = p * N + i
    inside = offset < n
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    y = tl.load(y_ptr + offset, mask=inside)
    total = x * x + 2 * y.to(tl.float32) - scale
    square = total[:, None] * tl.where(i[None, :] % 2 == 0, total[None, :], -1.5)
    total += tl.sum(square, axis=1) / N
    if p % 2 == 0:
        total = tl.maximum(total, 0.0)
    for k in range(0, p):
        total += tl.exp(-tl.abs(total)) * k
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=inside)


def run_mixed() -> torch.Tensor:
    x, y = torch.linspace(-2, 2, 60), torch.arange(60).to(torch.bfloat16)
    out = torch.zeros(60, dtype=torch.float16)
    mixed_kernel[(8,)](x, y, out, 60, 0.25, N=8)
    return out.view(torch.int16)


def described() -> list[Any]:
    """Describe what the tapes hold: every step by its name, its operands by the steps or constants that gave them."""
    return [_described(found, segment) for found in launch._tapes._tapes.values() if (segment := found.root)]


def _described(found: "tape.Tape", segment: "tape.Segment", known: dict[int, Any] | None = None) -> Any:
    known = dict(known or {})

    def operand(register: int) -> Any:
        held = found.registers[register]
        return known.get(register, register if held is None else (held.tobytes(), held.shape, str(held.dtype)))

    steps = []
    for step in segment.steps:
        steps.append((*step[:1], tuple(map(operand, step.inputs)), str(found.dtypes[step.output]), *step[4:]))
        known[step.output] = ("step", len(known))
    branches = {value: _described(found, following, known) for value, following in segment.branches.items()}
    guard = segment.guard and (operand(segment.guard.register), segment.guard.varies)
    return steps, guard, branches


def test_the_same_steps_are_noted_with_and_without(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "current", lambda builder: None)
        expected = run_mixed()
        by_language = described()
    assert not asked
    for _ in range(2):
        forget_tapes()
        assert torch.equal(run_mixed(), expected)
        assert described() == by_language
    assert 10 < len(asked) < 60


def test_the_language_is_asked_once(asked: list[str]) -> None:
    run_mixed()
    assert asked
    asked.clear()
    forget_tapes()
    run_mixed()
    assert not asked


@triton.jit
def product_kernel(x_ptr, y_ptr, out_ptr):
    x, y = tl.load(x_ptr), tl.load(y_ptr)
    tl.store(out_ptr, x * x)
    tl.store(out_ptr + 1, x * y)


def test_one_tensor_twice_is_not_taken_for_two() -> None:
    out = torch.zeros(2)
    product_kernel[(1,)](torch.tensor(3.0), torch.tensor(5.0), out)
    assert out.tolist() == [9.0, 15.0]


@triton.jit
def constant_kernel(out_ptr, a: tl.constexpr):
    tl.store(out_ptr, tl.full([], a, tl.float32))
    tl.store(out_ptr + 1, tl.load(out_ptr + 1) + a)
    tl.store(out_ptr + 2, (tl.load(out_ptr + 2).to(tl.int8) + a).to(tl.float32))
    tl.store(out_ptr + 3, tl.load(out_ptr + 3) * a)


def test_constants_that_the_language_tells_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = (1, True, 1.0, 0, False, 0.0, -0.0, 1.5, -1.5, 100)

    def results() -> list[list[float]]:
        forget_tapes()
        found = [torch.full((4,), 127.5) for _ in constants]
        for out, constant in zip(found, constants, strict=True):
            constant_kernel[(1,)](out, constant)
        return [out.tolist() for out in found]

    with monkeypatch.context() as patch:
        patch.setattr(launch, "current", lambda builder: None)
        expected = results()
    assert len(set(map(tuple, expected))) > 5
    assert results() == results() == expected


@triton.jit
def overflowing_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) + 1)


def test_changed_options_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.tensor([2**31 - 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    overflowing_kernel[(1,)](x, out)
    assert out.item() == -(2**31)
    forget_tapes()
    options = InterpreterOptions(sanitize_overflow=True, debug=True)
    monkeypatch.setattr(type(interpreter_builder), "options", options)
    with pytest.raises(InterpreterError, match="overflow"):
        overflowing_kernel[(1,)](x, out)


def doubling(add: Callable[..., Any]) -> Callable[..., Any]:
    def doubled(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return add(self, add(self, a, b, *args), b, *args)

    return doubled


def test_a_changed_function_of_the_language_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.tensor([3], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for function, expected in ((None, 4), (doubling, 5)):
        forget_tapes()
        if function:
            semantic = operations.TritonSemantic
            monkeypatch.setattr(semantic, "add", function(semantic.add))
        overflowing_kernel[(1,)](x, out)
        assert out.item() == expected


@triton.jit
def shapes_kernel(out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, N))


def test_an_error_is_the_language_s_own_each_time() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    texts = []
    for _ in range(3):
        with pytest.raises(InterpreterError) as caught:
            shapes_kernel[(1,)](out, N=8)
        texts.append(str(caught.value))
    assert len(set(texts)) == 1 and "incompatible dimensions" in texts[0]
    shapes_kernel[(1,)](out, N=4)
    assert out.tolist() == [0, 2, 4, 6, 0, 0, 0, 0]


@triton.jit
def turning_kernel(x_ptr, out_ptr, N: tl.constexpr):
    """Use constants in steps before a value is seen, and alone after it."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if tl.sum(x) > tl.program_id(0):
        x += tl.sum(i * 2)
    tl.store(out_ptr + tl.program_id(0) * N + i, x + i * 3)


def test_a_program_that_goes_another_way_comes_along_the_same_steps() -> None:
    x, out = torch.ones(4, dtype=torch.int32), torch.zeros(8, 4, dtype=torch.int32)
    turning_kernel[(8,)](x, out, N=4)
    expected = 1 + 3 * torch.arange(4) + 12 * (torch.arange(8)[:, None] < 4)
    assert torch.equal(out.long(), expected)


def test_what_is_not_understood_has_no_key() -> None:
    handle = TensorHandle(np.ones(1, np.float32), tl.float32)
    tensor = tl.tensor(handle, tl.float32)
    found: list[Any] = []
    assert operations._key(len, (tensor, 1, "a", (None, slice(None))), {"mask": None}, found) is not None
    assert found == [tensor]
    for value in (object(), [tensor], (1, tensor), np.float64(1), tl.tensor(object(), tl.float32)):
        assert operations._key(len, (value,), {}, []) is None


def test_courses_used_longest_ago_are_forgotten_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "ENTRIES", 5)
    assert torch.equal(run_mixed(), run_mixed())
    assert len(operations._courses) <= 5


def test_a_block_type_is_made_once() -> None:
    assert tl.block_type(tl.float32, [2, 4]) is tl.block_type(tl.float32, (tl.constexpr(2), 4))
    assert tl.block_type(tl.float32, [2, 4]) is not tl.block_type(tl.float32, [4, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])


@pytest.mark.parametrize("height", [1, 5, 12, 16])
def test_a_dot_of_16_bit_floats_is_rounded_once_wherever_its_row_lies(height: int) -> None:
    generator = torch.Generator().manual_seed(height)
    row, matrix = (torch.randn(shape, generator=generator).bfloat16().float().numpy() for shape in ((1, 48), (48, 40)))
    # Products of 16-bit floats are exact in fp64.
    exact = [math.fsum(column) for column in (row[0, :, None] * matrix.astype(np.float64)).T]
    found = _dot(False, np.repeat(row, height, axis=0), matrix, np.zeros((height, 40), np.float32))
    assert np.array_equal(found, np.broadcast_to(np.float32(exact), (height, 40)))
