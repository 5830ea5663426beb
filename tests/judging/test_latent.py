"""The row check: rows that one inverse rms explains bit for bit, and rows that none does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lastbit.judging.latent import check_rows, explain_rows
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import describe_rows
from lastbit.numerics import Premises, total, using
from lastbit.ops import Latent, op
from lastbit.references.layer_norm_gated import layer_norm_gated
from lastbit.references.rms_norm import rms_norm
from lastbit.result import RowCheck

EPS = 1e-6
WIDTH = 1024
CONTRACTS = ("native_multiply", "fp32_multiply")


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def normalized(x: Tensor, weight: Tensor | None = None, inv_rms: Tensor | None = None) -> Tensor:
    """Compute an RMSNorm that rounds to the dtype of `x` before and after it multiplies by the weight."""
    y = (x.float() * (inverse_rms(x) if inv_rms is None else inv_rms)).to(x.dtype)
    return y if weight is None else y * weight


def explained(
    actual: Tensor, x: Tensor, weight: Tensor | None = None, *, contract: str = "native_multiply", stage: str = "output"
) -> RowCheck:
    tensors = {"x": x} if weight is None else {"x": x, "weight": weight}
    point = rms_norm.contract(contract)
    problem = Problem(rms_norm, point, tensors, {"eps": EPS})
    return explain_rows(Observation.of(problem, {stage: actual}), problem.trace).check


def counted(check: RowCheck) -> tuple[int, int]:
    """Rows, and those that one value explains."""
    return check.rows, check.explained


def step(x: Tensor, where: tuple[int, ...], ulps: int = 1) -> Tensor:
    """Move one element of a copy by `ulps` of its dtype."""
    moved = x.clone()
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    moved.view(integer)[where] += ulps
    return moved


# Correct rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("width", [2, 3, 64, WIDTH])
def test_correct_rows_are_explained(dtype: torch.dtype, contract: str, width: int) -> None:
    x, weight = normals(16, width, seed=width).to(dtype), normals(width, seed=1).to(dtype)
    if contract == "native_multiply":
        y = normalized(x, weight)
    else:
        y = (x.float() * inverse_rms(x) * weight.float()).to(dtype)
    assert explained(y, x, weight, contract=contract) == RowCheck("inv_rms", 16, 16)


@pytest.mark.parametrize("error", [-2, -1, 1, 2])
def test_an_inverse_rms_off_by_its_bound_explains_a_row(error: int) -> None:
    """The latent value is free within its enclosure; only that the whole row shares it counts."""
    x, weight = normals(8, WIDTH), normals(WIDTH, seed=1)
    inv_rms = step(inverse_rms(x), (slice(None),), error)
    assert explained(normalized(x, weight, inv_rms), x, weight).explained == 8


def test_products_in_another_order_explain_a_row_where_the_contract_leaves_it_free() -> None:
    x, weight = normals(8, WIDTH), normals(WIDTH, seed=1)
    y = x * (inverse_rms(x) * weight)
    assert explained(y, x, weight, contract="fp32_multiply").explained == 8
    assert explained(y, x, weight, contract="native_multiply").explained == 0


# Faults


@pytest.mark.parametrize("ulps", [-1, 1])
@pytest.mark.parametrize("column", [0, 511, WIDTH - 1])
def test_one_element_off_by_one_ulp_is_caught(column: int, ulps: int) -> None:
    x = normals(1, WIDTH, seed=column)
    y = normalized(x)
    assert explained(y, x) == RowCheck("inv_rms", 1, 1)
    assert counted(explained(step(y, (0, column), ulps), x)) == (1, 0)


def test_rows_are_rejected_exactly_where_a_fault_is_planted() -> None:
    x, weight = normals(12, WIDTH), normals(WIDTH, seed=1)
    y = normalized(x, weight)
    planted = [0, 7, 11]
    for row in planted:
        y = step(y, (row, 37 * row % WIDTH))
    rejected = [row for row in range(12) if explained(y[row : row + 1], x[row : row + 1], weight).explained == 0]
    assert rejected == planted
    assert counted(explained(y, x, weight)) == (12, 9)


def test_a_smaller_number_of_candidates_at_once_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normals(12, 256)
    y = step(normalized(x), (5, 100))
    monkeypatch.setattr("lastbit.judging.candidates._AT_ONCE", {"cpu": 1})
    assert counted(explained(y, x)) == (12, 11)


def test_two_halves_with_different_inverse_rms_are_caught() -> None:
    """Each half on its own is explained, both values are within the enclosure, but one row has one inverse rms."""
    x = normals(4, WIDTH)
    first = inverse_rms(x)
    second = step(first, (slice(None),), 2)
    halves = normalized(x, inv_rms=first), normalized(x, inv_rms=second)
    mixed = torch.cat([halves[0][:, : WIDTH // 2], halves[1][:, WIDTH // 2 :]], dim=-1)
    assert [explained(y, x).explained for y in (*halves, mixed)] == [4, 4, 0]


def test_negative_and_zero_weights() -> None:
    x = normals(6, WIDTH)
    weight = normals(WIDTH, seed=1)
    weight[::3] = 0.0
    weight[1::3] = -weight[1::3].abs()
    y = normalized(x, weight)
    assert explained(y, x, weight).explained == 6
    assert explained(step(y, (2, 1)), x, weight).explained == 5, "off by one ulp under a negative weight"
    assert explained(step(y, (2, 2)), x, weight).explained == 5


def test_negative_elements_ask_for_the_other_direction() -> None:
    x = -normals(4, WIDTH).abs()
    assert explained(normalized(x), x).explained == 4
    assert explained(step(normalized(x), (1, 5)), x).explained == 3


def test_a_row_outside_its_enclosure_is_not_explained() -> None:
    x = normals(3, 64)
    assert explained(normalized(x) * 1.5, x).explained == 0


def test_a_row_with_an_element_that_no_value_gives_is_not_explained() -> None:
    """Although the element is the same for every candidate, so that none is asked to grow or to shrink."""
    x = normals(3, 64).to(torch.bfloat16)
    y = normalized(x)
    y[1, 5] = 100.0
    assert counted(explained(y, x)) == (3, 2)


def test_a_result_beside_the_stage_is_checked_together() -> None:
    """Both stages of a row must come from the same value."""
    x, weight = normals(4, WIDTH), normals(WIDTH, seed=1)
    contract = rms_norm.contract()
    problem = Problem(rms_norm, contract, {"x": x, "weight": weight}, {"eps": EPS})
    inner = normalized(x)
    other = normalized(x, weight, step(inverse_rms(x), (slice(None),), 2))
    together = [
        check_rows(Observation.of(problem, {"normalized": inner, "output": y})).explained
        for y in (inner * weight, other)
    ]
    assert together == [4, 0]


# What rows need that no value within the enclosure explains


SCALES = 10.0 ** torch.arange(-4, 4).reshape(-1, 1)


def sentence(check: RowCheck) -> str:
    return describe_rows(check, rms_norm.contract()).sentence


def test_a_wrong_count_needs_the_same_ratio_in_every_row() -> None:
    """The mean over a block of 128 columns in place of 96, the others being zero."""
    x = normals(8, 96) * SCALES * 1e5
    check = explained(normalized(x, inv_rms=torch.rsqrt(x.square().sum(-1, keepdim=True) / 128 + EPS)), x)
    assert counted(check) == (8, 0) and check.needs.found == check.needs.rows == 8
    assert check.needs.most is not None and check.needs.most.ratio == pytest.approx((4 / 3) ** 0.5, rel=1e-5)
    assert check.needs.most.value == pytest.approx(1.1547 * check.needs.most.expected, rel=1e-4)
    assert "each would come from another one, in every row about 1.1547" in sentence(check)
    assert sentence(check).endswith("which hints at a wrong count of elements.")


def test_an_eps_in_a_wrong_place_needs_a_ratio_that_grows_as_rows_shrink() -> None:
    x = normals(8, 256) * SCALES
    check = explained(normalized(x, inv_rms=1 / (x.square().mean(-1, keepdim=True).sqrt() + EPS)), x)
    needs = check.needs
    assert needs.found == needs.rows > 3 and needs.least is not None and needs.most is not None
    assert needs.most.ratio > 5 > 1.01 > needs.least.ratio
    assert needs.most.expected > 100 * needs.least.expected
    assert "; the larger the contract's value, the farther is the ratio from 1, which hints at eps" in sentence(check)


def test_rows_that_are_alike_do_not_tell_a_count_from_eps() -> None:
    x = normals(8, WIDTH)
    check = explained(normalized(x, inv_rms=torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)), x)
    assert "hints at a wrong count of elements, or a wrong eps, as these rows are alike" in sentence(check)


def test_elements_that_disagree_need_no_value() -> None:
    x = normals(4, WIDTH)
    check = explained(step(normalized(x), (slice(None), 5)), x)
    assert (check.needs.rows, check.needs.found) == (4, 0)
    assert sentence(check).endswith("some elements of a row need a larger one, others a smaller.")


def test_what_rows_of_both_kinds_need() -> None:
    x = normals(4, WIDTH)
    y = normalized(x, inv_rms=inverse_rms(x) * torch.tensor([[1.0], [1.5], [1.0], [1.0]]))
    text = sentence(explained(step(y, (3, 5)), x))
    assert text.startswith("2 of 4 rows cannot come from one fp32 inv_rms")
    assert "1 would come from another one, 1.5 times the contract's" in text
    assert text.endswith("in the others, some elements of a row need a larger one, others a smaller.")


def test_many_rows_are_searched_in_part() -> None:
    x = normals(200, 64)
    needs = explained(normalized(x, inv_rms=inverse_rms(x) * 1.5), x).needs
    assert needs.found == needs.rows == 50
    assert (needs + needs).rows == 100 and (needs + needs).most == needs.most


# Rows that cannot be tried


def test_a_single_column_tells_nothing() -> None:
    x = normals(5, 1)
    assert explained(normalized(x), x) == RowCheck("inv_rms", 0, 0)


def test_rows_whose_latent_value_is_not_finite_are_left_out() -> None:
    x = normals(5, 64)
    x[1, 3], x[2, 0] = float("inf"), float("nan")
    check = explained(normalized(x), x)
    assert check == RowCheck("inv_rms", 3 + 1, 3 + 1), "an infinite element has an inverse rms of zero"


def test_zero_and_constant_rows() -> None:
    x = torch.zeros(3, 64)
    x[1] = 0.75
    assert explained(normalized(x), x).explained == 3


def test_leading_dimensions_count_as_rows() -> None:
    x = normals(2, 3, 4, 64)
    assert explained(normalized(x), x) == RowCheck("inv_rms", 24, 24)
    transposed = x.transpose(0, 2)
    assert explained(normalized(transposed), transposed) == RowCheck("inv_rms", 24, 24)


# Other premises and ops


def test_a_tighter_enclosure_leaves_fewer_candidates() -> None:
    """An inverse rms off by 100 ulp explains a row in any order, but not in a tree of height 10."""
    x = normals(4, WIDTH).abs()
    y = normalized(x, inv_rms=step(inverse_rms(x), (slice(None),), 100))
    assert explained(y, x).explained == 4
    with using(Premises(depth=lambda n: 10)):
        assert explained(y, x).explained == 0


@op(rows=("x",), latent=Latent("shift", through=("shifted",)))
def shifted(x, *, contract, stage) -> None:
    """x minus its sum: decreasing in the latent value."""
    stage("shifted", x - stage("shift", total(x)), result=True)


def test_an_op_that_decreases_in_its_latent_value() -> None:
    x = normals(6, 50)
    contract = shifted.contract()
    right = x - x.sum(-1, keepdim=True)
    wrong = step(right, (4, 9))
    checks = [
        check_rows(Observation.of(Problem(shifted, contract, {"x": x}, {}), {"shifted": y})).explained
        for y in (right, wrong)
    ]
    assert checks == [6, 5]


def test_an_element_moves_with_the_latent_value_if_only_another_order_of_its_product_does() -> None:
    """Subnormal x: rounding x · r first may give one number for every candidate, where x · w first gives several."""
    x = torch.full((1, 512), 0.0)
    x[0, 0], x[0, 1:] = 1.0, 2.0**-149 * torch.arange(1, 512)
    weight = 1 + normals(512, seed=2).abs()
    for error in range(-3, 4):
        inv_rms = step(inverse_rms(x), (0, 0), error)
        for actual in (x * inv_rms * weight, x * (inv_rms * weight), x * weight * inv_rms):
            assert explained(actual, x, weight, contract="fp32_multiply") == RowCheck("inv_rms", 1, 1)


# Groups of columns, each with a latent value of its own


GROUPS, SIZE = 4, 96


def grouped(x: Tensor, *, group: int | None = None, error: float = 0.0, layer: bool = False) -> Tensor:
    """Compute a norm of groups in fp32, with the inverse deviation of one group off by a relative error."""
    v = x.unflatten(-1, (-1, SIZE))
    v = v - v.mean(-1, keepdim=True) if layer else v
    rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)
    if group is not None:
        rstd[:, group] *= 1 + error
    return (v * rstd).flatten(-2)


def explained_in_groups(y: Tensor, x: Tensor, *, layer: bool = False) -> RowCheck:
    tensors, point = {"x": x, "weight": torch.ones(x.shape[-1])}, layer_norm_gated.contract()
    params = {"eps": EPS, "group_size": SIZE, "is_rms_norm": not layer}
    problem = Problem(layer_norm_gated, point, tensors, params)
    return explain_rows(Observation.of(problem, {"output": y}), problem.trace).check


@pytest.mark.parametrize("layer", [False, True])
def test_each_group_has_its_own_latent_value(layer: bool) -> None:
    x = normals(10, GROUPS * SIZE) * 3.0 ** torch.arange(GROUPS).repeat_interleave(SIZE)
    assert explained_in_groups(grouped(x, layer=layer), x, layer=layer) == RowCheck("rstd", 10, 10)
    off = grouped(x, group=2, error=1e-3, layer=layer)
    assert counted(explained_in_groups(off, x, layer=layer)) == (10, 0)


def test_one_element_of_one_group_leaves_one_row_unexplained() -> None:
    x = normals(10, GROUPS * SIZE)
    assert counted(explained_in_groups(step(grouped(x), (7, 3 * SIZE + 5), 2), x)) == (10, 9)


def test_a_group_without_a_finite_latent_value_does_not_hide_the_others() -> None:
    x = normals(3, GROUPS * SIZE)
    x[1, SIZE + 2] = float("nan")
    y = grouped(x)
    assert explained_in_groups(y, x) == RowCheck("rstd", 3, 3)
    assert counted(explained_in_groups(step(y, (1, 3 * SIZE), 2), x)) == (3, 2)


@pytest.mark.parametrize(("rows", "step"), [(64, 1), (65, 2), (128, 2), (129, 3)])
def test_at_most_64_rows_are_searched_at_equal_distances(rows: int, step: int) -> None:
    x = normals(rows, 16)
    needs = explained(normalized(x, inv_rms=inverse_rms(x) * 2), x).needs
    assert needs.rows == needs.found == len(range(0, rows, step))
