"""Fused kernels of values and fingerprints against the torch functions that define them, bit for bit.

The kernels run in the interpreter here, and on a GPU in the tests marked gpu.
"""

import math
import os
from collections import Counter
from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lastbit import trust
from lastbit.case import TensorSpec, parse_case
from lastbit.dtypes import DTYPES
from lastbit.inputs import build, device_code, fused, values
from lastbit.inputs.bits import NAN_BITS, bits_of
from lastbit.inputs.device_code import encoded
from lastbit.inputs.fingerprint import fingerprint, fingerprints_of
from lastbit.inputs.guards import extent
from lastbit.inputs.regimes import REGIMES
from lastbit.interpret import install
from lastbit.numerics.formats import cast, format_of, from_ordinals, ordinals
from lastbit.numerics.fused.compiled import launcher, unspecialized

fingerprints = import_module("lastbit.inputs.fingerprint")  # whose name in the package is that of a function
FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
SIGNED = ("one_sign(,hidden)", "one_sign_fan_in(gate*up,hidden)", "one_sign(rank,rank)")
INTEGERS = (
    *("normal", "zeros", "ones", "counting", "bits"),
    *("below_7", "around_9", "experts_5", "labels_7", "loads_9", "sequences_9", "lookalikes_2"),
)


@pytest.fixture(autouse=True)
def for_any_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels for tensors of the CPU, too, and no memory of what earlier tests compared."""
    monkeypatch.setattr(trust, "_trusted", {})
    monkeypatch.setattr(values, "_FEW_USES", 0)
    if request.node.get_closest_marker("gpu"):
        return
    if os.environ["TRITON_INTERPRET"] == "0":
        pytest.skip("Triton compiles here, and these tensors are on the CPU")
    install()
    monkeypatch.setattr(fingerprints, "fuses", lambda tensor: True)
    monkeypatch.setattr(values, "fuses", lambda tensor: True)
    tiles(monkeypatch, 32, 32)  # interpreted programs take a time each


def tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """Make all tiles of that size."""
    for name in ("_TILE", "_NARROW_TILE"):
        monkeypatch.setattr(fused, name, (rows, columns))
    fused._rows.cache_clear()
    fused._elements.cache_clear()


def filled(spec: TensorSpec, seed: int, *, by_torch: bool) -> Tensor:
    """Memory that holds the tensor, and zeros where it has gaps."""
    memory = torch.zeros(extent(spec.shape, spec.element_strides), dtype=spec.torch_dtype)
    tensor = memory.as_strided(spec.shape, spec.element_strides)
    values.fill(tensor, spec, seed, budget=1 << 15 if by_torch else None)
    return bits_of(memory)


def assert_same_values(text: str, seed: int = 5) -> None:
    [spec] = parse_case(f"op x={text} seed=0").tensors
    assert torch.equal(filled(spec, seed, by_torch=False), filled(spec, seed, by_torch=True))


@pytest.mark.parametrize("regime", [*sorted(REGIMES), *SIGNED])
def test_values(regime: str) -> None:
    assert_same_values(f"bf16[30,45]:{regime}")


@pytest.mark.parametrize("regime", SIGNED)
def test_signs_of_each_matrix(regime: str) -> None:
    assert_same_values(f"fp32[3,5,40]:{regime}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("regime", ["rows", "huge", "special", "subnormal"])
def test_dtypes(regime: str, dtype: str) -> None:
    assert_same_values(f"{dtype}[20,33]:{regime}")


@triton.jit
def encode(x_ptr, out_ptr, dropped, half, odd, tiny, shift, base, beyond, last, sign, nan, N: tl.constexpr):
    i = tl.arange(0, N)
    bits = encoded(tl.load(x_ptr + i), dropped, half, odd, tiny, shift, base, beyond, last, sign, nan)
    tl.store(out_ptr + i, bits.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [DTYPES[name] for name in FLOATS], ids=str)
def test_rounding_of_ties_and_edges(dtype: torch.dtype) -> None:
    """Middles between neighbours, what is just beside them, the ends of the format, and any bits."""
    fmt = format_of(dtype)
    generator = torch.Generator().manual_seed(7)
    largest = int(ordinals(torch.tensor(fmt.max, dtype=torch.float64), fmt))
    positions = torch.cat(
        [torch.arange(20), largest - torch.arange(20), torch.randint(largest, (400,), generator=generator)]
    )
    lower = from_ordinals(positions, fmt)
    middles = lower + (from_ordinals(positions + 1, fmt) - lower) / 2
    beside = (
        torch.nextafter(middles, torch.tensor(math.inf).double()),
        torch.nextafter(middles, torch.tensor(0.0).double()),
    )
    x = torch.cat([lower, middles, *beside, torch.tensor([0.0, math.inf, math.nan, fmt.max * 1.01, fmt.quantum / 4])])
    anything = torch.randint(-(1 << 63), (1 << 63) - 1, (2048 - len(x),), generator=generator).view(torch.float64)
    x = torch.cat([x * torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0), anything])
    actual = bits_of(torch.zeros(2048, dtype=dtype))
    encode[(1,)](x, actual, *fused._encoding(dtype), N=2048, enable_fp_fusion=False)
    rounded = cast(x, dtype)
    expected = bits_of(rounded).masked_fill(rounded.to(torch.float32).isnan(), NAN_BITS[dtype])
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("regime", INTEGERS)
def test_integers(regime: str, dtype: str) -> None:
    assert_same_values(f"{dtype}[9,33]:{regime}")


@pytest.mark.parametrize(
    "text", ["int8[70]:bits", "uint8[3,5]:bits", "bool[9,9]", "bool[4]:ones", "int8[4,4]:around_9"]
)
def test_bytes(text: str) -> None:
    assert_same_values(text)


@pytest.mark.parametrize(
    "text",
    [
        "bf16[]",
        "bf16[1]:special",
        "fp32[3,4,5]@5,0,1:rows",
        "fp32[4,8]@0,1:rows",
        "bf16[2,5,3,16]@720,144,16,1:rows",
        "fp16[3,4,8]@8,24,1:offset",
        "e4m3[8,6]@1,9:normal",
        "int32[2,3,2,3,2]@1000,300,70,20,2:counting",
        "fp32[30,3]:rows",
    ],
)
@pytest.mark.parametrize("tile", [(32, 32), (2, 16)])
def test_strides(text: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, *tile)
    assert_same_values(text)


def test_strides_of_more_dimensions_than_the_kernel_has_are_left_to_torch() -> None:
    tensor = torch.zeros(99)
    assert fused.row_lines(tensor.as_strided((2,) * 6, (32, 16, 8, 4, 2, 1)), (2,) * 6) is not None
    assert fused.row_lines(tensor.as_strided((2,) * 5, (40, 19, 8, 3, 1)), (2,) * 5) is None
    assert_same_values("fp32[2,2,2,2,2]@40,19,8,3,1:rows")


@pytest.mark.parametrize("regime", [*sorted(REGIMES), *SIGNED])
def test_every_regime_is_a_program(regime: str) -> None:
    assert values._program(regime, torch.bfloat16, "x", (8, 16)) is not None


@pytest.mark.parametrize("regime", [*sorted(REGIMES), *SIGNED])
def test_one_program_serves_every_shape(regime: str) -> None:
    """Or Triton would compile a kernel per shape."""
    programs = [values._program(regime, torch.bfloat16, "x", shape) for shape in ((8, 16), (1, 1), (999, 4096), (3,))]
    assert len({fused.source(program, torch.bfloat16) for program in programs if program}) == 1
    assert fused.source(programs[0], torch.bfloat16) == fused.source(programs[0], torch.float16)


def bit_patterns(dtype: torch.dtype) -> Tensor:
    """All elements of a dtype of up to 16 bits; of a wider one the edges of its formats and random ones."""
    size = dtype.itemsize
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    if size <= 2:
        return torch.arange(1 << (8 * size)).to(integers).view(dtype)
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (999,), generator=generator)
    edges = torch.tensor(
        [0, 1, -1, NAN_BITS.get(dtype, 5), NAN_BITS.get(dtype, 5) + 1, 0x7F800001, 0xFF800000 - (1 << 32)]
    )
    return torch.cat([words, edges, edges << 32]).to(integers).view(dtype)


def value_fingerprint(tensor: Tensor) -> str:
    return fingerprints_of([tensor], values=True)[0]


@pytest.mark.parametrize("values_only", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_fingerprints(dtype: torch.dtype, values_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 1, 8192)
    tensor = bit_patterns(dtype) if dtype is not torch.bool else torch.arange(99) % 3 == 0
    of = value_fingerprint if values_only else fingerprint
    actual = of(tensor)
    assert all(trust._trusted.values())
    assert actual == by_torch(tensor, values_only=values_only)


def by_torch(tensor: Tensor, *, values_only: bool = False) -> str:
    """Compute the fingerprint as torch makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "fuses", lambda tensor: False)
        return (value_fingerprint if values_only else fingerprint)(tensor)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.is_floating_point], ids=str)
