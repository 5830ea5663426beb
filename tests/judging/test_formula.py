"""Residues of results beside those of contracts."""

from __future__ import annotations

import pytest
import torch

from lastbit.config import Config
from lastbit.judging.formula import Compared, compare_formulas, describe_formula, explaining, kept_apart
from lastbit.judging.problem import Problem
from lastbit.numerics.residues import Residues
from lastbit.result import OF_FORMULA
from lastbit.verify.project import open_project

RMS_NORM = open_project(Config(folder="")).op("rms_norm")
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def problem(name: str = "", x: torch.Tensor = X) -> Problem:
    weight = torch.linspace(0.5, 1.5, 8)
    contract = RMS_NORM.contract(name) if name else RMS_NORM.contract()
    return Problem(RMS_NORM, contract, {"x": x.bfloat16(), "weight": weight.bfloat16()}, {"eps": 1e-3})


def wrong_at(residues: Residues, *places: tuple[int, int]) -> Residues:
    mask = torch.zeros(3, 8, dtype=torch.bool)
    for place in places:
        mask[place] = True
    return Residues.where(mask, residues + residues, residues)


def test_elements_follow_from_the_contract_or_from_another_formula() -> None:
    of = problem()
    own = of.residues["output"]
    assert compare_formulas(of, {"output": own}) == {"output": Compared(24, 24, 0)}
    assert compare_formulas(of, {"output": wrong_at(own, (1, 2), (2, 0))}) == {"output": Compared(24, 22, 2, (1, 2))}
    assert compare_formulas(of, {}) == {} and compare_formulas(of, {"another": own}) == {}


def test_elements_that_are_not_finite_do_not_count() -> None:
    x = X.clone()
    x[1, 2] = torch.inf
    of = problem(x=x)
    finite = int(torch.isfinite(of.trace.enclosure("output").value).sum())
    found = compare_formulas(of, {"output": wrong_at(of.residues["output"], (1, 2))})["output"]
    assert 0 < finite < 24 and found.numel == finite and found.differs == 0


def test_what_is_stored_narrower_is_compared_as_rounded_to_it() -> None:
    of = problem()
    own, expected = of.residues["output"], of.trace.enclosure("output")
    stored = expected.value.to(torch.bfloat16)
    assert compare_formulas(of, {"output": own}, {"output": stored})["output"].equal == 24
    narrow = compare_formulas(of, {"output": own}, {"output": stored.to(torch.float8_e5m2)})["output"]
    assert narrow.equal < 24


def test_alternatives_are_kept_apart_by_elements_that_follow_from_the_contract_alone() -> None:
    of = problem()
    others = [c for c in RMS_NORM.candidates(of.contract) if str(c) != str(of.contract)]
    own = of.residues
    found = kept_apart(of, own, [of.contract, *others])
    assert found[str(of.contract)] == 0 and set(found.values()) > {0}
    apart = next(c for c in others if found.get(str(c)))
    count = found[str(apart)]
    theirs = of.under(apart).residues
    assert kept_apart(of, {"output": theirs["output"]}, [apart]) == {str(apart): 0}
    assert kept_apart(of, {}, [apart]) == {str(apart): 0} and 0 < count <= 24


def test_the_contracts_that_explain_every_element() -> None:
    of = problem()
    own = of.residues
    contracts = explaining(of, own)
    assert str(of.contract) in contracts
    apart = next(c for c, count in kept_apart(of, own, RMS_NORM.candidates(of.contract)).items() if count)
    assert apart not in contracts
    assert explaining(of, {"output": wrong_at(own["output"], (0, 0))}) == ()
    assert explaining(of, {}) == ()  # which says nothing of any


@pytest.mark.parametrize(("explained", "end"), [((), ""), (("a", "b"), "; all of them are those of a or of b")])
def test_a_formula_in_words(explained: tuple[str, ...], end: str) -> None:
    of = problem()
    found = describe_formula(of, "output", Compared(2400, 100, 1300, (0, 1)), explained)
    assert (found.kind, found.stage) == (OF_FORMULA, "output")
    assert found.sentence.startswith("1,300 of 2,400 elements follow from another formula than that of ")
    assert found.sentence.endswith(f", whatever the order of its sums{end}.")
