"""The share of each result that was decided, and how well latent values are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lastbit.judging import decided as module
from lastbit.judging.decided import decidable, shares
from lastbit.judging.expected import Numbers
from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure, exp, total, where
from lastbit.numerics.formats import BF16, FP32
from lastbit.ops import Latent, op
from lastbit.result import Comparison, Judgement, RowCheck, StageResult, Verdict

NAN, INF = math.nan, math.inf


@op(rows=("x",), latent=Latent("sum", through=("output",)))
def scaled(x: Enclosure, *, contract, stage) -> None:
    stage("output", x * stage("sum", total(x)), result=True)


@op(rows=("x",), latent=Latent("sum", through=("output",), also=("least", "never")))
def with_two(x: Enclosure, *, contract, stage) -> None:
    first, second = stage("sum", total(x)), stage("least", total(x * x))
    stage("output", x * first + second, result=True)


@op(rows=(), integers=("keep",))
def masked(x: Enclosure, keep: torch.Tensor, *, contract, stage) -> None:
    stage("open", exp(x), result=True)
    stage("doubled", x * 2.0, result=True)
    stage("chosen", where(keep, x * 2.0, 1.0), result=True)
    stage("indices", keep.long(), result=True)


def of(made, **tensors: torch.Tensor) -> Problem:
    return Problem(made, made.contract(""), tensors, {})


def stage(numel: int, *, name: str = "output", result: bool = True, **changes: int) -> StageResult:
    """Return a result of so many elements, of which `cumulative` and `isolated` are decided."""
    first, second = (Comparison(numel=numel, decided=changes.pop(kind, 0)) for kind in ("cumulative", "isolated"))
    return StageResult(name, "fp32", result, first, second, **changes)


EXACT = of(scaled, x=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (stage(8), 0.0),
        (stage(8, cumulative=2), 0.25),
        (stage(8, cumulative=2, isolated=4), 0.5),
        (stage(8, cumulative=2, isolated=4, equal=6), 0.75),
        (stage(8, isolated=1, equal=1), 0.125),
        (stage(8, cumulative=5, constant=4), 0.25),
        (stage(8, cumulative=4, constant=4), 0.0),
        (stage(8, cumulative=2, constant=4), 0.0),  # and not less
        (stage(8, cumulative=8, constant=8), 0.0),  # of nothing but constants nothing was decided
        (stage(0), 1.0),  # there was nothing to decide
        (stage(8, cumulative=2, in_rows=8), 0.25),  # rows that were not checked explain nothing
    ],
)
def test_shares_of_a_result(one: StageResult, share: float) -> None:
    assert shares(EXACT, Judgement(Verdict.PASSED, (one,))) == {"output": share}


def test_without_elements_constants_are_all_that_is_decided() -> None:
    empty = of(scaled, x=torch.ones(2, 0))
    assert shares(empty, Judgement(Verdict.PASSED, (stage(8, constant=8), stage(8, name="b")))) == {"output": 1, "b": 0}


def test_only_results_have_shares() -> None:
    judged = Judgement(Verdict.PASSED, (stage(4, name="sum", result=False, cumulative=4), stage(4, cumulative=1)))
    assert shares(EXACT, judged) == {"output": 0.25}


@pytest.mark.parametrize(
    ("rows", "counted"),
    [
        (RowCheck("sum", 2, 2), True),
        (RowCheck("sum", 2, 1, split=1), True),
        (RowCheck("sum", 1, 1), True),
        (RowCheck("sum", 0, 0), False),
        (RowCheck("sum", 2, 1), False),
        (None, False),
    ],
)
def test_explained_rows_count_by_what_is_known_of_their_value(rows: RowCheck | None, counted: bool) -> None:
    """Sums of ones are exact in any order: their value is known."""
    stages = (stage(8, cumulative=2, in_rows=8), stage(8, name="aside", cumulative=2))
    found = shares(EXACT, Judgement(Verdict.PASSED, stages, rows=rows))
    assert found == {"output": 1.0 if counted else 0.25, "aside": 0.25}


def test_what_is_open_of_a_value_lowers_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_known", lambda problem: 0.5)
    judged = Judgement(Verdict.PASSED, (stage(8, cumulative=2, in_rows=8),), rows=RowCheck("sum", 2, 2))
    assert shares(EXACT, judged) == {"output": 0.25 + 0.75 * 0.5}


def test_values_that_an_order_of_sums_leaves_open_are_known_in_part() -> None:
    x = torch.rand(3, 64, generator=torch.Generator().manual_seed(0))
    loose, sharp = of(scaled, x=x), replace(of(scaled, x=x), siblings=None)
    assert module._known(EXACT) == 1.0
    counts, precision = module._possible(loose)["sum"]
    assert precision == FP32.precision == 24
    least, _ = module._possible(replace(sharp, premises=replace(loose.premises, depth=module._no_height)))["sum"]
    assert bool((least <= 3).all()) and bool((counts > 3).all())
    wanted = (1 - torch.log2(counts / least) / 24).mean()
    assert module._known(loose) == pytest.approx(float(wanted), abs=1e-12)
    assert 0.5 < module._known(loose) < 1


def test_of_several_latent_values_the_least_known_counts() -> None:
    x = torch.rand(3, 64, generator=torch.Generator().manual_seed(0))
    assert set(module._possible(of(with_two, x=x))) == {"sum", "least"}
    assert module._known(of(with_two, x=x)) <= module._known(of(scaled, x=x))
    assert module._known(of(with_two, x=torch.ones(2, 4))) == 1.0


def test_only_the_first_rows_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([torch.ones(1, 64), torch.rand(1, 64, generator=torch.Generator().manual_seed(0))])
    assert module._known(of(scaled, x=x)) < 1.0
    monkeypatch.setattr(module, "_MOST", 64)
    assert module._known(of(scaled, x=x)) == 1.0


@pytest.mark.parametrize(
    ("own", "least", "share"),
    [
        (1.0, 1.0, 1.0),
        (2.0, 1.0, 0.75),
        (16.0, 1.0, 0.0),
        (64.0, 1.0, 0.0),
        (4.0, 2.0, 0.75),
        (1.0, 2.0, 1.0),
        (NAN, 1.0, 0.0),
    ],
)
def test_the_share_of_four_bits(own: float, least: float, share: float) -> None:
    assert module._share_of_bits(torch.tensor([own]), torch.tensor([least]), 4).tolist() == [share]


def numbers(*elements: tuple[float, float, float, float], fmt=BF16) -> Numbers:
    """Elements given as exact, value, lo, hi."""
    return Numbers(Enclosure(torch.tensor(elements, dtype=torch.float64).T.clone()), fmt)


def test_the_values_between_two_ends_are_counted() -> None:
    ulp = 2.0**-7
    expected = numbers(
        (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0 + 3 * ulp), (0.0, 0.0, -INF, 0.0), (0.0, 0.0, 0.0, INF)
    )
    counts, precision = module._count(expected)
    assert counts.nan_to_num(-1.0).tolist() == [1.0, 4.0, -1.0, -1.0] and precision == 8
    assert bool(counts[2:].isnan().all())


@pytest.mark.parametrize(
    ("element", "exact"),
    [
        ((1.0, 1.0, 1.0, 1.0), True),
        ((1.001, 1.0, 1.0, 1.0), False),  # something has been rounded
        ((1.0, 1.0, 1.0, 2.0), False),
        ((NAN, NAN, NAN, NAN), True),
        ((1.0, NAN, NAN, NAN), False),
        ((NAN, 1.0, 1.0, 2.0), False),
    ],
)
def test_an_element_that_nothing_has_rounded(element: tuple[float, float, float, float], exact: bool) -> None:
    assert module._exact(numbers(element)).tolist() == [exact]


def test_what_can_be_decided_of_each_result() -> None:
    """A NaN decides nothing, and constants are counted nowhere."""
    keep = torch.tensor([True, True, False, True])
    problem = of(masked, x=torch.tensor([0.0, 1.0, 2.0, NAN]), keep=keep)
    assert decidable(problem) == {"open": (0, 4), "doubled": (3, 4), "chosen": (2, 3)}
