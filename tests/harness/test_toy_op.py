"""A new op takes three new files and no edit elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lastbit import cli

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


Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def verify(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Run `lastbit verify` in the project; return its exit code, and what it printed."""
    monkeypatch.chdir(project)

    def call(*options: str) -> tuple[int, str]:
        command = ["verify", "--project", ".", "kernels", "--cases-per-group", "3", "-n", "1", *options]
        return cli.main(command), "".join(capsys.readouterr())

    return call


def test_right_kernels_pass(verify: Verify) -> None:
    code, printed = verify("-v")
    assert code == 0, printed
    assert "rounded" in printed
    assert "wide" in printed
    assert "FAILED" not in printed


def test_a_wrong_kernel_fails_and_the_contract_that_it_keeps_is_named(project: Path, verify: Verify) -> None:
    (project / "kernels" / "wrong.py").write_text(WRONG)
    code, printed = verify("claims_too_much")
    assert code == 1, printed
    assert "FAILED" in printed
    assert "fp32_square" in printed
    assert "squared x=bf16[1,7] factor=3.0 seed=0" in printed, "the smallest case, to run it again"
    assert "stopped after its first failure; --keep-going runs the rest" in " ".join(printed.split())