def test_fingerprint_of_values_is_that_of_fp32_with_one_nan(dtype: torch.dtype) -> None:
    tensor = bit_patterns(dtype)
    kept = bits_of(tensor).clone()
    wide = tensor if dtype is torch.float64 else tensor.to(torch.float32)
    assert by_torch(tensor, values_only=True) == by_torch(torch.where(torch.isnan(wide), torch.nan, wide))
    assert torch.equal(bits_of(tensor), kept)


@given(data=st.data())
def test_fingerprints_of_strided_tensors(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=5), label="shape"))
    order = data.draw(st.permutations(range(len(shape))), label="order")
    memory = torch.arange(4 * math.prod(shape) + 99).to(torch.int16)
    padded = [size + data.draw(st.integers(0, 1)) for size in shape]
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim], step = step, step * padded[dim]
    tensor = memory[: max(step, 1)].as_strided(shape, strides) if step <= memory.numel() else memory[:1].expand(shape)
    assert fingerprint(tensor) == by_torch(tensor)


def test_kernel_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and torch's values from then on."""
    [spec] = parse_case("op x=fp32[6,40]:rows seed=0").tensors
    encoding = fused._encoding(torch.bfloat16)
    monkeypatch.setattr(fused, "_encoding", lambda dtype: encoding)
    with pytest.warns(RuntimeWarning, match=r"inputs of fp32 \(rows\) on cpu: \d+ of 240 elements have other bits"):
        actual = filled(spec, 1, by_torch=False)
    assert torch.equal(actual, filled(spec, 1, by_torch=True))
    assert torch.equal(filled(spec, 2, by_torch=False), filled(spec, 2, by_torch=True))


