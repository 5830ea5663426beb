"""op_name computes what it should, and a kernel that rounds elsewhere is told.

Run `python3 -m pytest tests/test_op_name.py`. The kernels themselves are checked by `lastbit verify --op op_name`.
"""

from pathlib import Path

import pytest
import torch

from lastbit import ContractViolation, assert_contract

PROJECT = Path(__file__).resolve().parents[1]


def tensors(dtype):
    """Draw inputs with a seed of their own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 100, generator=generator).to(dtype)
    return x, torch.randn(100, generator=generator).to(dtype)


def formula(x, weight):
    """Compute the op in fp32, written without looking at the reference."""
    x, weight = x.float(), weight.float()
    return x.clamp(min=0) ** 2 * weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_formula_in_fp32_rounded_once_keeps_the_default_contract(dtype):
    x, weight = tensors(dtype)
    assert_contract("op_name", formula(x, weight).to(dtype), x=x, weight=weight, project=PROJECT)


def test_a_kernel_that_rounds_the_activation_does_not_keep_it():
    x, weight = tensors(torch.bfloat16)
    wrong = torch.relu(x).square() * weight  # in bf16: the activation is rounded before the product
    assert_contract("op_name", wrong, contract="rounded_activation", x=x, weight=weight, project=PROJECT)
    with pytest.raises(ContractViolation, match="rounded_activation"):  # it names the contract that is kept
        assert_contract("op_name", wrong, contract="fp32_activation", x=x, weight=weight, project=PROJECT)


def test_a_weight_of_another_width_is_refused():
    x, weight = tensors(torch.bfloat16)
    with pytest.raises(Exception, match="weight has shape"):
        assert_contract("op_name", x, x=x, weight=weight[1:], project=PROJECT)
