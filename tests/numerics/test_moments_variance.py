"""The second pass of a two-pass variance: what fp32 kernels compute lies within, one pass far from zero does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lastbit.numerics import Enclosure, Premises, hull, mean, mean_of_squares, using, variance_about

SIZE = 1024


def rows(offset: float, *, count: int = 16, size: int = SIZE) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0)) + offset


def two_pass(x: Tensor, center: Tensor) -> Tensor:
    return (x - center).square().mean(-1, keepdim=True)


def one_pass(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()


def outside(variance: Tensor, allowed: Enclosure) -> int:
    return int(((variance.double() < allowed.lo) | (variance.double() > allowed.hi)).sum())


@pytest.mark.parametrize("offset", [0.0, 1.0, 10.0, 100.0, 1000.0, 1e5])
@pytest.mark.parametrize("size", [1, 2, 3, 100, SIZE])
def test_two_passes_lie_within(offset: float, size: int) -> None:
    x = rows(offset, size=size)
    point = Enclosure.point(x)
    allowed = variance_about(point, mean(point))
    for center in (x.mean(-1, keepdim=True), x.flip(-1).cumsum(-1)[:, -1:] / size):
        assert outside(two_pass(x, center), allowed) == 0
    given = variance_about(point, Enclosure.point(x.mean(-1, keepdim=True)))
    assert outside(two_pass(x, x.mean(-1, keepdim=True)), given) == 0


@pytest.mark.parametrize("position", [-1.0, -0.5, 0.5, 1.0])
def test_a_mean_anywhere_in_its_enclosure_lies_within(position: float) -> None:
    x = rows(1000.0)
    point = Enclosure.point(x)
    center = mean(point)
    middle, radius = (center.lo + center.hi) / 2, (center.hi - center.lo) / 2
    chosen = (middle + position * radius * 0.999).float()
    assert outside(two_pass(x, chosen), variance_about(point, center)) == 0


@pytest.mark.parametrize("offset", [10.0, 100.0, 1000.0])
def test_one_pass_is_outside_far_from_zero(offset: float) -> None:
    x = rows(offset)
    point = Enclosure.point(x)
    with using(Premises(depth=lambda n: 20)):
        allowed = variance_about(point, Enclosure.point(x.mean(-1, keepdim=True)))
    assert outside(one_pass(x), allowed) >= 12


def test_intervals_of_the_elements_are_counted() -> None:
    """A member of the intervals, drawn at random or at their ends, has its variance within."""
    x = rows(3.0)
    wide = hull(Enclosure.point(x * (1 - 1e-4)), Enclosure.point(x * (1 + 1e-4)))
    allowed = variance_about(wide, mean(wide))
    for member in (x * (1 - 1e-4), x * (1 + 1e-4), x * (1 + 1e-4 * torch.randn(x.shape).sign())):
        member = member.clamp(wide.lo.float(), wide.hi.float())
        assert outside(two_pass(member, member.mean(-1, keepdim=True)), allowed) == 0


def test_it_is_much_narrower_than_interval_arithmetic() -> None:
    point = Enclosure.point(rows(1000.0))
    center = mean(point)
    naive, allowed = mean_of_squares(point - center), variance_about(point, center)
    assert ((allowed.hi - allowed.lo) < 0.2 * (naive.hi - naive.lo)).all()


def test_a_constant_row_has_no_variance() -> None:
    point = Enclosure.point(torch.full((1, 7), 1 / 3))
    allowed = variance_about(point, mean(point))
    assert allowed.lo.item() == 0.0
    assert allowed.exact.item() == pytest.approx(0.0, abs=1e-15)


def test_on_a_lattice_with_a_known_mean_it_is_a_point() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    allowed = variance_about(Enclosure.point(x), mean(Enclosure.point(x)))
    assert allowed.lo.item() == allowed.hi.item() == np.var([1.0, 2.0, 3.0, 6.0])
