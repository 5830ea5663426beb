"""Verdicts: every contract of RMSNorm against every other, stages, blocks of rows, and what cannot be judged."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.errors import KernelError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import describe_rows, describe_split, describe_stage, judge
from lastbit.numerics import Enclosure, total
from lastbit.ops import op
from lastbit.references.rms_norm import rms_norm
from lastbit.references.softmax import softmax
from lastbit.result import Comparison, Finding, Judgement, Need, Needs, RowCheck, StageResult, Verdict, Worst, simplest

EPS = 1e-6
ROWS, WIDTH = 8, 256
BF16, FP16, FLOAT = torch.bfloat16, torch.float16, torch.float32
CONTRACTS = tuple(map(str, (c for c in rms_norm.contracts() if c.options[0] != "input_multiply" and not c.options[2])))
BASE = "native_multiply+rounded_sum"

PAIRS = tuple(itertools.permutations(CONTRACTS, 2))

every_contract = pytest.mark.parametrize("contract", CONTRACTS)


def normals(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@functools.cache
def problem(dtype: torch.dtype, width: int = WIDTH, weight: torch.dtype | None = None) -> dict[str, Tensor]:
    return {
        "x": normals(ROWS, width, dtype=dtype, seed=1),
        "weight": normals(width, dtype=weight or dtype, seed=2),
        "residual": normals(ROWS, width, dtype=dtype, seed=3),
    }


def eager(
    contract: str, x: Tensor, weight: Tensor, residual: Tensor | None = None, eps: float = EPS
) -> dict[str, Tensor]:
    """RMSNorm in torch under one of the six contracts, with the stages that it passes through."""
    multiply, rule = contract.split("+")
    value = squared = x.float()
    stages: dict[str, Tensor] = {}
    if residual is not None:
        unrounded = x.float() + residual.float()
        stages["residual_sum"] = unrounded.to(x.dtype)
        rounded = stages["residual_sum"].float()
        squared = rounded if rule == "rounded_sum" else unrounded
        value = unrounded if rule == "unrounded_sum" else rounded
    stages["variance"] = squared.square().mean(-1, keepdim=True)
    stages["inv_rms"] = torch.rsqrt(stages["variance"] + eps)
    y = value * stages["inv_rms"]
    if multiply == "native_multiply":
        stages["normalized"] = y.to(weight.dtype)
        stages["product"] = stages["normalized"] * weight
        stages["output"] = stages["product"].to(x.dtype)
    else:
        stages["output"] = (y * weight.float()).to(x.dtype)
    return stages


def results(stages: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in stages.items() if name in ("residual_sum", "output")}


def judged(actual: dict[str, Tensor], tensors: dict[str, Tensor], contract: str = BASE, **params: object) -> Judgement:
    return judge(Problem(rms_norm, rms_norm.contract(contract), tensors, {"eps": EPS, **params}), actual)


# Contracts against each other


@every_contract
@pytest.mark.parametrize("dtype", [BF16, FP16, FLOAT], ids=str)
def test_every_contract_passes_itself(contract: str, dtype: torch.dtype) -> None:
    tensors = problem(dtype)
    judgement = judged(results(eager(contract, **tensors)), tensors, contract)
    assert judgement.verdict is Verdict.PASSED
    assert judgement.findings == ()
    assert judgement.rows is not None
    assert judgement.rows.explained == judgement.rows.rows == ROWS


@pytest.mark.parametrize(
    ("claimed", "kept", "dtype"),
    [*((*pair, BF16) for pair in PAIRS), *((*pair, FP16) for pair in itertools.pairwise(CONTRACTS))],
    ids=str,
)
def test_every_contract_fails_every_other_and_is_named(claimed: str, kept: str, dtype: torch.dtype) -> None:
    tensors = problem(dtype)
    judgement = judged(results(eager(kept, **tensors)), tensors, claimed)
    assert judgement.verdict is Verdict.FAILED
    alike = {kept, kept.replace("native", "input")}  # with a weight of x's dtype
    assert kept in simplest(judgement.explained_by, claimed)
    assert set(simplest(judgement.explained_by, claimed)) <= alike
    assert judgement.findings[0].stage == "output"
    assert claimed in judgement.findings[0].sentence


@pytest.mark.parametrize(("claimed", "kept"), PAIRS[::3])
def test_in_fp32_the_weight_rules_differ_in_freedom_only(claimed: str, kept: str) -> None:
    """fp32 rounds nothing, so the residual rules coincide, and native multiply is one of the orders of the other."""
    tensors = problem(FLOAT)
    assert judged(results(eager(kept, **tensors)), tensors, claimed).verdict is Verdict.PASSED


@pytest.mark.parametrize("kept", ["native_multiply", "fp32_multiply"])
def test_a_weight_of_another_dtype(kept: str) -> None:
    tensors = problem(BF16, WIDTH, FLOAT)
    judgement = judged(results(eager(f"{kept}+rounded_sum", **tensors)), tensors, f"{kept}+rounded_sum")
    assert judgement.verdict is Verdict.PASSED


def test_alternatives_that_a_correct_result_rules_out() -> None:
    tensors = problem(BF16)
    judgement = judged(results(eager(BASE, **tensors)), tensors)
    assert set(judgement.ruled_out) == {
        "fp32_multiply+rounded_sum",
        "native_multiply+unrounded_sum",
        "native_multiply+rounded_value",
        f"{BASE}+rounded_inverse",
        f"{BASE}+divided",
    }
    assert all((count > 0) == (name != f"{BASE}+divided") for name, count in judgement.ruled_out.items())
    settled = {"fp32_multiply+rounded_sum", "native_multiply+unrounded_sum"}
    actual = results(eager(BASE, **tensors))
    again = judge(Problem(rms_norm, rms_norm.contract(BASE), tensors, {"eps": EPS}), actual, settled=settled)
    assert set(again.ruled_out) == set(judgement.ruled_out) - settled


def test_stages_rule_out_what_the_results_alone_cannot() -> None:
    """Weights of zeros hide every rounding from the output, but not from the stages that the kernel shows."""
    tensors = {**problem(BF16), "weight": torch.zeros(WIDTH, dtype=BF16)}
    stages = eager(BASE, **tensors)
    hidden, shown = (judged(actual, tensors).ruled_out for actual in (results(stages), stages))
    assert hidden["fp32_multiply+rounded_sum"] == 0 < shown["fp32_multiply+rounded_sum"]


def test_an_alternative_that_asks_for_the_same_steps_is_not_counted() -> None:
    """Without a residual its rules coincide, and in fp32 the weight rules differ in what is free."""
    tensors = {n: t for n, t in problem(BF16).items() if n != "residual"}
    judgement = judged(results(eager(BASE, **tensors)), tensors)
    assert set(judgement.ruled_out) == {"fp32_multiply+rounded_sum", f"{BASE}+rounded_inverse", f"{BASE}+divided"}


def test_a_weight_of_ones_makes_the_weight_rules_coincide() -> None:
    tensors = {**problem(BF16), "weight": torch.ones(WIDTH, dtype=BF16)}
    judgement = judged(results(eager("fp32_multiply+rounded_sum", **tensors)), tensors)
    assert judgement.verdict is Verdict.PASSED
    assert judgement.ruled_out["fp32_multiply+rounded_sum"] == 0


# Faults


def test_one_wrong_element_in_full() -> None:
    tensors = problem(BF16)
    actual = results(eager(BASE, **tensors))
    actual["output"] = actual["output"].clone()
    actual["output"][5, 17] = 100.0
    judgement = judged(actual, tensors)
    [finding, *_] = judgement.findings
    assert (judgement.verdict, judgement.explained_by) == (Verdict.FAILED, ())
    assert (finding.kind, finding.stage) == ("outside", "output")
    assert "1 of 2,048 elements" in finding.sentence
    assert "worst at [5, 17]: 100.0, allowed" in finding.sentence


def test_a_wrong_residual_sum_is_found_beside_a_right_output() -> None:
    tensors = problem(BF16)
    actual = results(eager(BASE, **tensors))
    actual["residual_sum"] = tensors["residual"]
    judgement = judged(actual, tensors)
    assert judgement.verdict is Verdict.FAILED
    assert judgement.findings[0].stage == "residual_sum"


def test_nan_in_a_result_is_a_special_finding() -> None:
    tensors = problem(BF16)
    actual = results(eager(BASE, **tensors))
    actual["output"] = torch.where(torch.arange(WIDTH) == 3, torch.nan, actual["output"])
    [finding, *_] = judged(actual, tensors).findings
    assert finding.kind == "special"
    assert "NaN or infinite where they must not be" in finding.sentence


def test_a_row_that_only_the_row_check_rejects() -> None:
    """fp32, one ulp off: inside every enclosure; only contracts that leave the order of the product free allow it."""
    tensors = {n: t for n, t in problem(FLOAT, 1024).items() if n != "residual"}
    output = eager(BASE, **tensors)["output"].clone()
    output.view(torch.int32)[7, 100] += 1
    judgement = judged({"output": output}, tensors)
    assert judgement.verdict is Verdict.FAILED
    assert [f.kind for f in judgement.findings] == ["rows"]
    assert judgement.rows is not None
    assert (judgement.rows.rows, judgement.rows.explained) == (8, 7)
    assert judgement.findings[0].sentence.startswith("1 of 8 rows cannot come from one fp32 inv_rms")
    assert all(c.startswith("fp32_multiply") or c.endswith("divided") for c in judgement.explained_by)


def test_special_rows_pass_if_they_are_what_fp32_gives() -> None:
    tensors = {n: t.clone() for n, t in problem(BF16).items()}
    tensors["x"][0, 3], tensors["x"][1, 5], tensors["x"][2, 7] = torch.inf, torch.nan, 3e38
    tensors["x"][3], tensors["residual"][3] = 0.0, -0.0
    tensors["weight"][9], tensors["weight"][10] = torch.inf, torch.nan
    for contract in CONTRACTS:
        judgement = judged(results(eager(contract, **tensors)), tensors, contract)
        assert judgement.verdict is Verdict.PASSED, (contract, [f.sentence for f in judgement.findings])


# Stages


def test_stages_of_a_correct_kernel_pass() -> None:
    tensors = problem(BF16)
    judgement = judged(eager(BASE, **tensors), tensors)
    assert judgement.verdict is Verdict.PASSED
    assert [s.name for s in judgement.stages] == [
        *("residual_sum", "variance", "inv_rms", "normalized", "product", "output")
    ]
    assert [s.name for s in judgement.stages if s.result] == ["residual_sum", "output"]
    assert [s.dtype for s in judgement.stages] == ["bf16", "fp32", "fp32", "bf16", "bf16", "bf16"]
    assert all(s.isolated.outside == s.cumulative.outside == 0 for s in judgement.stages)
    assert len({s.fingerprint for s in judgement.stages}) == 5, "the product is the output here, bit for bit"


def first_wrong(judgement: Judgement) -> str:
    assert judgement.verdict is Verdict.FAILED
    return next(s.name for s in judgement.stages if s.isolated.outside)


def broken(fault: Callable[[dict[str, Tensor]], None], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the stages of an RMSNorm in which `fault` replaces a stage, and what follows from it."""
    stages = eager(BASE, **tensors)
    fault(stages)
    value = stages["residual_sum"].float()
    if "inv_rms" not in fault.__name__:
        stages["inv_rms"] = torch.rsqrt(stages["variance"] + EPS)
    if "normalized" not in fault.__name__:
        stages["normalized"] = (value * stages["inv_rms"]).to(BF16)
    stages["product"] = stages["normalized"] * tensors["weight"]
    stages["output"] = stages["product"]
    return stages


