"""`assert_contract`, the way into anyone's test."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit import ContractViolation, Undecided, assert_contract, kernel
from lastbit.errors import KernelError, LastbitError, UsageError
from lastbit.numerics import Bound, Premises
from lastbit.result import Verdict
from lastbit.verify import assertion
from tests.directed import rounded

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


def test_the_ops_of_lastbit_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(torch.bfloat16)
    y = native(**arguments)
    first = assert_contract("rms_norm", y, **arguments, eps=EPS)
    monkeypatch.setattr(assertion, "open_project", lambda config: pytest.fail(f"opened again: {config}"))
    assert assert_contract("rms_norm", y, **arguments, eps=EPS) == first


def test_a_direction_of_a_rounding_point() -> None:
    """Rounded to the weight's dtype, `output` is rounded already: a failure says at which point the direction is."""
    arguments = inputs(torch.bfloat16)
    x, weight = (t.float() for t in arguments.values())
    normalized = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).bfloat16().float()
    result = rounded(normalized * weight, torch.bfloat16, "zero")
    assert_contract("rms_norm", result, **arguments, eps=EPS, contract="native_multiply+product:zero")
    with pytest.raises(ContractViolation, match=r"Every bit is explained by: native_multiply\+product:zero"):
        assert_contract("rms_norm", result, **arguments, eps=EPS, contract="native_multiply+output:zero")
    with pytest.raises(UsageError, match=r"unknown rounding point .*'outputs'; did you mean 'output'"):
        assert_contract("rms_norm", result, **arguments, eps=EPS, contract="native_multiply+outputs:zero")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_broken_contract(dtype: torch.dtype) -> None:
    arguments = inputs(dtype)
    with pytest.raises(ContractViolation) as caught:
        assert_contract("rms_norm", wide(**arguments), **arguments, eps=EPS)
    first, finding, *_, last = str(caught.value).splitlines()
    assert first == "rms_norm does not keep native_multiply: FAILED"
    assert finding.startswith("  output: ")
    assert " of 2,048 elements (" in finding
    assert "have a value that is not possible under native_multiply; worst at [" in finding
    assert last == "  Every bit is explained by: fp32_multiply"
    assert isinstance(caught.value, AssertionError)
    assert caught.value.judgement.verdict is Verdict.FAILED


def test_an_option_is_named_where_it_makes_a_difference() -> None:
    """The rule of the residual sum where there is a residual."""
    x, weight = inputs(torch.bfloat16).values()
    results = {"output": wide(x + x, weight), "residual_sum": x + x}
    with pytest.raises(ContractViolation, match=r"does not keep native_multiply\+rounded_sum: FAILED"):
        assert_contract("rms_norm", results, x=x, weight=weight, residual=x, eps=EPS)


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


