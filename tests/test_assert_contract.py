"""`assert_contract`, the way into anyone's test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness import ContractViolation, assert_contract
from harness.errors import KernelError, LastbitError, UsageError
from harness.result import Verdict

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn((8, 256), generator=generator).to(dtype),
        "weight": torch.randn(256, generator=generator).to(dtype),
    }


def native(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def wide(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "contract"), [(native, ""), (native, "native_multiply"), (wide, "fp32_multiply")])
def test_a_kept_contract(kernel, contract: str, dtype: torch.dtype) -> None:
    arguments = inputs(dtype)
    judgement = assert_contract("rms_norm", kernel(**arguments), **arguments, eps=EPS, contract=contract)
    assert judgement.verdict is Verdict.PASSED
    assert [stage.name for stage in judgement.stages] == ["output"]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_broken_contract(dtype: torch.dtype) -> None:
    arguments = inputs(dtype)
    with pytest.raises(ContractViolation) as caught:
        assert_contract("rms_norm", wide(**arguments), **arguments, eps=EPS)
    first, finding, *_, last = str(caught.value).splitlines()
    assert first == "rms_norm does not keep native_multiply+rounded_sum: FAILED"
    assert finding.startswith("  output: ")
    assert " of 2,048 elements (" in finding
    assert "have a value that is not possible under native_multiply+rounded_sum; worst at [" in finding
    assert "Every bit is explained by: fp32_multiply+rounded_sum" in last
    assert isinstance(caught.value, AssertionError)
    assert caught.value.judgement.verdict is Verdict.FAILED


def test_a_broken_contract_in_fp32() -> None:
    arguments = inputs(torch.float32)
    y = native(**arguments)
    y.view(torch.int32)[3, 100] += 1
    with pytest.raises(ContractViolation, match="1 of 8 rows cannot come from one fp32 inv_rms"):
        assert_contract("rms_norm", y, **arguments, eps=EPS)


def test_the_wrong_eps_is_noticed() -> None:
    arguments = inputs(torch.bfloat16)
    with pytest.raises(ContractViolation):
        assert_contract("rms_norm", native(**arguments), **arguments, eps=0.5)


def test_a_result_that_decides_nothing_is_no_pass() -> None:
    x = torch.randn((4, 1), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ContractViolation, match="INCONCLUSIVE\n  no element has a single legal value") as caught:
        assert_contract("rms_norm", x * torch.rsqrt(x.square() + EPS), x=x, eps=EPS)
    assert caught.value.judgement.verdict is Verdict.INCONCLUSIVE
    assert not caught.value.judgement.findings


def test_several_results_and_stages() -> None:
    x, residual = inputs(torch.bfloat16)["x"], inputs(torch.bfloat16)["x"].flip(0)
    added = (x.float() + residual.float()).to(x.dtype)
    inv_rms = torch.rsqrt(added.float().square().mean(-1, keepdim=True) + EPS)
    actual = {"residual_sum": added, "output": (added.float() * inv_rms).to(x.dtype), "inv_rms": inv_rms}
    judgement = assert_contract("rms_norm", actual, x=x, residual=residual, eps=EPS)
    assert [stage.name for stage in judgement.stages] == ["residual_sum", "inv_rms", "output"]
    with pytest.raises(KernelError, match="rms_norm has the results residual_sum, output here; give a mapping"):
        assert_contract("rms_norm", actual["output"], x=x, residual=residual, eps=EPS)


def test_none_stands_for_what_is_left_out() -> None:
    arguments = inputs(torch.bfloat16)
    left_out = {"residual": None, "scale": None, "quant": None, "variance_size": None}
    assert_contract("rms_norm", native(**arguments), **arguments, **left_out, eps=EPS)


def test_tensors_that_require_grad() -> None:
    arguments = {name: tensor.requires_grad_() for name, tensor in inputs(torch.bfloat16).items()}
    assert_contract("rms_norm", native(**arguments), **arguments, eps=EPS)


def test_neither_the_result_nor_the_inputs_change() -> None:
    arguments = inputs(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    y = native(**arguments)
    kept = y.clone()
    assert_contract("rms_norm", y, **arguments, eps=EPS)
    assert torch.equal(y, kept)
    assert all(torch.equal(arguments[name], before[name]) for name in arguments)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("rmsnorm", {}, "unknown op 'rmsnorm'; did you mean 'rms_norm'?"),
        ("rms_norm", {"contract": "fp32"}, "unknown contract option of rms_norm 'fp32'"),
        ("rms_norm", {"wieght": torch.ones(256)}, "unknown tensor of rms_norm 'wieght'; did you mean 'weight'?"),
        ("rms_norm", {"epsilon": 1e-6}, "unknown parameter of rms_norm 'epsilon'"),
        ("rms_norm", {"wieght": None}, "'wieght'"),
        ("rms_norm", {"eps": None}, "not given eps"),
        ("rms_norm", {"x": None}, "not given x"),
        ("rms_norm", {"x": torch.ones((8, 256), dtype=torch.int32)}, "int32"),
        ("rms_norm", {"project": "/no/such/folder"}, "project folder '/no/such/folder' does not exist"),
    ],
)
def test_arguments_that_mean_nothing(op: str, change: dict[str, object], message: str) -> None:
    arguments = {**inputs(torch.bfloat16), "eps": EPS}
    actual = native(arguments["x"], arguments["weight"])  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        assert_contract(op, actual, **{**arguments, **change})  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.float(), "dtype torch.float32, but the op requires torch.bfloat16"),
        (lambda y: y[1:], r"shape \(7, 256\), but the op requires \(8, 256\)"),
        (lambda y: torch.cat([y, y]), r"shape \(16, 256\), but the op requires \(8, 256\)"),
    ],
)
def test_results_of_the_wrong_kind(change, message: str) -> None:
    arguments = inputs(torch.bfloat16)
    with pytest.raises(KernelError, match=message):
        assert_contract("rms_norm", change(native(**arguments)), **arguments, eps=EPS)


def test_an_op_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "thrice.py").write_text(
        'from harness.op import op\n\n\n@op(rows=("x",), rounds={"y": "x"})\n'
        'def thrice(x, *, contract, stage):\n    stage("y", x * 3.0, result=True)\n'
    )
    x = inputs(torch.bfloat16)["x"]
    assert_contract("thrice", 3 * x, x=x, project=tmp_path)
    with pytest.raises(ContractViolation):
        assert_contract("thrice", x + x, x=x, project=str(tmp_path))


def test_a_reference_file_without_its_op(tmp_path: Path) -> None:
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "thrice.py").write_text("def thrice(x): ...\n")
    with pytest.raises(LastbitError, match=r"thrice\.py must define the op 'thrice'"):
        assert_contract("thrice", torch.ones(1), x=torch.ones(1), project=tmp_path)
