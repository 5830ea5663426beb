"""Adapters of compiled norms: what they hand to a library, and refuse; a stand-in takes the library's place."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "external"
CASE = "rms_norm x={0}[9,64] weight={0}[64]:near_one {1}eps=1e-06 seed=1"


def kernels() -> dict[str, Kernel]:
    return {k.name: k for k in load_kernels(FOLDER) if k.source.startswith(str(FOLDER / "compiled_norms.py"))}


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds_first: bool) -> torch.Tensor:
    value = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if rounds_first:
        value = value.to(weight.dtype).float()
    return (value * weight.float()).to(weight.dtype)


def library(kernel: Kernel) -> SimpleNamespace:
    """Stand for a compiled library, computing as the kernel's contract says."""
    first, unrounded = "input_multiply" in kernel.contract, "unrounded_sum" in kernel.contract

    def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        assert out.is_contiguous()
        out.copy_(normalized(x, weight, eps, rounds_first=first))

    def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        total = x.float() + residual.float()
        residual.copy_(total)
        x.copy_(normalized(total if unrounded else residual, weight, eps, rounds_first=first))

    return SimpleNamespace(rms_norm=rms_norm, fused_add_rms_norm=fused_add_rms_norm)


def with_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = kernels()[name]
    monkeypatch.setitem(inspect.unwrap(kernel.call).__globals__, "operations", lambda _: library(kernel))
    return kernel


def verdict(kernel: Kernel, line: str) -> tuple[Verdict, object]:
    project = open_project(Config(folder=""))
    result = verify_case(Subject(kernel, project.op("rms_norm"), torch.device("cpu")), parse_case(line), repeat=False)
    return result.verdict, result.findings or result.reason


@pytest.mark.parametrize("name", kernels())
def test_refused_without_its_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTBIT_COMPILED_NORMS", raising=False)
    kernel = kernels()[name]
    given = {name: torch.ones(2, 8) for name in {"x", "residual"} & kernel.requires}
    with pytest.raises(UnsupportedCase, match=r"_\d+_\S*so is missing: .*compile_norms.py makes it"):
        kernel.call(**given, weight=torch.ones(8), eps=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", kernels())
def test_what_the_library_writes_is_returned(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = with_stand_in(name, monkeypatch)
    residual = f"residual={dtype}[9,64] " if "residual" in kernel.requires else ""
    found, why = verdict(kernel, CASE.format(dtype, residual))
    unsupported = dtype == "fp32" and name.startswith("flashinfer")
    assert found is (Verdict.UNSUPPORTED if unsupported else Verdict.PASSED), why


def test_vectors_that_are_not_aligned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = with_stand_in("vllm-0.33.0[rms_norm]", monkeypatch)
    x = torch.zeros(2 * 64 + 8).bfloat16()
    kernel.call(x=x[8:].view(2, 64), weight=torch.ones(64).bfloat16(), eps=1e-6)
    with pytest.raises(UnsupportedCase, match="x: rows do not begin at multiples of 8 elements"):
        kernel.call(x=x[1:129].view(2, 64), weight=torch.ones(64).bfloat16(), eps=1e-6)
    kernel.call(x=x[1:67].view(2, 33), weight=torch.ones(33).bfloat16(), eps=1e-6)  # read one by one


def test_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = with_stand_in("flashinfer[rmsnorm]", monkeypatch)
    with pytest.raises(UnsupportedCase, match=r"weight is torch.float32 and x torch.bfloat16"):
        kernel.call(x=torch.zeros(2, 8).bfloat16(), weight=torch.ones(8), eps=1e-6)


def test_rows_that_cannot_be_merged_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = with_stand_in("vllm-0.33.0[fused_add_rms_norm]", monkeypatch)
    x = torch.zeros(3, 2, 8).transpose(0, 1)
    with pytest.raises(UnsupportedCase, match="not equally far apart"):
        kernel.call(x=x, residual=torch.zeros(2, 3, 8), weight=torch.ones(8), eps=1e-6)
