"""What follows from no arithmetic is checked like everything else, and shows nothing about a kernel's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.judging import verdict as judging
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics import Enclosure, argmax, clamp, gather, total, where
from lastbit.ops import Op, op
from lastbit.references.cross_entropy import cross_entropy
from lastbit.references.rms_norm import rms_norm
from lastbit.references.softmax import softmax
from lastbit.result import Judgement, Verdict

KEEP = torch.tensor([True, False, True, True])


def op_of(reference: Callable[..., Enclosure], *, plain: tuple[str, ...] = ()) -> Op:
    """Make an op with the result `output`: x [N], indices or a mask, and weights that may be plain."""

    @op(rows=(), integers=("chosen",), plain=plain)
    def made(x: Enclosure, chosen: Tensor, weight: Tensor, *, contract, stage) -> None:
        stage("output", reference(x, chosen, weight), result=True)

    return made


def constant(made: Op, actual: Tensor, **tensors: Tensor) -> tuple[int, int, Verdict]:
    """Constant and decided elements of the result, and the verdict."""
    judgement = judge(Problem(made, made.contract(""), tensors, {}), {"output": actual})
    [stage] = judgement.stages
    return stage.constant, stage.decided, judgement.verdict


def given(chosen: Tensor = KEEP) -> dict[str, Tensor]:
    return {"x": torch.tensor([5.0, 6.0, 7.0, 8.0]), "chosen": chosen, "weight": torch.zeros(4)}


@pytest.mark.parametrize(
    ("reference", "actual", "counts"),
    [
        (lambda x, keep, weight: where(keep, x, -1.0), [5.0, -1.0, 7.0, 8.0], (1, 3)),
        (lambda x, keep, weight: (x * 2.0).zero_where(~keep), [10.0, 0.0, 14.0, 16.0], (1, 3)),
        (lambda x, keep, weight: gather(x, keep.long().cumsum(0) - 1), [5.0, 5.0, 6.0, 7.0], (0, 4)),  # a copy
        (lambda x, keep, weight: clamp(x, 6.0, 7.0), [6.0, 6.0, 7.0, 7.0], (0, 4)),  # which depends on x
        (lambda x, keep, weight: x * weight, [0.0] * 4, (0, 4)),  # and on the weight, which happens to be 0
        (lambda x, keep, weight: x * 0.0 + 1.0, [1.0] * 4, (4, 0)),
    ],
)
def test_constants_depend_on_no_number(reference, actual, counts) -> None:
    verdict = Verdict.PASSED if counts[1] else Verdict.INCONCLUSIVE
    assert constant(op_of(reference), torch.tensor(actual), **given()) == (*counts, verdict)


def test_a_plain_input_is_a_number_too() -> None:
    made = op_of(lambda x, keep, weight: Enclosure.point(weight), plain=("weight",))
    assert constant(made, torch.zeros(4), **given()) == (0, 4, Verdict.PASSED)


def test_integers_alone_are_what_an_op_computes_with() -> None:
    @op(rows=(), integers=("x",))
    def made(x: Tensor, *, contract, stage) -> None:
        stage("output", Enclosure.point(x) + 1.0, result=True)

    assert constant(made, torch.tensor([2.0, 3.0]), x=torch.tensor([1, 2])) == (0, 2, Verdict.PASSED)


def test_results_that_are_indices_have_no_constants() -> None:
    @op(rows=())
    def made(x: Enclosure, *, contract, stage) -> None:
        stage("output", argmax(x), result=True)

    assert constant(made, torch.tensor([[1]]), x=torch.tensor([[1.0, 2.0]]))[0] == 0


def test_what_cannot_be_right_is_outside_wherever_it_is() -> None:
    made = op_of(lambda x, keep, weight: where(keep, x, -1.0))
    assert constant(made, torch.tensor([5.0, 0.0, 7.0, 8.0]), **given())[2] is Verdict.FAILED


def test_masked_probabilities() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    actual = torch.softmax(x.float().masked_fill(~KEEP, -torch.inf), -1).bfloat16()
    keep = KEEP.expand(3, 4)
    judgement = judge(Problem(softmax, softmax.contract(""), {"x": x, "keep": keep}, {}), {"output": actual})
    assert [(stage.constant, judgement.verdict) for stage in judgement.stages] == [(3, Verdict.PASSED)]


def loss(labels: list[int]) -> Judgement:
    """Judge losses of which every one is computed from the first 448 of 512 classes."""
    logits = torch.randn(len(labels), 512, generator=torch.Generator().manual_seed(0))
    own = logits.gather(1, torch.tensor(labels).clamp(min=0)[:, None])[:, 0]
    actual = torch.where(torch.tensor(labels) < 0, 0.0, logits.logsumexp(-1) - own)
    tensors = {"logits": logits, "labels": torch.tensor(labels)}
    return judge(Problem(cross_entropy, cross_entropy.contract(""), tensors, {}), {"losses": actual})


@pytest.mark.parametrize("block", [1 << 17, 512])
def test_an_ignored_row_decides_no_loss(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all rows are evaluated at once, or one after the other."""
    monkeypatch.setitem(judging._BLOCK, "cpu", block)
    some, none = "no element but constants has a single", "no element has a single"
    for labels, ignored, why in (
        ([1, 2, -100], 1, some),
        ([1, 2, 3], 0, none),
        ([-100, -100], 2, "every element is a constant"),
    ):
        judgement = loss(labels)
        assert judgement.verdict is Verdict.INCONCLUSIVE
        assert [stage.constant for stage in judgement.stages] == [ignored]
        assert judgement.reason.startswith(why)


def test_integers_in_floating_point_are_decided_by_arithmetic() -> None:
    """Sums of squares that are exact in any order, rows of zeros among them."""
    x = torch.arange(-8.0, 8.0).repeat(4, 1).bfloat16()
    x[1] = 0.0
    actual = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    judgement = judge(Problem(rms_norm, rms_norm.contract(""), {"x": x}, {"eps": 1e-6}), {"output": actual})
    assert judgement.verdict is Verdict.PASSED
    assert [stage.constant for stage in judgement.stages] == [0]


def test_total_of_masked_elements_is_none_of_them() -> None:
    made = op_of(lambda x, keep, weight: total(x.zero_where(~keep)))
    assert constant(made, torch.tensor([20.0]), **given()) == (0, 1, Verdict.PASSED)
