"""Dots on simulated tensor cores of every known kind lie within the bounds of the premises that cover them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lastbit.calibrate import load_premises
from lastbit.calibrate.store import MeasuredPremise, save
from lastbit.errors import OpError
from lastbit.numerics import BY_CAPABILITY, LOOSEST, Enclosure, Premises, TensorCores, dot, format_of, using
from lastbit.numerics.formats import FP32, round_to

U = 2.0**-24
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KNOWN = {cores.devices.split(",")[0]: cores for cores in BY_CAPABILITY.values()}

every_model = pytest.mark.parametrize("cores", KNOWN.values(), ids=KNOWN)


def exponents(x: Tensor, smallest: int) -> Tensor:
    """Of each number, those below 2**smallest counting for it, and zeros for nothing."""
    return torch.where(x == 0, -2000, (torch.frexp(x).exponent - 1).clamp(min=smallest))


def simulated(cores: TensorCores, a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Dots of the rows of `a` and `b` (bf16 or fp16) by a model, added to a number of fp32 for each row."""
    smallest = -14 if a.dtype is torch.float16 else -126
    x, y = a.double(), b.double()
    exponent = exponents(x, smallest) + exponents(y, smallest)
    total = torch.zeros(*x.shape[:-1], 1, dtype=torch.float64) if start is None else start.double()[..., None]
    for step in range(0, x.shape[-1], cores.products):
        part = slice(step, step + cores.products)
        numbers = torch.cat([total, (x * y)[..., part]], -1)
        largest = torch.cat([exponents(total, -126), exponent[..., part]], -1).amax(-1, keepdim=True).clamp(min=-900)
        unit = torch.ldexp(torch.ones_like(total), largest - 23 - cores.extra_bits)
        total = round_to(((numbers / unit).trunc() * unit).sum(-1, keepdim=True), FP32.toward("zero"))
    return total[..., 0]


def adversarial(length: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """One large product among small ones that are cut off almost whole, and numbers of many scales and signs."""
    generator = torch.Generator().manual_seed(length)
    for exponent in (-16, -13, -12, -11):
        for significand in (1.0, 1.9375):
            a = torch.full((1, length), 2.0**exponent * significand)
            b = torch.full((1, length), 2.0**exponent * 1.9375)
            a[0, 0], b[0, 0] = 1.0, 1.5
            yield a.to(dtype), b.to(dtype)
            yield a.flip(-1).to(dtype), b.flip(-1).to(dtype)
    for spread in (0.0, 5.0):
        a, b = (torch.randn(20, length, generator=generator) for _ in range(2))
        scale = (torch.randn(20, length, generator=generator) * spread).round().clamp(-7, 7).exp2()
        yield (a * scale).to(dtype), b.to(dtype)
        yield (a.abs() * scale).to(dtype), b.abs().to(dtype)


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [2, 5, 16, 100])
def test_simulated_dots_lie_within_the_bound_of_their_model(
    cores: TensorCores, dtype: torch.dtype, length: int
) -> None:
    for a, b in adversarial(length, dtype):
        result = simulated(cores, a, b)
        for premises in (Premises(tensor_cores=cores, depth=lambda n: 2), Premises()):
            with using(premises):
                found = dot(Enclosure(a.double()[None, :, None, :]), Enclosure(b.double()[None, :, :, None]))
            assert bool(((found.lo[:, 0, 0] <= result) & (result <= found.hi[:, 0, 0])).all())


@every_model
def test_the_bound_is_not_much_more_than_what_can_happen(cores: TensorCores) -> None:
    """The small products beside a first one of 1 are as large as those that are cut off to nothing."""
    length = 1024
    half = -(23 + cores.extra_bits) // 2
    a = torch.full((1, length), 2.0**half * 1.875)
    b = torch.full((1, length), 2.0 ** (-(23 + cores.extra_bits) - half) * (1 - 2.0**-8) / 1.875 * 0.99)
    a[0, 0] = b[0, 0] = 1.0
    a, b = a.bfloat16(), b.bfloat16()
    error = float((simulated(cores, a, b).double() - (a.double() * b.double()).sum()).abs())
    assert 0.4 * cores.height(length) < error / U <= cores.height(length)


def test_the_bound_of_an_h200_excludes_what_older_tensor_cores_give() -> None:
    """Else one bound would do for all."""
    new, old = BY_CAPABILITY[9, 0], BY_CAPABILITY[7, 0]
    for exponent in range(-14, -9):
        a = torch.full((1, 1024), 2.0**exponent * 1.875).bfloat16()
        a[0, 0] = 1.0
        with using(Premises(tensor_cores=new)):
            found = dot(Enclosure.point(a), Enclosure.point(a.T))
        result = simulated(old, a, a)
        if not bool((found.lo[0] <= result) & (result <= found.hi[0])):
            return
    pytest.fail("no dot of a V100 leaves the bound of an H200")


