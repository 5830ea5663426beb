"""The PyTorch RMSNorms: which contract each of them keeps."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.rms_norm_contract import (
    BF16,
    CONTRACTS,
    DEVICE,
    DTYPES,
    EPS,
    FLOAT,
    FP16,
    KERNELS,
    assert_bits,
    integers,
    keeps,
    needs_device,
    normals,
    triton_kernel,
)

pytestmark = needs_device


@pytest.mark.parametrize("contract", CONTRACTS)
def test_eager_kernels_keep_their_contract_and_no_other(contract):
    x, residual = (integers(9, 96, dtype=BF16, most=200, seed=seed) for seed in (1, 2))
    tensors = (x, normals(96, dtype=BF16, seed=3), residual)
    output = KERNELS[f"eager[{contract}]"].call(*tensors, eps=EPS)["output"]
    assert [c for c in CONTRACTS if keeps(c, output, *tensors)] == [contract]


@pytest.mark.parametrize("quant", [None, "static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_eager_kernels_agree_with_triton_bit_for_bit(contract, dtype, quant):
    """On rows whose mean square, over one column, is a power of four."""
    x, residual = normals(9, 100, dtype=dtype, seed=1), normals(9, 100, dtype=dtype, seed=2)
    x[:, 0], residual[:, 0] = 1.5, 0.5
    weight = normals(100, dtype=dtype, seed=3)
    weight[7], weight[8] = float("nan"), float("inf")
    scale = torch.tensor([0.0123], device=DEVICE) if quant == "static" else None
    params = {"eps": 0.0, "variance_size": 1, "quant": quant}
    for factors in (weight, None):
        eager = KERNELS[f"eager[{contract}]"].call(x, factors, residual, scale, **params)
        ours = triton_kernel(contract)(x, factors, residual, scale, **params)
        assert eager.keys() == ours.keys()
        for name, actual in eager.items():
            assert_bits(actual, ours[name], name)


def test_eager_kernels_name_what_is_missing():
    x = integers(2, 8)
    with pytest.raises(ValueError, match="scale is missing"):
        KERNELS["eager[native_multiply+rounded_sum]"].call(x, eps=EPS, quant="static")
    with pytest.raises(ValueError, match="quant='int8'"):
        KERNELS["eager[native_multiply+rounded_sum]"].call(x, eps=EPS, quant="int8")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_function_multiplies_in_fp32(dtype):
    x, wide = integers(9, 3, 96, dtype=dtype, most=100), normals(96, seed=3)
    for weight in (None, wide.to(dtype), wide, wide.to(BF16)):
        for seen in (x, x.transpose(0, 1), x[..., 1:66]):
            factors = weight if weight is None else weight[: seen.shape[-1]]
            output = KERNELS["F.rms_norm"].call(seen, factors, eps=EPS)
            assert output.dtype == dtype
            assert keeps("fp32_multiply+rounded_sum", output, seen, factors)
            if weight is not None and weight.dtype is BF16:
                assert not keeps("native_multiply+rounded_sum", output, seen, factors)


@pytest.mark.parametrize("dtype", [BF16, *(pytest.param(d, marks=pytest.mark.slow) for d in (FP16, FLOAT))], ids=str)
def test_the_compiler_drops_the_rounding_of_the_native_source(dtype):
    x, weight = integers(9, 3, 96, dtype=dtype, most=100), normals(96, dtype=BF16, seed=3)
    for seen in (x, x.transpose(0, 1)):
        output = KERNELS["torch.compile[native_multiply]"].call(seen, weight, eps=EPS)
        assert (output.shape, output.dtype) == (seen.shape, dtype)
        assert keeps("fp32_multiply+rounded_sum", output, seen, weight)
        assert not keeps("native_multiply+rounded_sum", output, seen, weight)


def test_parameters_of_the_library_kernel_are_those_it_has():
    assert list(inspect.signature(KERNELS["F.rms_norm"].call).parameters) == ["x", "weight", "eps"]
