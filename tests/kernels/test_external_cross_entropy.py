"""Losses of other packages under their adapters: refused where the package is missing, and right where it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel, load_kernels
from lastbit.result import Verdict
from lastbit.verify.check import Subject, unsupported, verify_case
from lastbit.verify.project import open_project
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "external"
PACKAGES = {"liger": "liger_kernel", "fla[": "fla", "flash_attn": "flash_attn", "transformers": "transformers"}
KERNELS = {k.name: k for k in load_kernels(FOLDER) if k.op.startswith("cross_entropy")}
LINES = {
    "cross_entropy": "logits=bf16[9,70]:gates labels=int64[9]:labels_70 seed=1",
    "cross_entropy_backward": "logits=bf16[9,70]:gates labels=int64[9]:labels_70 grad_output=bf16[9] seed=1",
}


def package_of(name: str) -> str:
    return next(package for prefix, package in PACKAGES.items() if name.startswith(prefix))


def arguments(kernel: Kernel) -> dict[str, object]:
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = {"logits": logits, "labels": torch.arange(3), "grad_output": torch.ones(3).bfloat16(), "reduction": "mean"}
    return {name: value for name, value in given.items() if name in kernel.requires}


@pytest.mark.parametrize("name", KERNELS)
def test_refused_without_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_of(name)
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    (fresh,) = (k for k in load_kernels(FOLDER) if k.name == name)
    with pytest.raises(UnsupportedCase, match=rf"{package}.* cannot be imported .*pip install"):
        fresh.call(**arguments(fresh))


def test_refused_where_no_contract_describes_what_they_do() -> None:
    for name in ("liger[cross_entropy]", "fla[cross_entropy]"):
        nothing = parse_case("cross_entropy logits=bf16[0,4] labels=int64[0] seed=1")
        assert "non-empty" in unsupported(KERNELS[name], nothing)
    assert KERNELS["transformers[ForCausalLMLoss]"].takes["reduction"] == ("mean",)
    assert "mean" not in KERNELS["liger[cross_entropy]"].takes["reduction"]
    assert "one dtype" in KERNELS["liger[cross_entropy_backward]"].takes["tensors"]


@pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")
@pytest.mark.parametrize("name", [n for n, k in KERNELS.items() if not k.devices])
def test_the_contract_is_kept(name: str) -> None:
    if importlib.util.find_spec(package_of(name)) is None:
        pytest.skip(f"{package_of(name)} is not installed")
    kernel = KERNELS[name]
    line = LINES[kernel.op] + (" reduction=mean" if "reduction" in kernel.requires else "")
    subject = Subject(kernel, open_project(Config(folder="")).op(kernel.op), torch.device("cpu"))
    found = verify_case(subject, parse_case(f"{kernel.op} {line}"))
    assert found.verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE), found
