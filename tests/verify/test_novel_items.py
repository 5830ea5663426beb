"""Each option and each set of dtypes is looked at more closely once for each kernel: in the first item that has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lastbit.case import Group, parse_case
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject
from lastbit.verify.item_run import Explorer, run_item
from lastbit.verify.plan import SIZED, Item
from tests.harness.test_takes import NORM, kernel_of, norm, plan_of, recording

CASE = parse_case("rms_norm x=fp32[4,64] eps=1e-06 seed=1")


def kinds(items: Iterable[Item]) -> set[object]:
    rows = [item.group.combination for item in items]
    dtypes = (frozenset(option for axis, option in row.items() if axis.endswith(" dtype")) for row in rows)
    return {*dtypes, *(pair for row in rows for pair in row.items())}


def test_fewer_items_have_every_option_and_every_set_of_dtypes() -> None:
    items = [item for item in plan_of(kernel_of()).items if item.group.combination]
    novel = [item for item in items if item.novel]
    assert kinds(novel) == kinds(items) and len(novel) < len(items)


def test_each_kernel_has_its_own_and_what_is_no_combination_is_novel() -> None:
    plan = plan_of(kernel_of(name="a"), replace(kernel_of(name="b"), source="mine.py:70"))
    a, b = ([i.novel for i in plan.items if i.subject.kernel.name == name] for name in ("a", "b"))
    assert a == b and all(item.novel for item in plan.items if not item.group.combination)


def run(function: object, *, novel: bool) -> CaseResult:
    subject = Subject(kernel_of(function), NORM, torch.device("cpu"))  # type: ignore[arg-type]
    item = Item(subject, Group("plain", examples=(CASE,)), novel=novel)
    return Explorer(item, lambda result: None, lambda item, case, counted: None).run(CASE)


@pytest.mark.parametrize(("novel", "verdict"), [(True, Verdict.FAILED), (False, Verdict.PASSED)])
def test_other_values_are_tried_in_novel_items(novel: bool, verdict: Verdict) -> None:
    kept: list[Tensor] = []

    def keeping(x: Tensor, *, eps: float) -> Tensor:
        kept.append(norm(x, eps=eps))
        return kept[0].clone()

    assert run(keeping, novel=novel).verdict is verdict


@pytest.mark.parametrize("novel", [True, False])
def test_kernels_are_followed_in_novel_items(novel: bool) -> None:
    assert any(stage.equal for stage in run(norm, novel=novel).stages) is novel


@pytest.mark.parametrize(("group", "verdict"), [(SIZED, Verdict.FAILED), ("others", Verdict.PASSED)])
def test_kernels_are_followed_in_sized_cases(group: str, verdict: Verdict) -> None:
    """What is wrong by 1e-5 from some size on is no other number of bf16, for most values."""

    def wrong_if_wide(x: Tensor, *, eps: float) -> Tensor:
        squares = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(squares * (1.00001 if x.shape[-1] > 3000 else 1.0) + eps)).to(x.dtype)

    item = Item(Subject(kernel_of(wrong_if_wide), NORM, torch.device("cpu")), Group(group))
    explorer = Explorer(item, lambda result: None, lambda item, case, counted: None)
    lines = [f"rms_norm x=bf16[{shape}] eps=1e-06 seed=1" for shape in ("2,64", "2,6001", "2,30001", "9,6001")]
    expected = [Verdict.PASSED, verdict, verdict, Verdict.PASSED]  # the last one is large
    assert [explorer.run(parse_case(line)).verdict for line in lines] == expected


def test_kernels_are_followed_in_the_cheapest_case_with_a_feature() -> None:
    """Sixteen elements are fewer still, and tell less."""
    item = Item(Subject(kernel_of(norm), NORM, torch.device("cpu")), Group("plain"))
    explorer = Explorer(item, lambda result: None, lambda item, case, counted: None)
    shapes = ("fp32[16,64]", "fp32[2,8]", "fp32[4,64]", "bf16[7,64]", "bf16[5,64]", "bf16[70,640]")
    cases = [parse_case(f"rms_norm x={shape} eps=1e-06 seed=1") for shape in shapes]
    explorer.prefer(cases)
    followed = [any(stage.equal for stage in explorer.run(case).stages) for case in cases]
    assert followed == [False, False, True, False, True, False]


def test_an_item_prefers_cases_for_following() -> None:
    """The first case is not followed, as another one of the item with the same features has fewer elements."""
    lines = [f"rms_norm x=fp32[{rows},64] eps=1e-06 seed=1" for rows in (32, 8)]
    group = Group("plain", examples=tuple(map(parse_case, lines)))
    results: list[CaseResult] = []
    run_item(Item(Subject(kernel_of(norm), NORM, torch.device("cpu")), group), recording(results))
    assert [any(stage.equal for stage in result.stages) for result in results[:2]] == [False, True]
