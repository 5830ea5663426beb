"""What is nearer to real arithmetic than fp32 keeps a contract; what is between both does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.inputs import build
from lastbit.judging.beyond_fp32 import nearer
from lastbit.judging.expected import Numbers, Trace, known_exactly
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics import FORMATS, Enclosure, Premises, cast, exp, sum_in_any_order, using
from lastbit.numerics.premises import EXACT, REAL
from lastbit.ops import Op
from lastbit.references.all_reduce import all_reduce
from lastbit.references.cross_entropy import cross_entropy
from lastbit.references.cross_entropy_backward import cross_entropy_backward
from lastbit.references.layer_norm_gated import layer_norm_gated
from lastbit.references.rms_norm import rms_norm
from lastbit.references.softmax import softmax
from lastbit.references.swiglu import swiglu
from lastbit.result import Judgement, Verdict

CANCELLING = "cross_entropy logits=bf16[1,70]:gates labels=int64[1]:labels_70 logit_scale=-1.0 seed=19"
LOSS = 1.953842e-27  # log1p of the exponentials of the other logits, which fp64 gives to the last digit


def judged(op: Op, given: dict[str, Tensor], actual: dict[str, Tensor], **params: Any) -> Judgement:
    return judge(Problem(op, op.contract(), given, params), actual)


def normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def losses_of(x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp64 without cancellation."""
    others = x.double() - x.double().gather(-1, labels[:, None])
    others.scatter_(-1, labels[:, None], -math.inf)
    return others.exp().sum(-1).log1p()


def test_a_row_with_gates_near_the_end_of_fp32_is_legal_as_real_arithmetic_has_it() -> None:
    """Some elements are near 2^-126, where fp32 may lose digits; real arithmetic knows them like others."""
    case = parse_case(
        "layer_norm_gated x=fp32[1,320] weight=fp32[320] z=fp32[1,320]:gates eps=1e-05 is_rms_norm=True "
        "norm_before_gate=False seed=0"
    )
    given = build(case, "cpu").tensors
    x, weight, z = (given[name].double() for name in ("x", "weight", "z"))
    gated = x * z * torch.sigmoid(z)
    output = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert ((output.abs() > 0) & (output.abs() < 2.0**-110)).any()
    op = layer_norm_gated
    problem = Problem(op, op.contract("single_rounding"), given, dict(case.params))
    assert judge(problem, {"output": output.float()}).verdict is Verdict.PASSED
    wrong = torch.where(output.abs() < 2.0**-110, output * (1 + 2.0**-10), output).float()
    assert judge(problem, {"output": wrong}).verdict is Verdict.FAILED


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("factor", [0.0, 1.0, 1e20])
def test_a_loss_that_did_not_cancel_is_legal_and_a_wrong_one_is_not(factor: float, reduction: str) -> None:
    """0 is what fp32 gives; what is far from both is wrong."""
    case = parse_case(CANCELLING)
    given = build(case, "cpu").tensors
    losses = losses_of(-given["logits"], given["labels"])
    assert losses.item() == pytest.approx(LOSS)
    name = "losses" if reduction == "none" else "loss"
    judgement = judged(cross_entropy, given, {name: (losses * factor).float()}, logit_scale=-1.0, reduction=reduction)
    assert judgement.verdict is (Verdict.FAILED if factor > 1 else Verdict.PASSED), judgement.findings


