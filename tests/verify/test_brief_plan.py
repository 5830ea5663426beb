"""A smoke run is brief: each dtype and option in one case, fixed cases dealt among kernels of an op, and it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from lastbit.case import Case
from lastbit.config import Config
from lastbit.kernel import Kernel
from lastbit.verify.plan import BRIEF, Item, Plan, make_plan


def norm(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, *, eps: float, weight_offset: float = 0.0
) -> Tensor:
    return x


ONE = Kernel("one", "rms_norm", "fp32_multiply", norm, source="one.py:7", invariant=("run to run", "rows"))
TWO = replace(ONE, name="two", source="two.py:7", invariant=("run to run",))


def plan_of(*kernels: Kernel, profile: str = "smoke", **changes: object) -> Plan:
    config = Config(folder="", kernel_folders=(str(Path(__file__).parent),), profile=profile)
    return make_plan(replace(config, **changes), "cpu", load=lambda folder: kernels)  # type: ignore[arg-type]


def combined(plan: Plan) -> list[Item]:
    return [item for item in plan.items if item.group.combination]


def fixed(plan: Plan, group: str, kernel: str) -> list[Case]:
    items = (i for i in plan.items if (i.group.name, i.subject.kernel.name) == (group, kernel))
    return [case for item in items for case in item.own(item.group.examples)]


def test_each_dtype_and_option_has_a_case_and_pairs_that_are_left_are_told() -> None:
    smoke, ci = combined(plan_of(ONE)), combined(plan_of(ONE, profile="ci"))
    options = {option for item in ci for option in item.group.combination.items()}
    assert {option for item in smoke for option in item.group.combination.items()} == options
    assert all(len(item.group.designed) == 1 and item.planned(2).cases == 1 and item.novel for item in smoke)
    assert len(smoke) < len(ci) / 2
    left = [row for item in smoke for row in item.planned(2).left]
    rows = [sorted(map(str, row.items())) for row in (*left, *(item.group.combination for item in smoke))]
    assert sorted(rows) == sorted(sorted(map(str, item.group.combination.items())) for item in ci)
    assert not any(item.left for item in ci)


@pytest.mark.parametrize("group", ["edges", "real-shapes", "sizes"])
def test_each_fixed_case_is_one_kernels_of_its_op(group: str) -> None:
    ci, plan = plan_of(ONE, profile="ci"), plan_of(ONE, TWO)
    own, others = (fixed(plan, group, name) for name in ("one", "two"))
    every = fixed(plan_of(ONE), group, "one")
    assert len(own) - len(others) in (0, 1) and set(own).isdisjoint(others)
    if group != "sizes":  # of which a kernel that is alone has more
        assert set(every) == set(fixed(ci, group, "one")) == {*own, *others}
    assert [note.reason for note in plan.not_run].count(BRIEF) == 1
    assert BRIEF not in {note.reason for note in ci.not_run}


def test_a_case_that_few_kernels_take_goes_to_one_of_these() -> None:
    def plain(x: Tensor, *, eps: float) -> Tensor:
        return x

    plan = plan_of(ONE, replace(TWO, call=plain))
    assert set(fixed(plan_of(ONE), "edges", "one")) == {*fixed(plan, "edges", "one"), *fixed(plan, "edges", "two")}
    assert all(case.names <= {"x", "eps"} for case in fixed(plan, "edges", "two"))


def test_a_kernel_is_asked_what_it_promises_and_each_function_that_promises_anything() -> None:
    silent = replace(ONE, name="silent", source="silent.py:7", invariant=())
    others = [replace(ONE, name=f"k{n}", source=f"k{n}.py:7") for n in range(8)]
    plan = plan_of(ONE, TWO, silent, *others)
    asked = {i.subject.kernel.name: i.properties for i in plan.items if i.group.properties}
    assert asked == {kernel.name: kernel.invariant for kernel in (ONE, TWO, *others)}
    assert all(fixed(plan, "properties", name) for name in asked)


def test_kernels_are_followed_in_combinations_alone() -> None:
    plan = plan_of(ONE)
    assert all(item.novel is bool(item.group.combination) for item in plan.items)
    assert all(item.novel for item in plan_of(ONE, profile="ci").items if not item.group.combination)


@pytest.mark.parametrize("changes", [{"cases": 2}, {"isolate": True}, {"random": True}])
def test_a_run_of_which_somebody_says_more_is_not_brief(changes: dict[str, object]) -> None:
    assert not replace(Config(folder="", profile="smoke"), **changes).brief  # type: ignore[arg-type]
    assert Config(folder="", profile="smoke").brief and not Config(folder="").brief
