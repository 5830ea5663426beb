"""The kernels of quantization: all of them on the same numbers, arguments, layouts, and the tiles that cases reach."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.cases.quantize import groups
from lastbit.errors import UnsupportedCase
from lastbit.siblings import siblings
from tests.rms_norm_contract import BF16, DEVICE, FLOAT, FOLDER, FP16, LOADED, needs_device, normals, strided

pytestmark = needs_device

with siblings(FOLDER):
    module: Any = importlib.import_module("quantize")

KERNELS = {k.name: k.call for k in LOADED if k.op == "quantize"}
FAMILIES = pytest.mark.parametrize("name", ["triton[quotient]", "eager[quotient]"])


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Equal bits under equal names."""
    assert one.keys() == two.keys()
    return all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)


@pytest.mark.parametrize(
    "params",
    [
        {"dtype": "e4m3", "group_size": 128},
        {"dtype": "e4m3", "group_size": 64, "ue8m0": True, "least_amax": 1e-10},
        {"dtype": "e5m2", "least_scale": 1e-3},
        {"dtype": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FLOAT])
def test_families_agree_bit_by_bit(params: dict[str, Any], dtype: torch.dtype) -> None:
    x = normals(2, 3, 256, dtype=dtype)
    triton_, eager = (
        KERNELS[f"{family}[quotient]"](x, stages=module.STAGES, **params) for family in ("triton", "eager")
    )
    assert same(triton_, eager)
    groups_ = 256 // params.get("group_size", 256)
    assert triton_["scale"].shape == (2, 3, groups_) and triton_[f"{params['dtype']}_codes"].shape == x.shape


def test_a_vector_of_one_group_is_a_row() -> None:
    x = normals(4, 128, dtype=BF16)
    whole, grouped = (KERNELS["triton[reciprocal]"](x, dtype="e4m3", group_size=size) for size in (None, 128))
    assert same(whole, grouped)


@pytest.mark.parametrize("strides", [(1, 7), (300, 2), (161, 1), (0, 1)])
def test_any_strides(strides: tuple[int, int]) -> None:
    x = strided((7, 96), strides, BF16)
    kernel = KERNELS["triton[quotient]"]
    assert same(kernel(x, dtype="int8", group_size=32), kernel(x.contiguous(), dtype="int8", group_size=32))


def test_rows_with_a_gap_are_not_copied() -> None:
    x = strided((7, 96), (160, 1), BF16)
    plan = module._plan(module.described(x), None, "e4m3", 32, False, 0.0, 0.0, "quotient", "", "half_even", False)
    assert not plan.copied and plan.scales == 3


def test_cases_for_a_cpu_reach_both_sides_of_every_switch() -> None:
    accepts = frozenset({"x", "scale", "dtype", "group_size", "ue8m0", "least_amax", "least_scale"})
    cases = [case for group in groups(accepts, small=True) for case in group.examples if 0 not in case["x"].shape]
    switches = set()
    for case in cases:
        x = torch.empty(case["x"].shape, dtype={"bf16": BF16, "fp16": FP16, "fp32": FLOAT}[case["x"].dtype])
        if case["x"].strides is not None:
            x = strided(case["x"].shape, case["x"].strides, x.dtype)
        scale = torch.ones(1) if "scale" in case.names else None
        values = {"group_size": None, "ue8m0": False, "least_amax": 0.0, "least_scale": 0.0} | dict(case.params)
        plan = module._plan(
            module.described(x), module.described(scale), *(values[n] for n in ("dtype", "group_size", "ue8m0")),
            values["least_amax"], values["least_scale"], "quotient", "", "half_even", False,
        )  # fmt: skip
        switches |= {(n, plan.launch.parameters[n]) for n in ("LOOP", "FLAT", "ALIGNED", "GIVEN", "GROUPED", "UE8M0")}
    assert len(switches) == 12
    sizes = {group.combination["group_size"] for group in groups(accepts, small=True) if group.combination}
    assert sizes == {None, 128, 32, 256, 96}


@FAMILIES
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"dtype": "fp8"}, ValueError, "dtype='fp8' is not one of"),
        ({"dtype": "e4m3", "group_size": 5}, ValueError, "group_size=5 does not divide 8"),
        ({"dtype": "e4m3", "ue8m0": True}, ValueError, "no power of two"),
        ({"dtype": "e4m3", "least_amax": float("inf")}, ValueError, "least_amax=inf"),
        ({"dtype": "e4m3", "scale": torch.ones(2)}, ValueError, r"scale has shape \(2,\)"),
        ({"dtype": "e4m3", "scale": torch.ones(1).double()}, TypeError, "scale is torch.float64"),
        ({"dtype": "e4m3", "scale": torch.ones(1), "ue8m0": True}, ValueError, "leave them out"),
    ],
)
def test_arguments_that_have_no_codes(name: str, params: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {n: v.to(DEVICE) if isinstance(v, Tensor) else v for n, v in params.items()}
    with pytest.raises(error, match=message):
        KERNELS[name](normals(2, 8), **given)


@FAMILIES
def test_tensors_that_have_no_codes(name: str) -> None:
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        KERNELS[name](torch.ones(2, 8, dtype=torch.float64, device=DEVICE), dtype="e4m3")
    with pytest.raises(ValueError, match="x has no dimension"):
        KERNELS[name](torch.ones((), device=DEVICE), dtype="e4m3")
    with pytest.raises(UnsupportedCase, match="rows of up to"):
        KERNELS[name](torch.empty(1, 2**30 + 1, device="meta"), dtype="e4m3")


def test_the_fused_kernel_says_what_it_lacks() -> None:
    fused = {k.name: k.call for k in LOADED if k.op == "rms_norm_quantize"}
    x, per_token = normals(2, 8, dtype=BF16), fused["triton[rms_norm_quantize+per_token]"]
    with pytest.raises(UnsupportedCase, match="dtype='int8'"):
        per_token(x, eps=1e-6, dtype="int8", least_scale=0.0)
    with pytest.raises(UnsupportedCase, match=r"least_scale=0\.5"):
        per_token(x, eps=1e-6, dtype="e4m3", least_scale=0.5)
