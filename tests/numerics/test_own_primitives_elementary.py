"""Logarithms, powers of two, tanh, erf, sine and cosine by brute force: what computes them lies inside the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lastbit import numerics
from lastbit.numerics import DOCUMENTED, Bound, Enclosure, Premises, Primitive, exp, primitive, using
from lastbit.numerics.primitives import cos, erf, exp2, expm1, log, log1p, log2, sin, tanh

NAMES = ("exp2", "log", "log2", "log1p", "expm1", "tanh", "erf", "sin", "cos")
MINIMUM, TINY, HUGE = 2.0**-126, 2.0**-149, torch.finfo(torch.float32).max
every_function = pytest.mark.parametrize("name", NAMES)


def everything(dtype: torch.dtype) -> Tensor:
    """All numbers of a dtype of 16 bits, as fp32."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def spread(step: int) -> Tensor:
    """fp32 numbers of both signs from the smallest subnormal to infinity, one of `step`."""
    positive = torch.arange(1, 0x7F800001, step, dtype=torch.int64).to(torch.int32).view(torch.float32)
    return torch.cat([positive, -positive])


def function(name: str) -> Callable[[Enclosure], Enclosure]:
    found: Callable[[Enclosure], Enclosure] = getattr(numerics, name)
    return found


def inside(found: Tensor, e: Enclosure) -> Tensor:
    """Return which elements an enclosure allows."""
    found = found.double()
    unknown = torch.isneginf(e.lo) & torch.isposinf(e.hi)
    return ((found >= e.lo) & (found <= e.hi)) | (torch.isnan(found) & torch.isnan(e.lo)) | unknown


def by_libm(name: str, x: Tensor) -> Tensor:
    """Of the C library in double precision, rounded once."""
    of_one = getattr(math, name)
    return torch.tensor([_one(of_one, v) for v in x.tolist()], dtype=torch.float64).float()


def _one(of_one: Callable[[float], float], x: float) -> float:
    try:
        return of_one(x)
    except ValueError:  # log(0), and what is not defined
        return -math.inf if x == 0 or (x == -1 and of_one is math.log1p) else math.nan
    except OverflowError:
        return math.inf


@every_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_lies_inside_for_all_numbers_of_16_bits(name: str, dtype: torch.dtype) -> None:
    x = everything(dtype)
    assert inside(getattr(torch, name)(x), function(name)(Enclosure.point(x))).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "erf"])
def test_numpy_lies_inside_a_bound_of_its_own(name: str) -> None:
    """Its vectorised functions err by up to 4 ulp, which depends on the instructions of the CPU."""
    x = everything(torch.bfloat16)
    with np.errstate(all="ignore"):
        found = torch.from_numpy(getattr(np, name)(x.numpy()))
    with using(Premises(bounds={name: Bound(2.0**-21, "numpy")})):
        assert inside(found, function(name)(Enclosure.point(x))).all()


@every_function
def test_torch_lies_inside_from_the_smallest_number_to_the_largest(name: str) -> None:
    x = spread(9973)
    assert inside(getattr(torch, name)(x), function(name)(Enclosure.point(x))).all()


@every_function
def test_the_c_library_lies_inside(name: str) -> None:
    x = spread(1 << 19)
    assert inside(by_libm(name, x), function(name)(Enclosure.point(x))).all()


@every_function
def test_the_ends_are_no_farther_than_the_bound(name: str) -> None:
    x = spread(9973)
    e = function(name)(Enclosure.point(x))
    known = torch.isfinite(e.lo) & torch.isfinite(e.hi) & (e.exact.abs() > 2 * MINIMUM) & (x.abs() > MINIMUM)
    reach = (DOCUMENTED[name].relative + 2.0**-24 + 2.0**-40) * e.exact.abs()
    assert known.count_nonzero() > 10_000
    assert ((e.hi - e.exact)[known] <= reach[known]).all() and ((e.exact - e.lo)[known] <= reach[known]).all()


@every_function
@pytest.mark.parametrize("ulps", [4, -4])
def test_a_value_four_ulp_beyond_the_ends_is_found(name: str, ulps: int) -> None:
    x = everything(torch.bfloat16)
    e = function(name)(Enclosure.point(x))
    known = torch.isfinite(e.lo) & torch.isfinite(e.hi) & (e.exact != 0)
    moved = (e.hi if ulps > 0 else e.lo)[known].float()
    for _ in range(4):
        moved = torch.nextafter(moved, torch.tensor(math.copysign(math.inf, ulps)))
    assert not inside(moved, Enclosure(e.parts[:, known])).any()