def variance_in_bf16(stages: dict[str, Tensor]) -> None:
    stages["variance"] = stages["variance"].to(BF16).float()


def inv_rms_in_bf16(stages: dict[str, Tensor]) -> None:
    stages["inv_rms"] = stages["inv_rms"].to(BF16).float()


def normalized_toward_zero(stages: dict[str, Tensor]) -> None:
    exact = stages["residual_sum"].float() * stages["inv_rms"]
    stages["normalized"] = (exact.view(torch.int32) & ~0xFFFF).view(FLOAT).to(BF16)


@pytest.mark.parametrize(
    ("fault", "stage"),
    [(variance_in_bf16, "variance"), (inv_rms_in_bf16, "inv_rms"), (normalized_toward_zero, "normalized")],
)
def test_the_first_wrong_stage_is_named(fault: Callable[[dict[str, Tensor]], None], stage: str) -> None:
    """Only that stage is wrong from the kernel's own earlier values, although all later ones are from the inputs."""
    tensors = problem(BF16)
    judgement = judged(broken(fault, tensors), tensors)
    assert first_wrong(judgement) == stage
    assert [s.name for s in judgement.stages if s.isolated.outside] == [stage]
    assert next(s for s in judgement.stages if s.name == "output").cumulative.outside > 0


def test_a_product_in_fp32_is_found_at_the_product() -> None:
    """The kernel exposes what it multiplies, rounded; its product is that of the unrounded values."""
    tensors = problem(BF16)
    stages = eager(BASE, **tensors)
    value = stages["residual_sum"].float() * stages["inv_rms"]
    stages["product"] = stages["output"] = (value * tensors["weight"].float()).to(BF16)
    judgement = judged(stages, tensors)
    assert first_wrong(judgement) == "product"
    assert simplest(judgement.explained_by, BASE) == ("fp32_multiply+rounded_sum",)