def test_a_result_that_decides_nothing_is_no_pass_and_no_violation() -> None:
    x = torch.randn((4, 1), generator=torch.Generator().manual_seed(0))
    actual = x * torch.rsqrt(x.square() + EPS)
    with pytest.warns(Undecided, match="no element has a single legal value") as warned:
        judgement = assert_contract("rms_norm", actual, x=x, eps=EPS)
    assert (judgement.verdict, judgement.decided) == (Verdict.INCONCLUSIVE, {"output": 0.0})
    assert (warned[0].filename, warned[0].message.judgement) == (__file__, judgement)
    with pytest.raises(Undecided, match=r"less is decided than decided=0\.1 asks for") as caught:
        assert_contract("rms_norm", actual, x=x, eps=EPS, decided=0.1)
    assert not isinstance(caught.value, AssertionError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert assert_contract("rms_norm", actual, x=x, eps=EPS, decided=0).verdict is Verdict.INCONCLUSIVE


def losses(labels: Tensor, classes: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of 16,384 classes, of which the sum knows so many."""
    logits = torch.randn((len(labels), 16384), generator=torch.Generator().manual_seed(0))
    own = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    lse = logits[:, :classes].logsumexp(-1)
    return torch.where(labels < 0, 0.0, lse - own), {"logits": logits, "labels": labels}


@pytest.mark.parametrize("labels", [[1, 2, 3], [1, -100, 3]])
@pytest.mark.parametrize("classes", [16384, 16376])
def test_an_ignored_row_makes_no_pass(labels: list[int], classes: int) -> None:
    """In any order of the sum, 8 classes less are not seen; nor does a right result break anything."""
    actual, arguments = losses(torch.tensor(labels), classes)
    with pytest.warns(Undecided, match="losses: 0.000 of it is decided"):
        assert_contract("cross_entropy", actual, **arguments)


def test_of_no_rows_everything_is_decided() -> None:
    """A sum over no rows is 0, which is a constant, and nothing else is there to decide."""
    none, weight = torch.zeros(0, 8), torch.ones(8)
    given = {"x": none, "dy": none, "weight": weight, "rstd": torch.zeros(0, 1)}
    judgement = assert_contract("layer_norm_gated_backward", {"dx": none, "dw": 0 * weight}, **given, decided=1.0)
    assert judgement.decided == {"dx": 1.0, "dw": 1.0}


def test_shares_are_of_what_arithmetic_decides() -> None:
    labels = torch.tensor([0, -100, 0, 0])
    logits = torch.tensor([[0.0, -torch.inf]]).repeat(4, 1)
    judgement = assert_contract("cross_entropy", torch.zeros(4), logits=logits, labels=labels, decided=1.0)
    assert judgement.decided == {"losses": 1.0}
    assert [stage.constant for stage in judgement.stages] == [1]


def test_several_results_and_stages() -> None:
    x, residual = inputs(torch.bfloat16)["x"], inputs(torch.bfloat16)["x"].flip(0)
    added = (x.float() + residual.float()).to(x.dtype)
    inv_rms = torch.rsqrt(added.float().square().mean(-1, keepdim=True) + EPS)
    actual = {"residual_sum": added, "output": (added.float() * inv_rms).to(x.dtype), "inv_rms": inv_rms}
    judgement = assert_contract("rms_norm", actual, x=x, residual=residual, eps=EPS)
    assert [stage.name for stage in judgement.stages] == ["residual_sum", "inv_rms", "output"]
    with pytest.raises(
        KernelError, match="rms_norm has the results output, residual_sum here; give a tuple or a mapping"
    ):
        assert_contract("rms_norm", actual["output"], x=x, residual=residual, eps=EPS)


def test_results_by_order() -> None:
    """In that of the op, which is the usual one, and not in that of its stages."""
    x, residual = inputs(torch.bfloat16)["x"], inputs(torch.bfloat16)["x"].flip(0)
    added = (x.float() + residual.float()).to(x.dtype)
    y = (added.float() * torch.rsqrt(added.float().square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    given: dict[str, Any] = {"x": x, "residual": residual, "eps": EPS}
    for both in ((y, added), [y, added]):
        assert assert_contract("rms_norm", both, **given).verdict is Verdict.PASSED
    with pytest.raises(ContractViolation, match="The results were taken in this order: output, residual_sum"):
        assert_contract("rms_norm", (added, y), **given)
    with pytest.raises(KernelError, match="3 results were given by order, but rms_norm has these here: output, resid"):
        assert_contract("rms_norm", (y, added, added), **given)
    assert assert_contract("rms_norm", (native(**inputs(torch.bfloat16)),), **inputs(torch.bfloat16), eps=EPS)
    of_chain = assertion._built_in().op("all_reduce_rms_norm").returns
    assert [name for name in of_chain if name in ("output", "residual_sum")] == ["output", "residual_sum"]


def test_results_that_may_be_left_out_come_last() -> None:
    q = torch.randn((1, 4, 1, 8), generator=torch.Generator().manual_seed(0))
    scores = q[..., 0, :] @ q[..., 0, :].mT
    output = (torch.softmax(scores, -1) @ q[..., 0, :])[..., None, :]
    lse = torch.logsumexp(scores, -1)[:, None]
    for actual in (output, (output,), (output, lse)):
        judgement = assert_contract("attention", actual, q=q, k=q, v=q, scale=1.0, decided=0)
        assert len(judgement.stages) == (len(actual) if isinstance(actual, tuple) else 1)


def test_an_error_has_no_frames_of_lastbit_below_the_call() -> None:
    arguments = inputs(torch.bfloat16)
    with pytest.raises(ContractViolation) as broken:
        assert_contract("rms_norm", wide(**arguments), **arguments, eps=EPS)
    with pytest.raises(UsageError) as misused:
        assert_contract("rms_norms", wide(**arguments), **arguments, eps=EPS)
    for caught in (broken, misused):
        assert [frame.name for frame in caught.traceback.filter(caught)] == [frame_of_this_test()]


def frame_of_this_test() -> str:
    return sys._getframe(1).f_code.co_name


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
        ({"weight": torch.ones(1)}, "weight has shape (1,); with the other tensors it must be (256,)"),
        ({"weight": torch.ones(1, 256)}, "weight has shape (1, 256); with the other tensors it must be (256,)"),
        ({"weight": torch.tensor(1.0)}, "weight has shape (); with the other tensors it must be (256,)"),
        ({"residual": torch.ones(8, 1)}, "residual has shape (8, 1); with the other tensors it must be (8, 256)"),
        ({"scale": torch.tensor(1.0), "quant": "static"}, "scale has shape (); with the other tensors it must be (1,)"),
        ({"x": torch.tensor(1.0)}, "x has no dimension; it must be [..., N]"),
    ],
)
def test_nothing_is_broadcast_in_silence(change: dict[str, Tensor], message: str) -> None:
    arguments = {"x": torch.ones(8, 256), "weight": torch.ones(256), "eps": EPS}
    with pytest.raises(UsageError, match=re.escape(message)):
        assert_contract("rms_norm", torch.ones(8, 256), **{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("layer_norm_gated", {"x": torch.tensor(1.0)}),
        ("layer_norm_gated_backward", {"x": torch.tensor(1.0), "dy": torch.tensor(1.0), "rstd": torch.ones(1)}),
        ("layer_norm_gated_backward", {"x": torch.ones(8), "dy": torch.ones(8), "rstd": torch.tensor(1.0)}),
    ],
)
def test_tensors_without_dimensions_are_refused(op: str, change: dict[str, Tensor]) -> None:
    arguments: dict[str, object] = {"weight": torch.ones(8), **change}
    with pytest.raises(UsageError, match=r"has no dimension|has shape \(\)|have rows|has rows"):
        assert_contract(op, torch.ones(8), **{**arguments, **({"eps": EPS} if op.endswith("gated") else {})})  # type: ignore[arg-type]


# What is decided


LONG = 4096


def tree(terms: Tensor) -> Tensor:
    """Add 2^n terms by a tree of height n."""
    while terms.shape[-1] > 1:
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms


def height(terms: int) -> int:
    return (terms - 1).bit_length()


@kernel("rms_norm", contract="fp32_multiply", depth=height)
def by_a_tree(x: Tensor, *, eps: float, terms: int = LONG, columns: int = LONG) -> Tensor:
    squares = x.float().square()
    squares[..., columns:] = 0
    return (x.float() * torch.rsqrt(tree(squares) / terms + eps)).to(x.dtype)


def long_rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((2, LONG), generator=torch.Generator().manual_seed(0)).to(dtype)


FAULTS = {"eps": {"eps": 10 * EPS}, "mean over n - 1": {"terms": LONG - 1}, "a column": {"columns": LONG - 1}}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "known", [{"depth": 12}, {"depth": height}, {"kernel": by_a_tree}], ids=["int", "function", "kernel"]
)
def test_a_known_height_shows_what_any_order_hides(known: dict[str, Any], fault: str) -> None:
    x = long_rows()
    wrong = by_a_tree(x, **{"eps": EPS, **FAULTS[fault]})
    with pytest.raises(ContractViolation, match="does not keep fp32_multiply"):
        assert_contract("rms_norm", wrong, x=x, eps=EPS, **{"contract": "fp32_multiply", **known})


@pytest.mark.parametrize("fault", ["eps", "mean over n - 1"])
def test_without_a_height_less_is_decided_than_was_asked_for(fault: str) -> None:
    x = long_rows()
    wrong = by_a_tree(x, **{"eps": EPS, **FAULTS[fault]})
    blind = assert_contract("rms_norm", wrong, x=x, eps=EPS, contract="fp32_multiply")
    assert blind.decided["output"] < 0.7
    with pytest.raises(Undecided) as caught:
        assert_contract("rms_norm", wrong, x=x, eps=EPS, contract="fp32_multiply", decided=0.9)
    first, share, *_, last = str(caught.value).splitlines()
    assert first == "rms_norm may keep fp32_multiply, but less is decided than decided=0.9 asks for"
    assert share == f"  output: {blind.decided['output']:.3f} of it is decided (fp32)"
    assert last.startswith(
        "  What helps: depth=, the height of the kernel's summation tree, or kernel=, which declares it"
    )
    assert caught.value.judgement.decided == blind.decided


def test_a_registered_kernel_brings_its_contract_and_depth() -> None:
    x = long_rows()
    judgement = assert_contract("rms_norm", by_a_tree(x, eps=EPS), x=x, eps=EPS, kernel=by_a_tree, decided=0.9)
    assert judgement.decided == {"output": 1.0}  # by its formula
    assert judgement.verdict is Verdict.PASSED


@pytest.mark.parametrize("wrong", [{"eps": 10 * EPS}, {"eps": EPS, "count": 4095}], ids=["eps x 10", "n - 1"])
def test_another_formula_fails_where_any_order_would_pass(wrong: dict[str, float]) -> None:
    @kernel("rms_norm", contract="fp32_multiply")
    def norm(x: Tensor, *, eps: float) -> Tensor:
        total = x.float().square().sum(-1, keepdim=True)
        return x * torch.rsqrt(total / wrong.get("count", x.shape[-1]) + wrong["eps"])

    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(3))
    assert_contract("rms_norm", norm(x, eps=EPS), x=x, eps=EPS, contract="fp32_multiply", decided=0)
    with pytest.raises(ContractViolation, match="another formula than that of fp32_multiply"):
        assert_contract("rms_norm", norm(x, eps=EPS), x=x, eps=EPS, kernel=norm)


def test_integers_are_decided_without_a_height() -> None:
    x = long_rows().mul(3).round()
    judgement = assert_contract("rms_norm", by_a_tree(x, eps=EPS), x=x, eps=EPS, contract="fp32_multiply", decided=1.0)
    assert judgement.decided == {"output": 1.0}


def test_a_judgement_says_which_contracts_it_rules_out() -> None:
    arguments = inputs(torch.bfloat16)
    judgement = assert_contract("rms_norm", native(**arguments), **arguments, eps=EPS, decided=0.95)
    assert judgement.ruled_out["fp32_multiply+rounded_sum"] > 0
    assert "fp32_multiply+rounded_sum" not in judgement.not_ruled_out
    x = arguments["x"].float()
    alike = assert_contract("rms_norm", native(x, torch.ones(256)), x=x, weight=torch.ones(256), eps=EPS)
    assert "fp32_multiply+rounded_sum" in alike.not_ruled_out


def test_the_premises_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inverse root that was measured to err more has more legal values."""
    asked: list[torch.device] = []

    def measured(device: torch.device) -> Premises:
        asked.append(device)
        return Premises("mine", bounds={"rsqrt": Bound(2.0**-12, "measured")})

    arguments = inputs(torch.bfloat16)
    before = assert_contract("rms_norm", native(**arguments), **arguments, eps=EPS).stages[0].cumulative.decided
    monkeypatch.setattr("lastbit.verify.assertion.load_premises", measured)
    after = assert_contract("rms_norm", native(**arguments), **arguments, eps=EPS).stages[0].cumulative.decided
    assert asked == [torch.device("cpu")]
    assert after < before


@kernel("rms_norm", contract="fp32_multiply", name="two")
@kernel("rms_norm", name="one", unordered=("output",))
def twice_declared(x: Tensor, *, eps: float) -> Tensor:
    return native(x, torch.ones(x.shape[-1], dtype=x.dtype))


def test_of_several_declarations_the_one_of_the_contract_counts() -> None:
    x = inputs(torch.bfloat16)["x"]
    y = twice_declared(x, eps=EPS)
    assert_contract("rms_norm", y, x=x, eps=EPS, kernel=twice_declared, contract="native_multiply")
    with pytest.raises(UsageError, match=r"declared as one \(rms_norm\), two \(rms_norm fp32_multiply\); 2 of these"):
        assert_contract("rms_norm", y, x=x, eps=EPS, kernel=twice_declared)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": -1}, "depth=-1 is no height of a tree"),
        ({"depth": True}, "depth=True is no height of a tree"),
        ({"depth": 1.5}, "depth=1.5 is no height of a tree"),
        ({"decided": 90}, "decided=90 is no share; give a number from 0 to 1"),
        ({"kernel": native}, "is not decorated with @kernel"),
        (
            {"kernel": "triton[fp32_mulitply]"},
            "did you mean 'triton[fp32_multiply",
        ),
    ],
)
def test_a_claim_that_means_nothing(given: dict[str, Any], message: str) -> None:
    arguments = inputs(torch.bfloat16)
    with pytest.raises(UsageError, match=re.escape(message)):
        assert_contract("rms_norm", native(**arguments), **arguments, eps=EPS, **given)


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
        'from lastbit.ops import op\n\n\n@op(rows=("x",), rounds={"y": "x"})\n'
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


