"""What kernels use beyond arithmetic: descriptors, block pointers, mapped functions, persistent loops, the driver."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from lastbit.interpret import driver, install, launch, one_by_one
from lastbit.interpret.driver import MULTIPROCESSORS
from tests import interpret_wild as wild
from tests.tensor_core_dots import HOPPER, dot, tensor_cores

pytestmark = pytest.mark.filterwarnings("ignore:tl.make_block_ptr", "ignore::RuntimeWarning")
COMPOSED = [name for name in dict(wild.questions()) if "descriptor" in name or "pointer" in name]


@pytest.fixture(autouse=True, scope="module")
def faithful_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles Triton kernels (TRITON_INTERPRET is not 1)")
    install()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.contiguous().view(torch.uint8).equal(y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", COMPOSED)
def test_blocks_run_from_a_tape_as_by_python(name: str) -> None:
    ask = dict(wild.questions())[name]
    with one_by_one():
        expected = ask()
    assert same_bits(ask(), expected)
    tape = next(reversed(launch._tapes._tapes.values()))
    assert not tape.refused and tape.root is not None
    assert same_bits(ask(), expected)


def test_a_descriptor_fills_outside_and_never_stores_there() -> None:
    x = wild._matrix("bf16")
    expected = torch.zeros_like(x)
    for j in range(3):
        r = torch.zeros(8, 32, dtype=x.dtype)
        left = max(0, 16 - j * 32)
        part = x[4:12, max(0, j * 32 - 16) : j * 32 + 16]
        r[: part.shape[0], left : left + part.shape[1]] = part
        r = (r.float() + r.float().sum(1, keepdim=True)).to(x.dtype)
        target = expected[j * 2 : j * 2 + 8, max(0, j * 32 - 16) : j * 32 + 16]
        target[:] = r[: target.shape[0], left : left + target.shape[1]]
    assert same_bits(wild._host("bf16", "shift"), expected)


@triton.jit
def rows_kernel(x_ptr, out_ptr, rows_ptr, rows, columns, K: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [1, K])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [1, K])
    which = tl.load(rows_ptr + tl.arange(0, 8))
    out.scatter(x.gather(which, 16) + 1, 7 - tl.arange(0, 8), 48)


def test_rows_are_gathered_and_scattered() -> None:
    x, out = wild._matrix("fp32"), torch.full((11, 80), 9.0)
    which = torch.tensor([3, 0, 10, 99, 5, -1, 2, 3], dtype=torch.int32)
    rows_kernel[(1,)](x, out, which, 11, 80, K=64)
    expected = torch.full((11, 80), 9.0)
    for i, row in enumerate(which.tolist()):
        found = x[row, 16:80] if 0 <= row < 11 else torch.zeros(64)
        expected[7 - i, 48:] = found[:32] + 1
    assert same_bits(out, expected)


@triton.jit
def steps(x):
    return x * 2 + 1


@triton.jit
def programs_kernel(x, x_ptr, out_ptr, rows_ptr, count, columns, K: tl.constexpr):
    n = tl.program_id(0)
    block = tl.make_block_ptr(x_ptr, (count, columns), (columns, 1), (n * 4, 0), (4, K), (1, 0))
    r = tl.load(tl.advance(block, (0, 32 * (n % 2))), boundary_check=(0, 1), padding_option="zero")
    r += x.load([n * 4 - 2, 16])
    made = tl.make_tensor_descriptor(x_ptr, [count, columns - n % 3], [columns, 1], [1, K])
    gathered = made.gather(tl.load(rows_ptr + n * 8 + tl.arange(0, 8)), 16 * (n % 4))
    r += tl.sum(gathered, 0)[None, :]
    asm: tl.constexpr = "{.reg .b32 t; add.u32 t, $1, 0x01010101; and.b32 $0, t, 0x7F7F7F7F;}"
    r += tl.inline_asm_elementwise(asm, "=r,r", [r.to(tl.int8)], tl.int8, True, 4)
    r += tl.map_elementwise(steps, r)
    out = tl.make_tensor_descriptor(out_ptr, [count, columns], [columns, 1], [4, K])
    out.store([n * 4, 0], r)
    out.atomic_add([n * 3, 32], r)


@pytest.mark.skipif(not wild.BLOCK_POINTERS, reason="Triton 3.8 removed block pointers")
def test_many_programs_are_as_one_by_one() -> None:
    count, columns, programs = 30, 80, 9
    x = (torch.arange(count * columns).reshape(count, columns) % 23).float()
    which = torch.arange(programs * 8, dtype=torch.int32) * 7 % 37 - 2
    results = []
    for context in (one_by_one(), nullcontext()):
        out = torch.zeros(count, columns)
        with context:
            descriptor = TensorDescriptor.from_tensor(x, [4, 32])
            programs_kernel[(programs,)](descriptor, x, out, which, count, columns, K=32)
        results.append(out)
    assert same_bits(*results) and results[0].abs().sum() > 0


@triton.jit
def misaligned_kernel(x_ptr, columns, START: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [4, columns], [columns, 1], [4, 16])
    x.store([0, START], x.load([0, START]))


@pytest.mark.parametrize(("columns", "start", "words"), [(17, 0, "base and strides"), (32, 2, "innermost offset")])
def test_alignment_is_what_the_hardware_wants(columns: int, start: int, words: str) -> None:
    with pytest.raises(InterpreterError, match=words):
        misaligned_kernel[(1,)](torch.zeros(4, columns), columns, START=start)


def mapped(x: float, y: float) -> float:
    x, y = np.float32(x), np.float32(y)
    total = x * np.float32(2) if x > y else y if x != x else x + y
    count = 0
    while total > 100 and count < 9:
        total, count = total / np.float32(4), count + 1
    return float(total + np.float32(count))


def test_mapped_functions_branch_for_each_element() -> None:
    x, y = (wild.values("fp32", shift).numpy() for shift in (0, 3))
    expected = torch.tensor([mapped(*pair) for pair in zip(x, y, strict=True)])
    assert torch.equal(wild._mapped(1).nan_to_num(7.0), expected.nan_to_num(7.0))


@triton.jit
def smooth(x):
    return tl.exp(x) + 1.0


@triton.jit
def smooth_kernel(x_ptr, N: tl.constexpr):
    at = x_ptr + tl.program_id(0) * N + tl.arange(0, N)
    tl.store(at, tl.map_elementwise(smooth, tl.load(at)))


def test_a_mapped_function_without_branches_runs_from_a_tape() -> None:
    x = torch.arange(32.0) / 8
    expected = x.double().exp().float() + 1
    smooth_kernel[(4,)](x, N=8)
    assert torch.equal(x, expected)
    assert not next(reversed(launch._tapes._tapes.values())).refused


@triton.jit
def persistent_kernel(x_ptr, out_ptr, count, N: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, N), tl.num_programs(0), flatten=True, warp_specialize=False):
        at = tile * N + tl.arange(0, N)
        tl.store(out_ptr + at, tl.load(x_ptr + at, at < count) * 2, at < count)


def test_persistent_programs_on_as_many_multiprocessors_as_torch_tells() -> None:
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    x, out = torch.arange(7000.0), torch.zeros(7000)
    persistent_kernel[(programs,)](x, out, 7000, N=16)
    assert torch.equal(out, x * 2)
    assert torch.cuda.is_available() or programs == MULTIPROCESSORS


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU of its own")
def test_questions_to_the_driver_are_answered_without_a_gpu() -> None:
    active = triton.runtime.driver.active
    assert active.get_current_target().arch == 90
    assert active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"] == MULTIPROCESSORS
    assert torch.cuda.get_device_capability(torch.device("cpu")) == (9, 0)
    with pytest.raises((AssertionError, RuntimeError)):  # torch itself is told the truth
        eval("torch.cuda.current_device()", {"torch": torch, "__name__": "torch._inductor.codecache"})
    with torch.cuda.device(torch.device("cpu")):
        assert not torch.cuda.is_available()


def test_the_question_whether_there_is_a_gpu_starts_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts a thread, of which processes that are forked have half: see `lastbit.isolation.server`."""

    def started() -> int:
        raise AssertionError("the driver was started")

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", started, raising=False)
    driver.stand_in_for_gpu()


