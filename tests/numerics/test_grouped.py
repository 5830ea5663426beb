"""Products of rows with the matrix of their group are those of each group on its own, and zero without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lastbit.numerics import Enclosure, Factor, Groups, dot, grouped, grouped_dot, grouped_outer, hull

NAN = float("nan")
NUMBERS = torch.tensor([2, 0, -1, 2, 5, 3, 0, 2])  # of groups 0 to 3, of which 1 has no rows


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def enclosures(*shape: int, seed: int = 0) -> dict[int, Enclosure]:
    """Of one, two and four parts."""
    x = Enclosure.point(normals(*shape, seed=seed))
    return {1: x, 2: x * 1.1, 4: hull(x, x + 0.25)}


MATRICES = Enclosure.point(normals(4, 6, 3, seed=1))


def matrices(groups: Tensor) -> Factor:
    return Factor.right(MATRICES[groups,])


def test_rows_by_group() -> None:
    groups = Groups(NUMBERS, 4).rows
    assert {g: rows.tolist() for g, rows in groups.items()} == {0: [1, 6], 2: [0, 3, 7], 3: [5]}
    assert list(groups) == [0, 2, 3]


@pytest.mark.parametrize("numbers", [[], [-1, 4, 9]])
def test_numbers_of_no_group(numbers: list[int]) -> None:
    assert Groups(torch.tensor(numbers, dtype=torch.int64), 4).rows == {}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_each_row_is_multiplied_by_the_matrix_of_its_group(parts: int) -> None:
    rows = enclosures(8, 6)[parts]
    product = grouped_dot(rows, Groups(NUMBERS, 4), matrices, 3)
    assert product.shape == (8, 3)
    for row, group in enumerate(NUMBERS.tolist()):
        if 0 <= group < 4:
            alone = dot(rows[row : row + 1,], MATRICES[group,])
            assert torch.equal(product[row,].lo, alone.lo[0])
            assert torch.equal(product[row,].hi, alone.hi[0])
            assert product[row,].exact == pytest.approx((rows.exact[row] @ MATRICES.exact[group]), rel=1e-13)
        else:
            assert not product[row,].full.any()


def test_matrices_are_asked_for_only_of_groups_that_have_rows() -> None:
    asked: list[int] = []

    def noting(groups: Tensor) -> Factor:
        asked.extend(groups.tolist())
        return matrices(groups)

    grouped_dot(Enclosure.point(normals(8, 6)), Groups(NUMBERS, 4), noting, 3)
    assert asked == [0, 2, 3]


@pytest.mark.parametrize("block", [1, 8, 12, 40, 80, 120])
def test_it_does_not_matter_how_much_is_multiplied_at_once(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    rows, right, groups = enclosures(8, 6)[4], enclosures(8, 5, seed=3)[2], Groups(NUMBERS, 4)
    products, sums = grouped_dot(rows, groups, matrices, 3), grouped_outer(rows, right, groups)
    monkeypatch.setattr(grouped, "_BLOCK", block)
    assert torch.equal(grouped_dot(rows, groups, matrices, 3).full, products.full)
    found = grouped_outer(rows, right, groups)
    assert torch.equal(found.value, sums.value)
    assert torch.allclose(found.lo, sums.lo, rtol=2.0**-20, atol=2.0**-20)
    assert torch.allclose(found.hi, sums.hi, rtol=2.0**-20, atol=2.0**-20)


def test_rows_of_no_group_are_zero_whatever_they_hold() -> None:
    values = normals(8, 6)
    values[[2, 4]] = NAN
    product = grouped_dot(Enclosure.point(values), Groups(NUMBERS, 4), matrices, 3)
    assert not product.full[:, [2, 4]].any()
    assert product.full.isfinite().all()
    values[0, 3] = NAN
    product = grouped_dot(Enclosure.point(values), Groups(NUMBERS, 4), matrices, 3)
    assert product.lo.isnan().all(1).tolist() == [True, *[False] * 7], "other rows of the group are not touched"


@pytest.mark.parametrize("left_parts", [1, 4])
@pytest.mark.parametrize("right_parts", [1, 2])
def test_outer_products_are_added_over_the_rows_of_a_group(left_parts: int, right_parts: int) -> None:
    left, right = enclosures(8, 2)[left_parts], enclosures(8, 5, seed=3)[right_parts]
    sums = grouped_outer(left, right, Groups(NUMBERS, 4))
    assert sums.shape == (4, 2, 5)
    for group, rows in {0: [1, 6], 2: [0, 3, 7], 3: [5]}.items():
        exact = sum(torch.outer(left.exact[r], right.exact[r]) for r in rows)
        assert torch.allclose(sums.exact[group], exact, rtol=1e-13)
        assert (sums.lo[group] <= sums.value[group]).all()
        assert (sums.value[group] <= sums.hi[group]).all()
    assert not sums.full[:, 1].any(), "of a group without rows"


def test_an_outer_product_of_one_row_is_exact() -> None:
    left, right = (Enclosure.point(normals(8, n, seed=n).to(torch.bfloat16)) for n in (2, 5))
    sums = grouped_outer(left, right, Groups(NUMBERS, 4))
    assert torch.equal(sums.lo[3], sums.hi[3])
    assert torch.equal(sums.value[3], torch.outer(left.value[5], right.value[5]))


def test_rows_of_no_group_add_nothing() -> None:
    values = normals(8, 2)
    values[[2, 4]] = NAN
    sums = grouped_outer(Enclosure.point(values), Enclosure.point(normals(8, 5)), Groups(NUMBERS, 4))
    assert sums.full.isfinite().all()


def test_without_rows_sums_are_zero() -> None:
    nothing = Enclosure.point(torch.zeros(0, 6))
    groups = Groups(torch.zeros(0, dtype=torch.int64), 4)
    assert grouped_dot(nothing, groups, matrices, 3).shape == (0, 3)
    assert not grouped_outer(nothing, nothing, groups).full.any()