X, Y = torch.ones(2, 4), torch.full((2, 4), 2.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"contract": None}, "contract=None is no text; give options joined with +, or leave it out"),
        ({"eps": "1e-6"}, "eps='1e-6' is of type str; rms_norm takes float there"),
        ({"eps": True}, "eps=True is of type bool; rms_norm takes float there"),
        ({"eps": torch.tensor(1e-6)}, "eps is a tensor; rms_norm takes a Python value there, such as eps.item()"),
        ({"variance_size": 2.0}, "variance_size=2.0 is of type float; rms_norm takes int or None there"),
        ({"depth": -5}, "depth=-5 is no height of a tree"),
        ({"depth": lambda terms: -5}, "depth=<lambda> gave -5 for 4 terms; a height is an integer from 0"),
        ({"depth": lambda: 5}, "depth=<lambda> raised TypeError for 4 terms"),
        ({"decided": "all"}, "decided='all' is no share; give a number from 0 to 1"),
        ({"x": X.double()}, "x is float64, in which lastbit itself computes; give what a kernel gets: x.float()"),
        ({"x": X.long()}, "x is torch.int64; rms_norm takes floating-point numbers there"),
        ({"x": X.to_sparse()}, "x has the layout torch.sparse_coo; give a dense tensor, such as x.to_dense()"),
        ({"x": X.to("meta")}, "x is on the device meta, where tensors have no values"),
        ({"x": X.numpy()}, "x is of type ndarray; give a tensor, such as torch.as_tensor(x)"),
        ({"actual": Y.to_sparse()}, "actual has the layout torch.sparse_coo; give a dense tensor"),
        ({"actual": {"output": Y.numpy()}}, "output is of type ndarray; give a tensor, or a mapping"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),  # a function's text has its address
)
def test_what_makes_no_sense_is_told_in_a_sentence(given: dict[str, Any], said: str) -> None:
    arguments = {"actual": X, "x": X, "eps": 0.0, **given}
    with pytest.raises((UsageError, KernelError), match=re.escape(said)):
        assert_contract("rms_norm", arguments.pop("actual"), **arguments)


def test_a_value_that_no_sum_can_take_is_told_of_a_parameter_without_a_type(tmp_path: Path) -> None:
    """Where the reference does not say what its parameter is, its own line is named."""
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / "shifted.py").write_text(
        "from lastbit.ops import op\n\n@op(rows=('x',), rounds={'y': 'x'})\n"
        "def shifted(x, *, by, contract, stage):\n    stage('y', x + by, result=True)\n"
    )
    with pytest.raises(LastbitError, match=r"shifted.py:5, .*'one' is neither an enclosure nor a number"):
        assert_contract("shifted", Y, x=X, by="one", project=tmp_path)