def second_copy(name: str) -> Callable[..., object]:
    """Find a function of libdevice, of a module that is executed once more."""
    spec = importlib.util.find_spec("triton.language.extra.libdevice")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., object] = getattr(module, name)
    return function


copied = second_copy("rsqrt")


@triton.jit
def copied_kernel(x_ptr):
    tl.store(x_ptr, copied(tl.load(x_ptr)))


def test_functions_of_a_second_copy_of_libdevice() -> None:
    x = torch.tensor([16.0])
    copied_kernel[(1,)](x)
    assert x.item() == 0.25


@triton.jit
def inner(x):
    return tl.dot_scaled(x, None, "bf16", x, None, "bf16")


@triton.jit
def unknown_kernel(x_ptr):
    i = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(x_ptr + i, inner(tl.load(x_ptr + i)))


def test_an_unknown_operation_is_named_with_its_line() -> None:
    with pytest.raises(InterpreterError) as caught:
        unknown_kernel[(1,)](torch.zeros(32, 32, dtype=torch.bfloat16))
    message = str(caught.value)
    assert "the operation 'dot_scaled' is not interpreted" in message
    assert "test_interpret_wild.py:" in message and "in inner: return tl.dot_scaled(" in message
    assert "on a GPU, with --device cuda" in message


def test_other_errors_name_their_line_and_advise_nothing() -> None:
    descriptor = TensorDescriptor.from_tensor(torch.zeros(4, 32), [4, 16])
    with pytest.raises(InterpreterError, match=r"interpret_wild.py:\d+ in host_kernel: ") as caught:
        wild.host_kernel[(1,)](descriptor, descriptor, M=4, K=5, OP="copy")
    assert "--device cuda" not in str(caught.value)


