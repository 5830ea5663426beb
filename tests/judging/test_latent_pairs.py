"""The row check of gradients: c1 and c2 are two latent values that must explain a row together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from lastbit.judging import candidates
from lastbit.judging.latent import check_rows
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics import Enclosure, product_in_any_order, total
from lastbit.numerics.formats import sum_to_odd
from lastbit.ops import Latent, op
from lastbit.references.layer_norm_gated_backward import layer_norm_gated_backward
from lastbit.result import RowCheck, Verdict

ROWS = 4
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def problem(width: int, *, layer: bool = True, dtype: torch.dtype = torch.float32, groups: int = 1) -> Problem:
    """Draw normal numbers; the statistics are those of x."""
    x, dy = (normals(ROWS, width, seed=seed).to(dtype) for seed in (0, 1))
    tensors = {"x": x, "dy": dy, "weight": normals(width, seed=2).to(dtype)}
    parts = x.float().unflatten(-1, (groups, -1))
    mean = parts.mean(-1) if layer else torch.zeros(ROWS, groups)
    tensors["rstd"] = torch.rsqrt((parts - mean[..., None]).square().mean(-1) + 1e-5)
    tensors |= {"mean": mean} if layer else {}
    return Problem(layer_norm_gated_backward, layer_norm_gated_backward.contract(), tensors, {})


def stages(of: Problem, *, fused: bool = False, mean: bool = False, ulps: int = 0) -> dict[str, Tensor]:
    """dx by its formula, and c1 and c2; in the second half of a group c1 is `ulps` larger.

    `fused` is the product with c1, or, with `mean`, the one of a sum and 1 / n that is c2.
    """
    t, groups = of.tensors, of.tensors["rstd"].shape[-1]
    x, d = (v.float().unflatten(-1, (groups, -1)) for v in (t["x"], t["dy"].float() * t["weight"].float()))
    rstd = t["rstd"][..., None]
    normalized = (x - t["mean"][..., None] if "mean" in t else x) * rstd
    c1, c2 = (normalized * d).mean(-1, keepdim=True), d.mean(-1, keepdim=True)
    every = c1.expand_as(d).clone()
    every.view(torch.int32)[..., d.shape[-1] // 2 :] += ulps
    if "mean" not in t:
        shift = normalized * every
    else:
        exact = sum_to_odd(normalized.double() * every.double(), c2.expand_as(d).double())
        shift = exact.float() if fused else normalized * every + c2
    if mean:
        share = torch.tensor(1 / d.shape[-1]).double()
        product = (normalized * every).double()
        shift = sum_to_odd(product, (d.sum(-1, keepdim=True).double() * share).expand_as(product)).float()
    dx = ((d - shift) * rstd).flatten(-2).to(t["x"].dtype)
    return {"c1": c1[..., 0], "c2": c2[..., 0], "dx": dx}


def off_by_an_ulp(dx: Tensor, column: int) -> Tensor:
    moved = dx.clone()
    moved.view({2: torch.int16, 4: torch.int32}[dx.element_size()])[:, column] += 1
    return moved


def checked(of: Problem, dx: Tensor, **others: Tensor) -> RowCheck:
    return check_rows(Observation.of(of, {"dx": dx, **others}))


def counted(check: RowCheck) -> tuple[int, int, int]:
    return check.rows, check.explained, check.unexplained


# Correct rows


@every_dtype
@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("width", [3, 32, 200, 1024])
def test_correct_rows_are_explained(width: int, layer: bool, dtype: torch.dtype) -> None:
    of = problem(width, layer=layer, dtype=dtype)
    for fused in (False, True):
        check = checked(of, stages(of, fused=fused)["dx"])
        assert counted(check) == (ROWS, ROWS, 0)
    assert check.stages == ("c1 and c2" if layer else "c1")


@pytest.mark.parametrize("width", [24, 200, 1000])
def test_a_mean_that_is_fused_into_the_shift_is_no_fp32_number(width: int) -> None:
    of = problem(width)
    dx = stages(of, mean=True)["dx"]
    assert not dx.equal(stages(of)["dx"])
    assert counted(checked(of, dx)) == (ROWS, ROWS, 0)


def test_every_group_has_values_of_its_own() -> None:
    of = problem(512, groups=4)
    dx = stages(of)["dx"]
    assert counted(checked(of, dx)) == (ROWS, ROWS, 0)
    assert checked(of, off_by_an_ulp(dx, 300)).unexplained >= ROWS - 3


def test_rows_that_differ_in_one_direction_only() -> None:
    """Where x̂ is 1 or -1 no side of a box shrinks by itself."""
    of = problem(256)
    of = of.on({**of.tensors, "x": of.tensors["x"].sign()})
    assert counted(checked(of, stages(of)["dx"])) == (ROWS, ROWS, 0)


def test_what_a_kernel_shows_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    of, tried = problem(200), list[int]()
    forward = candidates._ends
    monkeypatch.setattr(candidates, "_ends", lambda rows, at: (tried.append(len(at.low)), forward(rows, at))[1])
    given = stages(of)
    assert checked(of, **given).explained == ROWS and sum(tried) == 1
    assert checked(of, given["dx"]).explained == ROWS and sum(tried) > 20


# Faults


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
def test_one_element_off_by_an_ulp_is_caught(layer: bool) -> None:
    """Where it has no neighbour that is possible with other values."""
    of = problem(1024, layer=layer)
    dx = stages(of)["dx"]
    found = [checked(of, off_by_an_ulp(dx, column)).unexplained for column in (0, 1023)]
    assert min(found) >= ROWS // 2, found


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
def test_halves_with_another_c1_are_caught(layer: bool) -> None:
    of = problem(1024, layer=layer)
    assert checked(of, stages(of, ulps=8)["dx"]).unexplained >= ROWS // 2
    assert checked(of, stages(of, ulps=200)["dx"]).unexplained == ROWS


def test_the_finding_names_both_values() -> None:
    of = problem(1024)
    judgement = judge(of, {"dx": off_by_an_ulp(stages(of)["dx"], 5), "dw": of_rows(of)})
    assert judgement.verdict is Verdict.FAILED
    [finding] = judgement.findings
    assert finding.sentence.endswith(" rows cannot come from one fp32 c1 and c2 under single_rounding.")


def of_rows(of: Problem) -> Tensor:
    t = of.tensors
    return (t["dy"] * ((t["x"] - t["mean"]) * t["rstd"])).sum(0)


# Lanes that disagree


def test_halves_of_a_row_of_32_may_have_values_of_their_own() -> None:
    of = problem(32)
    dx = stages(of, ulps=30)["dx"]
    assert checked(of, dx).split == ROWS
    assert checked(of, off_by_an_ulp(dx, 3)).unexplained > 0


# What is not asked


def test_a_gate_that_comes_after_the_norm_is_not_explained_by_c1() -> None:
    of = problem(64)
    z = normals(ROWS, 64, seed=3)
    seen = Observation.of(of.on({**of.tensors, "z": z}), {"dx": z, "dz": z})
    assert seen.through == ["dx"]
    assert replace(seen, problem=replace(seen.problem, params={"norm_before_gate": False})).through == ["dx", "dz"]


def test_rows_whose_search_has_no_end_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(200)
    dx = off_by_an_ulp(stages(of)["dx"], 5)
    assert checked(of, dx).unexplained
    monkeypatch.setattr(candidates, "_MOST_ROUNDS", 1)
    assert checked(of, dx).unexplained == 0
    monkeypatch.setattr(candidates, "_MOST_STEPS", 0)
    assert counted(checked(of, dx)) == (0, 0, 0)


def test_as_many_elements_as_values_tell_nothing() -> None:
    of = problem(2)
    assert counted(checked(of, stages(of)["dx"])) == (0, 0, 0)


# An op whose elements are no monotone functions of its latent values


@op(rows=("x",), latent=Latent("a", through=("y",), also=("b",)))
def bent(x: Enclosure, *, contract, stage) -> None:
    """x · a² - b, where a is the sum of x and b that of -x."""
    a, b = stage("a", total(x)), stage("b", total(-x))
    stage("y", product_in_any_order(a, a) * x - b, result=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_assumed_about_how_elements_depend_on_the_values(seed: int) -> None:
    """The enclosure of `a` holds zero, where every element turns."""
    x = normals(ROWS, 101, seed=seed)
    x[:, -1] = -x[:, :-1].sum(-1)
    a, b = x.flip(-1).cumsum(-1)[:, -1:], (-x).sum(-1, keepdim=True)
    of = Problem(bent, bent.contract(), {"x": x}, {})
    y = a * a * x - b
    right = check_rows(Observation.of(of, {"y": y}))
    assert right.explained and not right.unexplained
    y.view(torch.int32)[:, 7] += 64
    wrong = check_rows(Observation.of(of, {"y": y}))
    assert wrong.unexplained and not wrong.explained


def test_a_box_is_cut_so_that_each_point_is_in_one_part() -> None:
    """For every smaller box that may be searched first, which then is the last part."""
    sides = [[(first, last) for first in range(count) for last in range(first, count)] for count in (4, 3)]
    near = torch.tensor(list(product(*sides))).permute(2, 1, 0)[:, :, None]
    whole = torch.tensor([[0, 0], [3, 2]])[..., None, None].expand_as(near).contiguous()
    stack, depth = candidates._stacked(candidates._Boxes(*whole), candidates._Boxes(*near))
    for group in range(near.shape[-1]):
        ends = torch.stack([stack.low, stack.high], -1)[: int(depth[0, group]), :, 0, group].tolist()
        points = [point for box in ends for point in product(*(range(low, high + 1) for low, high in box))]
        assert sorted(points) == list(product(range(4), range(3)))
        assert ends[-1] == near[:, :, 0, group].T.tolist()