@every_function
def test_results_for_numbers_within_an_interval_lie_inside(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    size = 2.0 ** (torch.rand(4000, generator=generator) * 24 - 12)
    center = torch.randn(4000, generator=generator) * size
    width = size * 2.0 ** (torch.rand(4000, generator=generator) * 24 - 22)
    lo, hi = (center - width).double(), (center + width).double()
    allowed = function(name)(Enclosure(torch.stack([center.double(), center.double(), lo, hi])))
    share = torch.rand(64, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([lo[None], hi[None], lo + share * (hi - lo)]).float()
    x = x.clamp(lo.float(), hi.float())
    found = getattr(torch, name)(x)
    bad = ~inside(found, allowed)
    assert not bad.any(), (x[bad][:3], found[bad][:3])
    if name in ("sin", "cos"):  # an interval of less than a turn is not taken for one that holds everything
        assert (allowed.hi - allowed.lo < 1.999).count_nonzero() > 2000


@pytest.mark.parametrize(
    ("name", "lo", "hi", "least", "most"),
    [
        ("sin", 1.0, 2.0, math.sin(1.0), 1.0),
        ("sin", -2.0, -1.0, -1.0, math.sin(-1.0)),
        ("sin", 0.0, 7.0, -1.0, 1.0),
        ("sin", 2.0, 3.0, math.sin(3.0), math.sin(2.0)),
        ("cos", -0.5, 0.25, math.cos(0.5), 1.0),
        ("cos", 3.0, 3.5, -1.0, math.cos(3.5)),
        ("cos", 1.0, 2.0, math.cos(2.0), math.cos(1.0)),
        ("cos", 2.0**31, 2.0**31 + 256, -1.0, 1.0),
        ("log", 1.0, 2.0, 0.0, math.log(2.0)),
        ("tanh", -1.0, 2.0, math.tanh(-1.0), math.tanh(2.0)),
    ],
)  # fmt: skip
def test_ends_of_intervals_are_the_extremes(name: str, lo: float, hi: float, least: float, most: float) -> None:
    e = function(name)(Enclosure(torch.tensor([lo, lo, lo, hi], dtype=torch.float64)))
    assert float(e.lo) == pytest.approx(least, rel=1e-6) and float(e.hi) == pytest.approx(most, rel=1e-6)
    assert float(e.lo) <= least and float(e.hi) >= most


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("name", "x", "lo", "hi"),
    [
        ("exp2", -INF, 0.0, 0.0), ("exp2", INF, INF, INF), ("exp2", 129.0, INF, INF), ("exp2", -200.0, 0.0, 0.0),
        ("log", 0.0, -INF, -INF), ("log", -0.0, -INF, -INF), ("log", INF, INF, INF), ("log", -1.0, NAN, NAN),
        ("log", 1.0, 0.0, 0.0), ("log2", 1.0, 0.0, 0.0), ("log2", -INF, NAN, NAN),
        ("log1p", -1.0, -INF, -INF), ("log1p", -2.0, NAN, NAN), ("log1p", 0.0, 0.0, 0.0),
        ("expm1", -INF, -1.0, -1.0), ("expm1", 0.0, 0.0, 0.0), ("expm1", INF, INF, INF),
        ("tanh", 0.0, 0.0, 0.0), ("erf", 0.0, 0.0, 0.0), ("sin", 0.0, 0.0, 0.0),
        ("sin", INF, NAN, NAN), ("cos", -INF, NAN, NAN),
        *((name, NAN, NAN, NAN) for name in NAMES),
    ],
)  # fmt: skip
def test_special_values(name: str, x: float, lo: float, hi: float) -> None:
    e = function(name)(Enclosure.point(torch.tensor(x)))
    slack = 1e-6 if abs(lo) == 1.0 else 0.0
    assert (float(e.lo), float(e.hi)) == pytest.approx((lo, hi), abs=slack, nan_ok=True)


@pytest.mark.parametrize("name", ["log", "log2"])
def test_a_subnormal_argument_may_be_taken_for_zero(name: str) -> None:
    e = function(name)(Enclosure.point(torch.tensor([TINY, MINIMUM / 2, MINIMUM])))
    assert e.lo.tolist()[:2] == [-INF, -INF] and math.isfinite(float(e.lo[2]))
    assert (e.hi > -150).all()


@pytest.mark.parametrize("name", ["log1p", "expm1", "tanh", "erf", "sin"])
def test_a_subnormal_result_may_be_flushed(name: str) -> None:
    x = torch.tensor([MINIMUM / 2, -MINIMUM / 2, TINY])
    e = function(name)(Enclosure.point(x))
    assert inside(torch.zeros(3), e).all() and inside(x, e).all()


def test_powers_of_two_below_the_normal_range_may_be_flushed() -> None:
    for power in (exp2, lambda x: exp(x * math.log(2.0))):
        e = power(Enclosure.point(torch.tensor([-127.0, -149.0])))
        assert inside(torch.zeros(2), e).all() and inside(torch.tensor([2.0**-127, TINY]), e).all()
        assert not inside(torch.tensor([-TINY, -TINY]), e).any()


def test_the_exponential_of_minus_infinity_is_zero() -> None:
    e = exp(Enclosure.point(torch.tensor([-INF, -1000.0])))
    assert e.lo.tolist() == e.hi.tolist() == [0.0, 0.0]


@every_function
def test_of_what_may_be_anything_nothing_is_known(name: str) -> None:
    e = function(name)(Enclosure(torch.tensor([0.0, 0.0, -INF, INF], dtype=torch.float64)))
    assert (float(e.lo), float(e.hi)) == (-INF, INF)


def test_the_logarithm_of_an_interval_that_reaches_below_zero_is_unknown() -> None:
    e = log(Enclosure(torch.tensor([1.0, 1.0, -0.5, 2.0], dtype=torch.float64)))
    assert (float(e.lo), float(e.hi)) == (-INF, INF)


@every_function
def test_premises_replace_the_documented_bound(name: str) -> None:
    x = Enclosure.point(torch.tensor([0.75, 0.3]))
    with using(Premises(bounds={name: Bound(2.0**-12, "measured")})):
        wide = function(name)(x)
    assert ((wide.hi - wide.lo) > 100 * (function(name)(x).hi - function(name)(x).lo)).all()


def test_a_primitive_of_ones_own_falls_or_turns_as_it_says() -> None:
    bound = Bound(2.0**-22, "three ulp of fp32")
    falling = primitive("acot", lambda x: math.pi / 2 - torch.atan(x), shape="falling", bound=bound)
    x = torch.linspace(-30, 30, 999)
    assert inside((math.pi / 2 - x.double().atan()).float(), falling(Enclosure.point(x))).all()
    between = falling(Enclosure(torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float64)))
    assert float(between.lo) == pytest.approx(math.pi / 4) and float(between.hi) == pytest.approx(3 * math.pi / 4)

    def extent(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        through = (lo < 0) & (hi > 0)
        return torch.where(through, 1.0, torch.minimum(lo.cosh(), hi.cosh())), torch.maximum(lo.cosh(), hi.cosh())

    cosh = primitive("cosh", torch.cosh, shape=extent, bound=bound)
    turned = cosh(Enclosure(torch.tensor([0.0, 0.0, -1.0, 2.0], dtype=torch.float64)))
    assert float(turned.lo) == pytest.approx(1.0) and float(turned.hi) == pytest.approx(math.cosh(2.0))


def test_an_absolute_error_counts_at_zero_too() -> None:
    fast = primitive("lg2.approx", torch.log2, shape="rising", bound=Bound(2.0**-22, "PTX", absolute=2.0**-22))
    e = fast(Enclosure.point(torch.tensor([1.0, 1.5])))
    assert float(e.hi[0]) == 2.0**-22 and float(e.lo[0]) == -(2.0**-22)
    assert ((e.hi - e.lo) >= 2.0**-21).all()


def test_what_a_primitive_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="neither rising nor falling"):
        primitive("f", torch.sinh, shape="up", bound=Bound(0.0, ""))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="cbrt"):
        Premises().relative("cbrt")