def cut_off(exponent: int, place: int) -> float:
    """Measure what 63 products of 2^-exponent add to one of 1, in units of 2^-23."""
    a = np.full((1, 64), 2.0 ** -(exponent // 2), np.float16)
    b = np.full((64, 1), 2.0 ** -(exponent - exponent // 2), np.float16)
    a[:, place] = b[place] = 1
    return float(dot(HOPPER, a, b, np.zeros((1, 1), np.float32))[0, 0] - 1) * 2**23


@pytest.mark.parametrize(("place", "left"), [(0, [126, 63, 31, 15, 0, 0, 0]), (63, [126, 63, 31, 15, 6, 3, 1])])
def test_tensor_cores_cut_off_what_was_measured(place: int, left: list[float]) -> None:
    assert [cut_off(exponent, place) for exponent in range(22, 29)] == left


@pytest.mark.parametrize(
    ("first", "others", "left"), [((3, 2.0**27), (3, 2.0**11), 58), ((0, 2.0**39), (2**23, 1), 63)]
)
def test_subnormal_factors_count_for_the_smallest_normal(
    first: tuple[float, float], others: tuple[float, float], left: int
) -> None:
    """Factors in units of 2^-24, the smallest fp16."""
    a, b = np.full((1, 64), others[0] * 2.0**-24, np.float16), np.full((64, 1), others[1] * 2.0**-24, np.float16)
    a[:, 0], b[0] = np.float64(first) * 2.0**-24
    total = float(dot(HOPPER, a, b, np.zeros((1, 1), np.float32))[0, 0])
    assert (total - float(a[0, 0]) * float(b[0, 0])) / (float(a[0, 1]) * float(b[1, 0])) == left


def test_tensor_cores_are_off_unless_asked_for_also_on_a_tape() -> None:
    ask = dict(wild.questions())["dot large bf16 64"]
    plain = ask()
    with tensor_cores():
        cut = ask()
    a, b, c = wild.factors("large", "bf16", 64, 128, 16)
    expected = dot(HOPPER, *(x.float().numpy().astype(t) for x, t in ((a, "bfloat16"), (b, "bfloat16"))), c.numpy())
    assert np.array_equal(cut.numpy(), expected) and not torch.equal(cut, plain)
    assert torch.equal(ask(), plain)
