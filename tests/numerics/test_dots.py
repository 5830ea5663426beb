"""Dots and sums of products of intervals, of numbers that are not finite, and of what nothing is known about."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lastbit.numerics import (
    BY_CAPABILITY,
    Enclosure,
    Factor,
    Premises,
    TensorCores,
    dot,
    dots,
    hull,
    total_of_products,
    using,
)
from lastbit.numerics.dots import cut_off

INF, NAN = math.inf, math.nan

special = st.sampled_from([-INF, -(2.0**127), -3.0, -(2.0**-80), 0.0, 2.0**-80, 1.0, 5.0, 2.0**127, INF, NAN])


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def interval(lo: Tensor, hi: Tensor) -> Enclosure:
    """Make the interval between two ends; where one of them is NaN, both must be."""
    return Enclosure(torch.stack([lo, lo, lo, hi]).double())


def alike(one: Enclosure, other: Enclosure) -> bool:
    """Return whether value and ends are the same, NaN included."""
    a, b = one.full[1:], other.full[1:]
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def holds(enclosure: Enclosure, result: float) -> bool:
    lo, hi = enclosure.lo.item(), enclosure.hi.item()
    assert math.isnan(lo) == math.isnan(hi)
    if math.isnan(lo):
        return math.isnan(result)
    return (lo, hi) == (-INF, INF) or lo <= result <= hi


def fp32_dots(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Compute a · b in every order, each product rounded or fused into the sum."""
    results = []
    with np.errstate(all="ignore"):
        for order in itertools.permutations(range(len(a))):
            separate, fused = np.float32(0), np.float32(0)
            for i in order:
                exact = np.float64(a[i]) * np.float64(b[i])
                separate = separate + np.float32(exact)
                fused = np.float32(exact + np.float64(fused))
            results += [float(separate), float(fused)]
    return results


# Parts


@pytest.mark.parametrize("kind", ["normal", "lattice", "special"])
def test_equal_numbers_in_one_two_or_four_parts_have_equal_dots(kind: str) -> None:
    a, b = normals(4, 6), normals(6, 3, seed=1)
    if kind == "lattice":
        a, b = (a * 8).round(), (b * 8).round()
    if kind == "special":
        a[0, 1], a[1, 2], b[3, 0], a[2, 4], b[5, 2] = NAN, INF, -INF, 3e38, 2.0
    forms = [[Enclosure(Enclosure.point(x).full[:parts]) for parts in (1, 2, 4)] for x in (a, b)]
    first = dot(forms[0][0], forms[1][0])
    assert len(first.parts) == 4
    for left, right in itertools.product(*forms):
        found = dot(left, right)
        assert alike(found, first)
        assert torch.equal(found.exact.nan_to_num(), first.exact.nan_to_num())