def test_identities_hold_in_the_enclosures() -> None:
    x = Enclosure.point(torch.linspace(0.1, 3.0, 64))
    for one, other in (
        (log(exp2(x)), x * math.log(2.0)),
        (log2(exp2(x)), x),
        (log1p(expm1(x)), x),
        (sin(x) * sin(x) + cos(x) * cos(x), x * 0.0 + 1.0),
    ):
        assert ((one.lo <= other.hi) & (other.lo <= one.hi)).all()
    assert (tanh(x).hi > erf(x * 0.5).lo).all()


SAME = primitive("same", lambda x: x.clone(), shape="rising", bound=Bound(2.0**-20, "one in a million"))
OPPOSITE = primitive("opposite", torch.neg, shape="falling", bound=Bound(0.0, "exact", absolute=2.0**-10))
NEAR = 2.0**-126 * 2.0**-20
LEAST = 2.0**-147
"""What a subnormal result may err by."""


@pytest.mark.parametrize(
    ("x", "lo", "hi"),
    [
        (1.0, 1 - 2.0**-20, 1 + 2.0**-20),
        (-1.0, -1 - 2.0**-20, -1 + 2.0**-20),
        (3 * 2.0**-126, 3 * (2.0**-126 - NEAR), 3 * (2.0**-126 + NEAR)),
        (2.0**-125, 2 * (2.0**-126 - NEAR) - LEAST, 2 * (2.0**-126 + NEAR) + LEAST),
        (2.0**-126, 0.0, 2.0**-126 + NEAR + LEAST),
        (-(2.0**-126), -(2.0**-126) - NEAR - LEAST, 0.0),
        (2.0**-127, 0.0, 2.0**-127 + NEAR / 2 + LEAST),
        (2.0**-149, 0.0, 2.0**-149 + LEAST),
        (0.0, 0.0, 0.0),
    ],
)
def test_what_a_subnormal_number_or_result_may_become(x: float, lo: float, hi: float) -> None:
    e = SAME(Enclosure.point(torch.tensor([x], dtype=torch.float64)))
    assert (e.lo.item(), e.hi.item()) == (float(torch.tensor(lo)), float(torch.tensor(hi)))


