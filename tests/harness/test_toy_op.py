"""A new op takes three new files and no edit elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lastbit.files import IMPORTED_FROM

ROOT = Path(__file__).resolve().parents[2]

REFERENCE = '''\
"""y = x² · factor + bias."""

from lastbit.numerics import Enclosure
from lastbit.ops import Contract, StageRecorder, op


@op(
    rows=("x",),
    axes={"square_rule": {"rounded_square": {"square": "x"}, "fp32_square": {}}},
    rounds={"y": "x"},
)
def squared(
    x: Enclosure, bias: Enclosure | None = None, *, factor: float, contract: Contract, stage: StageRecorder
) -> None:
    y = stage("square", x * x) * factor
    stage("y", y if bias is None else y + bias, result=True)
'''

CASES = """\
from hypothesis import strategies as st

from lastbit.case import Case, Group, TensorSpec


@st.composite
def _cases(draw, bias):
    width = draw(st.integers(30, 50))
    tensors = [TensorSpec("x", "bf16", (draw(st.integers(1, 9)), width))]
    if bias:
        tensors.append(TensorSpec("bias", "bf16", (width,)))
    return Case("squared", tuple(tensors), {"factor": 3.0}, draw(st.integers(0, 99)))


def groups(accepts, *, small):
    yield Group("plain", strategy=_cases(False))
    yield Group("more", strategy=_cases(False))
    if "bias" in accepts:
        yield Group("bias", strategy=_cases(True))
"""

KERNELS = """\
from lastbit.kernel import kernel


def with_bias(y, bias, dtype):
    return (y if bias is None else y + bias.float()).to(dtype)


@kernel("squared")
def rounded(x, bias=None, *, factor):
    return with_bias((x * x).float() * factor, bias, x.dtype)


@kernel("squared", contract="fp32_square")
def wide(x, *, factor):
    return with_bias(x.float() * x.float() * factor, None, x.dtype)
"""

WRONG = '''\
from lastbit.kernel import kernel


@kernel("squared")
def claims_too_much(x, *, factor):
    """Keeps fp32_square, and claims to round the square."""
    return (x.float() * x.float() * factor).to(x.dtype)
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"references/squared.py": REFERENCE, "cases/squared.py": CASES, "kernels/squared.py": KERNELS}
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(source)
    return tmp_path


def verify(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `lastbit verify` in the project, in one process."""
    command = [sys.executable, "-m", "lastbit", "verify", "--project", str(project)]
    command += [str(project / "kernels"), "--cases-per-group", "3", "-n", "1", *options]
    environment = {**os.environ, "PYTHONPATH": str(IMPORTED_FROM), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)


def test_right_kernels_pass(project: Path) -> None:
    done = verify(project, "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rounded" in done.stdout
    assert "wide" in done.stdout
    assert "FAILED" not in done.stdout


def test_a_wrong_kernel_fails_and_the_contract_that_it_keeps_is_named(project: Path) -> None:
    (project / "kernels" / "wrong.py").write_text(WRONG)
    done = verify(project, "claims_too_much", "-n", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "fp32_square" in done.stdout
    assert "squared x=bf16[1,7] factor=3.0 seed=0" in done.stdout, "the smallest case, to run it again"
    assert "stopped after its first failure; --keep-going runs the rest" in " ".join(done.stdout.split())
