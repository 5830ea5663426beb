"""Formats of integers: rounding, positions and conversions, for every number that they have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lastbit.judging.torch_compare import _ulp_distance
from lastbit.numerics import (
    CODES,
    FORMATS,
    TARGETS,
    Enclosure,
    Format,
    ceil,
    clamp,
    floor,
    format_of,
    round_half_away,
    round_half_even,
    round_to,
    trunc,
)
from lastbit.numerics.formats import from_ordinals, ordinals

INF, NAN = math.inf, math.nan
every_format = pytest.mark.parametrize("fmt", CODES.values(), ids=str)


def integers(fmt: Format) -> torch.Tensor:
    assert fmt.lowest is not None
    return torch.arange(fmt.lowest, fmt.max + 1, dtype=torch.float64)


@every_format
def test_every_integer_is_a_number_of_its_format(fmt: Format) -> None:
    x = integers(fmt)
    limits = torch.iinfo(fmt.dtype)
    assert len(x) == 2 ** (4 if fmt.name == "int4" else 8) and limits.min <= x[0] and x[-1] <= limits.max
    assert round_to(x, fmt).equal(x)
    assert ordinals(x, fmt).equal(x.to(torch.int64)) and from_ordinals(ordinals(x, fmt), fmt).equal(x)
    assert (fmt.quantum, fmt.is_integer) == (1.0, True)


@every_format
def test_what_is_between_is_rounded_to_the_nearest_and_ties_to_even(fmt: Format) -> None:
    x = integers(fmt)[:-1]
    for share in (0.25, 0.5, 0.75):
        assert round_to(x + share, fmt).numpy().tolist() == np.rint((x + share).numpy()).tolist()
    assert round_to(x + 0.75, fmt.toward("zero")).equal(torch.trunc(x + 0.75))


@every_format
def test_what_is_beyond_is_no_number(fmt: Format) -> None:
    assert fmt.lowest is not None
    beyond = torch.tensor([fmt.max + 0.75, fmt.max + 0.5, 1e30, fmt.lowest - 0.75, -INF, NAN], dtype=torch.float64)
    rounded = round_to(beyond, fmt)
    assert rounded.nan_to_num(nan=0.5, posinf=9e9, neginf=-9e9).tolist()[:5] == [9e9, 9e9, 9e9, -9e9, -9e9]
    assert rounded[5].isnan()
    converted = Enclosure.point(beyond).rounded(fmt)
    assert converted.lo.eq(-INF).all() and converted.hi.eq(INF).all()


def test_of_an_end_that_is_beyond_nothing_is_known_of_the_other() -> None:
    ends = torch.tensor([[100.0, 100.0], [100.0, 100.0], [99.6, 126.0], [100.4, 127.5]], dtype=torch.float64)
    e = Enclosure(ends).rounded(CODES["int8"])
    assert e.lo.tolist() == [100.0, -INF] and e.hi.tolist() == [100.0, INF]


@every_format
def test_distances_are_differences(fmt: Format) -> None:
    x = integers(fmt)
    a, b = x[:, None].expand(-1, len(x)), x[None].expand(len(x), -1)
    assert _ulp_distance(a.contiguous(), b.contiguous(), fmt).equal((a - b).abs())


def test_integers_are_targets_and_no_inputs() -> None:
    assert set(TARGETS) == {*FORMATS, *CODES}
    with pytest.raises(Exception, match="int8"):
        format_of(torch.int8)


@pytest.mark.parametrize(
    ("function", "by_numpy"),
    [
        (round_half_even, np.rint),
        (round_half_away, lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x)),
        (floor, np.floor),
        (ceil, np.ceil),
        (trunc, np.trunc),
    ],
)
def test_functions_to_integers_are_exact_and_keep_intervals(function: object, by_numpy: object) -> None:
    x = torch.cat([torch.arange(-40, 41) / 4, torch.tensor([0.49999997, -0.49999997, 2.0**23 + 1, 2.0**60, INF])])
    e = function(Enclosure.point(x))  # type: ignore[operator]
    assert len(e.parts) == 1 and e.value.tolist() == by_numpy(x.double().numpy()).tolist()  # type: ignore[operator]
    wide = function(Enclosure(torch.stack([x, x, x - 0.3, x + 0.3]).double()))  # type: ignore[operator]
    assert wide.lo.tolist() == by_numpy((x - 0.3).double().numpy()).tolist()  # type: ignore[operator]
    assert function(Enclosure.point(torch.tensor(NAN))).value.isnan()  # type: ignore[operator]


def test_codes_have_two_legal_values_near_a_tie() -> None:
    x = torch.tensor([2.5, 3.4999, 126.5, -128.49], dtype=torch.float64)
    near = Enclosure(torch.stack([x, x, x - 1e-3, x + 1e-3]))
    codes = clamp(near, -128.0, 127.0).rounded(CODES["int8"])
    assert codes.lo.tolist() == [2.0, 3.0, 126.0, -128.0] and codes.hi.tolist() == [3.0, 4.0, 127.0, -128.0]