def test_a_gradient_that_did_not_cancel_is_legal() -> None:
    given = build(parse_case(CANCELLING), "cpu").tensors
    x, labels = -given["logits"].double(), given["labels"][:, None]
    log_probs = (x - x.gather(-1, labels)) - losses_of(x, given["labels"])[:, None]
    gradient = -log_probs.exp().scatter(-1, labels, log_probs.gather(-1, labels).expm1())
    assert gradient[0, 69].item() == pytest.approx(LOSS)
    inputs = {"logits": given["logits"].float(), "labels": given["labels"], "grad_output": torch.ones(1)}
    for legal in (gradient, gradient.scatter(-1, labels, 0.0)):
        actual = {"grad_logits": legal.float()}
        judgement = judged(cross_entropy_backward, inputs, actual, logit_scale=-1.0)
        assert judgement.verdict is Verdict.PASSED, judgement.findings
    actual = {"grad_logits": gradient.scatter(-1, labels, 1e-5).float()}
    assert judged(cross_entropy_backward, inputs, actual, logit_scale=-1.0).verdict is Verdict.FAILED


def test_a_failing_case_is_evaluated_in_real_arithmetic_once(monkeypatch: pytest.MonkeyPatch) -> None:
    premises, evaluate = list[Premises](), Problem.evaluate

    def counted(problem: Problem, *given: Any) -> Trace:
        premises.append(problem.premises)
        return evaluate(problem, *given)

    monkeypatch.setattr(Problem, "evaluate", counted)
    ranks = {"x": normals(1, 4, 64), "peer_1": normals(2, 4, 64)}
    judgement = judged(all_reduce, ranks, {"reduced": 2 * (ranks["x"] + ranks["peer_1"])})
    assert judgement.verdict is Verdict.FAILED and premises.count(REAL) == 1


@pytest.mark.parametrize(
    ("params", "stages", "said"),
    [
        ({}, {}, "allowed 0.0, exact 1.9538417e-27"),
        ({}, {"lse": torch.tensor([171.0])}, "allowed 0.0, exact 0"),  # given the kernel's own lse
        ({"reduction": "sum"}, {}, "allowed 0.0, exact 1.9538417e-27"),
        ({"label_smoothing": 0.5}, {}, "exact 81.6864175"),  # as F.cross_entropy has it in fp64
        ({"z_loss": 1e-40}, {}, None),  # fp64 loses the digits: nothing is called exact
    ],
)
def test_what_is_called_exact_is(params: dict[str, Any], stages: dict[str, Tensor], said: str | None) -> None:
    given = build(parse_case(CANCELLING), "cpu").tensors
    name = "loss" if "reduction" in params else "losses"
    judgement = judged(cross_entropy, given, {**stages, name: torch.tensor([1e9])}, logit_scale=-1.0, **params)
    [finding] = judgement.findings
    assert said is None or said in finding.sentence
    assert ("exact" in finding.sentence) == (said is not None)


@pytest.mark.parametrize(
    ("made", "exact"),
    [
        (lambda one: one.rounded(FORMATS["bf16"]), 1 + 2.0**-10),  # the contract's roundings are none of its
        (lambda one: sum_in_any_order([one, one, one], FORMATS["bf16"]), 3 + 3 * 2.0**-10),
        (lambda one: sum_in_any_order([one - 2.0**-10, one * 1e-39], FORMATS["bf16"]) - 1.0, None),
        (lambda one: exp(one * -740.0), None),  # a number of fp64 with few digits
        (lambda one: exp(one * -740.0) * 1e38, None),
        (lambda one: exp(one - one), 1.0),
    ],
)
def test_an_exact_value_is_known_or_not(made: Callable[[Enclosure], Enclosure], exact: float | None) -> None:
    with using(EXACT):
        stage = Numbers(made(Enclosure.point(1 + 2.0**-10)), FORMATS["fp32"])
    found = known_exactly(stage).item()
    assert math.isnan(found) if exact is None else found == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("least", "most", "legal", "wrong"),
    [
        (0.75, 0.75, [0.51, 0.75, 1.0], [0.5, 0.49, 1.01]),  # on both sides, nearer than 1
        (0.25, 0.75, [0.25, 0.51, 1.0], [0.249, 0.0, -0.4]),  # what is the truth, or nearer to it wherever it is
        (0.75, 1.0, [1.0], [0.99, 1.01]),  # fp32 may be the truth
        (-math.inf, 0.75, [1.0], [0.75]),
    ],
)
def test_what_is_nearer_to_the_truth_than_fp32(
    sign: float, least: float, most: float, legal: list[float], wrong: list[float]
) -> None:
    """The truth lies between `least` and `most`, and fp32 gives 1."""
    ends = torch.tensor(sorted([sign * least, sign * most]))
    middle = torch.tensor([0.75 * sign])
    real = Numbers(Enclosure(torch.stack([middle, middle, ends[:1], ends[1:]]).double()), FORMATS["fp32"])
    allowed = nearer(Numbers(Enclosure.point(torch.tensor([sign])), FORMATS["fp32"]), real)
    assert allowed.outside(sign * torch.tensor(legal)).tolist() == [False] * len(legal)
    assert allowed.outside(sign * torch.tensor(wrong)).tolist() == [True] * len(wrong)


