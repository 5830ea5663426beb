"""The test to paste fails for the wrong kernel and passes for the right one, wherever the tensors lie in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit import ContractViolation, kernel
from lastbit.case import parse_case
from lastbit.shrinking.pasted import test_of as pasted

LINE = "rms_norm x=bf16[1,2]:values(-1.5,1) weight=bf16[2]:values(1.25,1) eps=1e-06 seed=0"


def normalized(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


@kernel("rms_norm", contract="native_multiply", name="norm[wrong]")
def wrong(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return (normalized(x, eps) * weight.float()).to(x.dtype)


@kernel("rms_norm", contract="native_multiply", name="norm[right]")
def right(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return normalized(x, eps).to(x.dtype) * weight


def run(text: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with a function in place of the kernel that it imports."""
    module = ModuleType("norms")
    module.norm = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "norms", module)
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    namespace["test_norm_keeps_its_contract"]()


@pytest.mark.parametrize(
    ("line", "telling"),
    [
        (LINE, False),
        ("rms_norm x=bf16[1,300] weight=bf16[300] eps=1e-06 seed=1", True),
        ("rms_norm x=bf16[8,600] weight=bf16[600] eps=1e-06 seed=1", True),  # more than a line holds
    ],
)
def test_it_fails_for_the_wrong_kernel_only(line: str, telling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of two elements it does not say which other contract allows them: that is chance."""
    text = pasted("rms_norm", "native_multiply", parse_case(line), "norm[wrong]", source="/home/me/norms.py:12")
    assert line in text
    run(text, right, monkeypatch)
    with pytest.raises(ContractViolation, match="not possible under native_multiply") as caught:
        run(text, wrong, monkeypatch)
    assert ("Every bit is explained by: fp32_multiply" in str(caught.value)) == telling


def test_it_imports_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in a folder is imported as a test in the folder above does, with what lies beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pasted_kernels").mkdir()
    (tmp_path / "pasted_kernels" / "norms.py").write_text("def norm(x, weight, eps):\n    raise NotImplementedError\n")
    (tmp_path / "not-a-name").mkdir()

    def text(source: str) -> str:
        return pasted("rms_norm", "native_multiply", parse_case(LINE), "norm[wrong]", source=source)

    namespace: dict[str, Any] = {}
    exec(text("pasted_kernels/norms.py:1"), namespace)
    with pytest.raises(NotImplementedError):
        namespace["test_norm_keeps_its_contract"]()
    assert "from pasted_kernels.norms import norm" in text(str(tmp_path / "pasted_kernels" / "norms.py:1"))
    for elsewhere in ("/home/me/norms.py:1", "not-a-name/norms.py:1"):
        assert "from norms import norm" in text(elsewhere)


def test_a_kernel_that_takes_its_rows_for_dense_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    @kernel("rms_norm", contract="native_multiply", name="norm[dense]")
    def dense(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return right(x.as_strided(x.shape, (x.shape[-1], 1)), weight, eps=eps)

    case = parse_case("rms_norm x=bf16[2,1]@9,1:values(1,0) weight=bf16[1]:values(0) eps=1e-06 seed=0")
    text = pasted("rms_norm", "native_multiply", case, "norm[dense]")
    run(text.replace("from kernels import", "from norms import"), right, monkeypatch)
    with pytest.raises(ContractViolation):
        run(text.replace("from kernels import", "from norms import"), dense, monkeypatch)
