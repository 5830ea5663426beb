"""docs/primitives.md: its code runs, and its example project is judged as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lastbit import assert_contract
from lastbit.verify.assertion import ContractViolation

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "primitives.md"
PROJECT = ROOT / "docs" / "examples" / "own_primitive"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_code_in_the_page_runs(code: str) -> None:
    exec(compile(code, str(PAGE), "exec"), {})


def capped(scores: Tensor, cap: float, *, kept_bits: int = 24) -> Tensor:
    """cap · tanh(scores / cap), the tanh cut off."""
    mask = ~((1 << 24 - kept_bits) - 1)
    tangent = (torch.tanh(scores.float() / cap).view(torch.int32) & mask).view(torch.float32)
    return (tangent * cap).to(scores.dtype)


@pytest.mark.parametrize(
    ("bits", "contract", "passes"), [(24, "", True), (12, "fast", True), (12, "", False), (9, "fast", False)]
)
def test_a_contract_may_name_a_primitive_of_the_project(bits: int, contract: str, passes: bool) -> None:
    scores = (torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * 20).bfloat16()
    actual = capped(scores, 30.0, kept_bits=bits)
    if passes:
        judgement = assert_contract("soft_cap", actual, scores=scores, cap=30.0, contract=contract, project=PROJECT)
        assert judgement.decided["output"] > (0.8 if contract else 0.99)
        return
    with pytest.raises(ContractViolation, match="not possible"):
        assert_contract("soft_cap", actual, scores=scores, cap=30.0, contract=contract, project=PROJECT)