@pytest.mark.parametrize("wrong", [math.nan, 0.0, 5.0])
def test_where_real_arithmetic_is_not_known_it_explains_nothing(wrong: float) -> None:
    """Exponentials of what finfo.min has moved, and a gate of -inf: fp64 leaves any number open, fp32 one."""
    x, mask = normals(0, 4, 600).bfloat16(), torch.zeros(4, 600).bfloat16()
    mask[3] = torch.finfo(torch.bfloat16).min
    output = torch.softmax(x.float() * 0.125 + mask.float(), -1).bfloat16()
    output[3] = wrong
    assert judged(softmax, {"x": x, "mask": mask}, {"output": output}, scale=0.125).verdict is Verdict.FAILED
    gate, up = normals(1, 2, 64).bfloat16(), normals(2, 2, 64).bfloat16()
    gate[0, 3] = -math.inf
    limited = gate.float().clamp(max=7)
    output = (limited * torch.sigmoid(1.702 * limited) * (up.float().clamp(-7, 7) + 1)).bfloat16()
    limits = {"swiglu_limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    assert judged(swiglu, {"x": gate, "up": up}, {"output": output}, **limits).verdict is Verdict.PASSED
    output[0, 3] = 123.0 if math.isnan(wrong) else wrong  # NaN is right here
    assert judged(swiglu, {"x": gate, "up": up}, {"output": output}, **limits).verdict is Verdict.FAILED


@pytest.mark.parametrize(("left_out", "verdict"), [(0, Verdict.PASSED), (8, Verdict.FAILED)])
def test_a_sum_over_rows_must_follow_from_the_kernels_own_stages(left_out: int, verdict: Verdict) -> None:
    """The loss may be what the inputs allow in any order, and yet not what follows from the lse that was stored."""
    x, labels = normals(0, 3, 70000), torch.tensor([0, 5, 9])  # more than one block
    x[0] = 0.0
    x[0, 0] = 200.0
    lse, some = (x[:, : 70000 - n].double().logsumexp(-1).float() for n in (0, left_out))
    loss = (some - x.gather(-1, labels[:, None])[:, 0]).sum().reshape(1)
    given = {"logits": x, "labels": labels}
    assert judged(cross_entropy, given, {"lse": lse, "loss": loss}, reduction="sum").verdict is verdict


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_sum_over_ranks_in_fp64_is_rounded_once(ranks: int) -> None:
    """fp32 rounds to the middle of two numbers first, which real arithmetic is nearer to one of."""
    tensors = [(normals(rank, 256, 256) * 2.0 ** (9 * rank)).bfloat16() for rank in range(ranks)]
    given = {f"peer_{rank}" if rank else "x": tensor for rank, tensor in enumerate(tensors)}
    reduced = cast(torch.stack([t.double() for t in tensors]).sum(0), torch.bfloat16)
    assert judged(all_reduce, given, {"reduced": reduced}).verdict is Verdict.PASSED
    reduced[5, 9] *= 1 + 2.0**-6
    judgement = judged(all_reduce, given, {"reduced": reduced})
    assert judgement.verdict is Verdict.FAILED
    assert judgement.stages[0].cumulative.outside == 1


def normed(x: Tensor, weight: Tensor, eps: float, statistics: tuple[torch.dtype, torch.dtype]) -> Tensor:
    """LayerNorm with the mean and the variance in these dtypes, and everything else in fp32."""
    mean = x.to(statistics[0]).mean(-1, keepdim=True).float()
    variance = (x - mean).to(statistics[1]).square().mean(-1, keepdim=True).float()
    return (x - mean) * torch.rsqrt(variance + eps) * weight


@pytest.mark.parametrize("mean", [torch.float32, torch.float64])
@pytest.mark.parametrize("variance", [torch.float32, torch.float64])
def test_a_mean_may_have_more_range_than_the_variance(mean: torch.dtype, variance: torch.dtype) -> None:
    """The sum of x overflows, and so do the squares: each in fp32 alone."""
    given = {"x": normals(0, 4, 64).abs().add(1) * 2e37, "weight": normals(1, 64)}
    y = normed(**given, eps=1e-6, statistics=(mean, variance))
    assert judged(layer_norm_gated, given, {"output": y}, eps=1e-6).verdict is not Verdict.FAILED
    y[2, 3] = 0.5
    assert judged(layer_norm_gated, given, {"output": y}, eps=1e-6).verdict is Verdict.FAILED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16, 1024])
