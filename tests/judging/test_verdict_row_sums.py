"""Sums over rows: any order, any cut into blocks, and judged when all rows have been seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lastbit.judging.verdict as judging
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics import Enclosure, Premises, Sum, sum_of_row_products, sum_of_rows
from lastbit.ops import op
from lastbit.result import Judgement, Verdict

ROWS, WIDTH = 64, 24


@op(rows=("x", "dy"), rounds={"dw": "x", "db": "x"})
def gradients(x: Enclosure, dy: Enclosure, *, contract: object, stage: object) -> None:  # what a backward pass ends in
    product = stage("product", x * dy, result=True)  # type: ignore[operator]
    stage("dw", sum_of_row_products(x, dy), result=True)  # type: ignore[operator]
    stage("db", sum_of_rows(dy), result=True)  # type: ignore[operator]
    assert product is not None


def normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


def integers(seed: int) -> Tensor:
    return torch.randint(-8, 9, (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed)).float()


def judged(x: Tensor, dy: Tensor, **changed: Tensor) -> Judgement:
    actual = {"product": x * dy, "dw": (x * dy).sum(0), "db": dy.sum(0), **changed}
    return judge(Problem(gradients, gradients.contract(), {"x": x, "dy": dy}, {}), actual)


def orders(terms: Tensor) -> list[Tensor]:
    halves = terms[: ROWS // 2].sum(0) + terms[ROWS // 2 :].sum(0)
    return [terms.sum(0), terms.flip(0).cumsum(0)[-1], halves, terms.reshape(8, -1, WIDTH).sum(1).sum(0)]


@pytest.fixture(params=["whole", "in full", "screened"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_BLOCK", {"cpu": 1 << 22 if request.param == "whole" else 5 * WIDTH})
    if request.param == "in full":
        monkeypatch.setattr(judging.Screened, "begin", lambda seen: None)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("make", [normals, integers])
def test_every_order_passes(make) -> None:
    x, dy = make(0), make(1)
    for dw, db in zip(orders(x * dy), orders(dy), strict=True):
        assert judged(x, dy, dw=dw, db=db).verdict is Verdict.PASSED


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("make", [normals, integers])
def test_a_row_left_out_fails_and_names_the_sum(make) -> None:
    x, dy = make(0), make(1)
    judgement = judged(x, dy, dw=(x * dy)[:-1].sum(0))
    assert judgement.verdict is Verdict.FAILED
    assert [f.stage for f in judgement.findings] == ["dw"]
    assert judgement.findings[0].sentence.startswith(f"{int(((x * dy)[-1] != 0).sum())} of {WIDTH} elements")


@pytest.mark.usefixtures("block")
def test_integers_leave_one_legal_value() -> None:
    x, dy = integers(0), integers(1)
    dw = next(s for s in judged(x, dy).stages if s.name == "dw")
    assert dw.cumulative.decided == WIDTH
    off_by_one = (x * dy).sum(0)
    off_by_one[3] += 1
    assert judged(x, dy, dw=off_by_one).verdict is Verdict.FAILED


def test_blocks_give_the_statistics_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = normals(0), normals(1)
    whole = judged(x, dy)
    monkeypatch.setattr(judging, "_BLOCK", {"cpu": 7 * WIDTH})
    cut = judged(x, dy)
    for a, b in zip(whole.stages, cut.stages, strict=True):
        assert (a.name, a.cumulative.decided, a.cumulative.mismatched) == (
            b.name,
            b.cumulative.decided,
            b.cumulative.mismatched,
        )
        assert a.cumulative.budget_ratio == pytest.approx(b.cumulative.budget_ratio, rel=1e-6, abs=1e-6)


def test_a_bf16_accumulation_fails() -> None:
    x, dy = normals(0), normals(1)
    total = torch.zeros(WIDTH, dtype=torch.bfloat16)
    for row in x * dy:
        total = (total.float() + row).bfloat16()
    assert judged(x, dy, dw=total.float()).verdict is Verdict.FAILED


def test_no_row_sums_to_zero() -> None:
    x = torch.zeros(0, WIDTH)
    judgement = judged(x, x, dw=torch.zeros(WIDTH), db=torch.zeros(WIDTH))
    assert judgement.verdict is Verdict.PASSED
    assert judged(x, x, dw=torch.full((WIDTH,), 1e-30), db=torch.zeros(WIDTH)).verdict is Verdict.FAILED


def test_parts_join_in_any_order() -> None:
    x = Enclosure.point(normals(0))
    parts = [Sum.of(x.parts[:, a:b], dim=-2) for a, b in ((0, 5), (5, 6), (6, ROWS))]
    joined = (parts[2] + parts[0] + parts[1]).enclosure
    whole = Sum.of(x.parts, dim=-2).enclosure
    assert torch.equal(joined.value, whole.value)
    assert (joined.lo <= whole.hi).all()
    assert torch.allclose(joined.hi - joined.lo, whole.hi - whole.lo, rtol=1e-6)


def test_atomic_additions_may_flush_subnormal_numbers() -> None:
    x, dy = torch.full((ROWS, WIDTH), 2.0**-70), torch.full((ROWS, WIDTH), 2.0**-70)
    actual = {"product": x * dy, "dw": torch.zeros(WIDTH), "db": dy.sum(0)}
    problem = Problem(gradients, gradients.contract(), {"x": x, "dy": dy}, {})
    assert judge(problem, actual).verdict is Verdict.FAILED
    assert judge(replace(problem, premises=Premises(atomic=frozenset({"db"}))), actual).verdict is Verdict.FAILED
    assert judge(replace(problem, premises=Premises(atomic=frozenset({"dw"}))), actual).verdict is Verdict.PASSED


def test_one_row_without_leading_dimensions() -> None:
    x = normals(0)[0]
    assert judged(x, x, dw=x * x, db=x).verdict is Verdict.PASSED


def test_a_declared_depth_tightens_the_bound() -> None:
    x, dy = normals(0, 4096, 4), normals(1, 4096, 4)
    terms = (x * dy).reshape(64, 64, 4).sum(1).sum(0)
    moved = terms + 1e-2
    actual = {"product": x * dy, "dw": moved, "db": dy.sum(0)}
    problem = Problem(gradients, gradients.contract(), {"x": x, "dy": dy}, {})
    assert judge(problem, actual).verdict is Verdict.PASSED
    assert judge(replace(problem, premises=Premises(depth=lambda n: 12)), actual).verdict is Verdict.FAILED
