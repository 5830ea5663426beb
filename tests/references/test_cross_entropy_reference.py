"""The references of cross entropy: formulas in fp64, roundings that tell contracts apart, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit import assert_contract, kernel
from lastbit.case import TensorSpec, parse_case
from lastbit.errors import UsageError
from lastbit.inputs import build
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.kernel import load_file
from lastbit.ops import Op
from lastbit.verify.assertion import ContractViolation

FOLDER = Path(__file__).resolve().parents[2] / "references"
FORWARD: Op = load_file(FOLDER / "cross_entropy.py").cross_entropy
BACKWARD: Op = load_file(FOLDER / "cross_entropy_backward.py").cross_entropy_backward
ROWS, CLASSES = 6, 40
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2},
    {"logit_scale": 0.7, "softcap": 3.0},
    {"label_smoothing": 0.2, "softcap": 3.0, "z_loss": 0.05},
    {"label_smoothing": 1.0, "logit_scale": -0.5, "z_loss": 0.05},
]


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    labels[1] = -100
    logits = torch.randn(ROWS, CLASSES, generator=generator).bfloat16() * 3
    return {"logits": logits.to(dtype), "labels": labels}


def losses_of(logits: Tensor, labels: Tensor, **params: Any) -> Tensor:
    """In fp64, by torch."""
    scale, cap, z = params.get("logit_scale", 1.0), params.get("softcap"), params.get("z_loss", 0.0)
    x = logits * scale
    x = x if cap is None else cap * torch.tanh(x / cap)
    smoothing = params.get("label_smoothing", 0.0)
    losses = F.cross_entropy(x, labels, reduction="none", label_smoothing=smoothing)
    return losses + z * (labels != -100) * torch.logsumexp(x, -1) ** 2


def trace_of(op: Op, contract: str, given: dict[str, Tensor], **params: Any) -> Any:
    return Problem(op, op.contract(contract), given, params).evaluate()


@pytest.mark.parametrize("params", OPTIONS, ids=str)
def test_the_exact_losses_are_those_of_torch_in_fp64(params: dict[str, Any]) -> None:
    given = tensors(torch.float32)
    trace = trace_of(FORWARD, "from_lse", given, **params)
    losses = trace.stages["losses"].allowed
    torch.testing.assert_close(losses.exact, losses_of(**tensors(), **params), rtol=1e-7, atol=1e-9)
    assert bool(((losses.lo <= losses.value) & (losses.value <= losses.hi)).all())


@pytest.mark.parametrize("formula", ["from_log_probs", "rounded_log_probs", "rounded_log_sum"])
@pytest.mark.parametrize("params", OPTIONS[:2], ids=str)
def test_formulas_agree_in_exact_arithmetic(formula: str, params: dict[str, Any]) -> None:
    given = tensors(torch.bfloat16)
    own, other = (trace_of(FORWARD, c, given, **params).stages["losses"].allowed for c in ("from_lse", formula))
    torch.testing.assert_close(own.exact, other.exact, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("params", OPTIONS, ids=str)
def test_the_exact_gradient_is_that_of_the_losses(params: dict[str, Any]) -> None:
    grad_output = torch.linspace(-1, 2, ROWS)
    leaf = tensors()["logits"].requires_grad_()
    (wanted,) = torch.autograd.grad(losses_of(leaf, tensors()["labels"], **params), leaf, grad_output.double() / 3)
    given = {**tensors(torch.float32), "grad_output": grad_output}
    for contract in ("from_lse", "normalized+rounded_gradient"):
        found = trace_of(BACKWARD, contract, given, count=3, **params).stages["grad_logits"].allowed
        torch.testing.assert_close(found.exact, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_exact_gradient_of_log_probs_is_the_same(smoothing: float) -> None:
    given = {**tensors(torch.float32), "grad_output": torch.linspace(-1, 2, ROWS)}
    own, other = (
        trace_of(BACKWARD, c, given, label_smoothing=smoothing).stages["grad_logits"].allowed
        for c in ("from_lse", "from_log_probs")
    )
    torch.testing.assert_close(own.exact, other.exact, rtol=1e-6, atol=1e-9)


def test_a_mean_is_that_of_the_rows_which_count() -> None:
    given = tensors(torch.float32)
    wanted = float(F.cross_entropy(tensors()["logits"], given["labels"]))
    for contract in ("from_lse", "from_log_probs"):
        loss = trace_of(FORWARD, contract, given, reduction="mean").stages["loss"].finished.allowed
        assert abs(float(loss.exact) - wanted) < 1e-6 and float(loss.lo) <= wanted <= float(loss.hi)
    ignored = {**given, "labels": torch.full((ROWS,), -100)}
    loss = trace_of(FORWARD, "from_lse", ignored, reduction="mean").stages["loss"].finished.allowed
    assert loss.value.isnan().all()


def test_an_offset_of_all_logits_cancels_in_log_probs_alone() -> None:
    given = tensors(torch.float32)
    given["logits"] = given["logits"] + 2.0**14
    errors = {}
    for contract in ("from_lse", "from_log_probs"):
        losses = trace_of(FORWARD, contract, given).stages["losses"].allowed
        errors[contract] = float((losses.value - losses.exact).abs().max())
    assert errors["from_lse"] > 100 * errors["from_log_probs"] > 0


def judged(op: Op, contract: str, given: dict[str, Tensor], actual: dict[str, Tensor], **params: Any) -> str:
    return judge(Problem(op, op.contract(contract), given, params), actual).verdict.value


def test_torch_on_a_cpu_rounds_the_sum_of_exponentials() -> None:
    given = tensors(torch.bfloat16)
    actual = {"losses": F.cross_entropy(input=given["logits"], target=given["labels"], reduction="none")}
    assert judged(FORWARD, "rounded_log_sum", given, actual) == "PASSED"
    logits = torch.randn(200, 500, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    given = {"logits": logits, "labels": torch.arange(200)}
    actual = {"losses": F.cross_entropy(logits, given["labels"], reduction="none")}
    assert judged(FORWARD, "rounded_log_sum", given, actual) == "PASSED"
    assert judged(FORWARD, "rounded_log_probs", given, actual) == "FAILED"


def test_a_sum_that_is_divided_by_a_count_is_rounded_before() -> None:
    """As where F.cross_entropy gives a sum in bf16, which a trainer divides by the number of its tokens."""
    generator = torch.Generator().manual_seed(0)
    logits, labels, s = torch.randn(300, 24, generator=generator).bfloat16() * 3, torch.arange(300) % 24, 0.1
    log_probs = torch.log_softmax(logits.float(), -1).bfloat16().float()
    own = -log_probs.gather(1, labels[:, None]).sum().bfloat16()
    smooth = -log_probs.sum(-1).bfloat16().float().sum().bfloat16()
    total = ((1 - s) * own.float()).bfloat16() + (s / 24 * smooth.float()).bfloat16()
    given = {"logits": logits, "labels": labels}
    for count in range(3, 40):
        options = {"label_smoothing": s, "reduction": "mean", "count": count}
        assert judged(FORWARD, "rounded_log_probs", given, {"loss": (total / count)[None]}, **options) == "PASSED"


@pytest.mark.parametrize(("loss", "verdict"), [(11.75, "PASSED"), (11.6875, "FAILED")])
def test_a_smooth_loss_is_divided_by_a_rounded_number_of_rows(loss: float, verdict: str) -> None:
    """497 of the rows count, and torch on an H200 gave 11.75: it divides by that number in bf16, 496."""
    case = parse_case("cross_entropy logits=bf16[684,44]:rows labels=int64[684]:labels_44 seed=8517695")
    given = build(case, torch.device("cpu")).tensors
    options = {"label_smoothing": 0.5, "reduction": "mean"}
    actual = {"loss": torch.tensor([loss]).bfloat16()}
    assert judged(FORWARD, "rounded_log_probs", given, actual, **options) == verdict


@pytest.mark.parametrize("divided", ["first", "between", "last"])
def test_subnormal_gradients_may_be_divided_by_the_count_anywhere(divided: str) -> None:
    logits = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    lse, grad, count = torch.full((64,), 93.5), torch.full((64,), 1.7), 2
    squashed = torch.tanh(logits)
    probs = torch.exp(squashed - lse[:, None])
    probs[:, 0] -= 1.0
    factors = [probs, 1 - squashed * squashed, grad[:, None]]
    place = {"first": 0, "between": 1, "last": 2}[divided]
    gradient = torch.ones(64, 64)
    for position, factor in enumerate(factors):
        gradient = gradient * factor
        if position == place:
            gradient = gradient / count
    given = {"logits": logits, "labels": torch.zeros(64, dtype=torch.int64), "grad_output": grad, "lse": lse}
    judgement = judged(BACKWARD, "from_lse", given, {"grad_logits": gradient}, softcap=1.0, count=count)
    assert judgement != "FAILED"  # inconclusive: what tanh may err by leaves several multiples of the least number


def test_rows_are_judged_in_blocks_with_one_label_each() -> None:
    """More rows than are evaluated at once; a single wrong loss is found where it is."""
    logits = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = {"logits": logits, "labels": torch.arange(4000) % 20}
    found = Problem(FORWARD, FORWARD.contract("rounded_log_sum"), given, {})
    assert len(list(found.blocks(1 << 15))) > 1 and found.results == ["losses"]
    losses = F.cross_entropy(logits, given["labels"], reduction="none")
    assert judge(found, {"losses": losses}).verdict.value == "PASSED"
    losses[3999] *= 1.01
    judgement = judge(found, {"losses": losses})
    assert judgement.verdict.value == "FAILED" and judgement.stages[0].cumulative.worst.index == (3999,)
    assert Observation.of(found, {"losses": losses}).has_rows


REFUSED: list[tuple[Op, str, dict[str, Any], str]] = [
    (FORWARD, "", {"labels": torch.zeros(3).long()}, r"labels has shape \(3,\)"),
    (
        FORWARD,
        "",
        {"labels": torch.full((ROWS,), CLASSES)},
        "a label is 40; it must be from 0 to 39, or ignore_index=-100",
    ),
    (FORWARD, "", {"reduction": "average"}, "reduction='average' is none of none, sum, mean"),
    (FORWARD, "", {"count": 3}, "count=3 with reduction=none"),
    (FORWARD, "", {"softcap": -1.0}, r"softcap=-1\.0 must be positive"),
    (FORWARD, "", {"label_smoothing": 2.0}, r"label_smoothing=2\.0 must be from 0 to 1"),
    (FORWARD, "from_log_probs", {"z_loss": 0.1}, r"z_loss=0\.1 has a meaning under from_lse only"),
    (BACKWARD, "normalized", {"lse": torch.zeros(ROWS)}, "a saved lse has a meaning under from_lse only"),
    (BACKWARD, "from_log_probs", {"softcap": 3.0}, "logit_scale, softcap and z_loss have a meaning"),
    (BACKWARD, "from_log_probs+rounded_gradient", {}, "rounded_gradient has a meaning"),
    (BACKWARD, "", {"count": 0}, "count=0 must be 1 or more"),
    (BACKWARD, "", {"grad_output": torch.zeros(2)}, r"grad_output has shape \(2,\)"),
]


@pytest.mark.parametrize(("op", "contract", "changed", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_has_no_meaning_is_refused(op: Op, contract: str, changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = tensors(torch.float32)
    given |= {"grad_output": torch.zeros(ROWS)} if op is BACKWARD else {}
    given |= {name: value for name, value in changed.items() if isinstance(value, Tensor)}
    params = {name: value for name, value in changed.items() if not isinstance(value, Tensor)}
    with pytest.raises(UsageError, match=message):
        trace_of(op, contract, given, **params)


def test_a_label_for_each_row_of_another_number_is_refused() -> None:
    given = {**tensors(torch.float32), "labels": torch.zeros(ROWS + 1).long()}
    problem = Problem(FORWARD, FORWARD.contract(), given, {})
    with pytest.raises(UsageError, match=r"labels has (rows|shape) \(7,\)"):
        judge(problem, {"losses": torch.zeros(ROWS)})


def test_labels_and_masked_logits_are_what_they_are_called() -> None:
    case = parse_case("cross_entropy logits=fp32[64,50]:masked_classes labels=int64[64]:labels_50 seed=0")
    assert isinstance(case.tensors[0], TensorSpec)
    given = build(case, torch.device("cpu")).tensors
    labels, hidden = given["labels"], given["logits"].isneginf()
    assert {-100, 0, 49} <= set(labels.tolist()) <= {-100, *range(50)}
    assert not hidden.all(1).any() and bool(hidden.any(1).sum() > 40)
    steps = (hidden[:, 1:] != hidden[:, :-1]).sum(1)
    assert int(steps.max()) == 1 and bool(hidden[:, 0].any()) and bool(hidden[:, -1].any())


def _smoothed(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """Return a kernel that computes losses with a smoothing of 0.1 by a form of x [T, V], x[label] and lse, [T]."""

    @kernel("cross_entropy", contract="from_lse")
    def losses(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> dict[str, Tensor]:
        x = logits.float()
        return {"losses": form(x, x.gather(1, labels[:, None])[:, 0], torch.logsumexp(x, -1))}

    return losses


def _assert_smoothed(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Check 24 rows, in each of which a multiple of a logarithm has one sign or the other."""
    draw = torch.Generator().manual_seed(5)
    logits, labels = torch.randn(24, 2048, generator=draw), torch.randint(0, 2048, (24,), generator=draw)
    given = {"logits": logits, "labels": labels, "label_smoothing": 0.1}
    made = _smoothed(form)
    assert_contract("cross_entropy", made(**given), kernel=made, **given)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, own, lse: 0.9 * (lse - own) + 0.1 * (lse - x.mean(-1)),
        lambda x, own, lse: lse - 0.9 * own - 0.1 * x.mean(-1),
        lambda x, own, lse: lse - own + 0.1 * (own - x.mean(-1)),
        lambda x, own, lse: 0.9 * (lse - own) - (0.1 / 2048) * (x - lse[:, None]).sum(-1),
        lambda x, own, lse: 0.9 * lse - 0.9 * own + 0.1 * lse - 0.1 * x.mean(-1),
    ],
)
def test_losses_with_smoothing_in_another_form_are_right(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    _assert_smoothed(form)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, own, lse: lse - 0.1 * x.sum(-1) / 2047 - 0.9 * own,
        lambda x, own, lse: lse - 0.1 * (x.sum(-1) - own) / 2048 - 0.9 * own,
        lambda x, own, lse: lse - 0.1 * x.mean(-1) - 0.90001 * own,
        lambda x, own, lse: 0.9 * (lse - own) + 0.100001 * (lse - x.mean(-1)),
    ],
)
def test_losses_with_another_smoothing_are_seen(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Bounds allow them, and the two forms of the contract differ by a sign in half of the rows."""
    with pytest.raises(ContractViolation, match="24 of 24 elements follow from another formula"):
        _assert_smoothed(form)
