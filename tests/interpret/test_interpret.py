"""The bit-faithful interpreter against torch, against exact arithmetic and against answers of an H200."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.libdevice import rsqrt as imported_rsqrt
from triton.language.math import exp2 as imported_exp2
from triton.runtime.jit import mangle_type

from lastbit.interpret import descending, install
from lastbit.interpret.arguments import _mangled
from lastbit.interpret.rewrite import SUBSTITUTES
from tests import interpret_kernels as kernels
from tests.interpret_wild import BLOCK_POINTERS

# Where a question forms numbers from a NaN's payload, numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def faithful_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles Triton kernels (TRITON_INTERPRET is not 1)")
    install()


def test_types_are_called_as_the_compiler_calls_them() -> None:
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 bool int8 int16 int32 int64 uint8 uint16 uint32"
    tensors = [torch.empty(0, dtype=getattr(torch, name)) for name in names.split()]
    ends = [end + d for bits in (31, 63) for end in (-(1 << bits), 1 << bits) for d in (-1, 0, 1)]
    for value in (*tensors, True, 0, 1, *(n for n in ends if n >= -(1 << 63)), 1.5):
        assert _mangled(value) == mangle_type(value), value


def all_exponents_and_ties() -> torch.Tensor:
    """Every sign and exponent of fp32 with every tie, near-tie and end point of the narrower formats' significands."""
    heads = np.arange(1 << 9, dtype=np.uint32) << 23
    tails: set[int] = {0, 1, 0x7FFFFF}
    for kept in (2, 3, 7, 10, 15, 22):  # significand bits kept; 15 and 22 are ties of subnormals on the way down
        tie = 1 << (22 - kept)
        for lead in (0, 1, (1 << kept) - 1, 1 << max(kept - 1, 0)):
            tails |= {((lead << (23 - kept)) + tie + d) & 0x7FFFFF for d in (-1, 0, 1)}
    bits = (heads[:, None] | np.array(sorted(tails), dtype=np.uint32)[None, :]).ravel()
    return torch.from_numpy(bits.view(np.float32).copy())