@pytest.mark.parametrize(
    ("ends", "lo", "hi"),
    [
        ((1.0, 2.0), -2.0, -1.0),
        ((-3.0, 2.0), -2.0, 3.0),
        ((0.0, 1.0), -1.0, 0.0),
        ((2.0**-130, 1.0), -1.0, 0.0),
        ((-1.0, -(2.0**-130)), 0.0, 1.0),
        ((2.0**-126, 1.0), -1.0, -(2.0**-126)),
    ],
)
def test_ends_of_a_falling_function_are_exchanged(ends: tuple[float, float], lo: float, hi: float) -> None:
    """With an absolute error besides; a subnormal argument may be taken for zero."""
    e = OPPOSITE(Enclosure(torch.tensor([[ends[0]], [ends[0]], [ends[0]], [ends[1]]], dtype=torch.float64)))
    assert e.lo.item() == pytest.approx(lo - 2.0**-10, rel=1e-6) and e.hi.item() == pytest.approx(
        hi + 2.0**-10, rel=1e-6
    )


@pytest.mark.parametrize("wave", [sin, cos])
@pytest.mark.parametrize(
    ("lo", "hi", "crest", "trough"),
    [
        (-0.1, 0.1, True, False), (0.4, 0.6, False, True), (0.3, 0.45, False, False), (0.4, 1.1, True, True),
        (-5.1, -4.9, True, False), (0.1, 2.0**28, True, True),
    ],
)  # fmt: skip
def test_turning_points_within_an_interval(wave: Primitive, lo: float, hi: float, crest: bool, trough: bool) -> None:
    """Ends in turns beside the crest, which is at no turn of the cosine and a quarter of one of the sine."""
    at = 0.25 if wave is sin else 0.0
    ends = torch.tensor([lo + at, hi + at], dtype=torch.float64) * 2 * math.pi
    e = wave(Enclosure(torch.stack([ends[:1], ends[:1], ends[:1], ends[1:]])))
    values = (torch.sin if wave is sin else torch.cos)(ends)
    assert (e.hi.item() >= 1.0) == crest
    assert (e.lo.item() <= -1.0) == trough
    if not crest:
        assert e.hi.item() == pytest.approx(values.max().item(), rel=1e-5)
    if not trough:
        assert e.lo.item() == pytest.approx(values.min().item(), rel=1e-5)


def test_far_arguments_may_have_any_phase_unless_they_are_one_number() -> None:
    far = 2.0**30 * 1.5
    one, several = (sin(Enclosure(torch.tensor([[far], [far], [far], [end]]).double())) for end in (far, far + 128))
    assert several.lo.item() <= -1 and several.hi.item() >= 1 and one.hi.item() - one.lo.item() < 1e-5
    lost = sin(Enclosure(torch.tensor([[0.0], [0.0], [0.0], [INF]]).double()))
    assert (lost.lo.item(), lost.hi.item()) == (-INF, INF)
