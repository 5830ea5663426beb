"""A Triton kernel in somebody's own tests, on a CPU: interpreted as lastbit interprets, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lastbit import ContractViolation, assert_contract, interpret
from lastbit.case import parse_case
from lastbit.errors import InterpreterError
from lastbit.files import IMPORTED_FROM
from lastbit.shrinking.pasted import test_of as pasted

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="kernels are compiled where a GPU is")

KERNEL = """
import torch
import triton
import triton.language as tl
from lastbit import kernel


@triton.jit
def _rows(x, weight, out, columns, eps, STEP: tl.constexpr):
    at = tl.arange(0, STEP)
    inside = at < columns
    value = tl.load(x + tl.program_id(0) * columns + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value) / columns + eps)
    normalized = (value * inverse).to(tl.bfloat16)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + tl.program_id(0) * columns + at, normalized * scale, mask=inside)


@kernel("rms_norm")
def norm(x, weight, *, eps):
    out = torch.empty_like(x)
    _rows[(len(x),)](x, weight, out, x.shape[1], eps, triton.next_power_of_2(x.shape[1]))
    return out
"""
TEST = """
import torch
from lastbit import assert_contract
from norms import norm


def arguments():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((4, 100), (100,)))
    return {"x": x, "weight": weight, "eps": 1e-6}


def test_right():
    assert_contract("rms_norm", norm(**arguments()), **arguments())


def test_wrong(triton_interpreter):
    assert_contract("rms_norm", -norm(**arguments()), **arguments())
"""
LINE = "rms_norm x=bf16[2,3]:values(1,2,3,-1,5,7) weight=bf16[3]:values(1,1.5,2) eps=1e-06 seed=0"


def run(folder: Path, test: str, *options: str) -> str:
    """Run the test beside the kernel; what pytest printed."""
    (folder / "norms.py").write_text(KERNEL)
    (folder / "test_norm.py").write_text(test)
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["PYTHONPATH"] = os.pathsep.join([str(IMPORTED_FROM), str(folder)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", *options, "test_norm.py"]
    return subprocess.run(command, cwd=folder, env=own, text=True, capture_output=True).stdout


def test_the_plugin_interprets_what_test_modules_import_and_tracebacks_end_at_the_test(tmp_path: Path) -> None:
    printed = run(tmp_path, TEST, "-p", "lastbit.pytest_interpreter")
    assert "1 failed, 1 passed" in printed, printed
    assert "ContractViolation: rms_norm does not keep" in printed
    assert [line for line in printed.splitlines() if line.startswith("test_norm.py:")] == [
        "test_norm.py:18: ContractViolation"
    ]
    assert "harness/" not in printed


def test_the_test_that_is_printed_runs_as_it_stands(tmp_path: Path) -> None:
    text = pasted("rms_norm", "", parse_case(LINE), "norm", source="norms.py:20", interpreted=True)
    printed = run(tmp_path, text)
    assert "1 passed" in printed, printed


def test_tritons_own_interpreter_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    x = torch.ones(2, 8).bfloat16()
    told = "Triton's own interpreter has run kernels in this process; it rounds otherwise than a GPU."
    for installed, builder in ((False, {"grid_dim": (1, 1, 1)}), (False, {}), (True, {"grid_dim": (1, 1, 1)})):
        monkeypatch.setattr(interpret, "_installed", installed)
        monkeypatch.setattr(interpreter, "interpreter_builder", SimpleNamespace(**builder))
        with pytest.raises(ContractViolation) as caught:
            assert_contract("rms_norm", -x, x=x, eps=1e-6)
        assert (told in str(caught.value)) is (not installed and bool(builder))


def test_triton_that_compiles_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(interpret, "_installed", False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(InterpreterError, match=r"by lastbit\.interpret_triton\(\) at the top of conftest\.py"):
        interpret.interpret_triton()