def test_the_loosest_model_is_as_loose_as_every_known_one() -> None:
    for cores in BY_CAPABILITY.values():
        assert LOOSEST.cut >= cores.cut
        assert all(LOOSEST.height(n) >= cores.height(n) for n in range(1, 5000))


def test_heights() -> None:
    """Of an H200: (K + 5 ceil(K / 16)) / 2; in all: what each step loses in units of u."""
    hopper = BY_CAPABILITY[9, 0]
    assert [hopper.height(n) for n in (1, 2, 16, 64, 2048)] == [1, 4, 11, 42, 1344]
    assert BY_CAPABILITY[8, 0].height(64) == 64 + 8 + 16
    assert BY_CAPABILITY[7, 0].height(64) == 2 * (64 + 16) + 32


# Which premises cover which device


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures but those that a test keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Premises:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return load_premises(CUDA)


@pytest.mark.parametrize(
    ("capability", "model", "said"),
    [
        ((7, 0), (4, 0), "tensor cores of V100 (4 products at a time, 0 extra bits)"),
        ((8, 0), (8, 1), "tensor cores of A100 (8 products at a time, 1 extra bit)"),
        ((8, 9), (8, 1), "tensor cores of A100, taken for all of Ampere and Ada (8 products"),
        ((9, 0), (16, 2), "tensor cores of H100 and H200 (16 products at a time, 2 extra bits)"),
        ((10, 0), (4, 0), "not covered: no model of compute capability 10.0 is here"),
        ((7, 5), (4, 0), "not covered: no model of compute capability 7.5 is here"),
    ],
)
def test_the_premises_of_a_gpu_go_by_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], model: tuple[int, int], said: str
) -> None:
    premises = on_a_gpu(monkeypatch, capability)
    assert premises.tensor_cores is not None
    assert (premises.tensor_cores.products, premises.tensor_cores.extra_bits) == model
    assert premises.device.startswith("documented primitives, ")
    assert said in premises.device


def test_no_premise_covers_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    premises = on_a_gpu(monkeypatch, (9, 4))
    assert premises.tensor_cores is LOOSEST
    assert "no premise is for AMD devices" in premises.device


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_dot_of_fp8_is_refused_where_tensor_cores_may_compute_it(dtype: torch.dtype) -> None:
    """Hopper keeps 13 bits below the largest product: what it gives is outside of every bound here."""
    x = Enclosure.point(torch.randn(4, 32).to(dtype))
    y = Enclosure.point(torch.randn(32, 4).bfloat16())
    for left in (x, x[:2, :], x.reshape(4, 32), x.transposed.transposed, x.zero_where(x.value < 0)):
        with using(Premises()), pytest.raises(OpError, match="how tensor cores add products of fp8 is not known here"):
            dot(left, y)
    with using(Premises()):
        dot(x * 1.0, y)  # a kernel that converts it first
        with pytest.raises(OpError, match=f"operand of {format_of(dtype).name}"):
            dot(y.transposed, (x.transposed * 1.0).rounded(format_of(dtype)))
    with using(Premises(tensor_cores=None)):
        assert dot(x, y).shape == (4, 4)


def test_the_cpu_rounds() -> None:
    premises = load_premises(CPU)
    assert premises.tensor_cores is None
    assert premises.dot_accumulation(64) == premises.accumulation(64)
    assert premises.device == "documented primitives, dots in any order, rounded"


def test_what_is_not_known_is_as_loose_as_anything_known() -> None:
    assert Premises().tensor_cores is LOOSEST


def test_figures_that_were_measured_replace_primitives_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    documented = load_premises(CUDA)
    save(CUDA, [MeasuredPremise("tl rsqrt", "rsqrt", 2.0**-23, 2.0**-22, exhaustive=True)])
    premises = load_premises(CUDA)
    assert premises.inverse_root == 2.0**-23
    assert premises.tensor_cores == documented.tensor_cores
    assert premises.device.startswith("primitives calibrated on a GPU, triton")
    assert premises.device.endswith("tensor cores of A100 (8 products at a time, 1 extra bit)")


def test_a_sample_does_not_narrow_an_inverse_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """5u is more than rsqrt is documented with, and less than a root and a division may err by."""
    save(CPU, [MeasuredPremise("tl 1/sqrt", "rsqrt", 5 * U, 8 * U)])
    premises = load_premises(CPU)
    assert premises.inverse_root == Premises().inverse_root > 8 * U
    assert premises.device.startswith("documented primitives, checked on ")
    save(CPU, [MeasuredPremise("tl 1/sqrt", "rsqrt", 9 * U, 8 * U)])
    assert math.isclose(load_premises(CPU).inverse_root, 9 * U)