def test_small_tensors_are_filled_by_torch_until_a_kernel_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is worth it at once; whatever fills a tensor, its values are the same."""
    monkeypatch.setattr(values, "_FEW_USES", 2)
    monkeypatch.setattr(values, "_uses", Counter())
    monkeypatch.setattr(fused, "_LARGE", 300)
    filled_at_once = []
    fill_at_once = values.fill_at_once
    monkeypatch.setattr(values, "fill_at_once", lambda *what: (filled_at_once.append(1), fill_at_once(*what)))
    for shape, kernels in (("6,40", 0), ("6,40", 0), ("6,40", 2), ("6,40", 3), ("7,50", 5)):
        [spec] = parse_case(f"op x=fp32[{shape}]:rows seed=0").tensors
        assert torch.equal(filled(spec, 1, by_torch=False), filled(spec, 1, by_torch=True))
        assert len(filled_at_once) == kernels, shape


def test_kernel_that_does_not_compile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused, "launcher", fails)
    with pytest.warns(RuntimeWarning, match="fingerprints of torch.float32 on cpu: RuntimeError: no compiler"):
        assert fingerprint(torch.ones(3)) == by_torch(torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: str) -> None:
    """Every regime, in compiled kernels, against torch on the CPU; no kernel was refused."""
    for regime in (*REGIMES, *SIGNED) if dtype in FLOATS else ("normal", "bits"):
        case = parse_case(f"op x={dtype}[70,300]:{regime} seed=3")
        actual, expected = (build(case, device).tensors["x"] for device in ("cuda", "cpu"))
        assert torch.equal(bits_of(actual.cpu()), bits_of(expected)), regime
        assert fingerprint(actual) == fingerprint(expected)
        assert value_fingerprint(actual) == value_fingerprint(expected)
    assert all(trust._trusted.values())


def test_a_kernel_is_compiled_for_each_dtype() -> None:
    kernel, cpu = unspecialized(device_code.add_hashes), torch.device("cpu")
    narrow, wide = (launcher(kernel, ("stored", 1, 32, True), cpu, dtype) for dtype in (torch.int8, torch.int64))
    assert narrow is not wide
    assert narrow is launcher(kernel, ("stored", 1, 32, True), cpu, torch.int8)
