"""softcap computes what it should, and a kernel that rounds elsewhere is told."""

from pathlib import Path

import pytest
import torch

from lastbit import ContractViolation, assert_contract

PROJECT = Path(__file__).resolve().parents[1]
X = torch.linspace(-200, 200, 4001).reshape(1, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_formula_in_fp32_rounded_once_keeps_the_default_contract(dtype):
    x = X.to(dtype)
    expected = (30.0 * torch.tanh(x.float() / 30.0)).to(dtype)
    assert_contract("softcap", expected, x=x, cap=30.0, project=PROJECT)


def test_rounded_steps_are_another_contract():
    x = X.bfloat16()
    rounded = torch.tanh(x / 30.0) * 30.0
    assert_contract("softcap", rounded, contract="rounded_steps", x=x, cap=30.0, project=PROJECT)
    with pytest.raises(ContractViolation, match="rounded_steps"):  # it names the contract that is kept
        assert_contract("softcap", rounded, contract="fp32_steps", x=x, cap=30.0, project=PROJECT)


def test_a_tanh_of_exponentials_is_not_accurate_near_zero():
    """2 · sigmoid(2x) - 1 cancels: its error is absolute, so that small logits lose their bits."""
    x = (X / 1e5).half()
    formula = (30.0 * (2 * torch.sigmoid(2 * x.float() / 30.0) - 1)).half()
    with pytest.raises(ContractViolation, match="not possible"):
        assert_contract("softcap", formula, x=x, cap=30.0, project=PROJECT)


def test_a_cap_that_is_no_cap_is_refused():
    with pytest.raises(Exception, match=r"cap=0\.0 must be above 0"):
        assert_contract("softcap", X, x=X, cap=0.0, project=PROJECT)