def random_patterns(count: int, seed: int) -> torch.Tensor:
    bits = np.random.Generator(np.random.Philox(seed)).integers(0, 1 << 32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def through_kernel(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    block = 1 << 20
    padded = torch.zeros(-(-x.numel() // block) * block, dtype=x.dtype)
    padded[: x.numel()] = x
    out = torch.empty(padded.shape, dtype=dtype)
    kernels.cast_kernel[(padded.numel() // block,)](padded, out, N=block, ROUNDING=rounding)
    return out[: x.numel()]


def unequal(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return where the bits differ, except that any NaN equals any NaN."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    both_nan = actual.double().isnan() & expected.double().isnan()
    return (actual.view(as_int) != expected.view(as_int)) & ~both_nan


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2"])
@pytest.mark.parametrize("inputs", ["edges", "random"])
def test_fp32_rounds_to_narrow_formats_as_torch_does(name: str, inputs: str) -> None:
    x = all_exponents_and_ties() if inputs == "edges" else random_patterns(10_000_000, seed=1)
    dtype = kernels.DTYPES[name]
    if name in ("e4m3", "e5m2"):
        largest = torch.finfo(dtype).max
        expected = x.clamp(-largest, largest).to(dtype)  # torch's own treatment of overflow depends on its release
    else:
        expected = x.to(dtype)
    wrong = unequal(through_kernel(x, dtype), expected)
    assert not wrong.any(), f"{int(wrong.sum())} of {x.numel()} differ, the first for {x[wrong][0].item().hex()}"


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_rounding_toward_zero_is_the_largest_number_not_beyond(name: str) -> None:
    x = torch.cat([all_exponents_and_ties(), random_patterns(1_000_000, seed=2)])
    x = x[x.isfinite()]
    dtype = kernels.DTYPES[name]
    actual = through_kernel(x, dtype, "rtz")
    next_out = (actual.view(torch.int16) + 1).view(dtype)
    assert bool((actual.double().abs() <= x.double().abs()).all())
    assert bool(((next_out.double().abs() > x.double().abs()) | next_out.isinf()).all())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_fp64_is_rounded_once(name: str) -> None:
    half_ulp = {"bf16": 2.0**-8, "fp16": 2.0**-11}[name]
    ties = [1 + half_ulp + 2.0**-40, 1 + half_ulp - 2.0**-40, 1 + half_ulp, 1 + 3 * half_ulp]
    expected = [1 + 2 * half_ulp, 1.0, 1.0, 1 + 4 * half_ulp]
    x = torch.tensor(ties, dtype=torch.float64).repeat(kernels.N // 4)
    out = torch.empty(kernels.N, dtype=kernels.DTYPES[name])
    kernels.cast_kernel[(1,)](x, out, N=kernels.N, ROUNDING=None)
    assert out[:4].tolist() == expected


def from_codes(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes.ravel().view(np.int16)).view(torch.bfloat16)


def special_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of bf16 zeros, infinities, NaN, subnormals, powers of two and their neighbours."""
    codes = {0x0000, 0x0001, 0x0002, 0x007F, 0x7F80, 0x7FC0, 0x7F81, 0x7F7F}
    codes |= {(e << 7) + d for e in (1, 2, 8, 64, 119, 126, 127, 128, 135, 200, 254) for d in (-1, 0, 1, 64, 127)}
    signed = np.array(sorted(codes | {c | 0x8000 for c in codes}), dtype=np.uint16)
    first, second = np.meshgrid(signed, signed)
    return from_codes(first), from_codes(second)


def random_pairs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bf16 bit patterns, the exponents of half of the pairs near each other so that addition rounds."""
    rng = np.random.Generator(np.random.Philox(3))
    first = rng.integers(0, 1 << 16, count, dtype=np.uint16)
    second = rng.integers(0, 1 << 16, count, dtype=np.uint16)
    near = (first & 0x7F80).astype(np.int64) + (rng.integers(-9, 10, count) << 7)
    second[::2] = ((second & 0x807F) | np.clip(near, 0, 0x7F80).astype(np.uint16))[::2]
    return from_codes(first), from_codes(second)


@pytest.mark.parametrize("inputs", ["special", "random"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_bf16_arithmetic_rounds_the_exact_result_once(operation: str, inputs: str) -> None:
    x, y = special_pairs() if inputs == "special" else random_pairs(10_000_000)
    block = 1 << 20
    size = -(-x.numel() // block) * block
    x, y = (torch.cat([a, a.new_ones(size - a.numel())]) for a in (x, y))
    out = torch.empty_like(x)
    kernels.binary_kernel[(size // block,)](x, y, out, N=block, OP=operation)
    exact = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[operation]
    for start in range(0, size, block):
        part = slice(start, start + block)
        # fp32 of the fp64 result is innocuous: the product is exact, and a sum keeps 24 >= 2·8 + 2 bits
        expected = exact(x[part].double(), y[part].double()).float().bfloat16()
        wrong = unequal(out[part], expected)
        assert not wrong.any(), f"{int(wrong.sum())} differ, the first at {x[part][wrong][0]}, {y[part][wrong][0]}"


H200 = np.load(Path(__file__).parents[1] / "interpret_h200.npz")
QUESTIONS = dict(kernels.questions())
APPROXIMATE = {
    "div": 2, "sqrt fp32": 2, "rsqrt fp32": 2, "recip": 2, "exp": 80, "exp2": 3, "log": 3, "log2": 3,
    "libdevice.rsqrt": 2, "libdevice.tanh": 2, "libdevice.erf": 2, "libdevice.pow": 16, "libdevice.exp": 3,
    "libdevice.log1p": 2, "dot fp32 tf32x3": 8,
}  # fmt: skip
"""Beginning of a question's name → units in the last place by which the GPU's approximation may be off."""


def tolerance(name: str) -> int:
    return next((ulps for start, ulps in APPROXIMATE.items() if f"{name} ".startswith(f"{start} ")), 0)


def undecided(name: str, answer: np.ndarray) -> np.ndarray:
    """Elements on which the interpreter deliberately does not follow the H200 with Triton 3.6."""
    if name.startswith(("floordiv", "mod")):  # integer division by zero means nothing
        return kernels.values("i32", 3).numpy() == 0
    if name == "cast e5m2 bf16":  # a bit trick of this release makes finite numbers of infinities and NaN
        return ~np.isfinite(answer)
    if name == "libdevice.pow":  # the GPU raises subnormals to a power inaccurately
        return np.abs(kernels.values("fp32").numpy()) < 2.0**-126
    if name.startswith("neg ") and not triton.__version__.startswith(("3.6.", "3.7.")):
        return answer == 0  # negation was 0 - x up to Triton 3.7, and is a change of sign since
    return np.zeros(answer.shape, dtype=bool)


def numbers(answer: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Raw bits as numbers, in fp64 where they are floats."""
    out = torch.from_numpy(answer.view(f"i{answer.itemsize}")).view(dtype)
    return (out.double() if dtype.is_floating_point else out).numpy()


def ordinals(x: np.ndarray) -> np.ndarray:
    """fp32 numbers counted from zero, so that differences are units in the last place."""
    bits = x.astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@pytest.mark.parametrize("name", [name for name in QUESTIONS if H200[name].size])
def test_answers_are_those_of_an_h200(name: str) -> None:
    out = QUESTIONS[name]()
    actual, expected = numbers(kernels.raw_bits(out), out.dtype), numbers(H200[name], out.dtype)
    if ulps := tolerance(name):
        wrong = np.abs(ordinals(actual) - ordinals(expected)) > ulps
    else:
        wrong = (actual != expected) | (np.signbit(actual.astype(float)) != np.signbit(expected.astype(float)))
    if out.dtype.is_floating_point:
        wrong &= ~(np.isnan(actual) & np.isnan(expected))
    wrong &= ~undecided(name, actual)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ; first {actual[wrong][0]}, H200 {expected[wrong][0]}"


def test_scalar_float_argument_is_fp32_and_promotes_bf16() -> None:
    x = torch.full((kernels.N,), 3.0, dtype=torch.bfloat16)
    out = torch.empty(kernels.N)
    kernels.scalar_kernel[(1,)](x, out, 0.1, 1, 0.1, True, N=kernels.N, OP="mul")
    assert out[0].item() == float(np.float32(3.0) * np.float32(0.1))


def test_annotated_scalar_argument_keeps_fp64() -> None:
    out = torch.empty(kernels.N, dtype=torch.float64)
    kernels.scalar_kernel[(1,)](torch.ones(kernels.N), out, 0.1, 1, 0.1, True, N=kernels.N, OP="add_wide")
    assert out[0].item() == 1.1


def test_accumulating_with_a_scalar_stays_fp32() -> None:
    out = torch.empty(kernels.N)
    kernels.scalar_kernel[(1,)](torch.ones(kernels.N), out, 0.1, 1, 0.1, True, N=kernels.N, OP="accumulate")
    total = np.float32(0)
    for _ in range(50):
        total += np.float32(0.1)
    assert out[0].item() == float(total)


@pytest.mark.parametrize("operation", ["int_wrap", "loop"])
def test_int32_products_wrap(operation: str) -> None:
    x = torch.zeros(kernels.N, dtype=torch.int32)
    out = torch.empty(kernels.N, dtype=torch.int64)
    kernels.scalar_kernel[(1,)](x, out, 0.1, 123457, 0.1, True, N=kernels.N, OP=operation)
    product = 123457**2 if operation == "int_wrap" else 20000 * 131072
    assert out[0].item() == (product + 2**31) % 2**32 - 2**31


def test_maximum_ignores_nan_unless_it_propagates() -> None:
    x = torch.tensor([float("nan"), -0.0, float("nan"), 1.0] * (kernels.N // 4))
    y = torch.tensor([1.0, 0.0, float("nan"), float("nan")] * (kernels.N // 4))
    out = torch.empty(kernels.N)
    kernels.binary_kernel[(1,)](x, y, out, N=kernels.N, OP="max")
    assert out[[0, 3]].tolist() == [1.0, 1.0] and out[2].isnan() and not out[1].signbit()
    kernels.binary_kernel[(1,)](x, y, out, N=kernels.N, OP="max_nan")
    assert out[[0, 2, 3]].isnan().all()


@triton.autotune(
    configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"], reset_to_zero=["out_ptr"]
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.atomic_add(out_ptr + i, tl.load(x_ptr + i, mask=mask) + EVEN, mask=mask)


def test_autotuned_kernel_takes_its_first_configuration() -> None:
    x, out = torch.arange(64, dtype=torch.float32), torch.full((64,), 7.0)
    tuned_kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, out, 64)
    assert tuned_kernel.best_config.kwargs == {"BLOCK": 32}
    assert torch.equal(out, x + 1)


@triton.jit
def larger_by_branch(a, b):
    result = b
    if a > b:
        result = a
    return result


@triton.jit
def branching_reduce_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, N)), 0, larger_by_branch))


def test_combine_function_may_branch_on_values() -> None:
    out = torch.empty(1)
    branching_reduce_kernel[(1,)](torch.tensor([1.0, 5.0, -2.0, 3.0]), out, N=4)
    assert out.item() == 5.0


@triton.jit
def imported_names_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, imported_rsqrt(imported_exp2(tl.load(x_ptr + i))))


def test_functions_imported_by_name_before_installation_work() -> None:
    out = torch.empty(4)
    imported_names_kernel[(1,)](torch.tensor([0.0, 2.0, 4.0, -2.0]), out, N=4)
    assert out.tolist() == [1.0, 0.5, 0.25, 2.0]


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, height, width, M: tl.constexpr):
    source = tl.make_tensor_descriptor(x_ptr, [height, width], [width, 1], [M, M])
    target = tl.make_tensor_descriptor(out_ptr, [height, width], [width, 1], [M, M])
    for row in range(0, height, M):
        target.store([row, 0], source.load([row, 0]) * 0.1)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_descriptors_load_and_store_16_bit_formats(name: str) -> None:
    x = torch.arange(20 * 8, dtype=torch.float32).reshape(20, 8).to(kernels.DTYPES[name])
    out = torch.empty_like(x)
    descriptor_kernel[(1,)](x, out, 20, 8, M=8)
    assert torch.equal(out, x * torch.tensor(0.1, dtype=x.dtype))


@triton.jit
def descriptor_extremes(x_ptr, y_ptr, height, M: tl.constexpr):
    value = tl.load(y_ptr + tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :])
    tl.make_tensor_descriptor(x_ptr, [height, M], [M, 1], [M, M]).atomic_min([0, 0], value)
    tl.make_tensor_descriptor(x_ptr + height * M, [height, M], [M, 1], [M, M]).atomic_max([0, 0], value)
    tl.make_tensor_descriptor(x_ptr + 2 * height * M, [height, M], [M, 1], [M, M]).atomic_add([0, 0], value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32], ids=str)
def test_descriptors_update_rows_that_there_are(dtype: torch.dtype) -> None:
    """Of four rows of a block, the three that the tensors have; -1 is the largest number without a sign."""
    x = torch.arange(36, dtype=torch.int32).reshape(3, 3, 4).view(dtype)
    y = torch.tensor([5, -1, 2, 7] * 4, dtype=torch.int32).view(dtype)
    before, added = x.view(torch.int32).long(), y.view(torch.int32).long().reshape(4, 4)[:3]
    if dtype is torch.uint32:
        added = added % 2**32
    descriptor_extremes[(1,)](x, y, 3, M=4)
    right = [torch.minimum(before[0], added), torch.maximum(before[1], added), before[2] + added]
    assert x.view(torch.int32).tolist() == torch.stack(right).to(torch.int32).tolist()


@pytest.mark.skipif(not BLOCK_POINTERS, reason="Triton 3.8 removed block pointers")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers_load_and_store_bf16() -> None:
    x = torch.arange(6 * 8, dtype=torch.float32).reshape(6, 8).bfloat16()
    out = torch.empty_like(x)
    block_pointer_kernel[(1,)](x, out, 6, 8, M=8)
    assert torch.equal(out, x + 1)


@triton.jit
def block_pointer_kernel(x_ptr, out_ptr, height, width, M: tl.constexpr):
    source = tl.make_block_ptr(x_ptr, (height, width), (width, 1), (0, 0), (M, M), (1, 0))
    target = tl.make_block_ptr(out_ptr, (height, width), (width, 1), (0, 0), (M, M), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0,), padding_option="zero") + 1, boundary_check=(0,))


@triton.jit
def constants_kernel(out_ptr, DTYPE: tl.constexpr):
    filled = tl.full([4], 0.1, DTYPE) + tl.zeros([4], DTYPE)
    tl.store(out_ptr + tl.arange(0, 4), filled)


@triton.jit
def words_kernel(bytes_ptr, out_ptr, first, N: tl.constexpr):
    i = tl.arange(0, N)
    words = (bytes_ptr + first).to(tl.pointer_type(tl.int32))
    tl.store(out_ptr + i, tl.load(words + i))


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("first", range(4))
def test_words_are_read_from_bytes_wherever_they_begin(start: int, first: int) -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    out = torch.empty(4, dtype=torch.int32)
    words_kernel[(1,)](memory[start:], out, first, N=4)
    at = start + first
    assert torch.equal(out.view(torch.uint8), memory[at : at + 16])


@triton.jit
def lowering_and_exchanging(x, low, new, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(low + i, tl.atomic_min(x + i, tl.load(low + i)))
    tl.store(new + i, tl.atomic_xchg(x + i, tl.load(new + i)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64])
def test_atomic_minima_and_exchanges_give_what_was_there(dtype: torch.dtype) -> None:
    x, low, new = (torch.tensor(row, dtype=dtype) for row in ([1, -2, 3, -4], [2, -3, -5, 6], [7, 8, 9, -1]))
    before, lowest, exchanged = x.clone(), torch.minimum(x, low), new.clone()
    lowering_and_exchanging[(1,)](x, low, new, N=4)
    assert torch.equal(low, before)
    assert torch.equal(new, lowest)
    assert torch.equal(x, exchanged)


@triton.jit
def adding_to_some(x, old, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_add(x + i, 1, mask=i % 2 == 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_atomic_operations_give_what_masked_loads_give_where_they_are_masked(dtype: torch.dtype) -> None:
    x = torch.tensor([5, 6, 7, 8], dtype=dtype)
    old = torch.zeros_like(x)
    adding_to_some[(1,)](x, old, N=4)
    assert x.tolist() == [6, 6, 8, 8]
    undefined = torch.full((2, x.element_size()), 255, dtype=torch.uint8).view(dtype)[:, 0]
    assert old[::2].tolist() == [5, 7]
    assert torch.equal(old[1::2].clone().view(torch.uint8), undefined.view(torch.uint8))


def test_constants_have_the_format_asked_for() -> None:
    out = torch.empty(4, dtype=torch.bfloat16)
    constants_kernel[(1,)](out, DTYPE=tl.bfloat16)
    assert torch.equal(out, torch.full((4,), 0.1, dtype=torch.bfloat16))


@triton.jit
def logic_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    inside = x > 0 and x < 3
    tl.store(out_ptr + i, (inside or not x < 5).to(tl.int32))


def test_and_or_not_of_blocks_are_elementwise() -> None:
    out = torch.empty(4, dtype=torch.int32)
    logic_kernel[(1,)](torch.tensor([-1.0, 1.0, 4.0, 6.0]), out, N=4)
    assert out.tolist() == [0, 1, 0, 1]


@triton.jit
def extremes_kernel(x_ptr, out_ptr, rows, N: tl.constexpr):
    last = min((tl.program_id(0) + 1) * 3, rows)  # two numbers, neither of which Python sees
    x = tl.load(x_ptr + tl.arange(0, N))
    total = tl.zeros([N], tl.float32)
    for _ in range(0, last):
        total += max(x, 1.0)
    tl.store(out_ptr + tl.arange(0, N), min(total, 5.0, x) + max(N, 2))


@pytest.mark.parametrize(("rows", "count"), [(2, 2), (9, 3)])
def test_min_and_max_choose_elementwise(rows: int, count: int) -> None:
    x = torch.tensor([-2.0, 0.5, 4.0, 9.0])
    out = torch.empty(4)
    extremes_kernel[(1,)](x, out, rows, N=4)
    total = count * x.clamp(min=1.0)
    assert torch.equal(out, torch.minimum(total.clamp(max=5.0), x) + 4)


def test_a_kernel_may_use_what_its_enclosing_function_defines() -> None:
    factor = tl.constexpr(3.0)

    @triton.jit
    def closing_kernel(x_ptr):
        tl.store(x_ptr, tl.load(x_ptr) * factor)

    x = torch.tensor([2.0])
    closing_kernel[(1,)](x)
    assert x.item() == 6.0


@triton.jit
def missing_function_kernel(x_ptr):
    tl.store(x_ptr, kernels.libdevice.j0(tl.load(x_ptr)))


@triton.jit
def block_truth_kernel(x_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    if x > 0:
        tl.store(x_ptr + tl.arange(0, N), -x)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (lambda x: missing_function_kernel[(1,)](x), "libdevice function 'j0f' is not interpreted"),
        (lambda x: block_truth_kernel[(1,)](x, N=4), "no single truth value"),
        (lambda x: block_truth_kernel[(1, 65536)](x, N=4), r"the grid is \(1, 65536\); CUDA takes at most"),
    ],
)
def test_what_cannot_be_interpreted_is_named(launch: Callable[[torch.Tensor], None], words: str) -> None:
    with pytest.raises((triton.runtime.errors.InterpreterError, ValueError), match=words):
        launch(torch.ones(4))


def test_kernel_modules_are_left_alone() -> None:
    kernels.cast_kernel[(1,)](torch.ones(512), torch.empty(512), N=512, ROUNDING=None)
    assert "interpreter_builder" not in vars(kernels)


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        (None, "import lastbit.interpret as i; i.install()", "TRITON_INTERPRET is None"),
        ("0", "import lastbit.interpret as i; i.install()", "TRITON_INTERPRET is '0'"),
        (
            None,
            "import triton.language, os; os.environ['TRITON_INTERPRET'] = '1'; "
            "import lastbit.interpret as i; i.install()",
            "is '1' now but was not when Triton was imported",
        ),
    ],
)
def test_without_interpreter_mode_the_error_names_the_setting(setting: str | None, code: str, words: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if setting is not None:
        environment["TRITON_INTERPRET"] = setting
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "InterpreterError" in done.stderr and words in done.stderr and "Set TRITON_INTERPRET=1" in done.stderr


def test_self_test_passes_here_and_names_what_differs() -> None:
    from lastbit.interpret import selftest

    assert selftest.differences() == []
    wrong = ("one", lambda: torch.tensor([1.0]), [2.0])
    assert "one" in selftest.differences((wrong,))[0]


def test_a_language_that_asks_a_builder_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs could not be recorded, and all but the first would do nothing."""
    from lastbit.interpret import selftest

    selftest.check_that_one_builder_is_asked()
    monkeypatch.setattr(tl, "arange", lambda start, end: np.arange(start, end))
    with pytest.raises(AttributeError, match="cannot be exchanged"):
        selftest.check_that_one_builder_is_asked()


# The order of programs


@triton.jit
def _numbered(out, turn):
    """Each program notes its turn at its own place, three numbers on."""
    place = tl.program_id(0) * 6 + tl.program_id(1) * 3
    tl.store(out + place, tl.atomic_add(turn, 1))


def turns(grid: tuple[int, ...]) -> list[int]:
    out, turn = torch.zeros(2, 2, 3, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
    _numbered[grid](out, turn)
    return out[..., 0].flatten().tolist()


def test_programs_run_from_the_last_to_the_first_within_the_context() -> None:
    assert turns((2, 2)) == [0, 1, 2, 3]
    with descending() as descent:
        assert turns((1,)) == [0, 0, 0, 0]
        assert not descent.seen
        assert turns((2, 2)) == [3, 2, 1, 0]
        assert descent.seen
        with descending() as inner:
            pass
        assert turns((2, 2)) == [3, 2, 1, 0] and not inner.seen
    assert turns((2, 2)) == [0, 1, 2, 3]


def test_functions_that_are_replaced_are_kept_so_that_nothing_else_gets_their_id() -> None:
    assert SUBSTITUTES and all(id(original) == known for known, (original, _) in SUBSTITUTES.items())