def test_stages_narrow_what_explains_a_result() -> None:
    """Weights of zeros let every weight rule explain the output; the stages that the kernel shows do not."""
    tensors = {**problem(BF16), "weight": torch.zeros(WIDTH, dtype=BF16)}
    stages = eager("native_multiply+unrounded_sum", **tensors)
    claimed = "fp32_multiply+rounded_sum"
    assert judged(results(stages), tensors, claimed).verdict is Verdict.PASSED
    explaining = simplest(judged(stages, tensors, claimed).explained_by, claimed)
    assert explaining == ("native_multiply+unrounded_sum", "input_multiply+unrounded_sum")


def test_the_claimed_contract_by_another_name_explains_nothing() -> None:
    """Without a residual the residual rules are one computation."""
    tensors = {n: t for n, t in problem(BF16).items() if n != "residual"}
    stages = eager(BASE, **tensors)
    stages["variance"] = stages["variance"].to(BF16).float()
    judgement = judged(stages, tensors)
    assert judgement.verdict is Verdict.FAILED and judgement.explained_by == ()


def test_a_contract_that_knows_nothing_of_what_is_wrong_explains_nothing() -> None:
    """A softmax that overflows was said to keep `base2`, which knows nothing of scores near the largest number."""
    x = torch.tensor([[-1e24, 2e24]])
    of = Problem(softmax, softmax.contract("fp32_scores"), {"x": x}, {"scale": -3.0})
    wrong = judge(of, {"output": torch.tensor([[math.nan, 0.0]])})
    assert wrong.verdict is Verdict.FAILED and not wrong.explained_by
    other = of.under(softmax.contract("fp32_scores+base2"))
    assert judge(other, {"output": torch.tensor([[math.nan, 0.0]])}).verdict is not Verdict.FAILED


