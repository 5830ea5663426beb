"""The Triton RMSNorm against its contracts, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.errors import UnsupportedCase
from tests.rms_norm_contract import (
    BF16,
    CONTRACTS,
    DEVICE,
    DTYPES,
    EPS,
    FLOAT,
    KERNELS,
    LAYOUTS,
    assert_bits,
    expected,
    integers,
    needs_device,
    normals,
    result_name,
    strided,
    triton_kernel,
)

pytestmark = needs_device


def check(contract: str, *tensors: Tensor | None, **params: Any) -> dict[str, Tensor]:
    """Run the Triton kernel of `contract` and compare every result."""
    returned = triton_kernel(contract)(*tensors, **{"eps": EPS} | params)
    results = returned if isinstance(returned, dict) else {result_name(params.get("quant")): returned}
    wanted = expected(contract, *tensors, **params)  # type: ignore[arg-type]
    names = {result_name(params.get("quant"))}
    names |= {"scale"} if params.get("quant") == "dynamic" else set()
    names |= {"residual_sum"} if len(tensors) > 2 and tensors[2] is not None else set()
    assert results.keys() == names
    for name, actual in results.items():
        assert actual.is_contiguous()
        assert_bits(actual, wanted[name], name)
    return results


def test_every_contract_is_registered_and_says_what_it_takes():
    for contract in CONTRACTS:
        one = KERNELS[f"triton[{contract}]"]
        assert one.contract == contract
        assert one.stages == ("variance", "inv_rms", "normalized", "product", "output")
        assert one.requires == {"x", "eps"}
        assert ("weight_offset" in one.accepts) == contract.startswith("fp32_multiply")
        assert "weight_rule" not in one.accepts


@pytest.mark.parametrize("quant", [None, "static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract_on_random_data(contract, dtype, quant):
    x, residual = normals(9, 100, dtype=dtype, seed=1), normals(9, 100, dtype=dtype, seed=2)
    scale = torch.tensor([0.0123], device=DEVICE) if quant == "static" else None
    weights = [None] + [normals(100, dtype=d, seed=3) for d in DTYPES]
    for weight in weights:
        check(contract, x, weight, residual, scale, variance_size=1, quant=quant)
        check(contract, x, weight, None, scale, variance_size=1, quant=quant)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 5, 16, 128, 769, 5125, 16384, 20000])
def test_row_lengths(n, dtype):
    x, residual = integers(2, n, dtype=dtype), integers(2, n, dtype=dtype, seed=1)
    check("native_multiply+rounded_sum", x, normals(n, dtype=dtype), residual)
    check("fp32_multiply+unrounded_sum", x, normals(n), None)


@pytest.mark.parametrize("quant", ["static", "dynamic"])
@pytest.mark.parametrize("n", [769, 16385, 40000])
def test_fp8_of_rows_of_one_block_and_of_many(n, quant):
    scale = torch.tensor([0.01], device=DEVICE) if quant == "static" else None
    x, weight = integers(2, n, dtype=BF16), normals(n, dtype=BF16)
    check("native_multiply+unrounded_sum", x, weight, integers(2, n, dtype=BF16, seed=1), scale, quant=quant)


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("n", [24, 300])
def test_numbers_of_rows(n, rows):
    check("native_multiply+rounded_sum", integers(rows, n, dtype=BF16), normals(n, dtype=BF16), None, quant="dynamic")


@pytest.mark.parametrize("n", [5, 769, 20000])
@pytest.mark.parametrize("part", [1, 3, "half", "all"])
def test_variance_size(n, part):
    size = {"half": (n + 1) // 2, "all": n}.get(part, part)
    check("native_multiply+rounded_sum", integers(3, n, dtype=BF16, most=20), None, None, variance_size=size)


def test_gemma_offset_is_added_in_fp32():
    weight = normals(128, dtype=BF16, seed=3) / 64
    check("fp32_multiply+rounded_sum", integers(4, 128, dtype=BF16), weight, weight_offset=1.0)


def test_a_weight_of_minus_zero_keeps_its_sign():
    output = triton_kernel("fp32_multiply+rounded_sum")(
        integers(1, 8, most=0) + 1, torch.full((8,), -0.0, device=DEVICE), eps=EPS
    )
    assert torch.signbit(output).all()


def test_a_subnormal_mean_square_gives_a_finite_inverse():
    x = torch.full((1, 4), 2.0**-65, device=DEVICE)
    returned = triton_kernel()(x, eps=0.0, stages=("inv_rms",))
    assert returned["inv_rms"].item() == 2.0**65


def test_zero_rows_are_zero():
    check("native_multiply+rounded_sum", torch.zeros(3, 40, dtype=BF16, device=DEVICE), None, quant="dynamic")


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("quant", [None, "static", "dynamic"])
def test_special_values(contract, quant):
    x = integers(5, 40, dtype=BF16)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), 3e38
    weight = normals(40, dtype=BF16)
    weight[7], weight[8], weight[9] = float("nan"), float("-inf"), 1e30
    scale = torch.tensor([1e-3], device=DEVICE) if quant == "static" else None
    results = check(contract, x, weight, None, scale, quant=quant)
    codes = next(iter(results.values())).float()
    assert codes[:, 7].isnan().all(), "a NaN must stay a NaN"
    if quant == "static":
        assert codes[4, 9].abs() == 448, "finite values beyond the largest code must saturate"


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, offset):
    shape, strides = LAYOUTS[layout]
    x = strided(shape, strides, dtype, offset=offset)
    weight = strided((shape[-1],), (3,), dtype)
    check("native_multiply+rounded_sum", x, weight)
    check("native_multiply+rounded_sum", x, weight, integers(*shape, dtype=dtype, seed=2))
    check("fp32_multiply+rounded_value", integers(*shape, dtype=dtype), weight, x, quant="dynamic")


@pytest.mark.parametrize("quant", [None, "dynamic"])
@pytest.mark.parametrize("n", [100, 769, 20000])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_stages_are_stored_and_change_no_bit(contract, n, quant):
    one = KERNELS[f"triton[{contract}]"]
    x, residual, weight = (integers(*shape, dtype=BF16, seed=s) for s, shape in enumerate([(3, n), (3, n), (n,)]))
    plain = one.call(x, weight, residual, eps=EPS, quant=quant)
    stored = one.call(x, weight, residual, eps=EPS, quant=quant, stages=one.stages)
    wanted = expected(contract, x, weight, residual, quant=quant)
    assert stored.keys() == plain.keys() | set(one.stages) == wanted.keys()
    for name, actual in stored.items():
        fp32_buffer = name in one.stages and name not in plain
        assert_bits(actual, wanted[name].float() if fp32_buffer else wanted[name], name)
        if name in plain:
            assert_bits(plain[name], actual, name)


def test_only_the_stages_asked_for_are_returned():
    x = integers(3, 40, dtype=BF16)
    assert triton_kernel()(x, eps=EPS, stages=("inv_rms",)).keys() == {"inv_rms", "output"}
    assert triton_kernel()(x, eps=EPS, stages=("product",)).keys() == {"output"}, "no weight, no product"


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)])
def test_no_rows(shape):
    x = torch.empty(shape, dtype=BF16, device=DEVICE)
    returned = triton_kernel()(x, None, x, eps=EPS, quant="dynamic", stages=("variance",))
    assert {name: tuple(t.shape) for name, t in returned.items()} == {
        "variance": (*shape[:-1], 1),
        "quantized": shape,
        "scale": (*shape[:-1], 1),
        "residual_sum": shape,
    }


def test_arguments_that_do_not_fit_are_refused():
    x = integers(3, 40, dtype=BF16)
    refused = [
        ({"weight": integers(39)}, ValueError, r"weight has shape \(39,\)"),
        ({"weight": integers(40).double()}, TypeError, "weight is torch.float64"),
        ({"residual": integers(3, 40)}, TypeError, "residual is torch.float32; with x torch.bfloat16"),
        ({"residual": integers(1, 40, dtype=BF16)}, ValueError, r"residual has shape \(1, 40\)"),
        ({"weight": torch.empty(40, device="meta")}, ValueError, f"weight is on meta, but x is on {DEVICE}"),
        ({"quant": "static"}, ValueError, "scale is missing"),
        ({"scale": integers(1)}, ValueError, "scale is given, but quant=None"),
        ({"quant": "int8"}, ValueError, "'int8' is not one of None, 'static', 'dynamic'"),
        ({"stages": ("rstd",)}, ValueError, "stages: 'rstd'"),
        ({"variance_size": 41}, ValueError, "variance_size=41 is not between 1 and the 40 columns"),
    ]
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            triton_kernel()(x, **arguments, eps=EPS)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        triton_kernel()(x.double(), eps=EPS)
    with pytest.raises(ValueError, match="no dimension"):
        triton_kernel()(torch.tensor(1.0), eps=EPS)
    with pytest.raises(UnsupportedCase, match="last dimension of x is 0"):
        triton_kernel()(torch.empty(3, 0), eps=EPS)
    with pytest.raises(TypeError, match="weight_offset"):
        triton_kernel()(x, eps=EPS, weight_offset=1.0)


def test_rows_that_no_32_bit_column_number_reaches_are_unsupported():
    with pytest.raises(UnsupportedCase, match=str(2**30 + 1)):
        triton_kernel()(torch.empty(1, 2**30 + 1, dtype=BF16, device="meta"), eps=EPS)


def test_depth_is_never_more_than_any_order_needs():
    depth = KERNELS["triton[native_multiply+rounded_sum]"].depth
    assert [depth(n) for n in (1, 5, 128, 16384, 16385)] == [1, 5, 41, 41, 42]