@pytest.mark.parametrize("kind", ["normal", "lattice", "special", "beyond"])
def test_a_dot_of_which_the_host_is_told_nothing_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator nobody asks whether a radius is zero everywhere, or whether all sums are in range."""
    a, b = ((normals(2, *shape) * 8).round() for shape in ((4, 6), (6, 3)))
    if kind != "lattice":
        a, b = a * 1.1, b * 1.1
    if kind == "special":
        a[0, 0, 1], a[0, 1, 2], b[0, 3, 0], a[1, 2, 4], b[1, 5, 2] = NAN, INF, -INF, 3e38, 2.0
    if kind == "beyond":
        a[0, 0], b[0, :, 1], a[1, 1] = 2.0**100, -(2.0**100), 0.0
    forms = [[Enclosure.point(x), Enclosure(Enclosure.point(x).full), interval(x, x + x.abs())] for x in (a, b)]
    known = [dot(left, right) for left, right in itertools.product(*forms)]
    monkeypatch.setattr(dots, "_all_zero", lambda radius: False)
    monkeypatch.setattr(dots, "_all_within", lambda magnitude, fmt: False)
    for (left, right), expected in zip(itertools.product(*forms), known, strict=True):
        found = dot(left, right)
        assert alike(found, expected)
        assert torch.equal(found.exact.nan_to_num(), expected.exact.nan_to_num())


def test_the_exact_part_is_that_of_the_exact_parts() -> None:
    """Not of the values, from which they may differ."""
    a, b = (Enclosure(torch.stack([x, x + 1]).double()) for x in (normals(2, 5), normals(5, 3, seed=1)))
    found = dot(a, b)
    assert torch.allclose(found.exact, a.exact @ b.exact, rtol=1e-14)
    assert torch.allclose(found.value, a.value @ b.value, rtol=1e-6)
    assert not torch.allclose(found.exact, found.value, rtol=0.1)


@pytest.mark.usefixtures("no_tensor_cores")
def test_one_product_of_bf16_is_exact_and_a_sum_is_wider_the_more_terms_it_has() -> None:
    a, b = normals(1, 512).to(torch.bfloat16).abs(), normals(512, 1, seed=1).to(torch.bfloat16).abs()
    widths = []
    for n in (1, 2, 8, 64, 512):
        found = dot(Enclosure.point(a[:, :n]), Enclosure.point(b[:n]))
        widths.append(((found.hi - found.lo) / found.value).item() * 2.0**24)
    assert widths[0] == 0
    assert widths == sorted(widths)
    assert widths[-1] <= 2 * 512 + 4


def test_a_tree_of_known_height_tightens_a_dot_no_further_than_tensor_cores_allow() -> None:
    a, b = Enclosure.point(normals(1, 512).abs()), Enclosure.point(normals(512, 1, seed=1).abs())
    hopper = BY_CAPABILITY[9, 0]
    with using(Premises(tensor_cores=hopper)):
        any_order = dot(a, b)
    with using(Premises(tensor_cores=hopper, depth=lambda n: 9)):
        by_depth = dot(a, b)
        by_depth_total = total_of_products(a, Enclosure.point(b.value.T))
    width, tight, tree = ((e.hi - e.lo).item() for e in (any_order, by_depth, by_depth_total))
    assert 0.5 * width < tight < 0.9 * width
    assert tree < tight / 10


# Rows that are special, beside others that are not


def beside(row: list[Enclosure], column: Enclosure) -> None:
    """Each row has the dot that it has alone."""
    together = dot(Enclosure(torch.cat([r.full for r in row], 1)), column)
    for i, one in enumerate(row):
        alone = dot(one, column)
        assert alike(together[i : i + 1,], alone), i


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])
def test_rows_do_not_touch_each_other(bad: float) -> None:
    plain = normals(1, 6)
    wrong = plain.clone()
    wrong[0, 2] = bad
    rows = [Enclosure.point(wrong), hull(Enclosure.point(plain), Enclosure.point(plain + 0.5))]
    unknown = interval(plain.where(plain != plain[0, 1], -INF), plain.where(plain != plain[0, 1], INF))
    for column in (normals(6, 1, seed=1), normals(6, 1, seed=1).abs() * 4):
        beside([*rows, unknown, Enclosure.point(plain)], Enclosure.point(column))
        wide = hull(Enclosure.point(column), Enclosure.point(column + 0.25))
        beside([*rows, unknown, Enclosure.point(plain)], wide)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_columns_do_not_touch_each_other(bad: float) -> None:
    a = hull(Enclosure.point(normals(2, 6)), Enclosure.point(normals(2, 6) + 0.5))
    b = normals(6, 3, seed=1)
    clean = dot(a, Enclosure.point(b))
    b[4, 1] = bad
    found = dot(a, Enclosure.point(b))
    assert alike(found[:, ::2], clean[:, ::2])
    if math.isnan(bad):
        assert found.lo[:, 1].isnan().all()
        assert found.hi[:, 1].isnan().all()
    else:
        assert (found.lo[:, 1] == -INF).all()
        assert (found.hi[:, 1] == INF).all()


@pytest.mark.parametrize(
    ("row", "lo", "hi"),
    [
        ([(1, 1), (NAN, NAN), (1, 2)], NAN, NAN),
        ([(NAN, NAN), (-INF, INF), (1, 1)], NAN, NAN),
        ([(INF, INF), (1, 1), (2, 2)], INF, INF),
        ([(INF, INF), (-INF, -INF), (2, 2)], NAN, NAN),
        ([(INF, INF), (-INF, INF), (2, 2)], -INF, INF),
        ([(1, 1), (-INF, INF), (2, 2)], -INF, INF),
        ([(3e38, 3e38), (3e38, 3e38), (-3e38, -3e38)], -INF, INF),
    ],
)
def test_what_must_be_nan_and_what_is_unknown(row: list[tuple[float, float]], lo: float, hi: float) -> None:
    a = interval(*(torch.tensor([ends]) for ends in zip(*row, strict=True)))
    found = dot(a, Enclosure.point(torch.ones(3, 1)))
    assert np.array_equal([found.lo.item(), found.hi.item()], [lo, hi], equal_nan=True)


def test_an_infinity_times_zero_is_nan() -> None:
    found = dot(Enclosure.point(torch.tensor([[INF, 1.0]])), Enclosure.point(torch.tensor([[0.0, 1.0], [1.0, 1.0]])))
    assert found.lo.isnan().tolist() == [[True, False]]
    assert found.hi[0, 1] == INF


def ends(a: float, b: float) -> tuple[float, float]:
    """Of the interval between two numbers: NaN if one of them is."""
    return (NAN, NAN) if math.isnan(a) or math.isnan(b) else (min(a, b), max(a, b))


intervals = st.tuples(*[st.builds(ends, special, special)] * 3)


@given(left=intervals, right=intervals)
@example(((1.0, 1.0), (2.0**127, 2.0**127), (2.0**127, 2.0**127)), ((1.0, 1.0), (1.0, 1.0), (-1.0, -1.0)))
@example(((INF, INF), (0.0, 0.0), (1.0, 5.0)), ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)))
def test_dots_of_members_lie_within(left: tuple, right: tuple) -> None:
    """Over ends that are zero, infinite, NaN and near overflow, in every order, as a dot and as a sum of products."""
    a, b = (interval(*torch.tensor(side, dtype=torch.float64).T) for side in (left, right))
    product = dot(Enclosure(a.parts[:, None, :]), Enclosure(b.parts[:, :, None]))
    summed = total_of_products(a, b)
    for x in itertools.product(*left):
        for y in itertools.product(*right):
            for result in fp32_dots(x, y):
                assert holds(product, result), (x, y, result)
                assert holds(summed, result), (x, y, result)


# Sums of products


def test_a_sum_of_products_holds_them_rounded_or_fused() -> None:
    a, b = normals(50, 5), normals(50, 5, seed=1)
    found = total_of_products(Enclosure.point(a), Enclosure.point(b))
    assert found.shape == (50, 1)
    differing = 0
    for i in range(50):
        results = fp32_dots(a[i].tolist(), b[i].tolist())
        assert all(holds(found[i,], result) for result in results)
        differing += len(set(results)) > 1
    assert differing > 40
    assert torch.allclose(found.exact[:, 0], (a.double() * b.double()).sum(-1), rtol=1e-14)
    assert bool((found.hi - found.lo <= 12 * 2.0**-24 * (a * b).double().abs().sum(-1, keepdim=True)).all())


@pytest.mark.usefixtures("no_tensor_cores")
def test_a_product_that_is_not_rounded_may_leave_what_a_rounded_one_does_not() -> None:
    """3 times a third of fp32 is 1 + 2**-25, which rounds to 1."""
    third = float(np.float32(1 / 3))
    left, right = torch.tensor([[third, 1.0]]), torch.tensor([[3.0, -1.0]])
    for found in (
        total_of_products(Enclosure.point(left), Enclosure.point(right)),
        dot(Enclosure.point(left), Enclosure.point(right.T)),
    ):
        assert holds(found, 0.0)
        assert holds(found, 2.0**-25)
        assert not holds(found, 2.0**-20)


def test_a_sum_of_products_on_a_lattice_is_a_point() -> None:
    a, b = ((normals(4, 9, seed=s) * 10).round() for s in (0, 1))
    found = total_of_products(Enclosure.point(a), Enclosure.point(b * 2.0**-30))
    assert torch.equal(found.lo, found.hi)
    assert torch.equal(found.value[:, 0], (a * b).double().sum(-1) * 2.0**-30)


def test_a_single_product_is_rounded_once() -> None:
    a, b = normals(20, 1), normals(20, 1, seed=1)
    found = total_of_products(Enclosure.point(a), Enclosure.point(b))
    assert torch.equal(found.value, (a * b).double())
    assert all(holds(found[i,], (a * b)[i].item()) for i in range(20))


@pytest.mark.parametrize("cores", BY_CAPABILITY.values(), ids=str)
def test_what_is_cut_off_is_not_lost_to_fp32(cores: TensorCores) -> None:
    """Operands beyond fp16, the largest 1: each product may lose 2**-126 of the share that is cut off."""
    a = Enclosure.point(torch.tensor([[1.0, 2.0**-100]]))
    left, right = Factor.left(a), Factor.right(a.transposed)
    assert float(cut_off(left.limits, right.limits, left.least_limits, cores.cut)) == cores.cut * 2.0**-126
