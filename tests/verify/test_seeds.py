"""Groups of cases do not draw alike, and chosen cases see other values as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lastbit.case import Case, Group, parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import UnsupportedCase
from lastbit.kernel import Kernel
from lastbit.ops import Op
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.drawing import draw, drawing
from lastbit.verify.item_run import CaseFailed, run_item
from lastbit.verify.plan import Item, make_plan
from lastbit.verify.power import Separable
from lastbit.verify.project import open_project
from tests.recorded import Recorded

PROJECT = open_project(Config(folder=""))
OP = "completion_mask"


def groups_of(op: str) -> list[Group]:
    """Return the groups for a kernel that takes everything."""
    the_op = PROJECT.op(op)
    return PROJECT.groups(op, frozenset(the_op.inputs) | frozenset(the_op.params), small=True)


def ran(call: Any, group: Group, *, cases: int = 0, asked: bool = False) -> list[CaseResult]:
    """Run an item until it fails, and return its results."""
    subject = Subject(Kernel("mine", OP, "", call), PROJECT.op(OP), torch.device("cpu"))
    recorded: Any = Recorded(cases)
    with suppress(CaseFailed):
        run_item(Item(subject, group, asked), recorded)
    return list(recorded.results)


def test_groups_of_other_names_draw_other_cases() -> None:
    def declines(ids: Tensor, eos_ids: Tensor, *, mask_truncated: bool) -> Tensor:
        raise UnsupportedCase("every case")

    drawing = next(group for group in groups_of(OP) if group.strategy is not None)
    alike = replace(drawing, name="another name")
    assert draw(drawing, 8) == draw(replace(drawing), 8) != draw(alike, 8)
    for group in (drawing, alike):
        assert {r.case for r in ran(declines, group, cases=8)} == {str(case) for case in draw(group, 8)}


LINES = tuple(
    f"{OP} ids={ids}:sequences_2 eos_ids=int64[2]:counting seed={seed}"
    for seed, ids in enumerate(
        ("int64[3,7]", "int64[2,9]", "int64[2,5]@9,1", "int64[4,5]@9,1", "int32[3,7]", "int64[3,8]")
    )
)


@pytest.mark.parametrize(("asked", "expected"), [(False, [5, 2, 5, 2, 5, 2]), (True, [5] * 6)])
def test_the_first_case_of_each_kind_sees_other_values(asked: bool, expected: list[int]) -> None:
    seen: list[str] = []

    def mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
        seen.append(f"{ids.dtype} {tuple(ids.shape)} {ids.stride()}")
        is_eos = torch.isin(ids, eos_ids).int()
        return (is_eos.cumsum(-1) - is_eos == 0).int()

    results = ran(mask, Group("mine", examples=tuple(map(parse_case, LINES))), asked=asked)
    assert [r.verdict for r in results] == [Verdict.PASSED] * len(LINES)
    assert list(Counter(seen).values()) == expected


@pytest.mark.parametrize(
    ("asked", "outside", "added", "follows"),
    [(False, 0, LINES[:1], LINES[:1]), (False, 1, LINES[:1], ()), (True, 0, (), ())],
)
def test_a_case_that_tells_contracts_apart_is_added_where_no_line_was_given(
    monkeypatch: pytest.MonkeyPatch, asked: bool, outside: int, added: tuple[str, ...], follows: tuple[str, ...]
) -> None:
    """Rows of such a case are cut, which what a kernel takes may exclude; residues may tell what bounds have not."""
    followed: list[str] = []

    def with_formula(subject: Subject, case: Case, result: CaseResult, begins: Callable[[], None]) -> CaseResult:
        followed.append(str(case))
        return result

    taken, other = parse_case(LINES[0]), parse_case(LINES[0] + " mask_truncated=True")

    def telling(
        results: Sequence[CaseResult], op: Op, separable: Separable, takes: Callable[[Case], bool]
    ) -> list[Case]:
        return [case for case in (taken, other) if takes(case) and str(case) not in {r.case for r in results}]

    def verified(*args: Any, **options: Any) -> CaseResult:
        return replace(verify_case(*args, **options), ruled_out={"another": outside})

    monkeypatch.setattr("lastbit.verify.item_run.verify_case", verified)
    monkeypatch.setattr("lastbit.verify.item_run.untold", telling)
    monkeypatch.setattr("lastbit.verify.item_run.with_formula", with_formula)

    def mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
        is_eos = torch.isin(ids, eos_ids).int()
        return (is_eos.cumsum(-1) - is_eos == 0).int()

    examples = Group("mine", examples=(parse_case(LINES[1]),))
    assert {r.case for r in ran(mask, examples, asked=asked)} == {LINES[1], *added}
    assert followed == [LINES[1], *follows]


def test_lines_that_a_reader_gives_are_asked_for(tmp_path: Path) -> None:
    config = Config(folder=str(tmp_path), ops=(OP,), device_plan=DevicePlan({"cpu": ""}), lines=LINES[:1])
    assert all(item.asked for item in make_plan(config, "cpu").items)
    assert not any(item.asked for item in make_plan(replace(config, lines=()), "cpu").items)


def test_what_is_drawn_does_not_depend_on_the_modules_that_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis tries constants that it finds in modules, which are others in each process."""
    strategy = st.integers(0, 2**31 - 1)
    before, after = list[int](), list[int]()
    drawing(strategy, before.append, count=300, seed_=1)
    (tmp_path / "full_of_constants.py").write_text(f"numbers = {[10_007 * number for number in range(1, 200)]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("full_of_constants")
    drawing(strategy, after.append, count=300, seed_=1)
    assert before == after