def test_a_row_in_fp64_needs_no_latent_value_of_fp32(dtype: torch.dtype, width: int) -> None:
    given = {"x": normals(1, 16, width).to(dtype), "weight": normals(2, width).to(dtype)}
    x, weight, eps = given["x"].double(), given["weight"].double(), float(torch.tensor(1e-6))
    y = cast(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight, dtype)
    problem = Problem(rms_norm, rms_norm.contract("fp32_multiply"), given, {"eps": 1e-6})
    judgement = judge(problem, {"output": y})
    assert judgement.verdict is Verdict.PASSED, judgement.findings
    assert judgement.rows is not None and judgement.rows.explained == judgement.rows.rows
    y[3, 5] = torch.nextafter(y[3, 5], torch.full_like(y[3, 5], math.inf))
    assert judge(problem, {"output": y}).verdict is Verdict.FAILED


def in_fp64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LayerNorm in fp64, rounded once."""
    centered = x.double() - x.double().mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_a_difference_that_cancels_in_fp64_is_legal() -> None:
    """The mean of a row is 1, and so are some elements: real arithmetic gives 0, and fp64 what it errs."""
    x = (normals(1, 6, 93) * 4).round()
    x[:, 0] += 93 - x.sum(-1)
    given = {"x": x, "weight": normals(2, 93).bfloat16()}
    y = in_fp64(**given, eps=1e-5)
    assert (y == 0).any(-1).all()
    assert judged(layer_norm_gated, given, {"output": y.float()}, eps=1e-5).verdict is Verdict.PASSED
    for wrong in (y + 1e-12 * (y == 0), y * (1 + 1e-7 * (y > 0))):
        assert judged(layer_norm_gated, given, {"output": wrong.float()}, eps=1e-5).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("eps", "verdict"),
    [(1e-5, Verdict.PASSED), (float(torch.tensor(1e-5)), Verdict.PASSED), (1.00001e-5, Verdict.FAILED)],
)
def test_in_fp64_eps_may_be_of_fp32_or_as_it_is_written(eps: float, verdict: Verdict) -> None:
    given = {"x": normals(1, 64, 93) * 1e-3, "weight": normals(2, 93).bfloat16()}
    x = given["x"].double()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * given["weight"].double()
    judgement = judged(layer_norm_gated, given, {"output": y.float()}, eps=1e-5, is_rms_norm=True)
    assert judgement.verdict is verdict