def test_values_that_are_not_of_the_format_of_their_stage_are_wrong_there() -> None:
    """A kernel that exposes fp32 where the contract rounds."""
    tensors = problem(BF16)
    stages = eager(BASE, **tensors)
    stages["normalized"] = stages["residual_sum"].float() * stages["inv_rms"]
    stages["product"] = stages["output"] = (stages["normalized"] * tensors["weight"].float()).to(BF16)
    assert first_wrong(judged(stages, tensors)) == "normalized"


def test_stages_that_follow_from_each_other_but_not_from_the_inputs() -> None:
    """A kernel that leaves its weight out twice over: each stage is right given the one before but one is missing."""
    tensors = problem(BF16)
    stages = eager(BASE, **tensors)
    doubled = eager(BASE, 2 * tensors["x"], tensors["weight"], tensors["residual"])
    actual = {"residual_sum": stages["residual_sum"], "output": doubled["output"], "product": doubled["product"]}
    judgement = judged(actual, tensors)
    sentences = {f.stage: f.sentence for f in judgement.findings}
    assert "a stage is missing or out of order" in sentences["output"]
    assert "a stage is missing" not in sentences["product"]


def test_a_stage_that_the_contract_does_not_have() -> None:
    tensors = problem(BF16)
    with pytest.raises(KernelError, match=r"'sum_of_squares', which is no stage here: 'residual_sum', 'variance'"):
        judged({**results(eager(BASE, **tensors)), "sum_of_squares": tensors["x"]}, tensors)


