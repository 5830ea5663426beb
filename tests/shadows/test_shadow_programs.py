"""Residues of interpreted Triton programs: forms of one formula are equal, faults are not, tricks are opened."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import numpy as np
import pytest
import shadow_kernels as kernels
import torch
import triton
from torch import Tensor

from lastbit.inputs import build
from lastbit.interpret import install
from lastbit.interpret.watching import watched
from lastbit.kernel import Kernel
from lastbit.numerics import formats
from lastbit.numerics.residues import Residues, constant
from lastbit.shadows.following import follow
from lastbit.shadows.programs import Shadowing
from lastbit.shadows.shadow_memory import ShadowMemory
from lastbit.siblings import siblings
from tests.faults import hunt
from tests.rms_norm_contract import FOLDER

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 was not set")

if triton.knobs.runtime.interpret:
    install()

with siblings(FOLDER):
    attention: Any = importlib.import_module("attention")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def followed(kernel: Any, *args: Any, **kwargs: Any) -> tuple[Residues, list[tuple[str, str, str]]]:
    memory = ShadowMemory()
    with watched(following := Shadowing(memory)):
        result = kernel(*args, **kwargs)
    return memory.read(result), following.opaque


def residues(kernel: Any, *args: Any, **kwargs: Any) -> Residues:
    found, opaque = followed(kernel, *args, **kwargs)
    assert not opaque
    return found


def norm_by_hand(x: Tensor, w: Tensor, eps: float = 1e-6) -> Residues:
    own, n = Residues.of(x), Residues.of(torch.tensor(x.shape[1]))
    rstd = ((own * own).total() / n + constant(eps)).sqrt().reciprocal()
    scaled = own * rstd * Residues.of(w)
    values = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * w.double()
    return scaled.rounded(formats.format_of(x.dtype), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_is_its_formula_whatever_its_form(dtype: torch.dtype) -> None:
    x, w = torch.randn(8, 100).to(dtype), torch.randn(100).to(dtype)
    expected = norm_by_hand(x, w)
    assert not expected.open.all()
    forms = ({}, {"block": 16}, {"block": 128}, {"form": "fma"}, {"form": "divided"}, {"form": "times"})
    for form in forms:
        assert residues(kernels.norm, x, w, **form).equal(expected).all(), form


@pytest.mark.parametrize("fault", ["count", "column", "eps", "rounded"])
def test_a_fault_of_a_norm_differs(fault: str) -> None:
    x, w = torch.randn(8, 100).bfloat16(), torch.randn(100).bfloat16()
    right, change = residues(kernels.norm, x, w), {"eps": 1e-5} if fault == "eps" else {"fault": fault}
    wrong = residues(kernels.norm, x, w, **change)
    decided = ~right.open & ~wrong.open
    assert decided.any() and wrong.differs(right)[decided].float().mean() > 0.9


def test_a_softmax_in_every_form() -> None:
    x = torch.randn(29)
    right = residues(kernels.softmax, x, "plain")
    assert not right.open.any()
    masked = [(form, 8) for form in ("masked", "masked by a half", "masked by a sum", "first tile masked")]
    for form, block in (("online", 4), ("online", 16), ("base 2", 8), ("unshifted", 8), *masked):
        found = residues(kernels.softmax, x, form, block)
        assert found.equal(right).all() and not found.open.any(), form
    for fault in ("unscaled", "one masked"):
        assert residues(kernels.softmax, x, fault).differs(right).all(), fault


def test_sums_in_every_order() -> None:
    x = torch.randn(27)
    right = residues(kernels.variance, x, "two passes")
    assert not right.open.any()
    for form in ("welford", "kahan", "squares", "running"):
        assert residues(kernels.variance, x, form).equal(right).all(), form
    assert residues(kernels.variance, torch.cat([x, torch.zeros(1)]), "welford").differs(right).all()


def test_atomic_updates() -> None:
    x = torch.randn(4, 8)
    assert residues(kernels.columns, x, "add").equal(Residues.of(x).total(0, keepdim=False)).all()
    assert residues(kernels.columns, x, "same address").equal(residues(kernels.columns, x, "sum")).all()
    largest = residues(kernels.columns, x, "max")
    assert largest.equal(residues(kernels.columns, x, "largest")).all() and not largest.open.any()


def test_rounded_atomic_sums_are_open() -> None:
    x = torch.randn(4, 8).half()
    added = residues(kernels.columns, x, "add")
    assert not added.differs(Residues.of(x).total(0, keepdim=False)).any()
    assert residues(kernels.columns, x[:1].contiguous(), "add").equal(Residues.of(x[0])).all()


def attended(tile: int, dtype: torch.dtype, *, base_2: bool = False) -> Residues:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 40, 2, 16).to(dtype) for _ in range(3))

    def call() -> Tensor:
        output, lse = torch.empty_like(q), torch.empty(1, 2, 40)
        attention._launch(q, k, v, None, output, lse, 0.25, True, None, tile, base_2=base_2, scaled_query=False)
        return output

    return residues(call)


def test_attention_of_any_tile() -> None:
    whole = attended(64, torch.float32)
    assert not whole.open.any()
    assert attended(16, torch.float32).equal(whole).all() and attended(32, torch.float32).equal(whole).all()
    assert attended(16, torch.float32, base_2=True).equal(whole).all()


def test_attention_whose_weights_are_rounded_differs_where_the_maximum_moved() -> None:
    whole, tiled = attended(64, torch.bfloat16), attended(16, torch.bfloat16)
    rows = tiled.equal(whole).all(-1)[0]
    assert rows[:16].all() and not rows.all()


def test_attention_whose_keys_are_split_and_merged() -> None:
    q, k, v = (torch.randn(1, 32, 1, 16) for _ in range(3))

    def call(first: int, end: int) -> tuple[Tensor, Tensor]:
        output, lse = torch.empty_like(q), torch.empty(1, 1, 32)
        keys, values = (x[:, first:end] for x in (k, v))
        attention._launch(q, keys, values, None, output, lse, 0.25, False, None, 16, base_2=False, scaled_query=False)
        return output.view(32, 16), lse.view(32)

    whole = residues(lambda: call(0, 32)[0])
    split = residues(lambda: kernels.merged(*call(0, 20), *call(20, 32)))
    assert not whole.open.any() and split.equal(whole).all()
    assert residues(lambda: kernels.merged(*call(0, 20), *call(19, 32))).differs(whole).any()


SAME = {
    "sorted": ("sorted in halves",),
    "plain": ("moved", "bits and back"),
    "max": ("largest",),
    "abs": ("abs by bits", "abs by choice"),
    "power of two": ("power of two by log2",),
    "tanh": ("tanh of exp",),
    "exp": ("ex2", "expm1"),
    "sigmoid": ("sigmoid of tanh",),
    "sin": ("sine",),
    "cube": ("pow",),
    "larger": ("max of PTX",),
    "e4m3": ("clamped e4m3",),
}


@pytest.mark.parametrize("form", SAME)
def test_two_ways_to_one_number(form: str) -> None:
    x, z = torch.randn(16), torch.randn(16)
    right = residues(kernels.elementwise, form, x, z)
    assert form == "e4m3" or not right.open.any()
    for other in SAME[form]:
        assert residues(kernels.elementwise, other, x, z).equal(right).all(), other


def test_two_numbers() -> None:
    x, z = torch.randn(16), torch.randn(16)
    found = {form: residues(kernels.elementwise, form, x, z) for form in ("plain", "abs", "bf16", "bf16 toward zero")}
    assert found["bf16"].differs(found["plain"]).all()
    assert found["bf16"].differs(found["bf16 toward zero"]).all()
    assert torch.equal(found["abs"].differs(found["plain"]), x * z < 0)


OPENED = {
    "split": ("plain", "subtraction", "a number is split into parts of bf16"),
    "magic": ("rint", "addition", "a large power of two is added"),
    "fused magic": ("rint", "addition", "a large power of two is added"),
    "fixed point": ("plain", "bits", "digits of a float are used as an integer"),
    "rounded bits": ("bf16", "bitcast", "the bits of a float were computed"),
    "cut bits": ("plain", "bitcast", "the bits of a float were computed"),
    "saturated": ("saturated sum", "inline assembly", "`add.sat.f32"),
    "assembly": ("plain", "inline assembly", "`copysign.f32 $0, $2, $1;` has no rule"),
}


@pytest.mark.parametrize("form", OPENED)
def test_a_trick_is_opened_with_its_line_and_reason(form: str) -> None:
    x, z = torch.randn(16), torch.randn(16)
    right, operation, reason = OPENED[form]
    found, opaque = followed(kernels.elementwise, form, x, z)
    assert not found.differs(residues(kernels.elementwise, right, x, z)).any()
    assert any(name == operation and "shadow_kernels.py:" in line and reason in why for name, line, why in opaque)


def test_a_kernel_that_was_followed_says_what_ended_it() -> None:
    kernel = Kernel("cut", "elementwise", "", lambda x, z: kernels.elementwise("cut bits", x, z))
    (said,) = follow(kernel, {"x": torch.randn(16), "z": torch.randn(16)}, {}, ["output"], []).opaque
    assert re.fullmatch(
        r"bitcast at shadow_kernels\.py:\d+ `.+`: the bits of a float were computed as an integer", said
    )


@pytest.mark.parametrize("special", [0.0, -0.0, math.inf, -math.inf, math.nan, 1e38])
def test_numbers_that_are_zero_or_not_finite_never_differ(special: float) -> None:
    x, z = torch.randn(16), torch.randn(16) * 100
    x[3] = special
    for form, others in {**SAME, "plain": ("bits and back", "moved", "split")}.items():
        right, _ = followed(kernels.elementwise, form, x, z)
        for other in others:
            assert not followed(kernels.elementwise, other, x, z)[0].differs(right).any(), (form, other)


@pytest.mark.parametrize(("x", "z"), [(1 / 3, 3.75), (1.251, 1.0)])
def test_bits_that_are_those_of_a_number_by_chance(x: float, z: float) -> None:
    left, right = torch.tensor([x, 1.251, 1.25, 1.25] * 4), torch.tensor([z, 1.0, 1.0, 1.0] * 4)
    forms = "cut bits", "bf16 toward zero"
    cut, toward_zero = (followed(kernels.elementwise, form, left, right)[0] for form in forms)
    assert not cut.differs(toward_zero).any()


def test_a_cast_toward_zero_is_rounded_in_that_direction() -> None:
    """A cast to nearest is another function of the same numbers, but for those that bf16 holds."""
    x, z = torch.randn(16), torch.full((16,), 0.75)
    x[3] = 1.5
    values = (x * z).double()
    product = Residues.of(x) * Residues.of(z)
    cut, nearest = (residues(kernels.elementwise, form, x, z) for form in ("bf16 toward zero", "bf16"))
    assert cut.equal(product.rounded(formats.BF16.toward("zero"), values)).all()
    assert nearest.equal(product.rounded(formats.BF16, values)).all()
    assert cut.equal(nearest).nonzero().tolist() == [[3]]


def test_numbers_near_the_largest_of_a_format_are_open() -> None:
    x, z = torch.tensor([1.0, 1.49, 1.5, 1.6, 2.0, 30.0, -1.5, -30.0] * 2), torch.ones(16)
    found = residues(kernels.elementwise, "e4m3", x, z)
    assert torch.equal(found.open, (x.abs() * 300 > 448) & (x.abs() * 300 < 500))
    assert found[5].equal(Residues.of(torch.tensor(448.0))) and found[7].equal(Residues.of(torch.tensor(-448.0)))


def test_memory_that_is_copied_as_bits() -> None:
    x, w = torch.randn(3, 20), torch.randn(20)
    right = residues(kernels.norm, x, w)
    assert torch.equal(residues(kernels.copied, x, w, "bits").numbers, right.numbers)
    found, opaque = followed(kernels.copied, x, w, "cut bits")
    assert found.open.all() and opaque[0][0] == "bitcast"


def test_dots() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(16, 64).to(dtype), torch.randn(64, 16).to(dtype)
        expected = Residues.of(a) @ Residues.of(b)
        for block in (16, 32):
            assert residues(kernels.dot, a, b, block=block).equal(expected).all()
    assert residues(kernels.dot, a.float(), b.float(), precision="tf32").equal(expected).all()
    a = torch.randn(16, 64)
    found, opaque = followed(kernels.dot, a, b.float(), precision="tf32")
    assert found.open.all() and opaque[0][0] == "dot" and "tf32" in opaque[0][2]


def test_every_triton_kernel_of_this_repository_is_followed() -> None:
    ours = [kernel for kernel in hunt.clean_kernels() if kernel.name.startswith("triton[")]
    for kernel in ours:
        groups = hunt.project().groups(kernel.op, kernel.accepts, small=True)
        examples = [c for g in groups for c in g.examples if "huge" not in str(c) and kernel.requires <= c.names]
        sizes = {case: [math.prod(spec.shape) for spec in case.tensors] for case in examples}
        cases = sorted((sum(size), str(case), case) for case, size in sizes.items() if min(size) and sum(size) > 100)
        inputs = build(cases[0][2].gathered(), "cpu")
        memory = ShadowMemory()
        with watched(following := Shadowing(memory)):
            returned = kernel.call(**inputs.hand_out(), **inputs.case.params)
        results = [returned] if isinstance(returned, Tensor) else returned.values()
        assert not following.opaque, (kernel.name, following.opaque)
        assert not all(memory.read(x).open.all() for x in results), (kernel.name, str(cases[0][2]))
    assert len(ours) > 40


def test_memory_that_is_seen_as_another_dtype() -> None:
    memory, buffer = ShadowMemory(), torch.zeros(16, dtype=torch.uint8)
    x = buffer.view(torch.float32)
    memory.register(buffer)
    addresses = np.array([x.data_ptr() + 4 * i for i in range(4)], np.uint64)
    written = Residues.of(torch.randn(4)) * Residues.of(torch.randn(4))
    memory.store(addresses, written, torch.float32)
    assert memory.load(addresses, x).equal(written).all() and memory.read(x).equal(written).all()
    assert memory.read(buffer).open.all()
    assert memory.load(addresses, torch.zeros(4, dtype=torch.int32)).open.all()


def test_programs_that_do_not_begin_in_time_are_open() -> None:
    x, w = torch.randn(8, 100), torch.randn(100)
    kernel = Kernel("mine", "rms_norm", "", lambda x, w: kernels.norm(x, w))
    found = follow(kernel, {"x": x, "w": w}, {}, ["output"], [100.0, 1e-6], seconds=0.0)
    equal = found.results["output"].equal(expected := norm_by_hand(x, w))
    assert found.cut and not found.opaque and equal[0].all() and not equal[1:].any()
    assert found.results["output"].open[1:].all() and not found.results["output"].differs(expected).any()


def test_nothing_is_computed_from_a_launch_that_was_followed_in_part() -> None:
    x, w = torch.randn(8, 100), torch.randn(100)
    for further in (lambda y: y * 2, lambda y: kernels.norm(y, w)):
        kernel = Kernel("mine", "rms_norm", "", lambda x, w, then=further: then(kernels.norm(x, w)))
        found = follow(kernel, {"x": x, "w": w}, {}, ["output"], [100.0, 1e-6], seconds=0.0)
        assert not found.results and "not all programs of a launch could be followed in time" in found.opaque[0]