# What cannot be judged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[:, :-1], r"result 'output' has shape \(8, 255\), but the op requires \(8, 256\)"),
        (lambda y: y[:-1], r"has shape \(7, 256\)"),
        (lambda y: y[None], r"has shape \(1, 8, 256\)"),
        (lambda y: y.flatten(), r"has shape \(2048,\)"),
        (lambda y: y.float(), r"result 'output' has dtype torch.float32, but the op requires torch.bfloat16"),
        (lambda y: y.to("meta"), r"result 'output' has device meta, but the op requires cpu"),
    ],
)
@pytest.mark.parametrize("block", [1 << 22, 1 << 9], ids=["one block", "several blocks"])
def test_a_result_of_the_wrong_kind(
    change: Callable[[Tensor], Tensor], message: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastbit.judging.verdict._BLOCK", {"cpu": block})
    tensors = {n: t for n, t in problem(BF16).items() if n != "residual"}
    with pytest.raises(KernelError, match=message):
        judged({"output": change(eager(BASE, **tensors)["output"])}, tensors)


@pytest.mark.parametrize("block", [1 << 22, 1 << 9], ids=["one block", "several blocks"])
def test_a_result_with_rows_too_many(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the blocks in which the rows are judged."""
    monkeypatch.setattr("lastbit.judging.verdict._BLOCK", {"cpu": block})
    tensors = {n: t for n, t in problem(BF16).items() if n != "residual"}
    output = eager(BASE, **tensors)["output"]
    with pytest.raises(KernelError, match=r"has shape \(9, 256\), but the op requires \(8, 256\)"):
        judged({"output": torch.cat([output, output[:1]])}, tensors)


def test_a_missing_result() -> None:
    tensors = problem(BF16)
    with pytest.raises(KernelError, match="returned 'output', but not the result 'residual_sum'"):
        judged({"output": eager(BASE, **tensors)["output"]}, tensors)
    with pytest.raises(KernelError, match="returned nothing, but not the result"):
        judged({}, tensors)


def test_a_case_that_decides_nothing_is_inconclusive() -> None:
    """One column in fp32: no row to explain, and the enclosure of x / |x| is no point."""
    x = normals(6, 1)
    judgement = judged({"output": x * torch.rsqrt(x.square() + EPS)}, {"x": x})
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "no element has a single legal value" in judgement.reason


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_an_empty_result_is_right(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape, dtype=BF16)
    assert judged({"output": x}, {"x": x}).verdict is Verdict.PASSED


def test_an_empty_result_of_the_wrong_shape_or_dtype_is_an_error_all_the_same() -> None:
    x = torch.zeros(0, 8, dtype=BF16)
    for wrong in (torch.zeros(5, 8, dtype=BF16), torch.zeros(0, 8)):
        with pytest.raises(KernelError, match="but the op requires"):
            judged({"output": wrong}, {"x": x})
    with pytest.raises(KernelError, match="not the result 'output'"):
        judged({}, {"x": x})


# Blocks


def without_bits(judgement: Judgement) -> Judgement:
    """Round figures off, since sums in another order differ in their last bits."""
    stages = tuple(
        replace(
            s,
            **{
                view: replace(
                    getattr(s, view),
                    **{
                        n: round(getattr(getattr(s, view), n), 9)
                        for n in ("squared_error", "squared_exact", "squared_contract", "bias_sum")
                    },
                )
                for view in ("cumulative", "isolated")
            },
        )
        for s in judgement.stages
    )
    return replace(judgement, stages=stages)


@pytest.mark.parametrize("wrong", [None, (0, 0, 5), (2, 3, 31), (4, 6, 63)])
@pytest.mark.parametrize("block", [1, 130, 450, 1000])
def test_blocks_of_rows_give_the_same_judgement(
    block: int, wrong: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a strided input with two leading dimensions, and one wrong element anywhere."""
    x = normals(7, 5, 80, dtype=BF16).transpose(0, 1)[..., :64]
    assert x.shape == (5, 7, 64)
    tensors = {"x": x, "weight": normals(64, dtype=BF16, seed=1)}
    stages = {n: t for n, t in eager(BASE, **tensors).items() if n in ("inv_rms", "output")}
    if wrong is not None:
        stages["output"][wrong] = 50.0
    whole = judged(stages, tensors)
    monkeypatch.setattr("lastbit.judging.verdict._BLOCK", {"cpu": block})
    cut = judged(stages, tensors)
    assert replace(without_bits(cut), ruled_out={}) == replace(without_bits(whole), ruled_out={})
    assert set(cut.ruled_out) == set(whole.ruled_out)
    output = cut.stages[-1]
    assert output.cumulative.numel == x.numel()
    if wrong is not None:
        assert output.cumulative.worst is not None
        assert output.cumulative.worst.index == wrong


def test_results_of_several_contracts_in_different_blocks_are_explained_by_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = problem(BF16)
    first, second = (
        results(eager(c, **tensors)) for c in ("fp32_multiply+rounded_sum", "native_multiply+rounded_value")
    )
    mixed = {n: torch.cat([first[n][:4], second[n][4:]]) for n in first}
    monkeypatch.setattr("lastbit.judging.verdict._BLOCK", {"cpu": 4 * WIDTH})
    judgement = judged(mixed, tensors)
    assert (judgement.verdict, judgement.explained_by) == (Verdict.FAILED, ())


@op(rows=())
def column_sum(x: Enclosure, *, contract, stage) -> None:
    """Add the rows: no dimension of x indexes independent rows."""
    turned = Enclosure(x.parts.transpose(-1, -2))
    stage("sums", Enclosure(total(turned).parts.squeeze(-1)), result=True)


@pytest.mark.parametrize("block", [1 << 22, 64])
def test_an_op_without_independent_rows_is_judged_in_one_piece(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(-9, 9, (40, 16), generator=torch.Generator().manual_seed(0)).float()
    monkeypatch.setattr("lastbit.judging.verdict._BLOCK", {"cpu": block})
    judgement = judge(Problem(column_sum, column_sum.contract(), {"x": x}, {}), {"sums": x.sum(0)})
    assert judgement.verdict is Verdict.PASSED


def test_a_vector_is_one_row() -> None:
    tensors = {"x": normals(64, dtype=BF16), "weight": normals(64, dtype=BF16, seed=1)}
    judgement = judged({"output": eager(BASE, **tensors)["output"]}, tensors)
    assert judgement.verdict is Verdict.PASSED
    assert judgement.rows is not None
    assert judgement.rows.rows == 1


# Quantisation


def static(tensors: dict[str, Tensor], scale: Tensor) -> Tensor:
    y = eager(BASE, **tensors)["output"].float()
    return (y * scale.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def test_static_codes() -> None:
    tensors = {n: t for n, t in problem(BF16).items() if n != "residual"}
    scale = torch.tensor([0.0123])
    inputs = {**tensors, "scale": scale}
    assert judged({"quantized": static(tensors, scale)}, inputs, quant="static").verdict is Verdict.PASSED
    y = eager(BASE, **tensors)["output"].float()
    toward_zero = y * scale.reciprocal() * (1 - 2.0**-5)
    wrong = toward_zero.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    judgement = judged({"quantized": wrong}, inputs, quant="static")
    assert judgement.verdict is Verdict.FAILED
    assert judgement.findings[0].stage == "quantized"


def test_dynamic_codes_and_scale() -> None:
    tensors = {n: t for n, t in problem(FP16).items() if n != "residual"}
    y = eager(BASE, **tensors)["output"].float()
    scale = y.abs().amax(-1, keepdim=True) / torch.tensor(448.0)
    codes = (y / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    judgement = judged({"quantized": codes, "scale": scale}, tensors, quant="dynamic")
    assert judgement.verdict is Verdict.PASSED, [f.sentence for f in judgement.findings]
    wrong = judged({"quantized": codes, "scale": scale * (1 + 2.0**-10)}, tensors, quant="dynamic")
    assert first_wrong(wrong) == "scale"


# Sentences


def comparison(outside: int, numel: int = 400, **rest: Any) -> Comparison:
    return Comparison(numel=numel, outside=outside, **rest)


WORST = Worst((1, 7), 2.5, 2.0, 2.0000001, 1.5, 2.25, 3.0)


@pytest.mark.parametrize(
    ("cumulative", "isolated", "kind", "sentence"),
    [
        (
            comparison(1, worst=WORST), comparison(0), "outside",
            "1 of 400 elements (0.25 %) have a value that is not possible under c given the inputs, although each "
            "stage follows from the one before: a stage is missing or out of order; worst at [1, 7]: 2.5, allowed from "
            "1.5 to 2.25, exact 2.0000001, 3 ulp from the contract's value.",
        ),
        (
            comparison(9), comparison(2, special=2, worst=replace(WORST, lo=2.25, exact=math.nan, ulp=math.inf)),
            "special",
            "2 of 400 elements (0.5 %) are NaN or infinite where they must not be, or the reverse, under c; worst at "
            "[1, 7]: 2.5, allowed 2.25.",
        ),
        (
            comparison(0), comparison(123, 4_000_000, special=1), "outside",
            "123 of 4,000,000 elements (0.00308 %) have a value that is not possible under c given the kernel's own "
            "earlier stages; no element to show.",
        ),
    ],
)  # fmt: skip
def test_what_is_said_of_a_stage(cumulative: Comparison, isolated: Comparison, kind: str, sentence: str) -> None:
    stage = StageResult("y", "bf16", True, cumulative, isolated)
    assert describe_stage(stage, "c") == Finding(kind, "y", sentence)


ROWS_OF = "5 of 9 rows cannot come from one fp32 rstd under c"


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        (Needs(), f"{ROWS_OF}."),
        (Needs(5), f"{ROWS_OF}: some elements of a row need a larger one, others a smaller."),
        (
            Needs(5, 1, Need(3.0, 2.0), Need(3.0, 2.0)),
            f"{ROWS_OF}: 1 would come from another one, 1.5 times the contract's (3 where that is 2); in the others, "
            "some elements of a row need a larger one, others a smaller.",
        ),
        (
            Needs(5, 5, Need(2.2, 2.0), Need(4.44, 4.0)),
            f"{ROWS_OF}: each would come from another one, in every row about 1.11 times the contract's (4.44 where "
            "that is 4), which hints at a wrong count of elements.",
        ),
        (
            Needs(3, 3, Need(2.2, 2.0), Need(2.23, 2.02)),
            f"{ROWS_OF}: each of 3 that were searched would come from another one, in every row about 1.10396 times "
            "the contract's (2.23 where that is 2.02), which hints at a wrong count of elements, or a wrong eps, as "
            "these rows are alike.",
        ),
        (
            Needs(3, 2, Need(2.2, 2.0), Need(16.0, 8.0)),
            f"{ROWS_OF}: 2 of 3 that were searched would come from another one, from 1.1 times the contract's (2.2 "
            "where that is 2) to 2 times the contract's (16 where that is 8); the larger the contract's value, the "
            "farther is the ratio from 1, which hints at eps; in the others, some elements of a row need a larger one, "
            "others a smaller.",
        ),
        (
            Needs(5, 5, Need(0.5, 2.0), Need(0.9, 1.0)),
            f"{ROWS_OF}: each would come from another one, from 0.25 times the contract's (0.5 where that is 2) to 0.9 "
            "times the contract's (0.9 where that is 1); the larger the contract's value, the farther is the ratio "
            "from 1, which hints at eps.",
        ),
        (
            Needs(5, 5, Need(0.5, 2.0), Need(1.1, 1.0)),
            f"{ROWS_OF}: each would come from another one, from 0.25 times the contract's (0.5 where that is 2) to 1.1 "
            "times the contract's (1.1 where that is 1); the larger the contract's value, the farther is the ratio "
            "from 1, which hints at cancellation, as in a variance in one pass.",
        ),
        (
            Needs(5, 5, Need(2.2, 2.0), Need(16.0, 2.0)),
            f"{ROWS_OF}: each would come from another one, from 1.1 times the contract's (2.2 where that is 2) to 8 "
            "times the contract's (16 where that is 2).",
        ),
    ],
)
def test_what_is_said_of_rows(needs: Needs, sentence: str) -> None:
    assert describe_rows(RowCheck("rstd", 9, 3, 1, needs), "c") == Finding("rows", "rstd", sentence)


def test_what_is_said_of_rows_of_two_values() -> None:
    said = describe_split(RowCheck("rstd", 1200, 3, 1100, also=("mean",)), "c")
    assert said.kind == "lanes" and said.stage == "rstd" and said.notice
    assert said.sentence.startswith(
        "1,100 of 1,200 rows come from two values of fp32 rstd and mean, one in each half of"
    )
    assert "in rows of at most 32 columns; a statistic" in said.sentence
