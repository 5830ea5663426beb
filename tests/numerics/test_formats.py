"""Rounding to floating-point formats against exact rational arithmetic, and distances on their grids."""

from __future__ import annotations

import bisect
import functools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lastbit.errors import UsageError
from lastbit.numerics.formats import (
    BF16,
    DIRECTIONS,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    FP64,
    Direction,
    Format,
    around,
    cast,
    format_of,
    from_ordinals,
    ordinals,
    round_bits,
    round_ends,
    round_to,
)

NARROW = (FP32, BF16, FP16, E4M3, E5M2)
ONE_RESULT: tuple[Direction, ...] = ("nearest", "zero", "ties_away")
ENUMERABLE = (FP16, E4M3, E5M2, BF16)

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
every_narrow_format = pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
every_enumerable_format = pytest.mark.parametrize("fmt", ENUMERABLE, ids=lambda f: f.name)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN for any NaN."""
    return torch.equal(
        torch.where(a.isnan(), 0.0, a).view(torch.int64), torch.where(b.isnan(), 0.0, b).view(torch.int64)
    )


def rational_rounding(x: float, fmt: Format, mode: str = "nearest") -> float:
    """`x` rounded to `fmt` by exact rational arithmetic, from the definition of the format alone.

    `outward` is away from zero, to the next number.
    """
    if math.isnan(x):
        return math.nan
    beyond = math.inf if fmt.overflow == "inf" else math.nan
    if math.isinf(x):
        return math.copysign(beyond, x)
    exact = abs(Fraction(x))
    exponent = fmt.min_exponent
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    step = Fraction(2) ** (exponent - fmt.precision + 1)
    below = exact // step
    rest = exact - below * step
    up = {
        "zero": False,
        "nearest": rest > step / 2 or (rest == step / 2 and below % 2 == 1),
        "ties_away": rest >= step / 2,
        "outward": rest > 0,
    }[mode]
    rounded = (below + up) * step
    if rounded > Fraction(fmt.max):
        return math.copysign(fmt.max if mode == "zero" else beyond, x)
    return math.copysign(float(rounded), x)


@functools.cache
def finite_values(fmt: Format) -> list[float]:
    """Every finite number of a 8- or 16-bit format without sign, ascending, as torch decodes its bit patterns."""
    integer = torch.uint8 if fmt.dtype.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * fmt.dtype.itemsize - 1), dtype=torch.int32).to(integer)
    values = codes.view(fmt.dtype).to(torch.float64)
    return sorted(values[values.isfinite()].tolist())


@functools.cache
def numbers_near(fmt: Format) -> tuple[float, ...]:
    """Values of the format, midpoints of neighbours, and the fp64 neighbours of both: where rounding goes wrong."""
    draw = random.Random(fmt.name)
    exponents = [fmt.min_exponent - fmt.precision, fmt.min_exponent - 1, fmt.min_exponent, -1, 0, 1]
    exponents += [draw.randint(fmt.min_exponent - fmt.precision - 2, int(math.log2(fmt.max))) for _ in range(30)]
    found = [0.0, fmt.max, fmt.quantum, fmt.quantum / 2, 2.0**fmt.min_exponent, fmt.max + fmt.max * fmt.epsilon / 4]
    for exponent in exponents:
        step = 2.0 ** max(exponent - fmt.precision + 1, fmt.min_exponent - fmt.precision + 1)
        grid = math.floor(draw.uniform(1, 2) * 2.0**exponent / step) * step
        found += [grid, grid + step / 2, grid + step, grid + draw.random() * step]
    found += [v for x in found for v in (math.nextafter(x, 0), math.nextafter(x, math.inf))]
    return tuple(v for x in found if math.isfinite(x) for v in (x, -x))


# Formats


@every_enumerable_format
def test_parameters_of_a_format_follow_from_its_bit_patterns(fmt: Format) -> None:
    values = finite_values(fmt)
    assert (values[0], values[1], values[-1]) == (0.0, fmt.quantum, fmt.max)
    assert values[values.index(1.0) + 1] == 1 + fmt.epsilon
    assert 2.0**fmt.min_exponent / fmt.quantum == 2 ** (fmt.precision - 1)
    integer = torch.uint8 if fmt.dtype.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * fmt.dtype.itemsize - 1), dtype=torch.int32).to(integer).view(fmt.dtype)
    assert bool(codes.to(torch.float64).isinf().any()) == (fmt.overflow == "inf")


@every_format
def test_format_of_is_the_inverse_of_dtype(fmt: Format) -> None:
    assert format_of(fmt.dtype) is fmt


def test_format_of_an_integer_dtype() -> None:
    with pytest.raises(UsageError, match=r"unknown floating-point dtype torch\.int8.*torch\.float16"):
        format_of(torch.int8)


# Rounding


@every_narrow_format
@pytest.mark.parametrize("mode", ONE_RESULT)
def test_rounding_near_grid_points_and_midpoints(fmt: Format, mode: Direction) -> None:
    numbers = numbers_near(fmt)
    expected = tensor(*(rational_rounding(x, fmt, mode) for x in numbers))
    assert same(round_bits(tensor(*numbers), fmt.toward(mode)), expected)
    assert same(round_to(tensor(*numbers), fmt.toward(mode)), expected)


@given(x=st.floats(width=64), fmt=st.sampled_from(NARROW), mode=st.sampled_from(ONE_RESULT))
def test_rounding_any_number(x: float, fmt: Format, mode: Direction) -> None:
    expected = tensor(rational_rounding(x, fmt, mode))
    assert same(round_bits(tensor(x), fmt.toward(mode)), expected)
    assert same(round_to(tensor(x), fmt.toward(mode)), expected)


@every_narrow_format
def test_the_numbers_around_a_number(fmt: Format) -> None:
    numbers = numbers_near(fmt)
    below, above = around(tensor(*numbers), fmt)
    assert same(below, tensor(*(rational_rounding(x, fmt, "outward" if x < 0 else "zero") for x in numbers)))
    assert same(above, tensor(*(rational_rounding(x, fmt, "zero" if x < 0 else "outward") for x in numbers)))
    assert same(round_to(tensor(*numbers), fmt.toward("either")), round_to(tensor(*numbers), fmt))
    held = round_to(tensor(*numbers), fmt.toward("zero"))
    assert all(same(end, held) for end in around(held, fmt))


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(x=st.floats(-300, 300), y=st.floats(-300, 300))
def test_rounding_is_monotone_and_bounds_what_lies_between(direction: Direction, x: float, y: float) -> None:
    fmt = E4M3.toward(direction)
    ends = round_ends(tensor(min(x, y)), tensor(max(x, y)), fmt)
    for inside in (x, y, (x + y) / 2):
        least, most = round_ends(tensor(inside), tensor(inside), fmt)
        assert bool((ends[0] <= least) & (most <= ends[1]))
        assert bool((least <= round_to(tensor(inside), fmt)) & (round_to(tensor(inside), fmt) <= most))


@given(mantissa=st.floats(-2, 2), fmt=st.sampled_from(NARROW), data=st.data())
def test_rounding_within_the_range_of_the_format(mantissa: float, fmt: Format, data: st.DataObject) -> None:
    """Unlike the fp64 numbers that Hypothesis likes, these rarely overflow or vanish."""
    exponent = data.draw(st.integers(fmt.min_exponent - fmt.precision - 1, math.frexp(fmt.max)[1]))
    x = math.ldexp(mantissa, exponent)
    assert same(round_bits(tensor(x), fmt), tensor(rational_rounding(x, fmt)))


@every_enumerable_format
def test_midpoints_of_all_neighbours_round_to_the_even_one(fmt: Format) -> None:
    """And the fp64 numbers beside a midpoint to the nearer one."""
    values = tensor(*finite_values(fmt))
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    assert same(round_to(middle, fmt), even)
    assert same(round_to(-middle, fmt), -even)
    assert same(round_to(torch.nextafter(middle, low), fmt), low)
    assert same(round_to(torch.nextafter(middle, high), fmt), high)
    assert same(round_to(torch.nextafter(high, low), fmt.toward("zero")), low)


@given(x=st.floats(-300, 300))
@example(232.0)
@example(2.0**-10)
def test_nothing_is_nearer_than_the_rounded_value(x: float) -> None:
    """Brute force over all numbers of e4m3."""
    values = finite_values(E4M3)
    at = bisect.bisect(values, abs(x))
    neighbours = values[max(0, at - 1) : at + 1]
    nearest = min(abs(Fraction(v) - abs(Fraction(x))) for v in neighbours)
    assert abs(Fraction(round_to(tensor(x), E4M3).item()) - Fraction(x)) == nearest


@every_narrow_format
def test_special_values(fmt: Format) -> None:
    assert same(round_to(tensor(0.0, -0.0, math.nan), fmt), tensor(0.0, -0.0, math.nan))
    beyond = math.inf if fmt.overflow == "inf" else math.nan
    assert same(round_to(tensor(math.inf, -math.inf), fmt), tensor(beyond, -beyond))
    assert same(round_to(tensor(math.inf, -math.inf), fmt.toward("zero")), tensor(beyond, -beyond))
    assert same(round_to(tensor(1e308, -1e308), fmt.toward("zero")), tensor(fmt.max, -fmt.max))
    assert same(round_to(tensor(5e-324, -5e-324), fmt), tensor(0.0, -0.0))


@every_narrow_format
def test_overflow_starts_halfway_to_the_next_number(fmt: Format) -> None:
    last_step = 2.0 ** (math.frexp(fmt.max)[1] - fmt.precision)
    halfway = fmt.max + last_step / 2
    below, at, above = round_to(tensor(math.nextafter(halfway, 0), halfway, math.nextafter(halfway, math.inf)), fmt)
    assert below == fmt.max
    assert not above.isfinite()
    # The tie goes to the even neighbour: for e4m3 that is 448, because its largest significand is 1.75, not 1.875.
    assert (at == fmt.max) if fmt is E4M3 else at.isinf()


@pytest.mark.parametrize(
    ("fmt", "x", "expected"),
    [
        (BF16, 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7),
        (BF16, 1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-7),
        (FP16, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-10),
        (E5M2, 1 + 2.0**-3 + 2.0**-40, 1.25),
    ],
)
def test_no_double_rounding_through_fp32(fmt: Format, x: float, expected: float) -> None:
    """These numbers lie just off a midpoint, and their fp32 roundings exactly on it."""
    assert round_to(tensor(x), fmt).item() == expected
    assert cast(tensor(x), fmt.dtype).item() == expected
    via_fp32 = tensor(x).to(torch.float32).to(fmt.dtype).item()
    assert via_fp32 != expected, "torch's own cast rounds once here, so that this number is no trap"


def test_fp64_is_left_alone() -> None:
    x = tensor(1 + 2.0**-52, -0.0, math.inf, 5e-324)
    assert round_to(x, FP64) is x
    assert cast(x, torch.float64) is x


@given(bits=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=200))
def test_fast_path_of_fp32_is_the_integer_path(bits: list[int]) -> None:
    x = torch.tensor(bits, dtype=torch.int64).view(torch.float64)
    narrow = torch.ldexp(x.frexp().mantissa.nan_to_num(0.5), torch.tensor(bits) % 300 - 160)
    for numbers in (x, narrow):
        assert same(round_to(numbers, FP32), round_bits(numbers, FP32))


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=lambda f: f.name)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
@example(bits=[0x7F800000, 0x3F800000])
@example(bits=[0x80000000, 0x00000001, 0x33000000, 0x477FEFFF, 0x477FF000, 0x43E80000])
def test_fast_path_of_fp32_numbers_is_the_integer_path(fmt: Format, bits: list[int]) -> None:
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32).double()
    for numbers in (x, x.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0).clamp(-fmt.max, fmt.max)):
        fast, slow = round_to(numbers, fmt), round_bits(numbers, fmt)
        assert torch.equal(fast.isnan(), slow.isnan())
        assert torch.equal(fast.nan_to_num().view(torch.int64), slow.nan_to_num().view(torch.int64))


@every_narrow_format
def test_rounding_is_monotone_and_idempotent(fmt: Format) -> None:
    x = tensor(*numbers_near(fmt)).sort().values
    rounded = round_to(x, fmt)
    finite = rounded[rounded.isfinite()]
    assert (finite.diff() >= 0).all()
    assert same(round_to(rounded, fmt), rounded)


def test_shape_is_kept() -> None:
    assert round_to(torch.zeros(2, 0, 3, dtype=torch.float64), BF16).shape == (2, 0, 3)
    assert round_to(torch.tensor(1.3, dtype=torch.float64), FP16).shape == ()


# Casts


@pytest.mark.parametrize("fmt", [BF16, FP16, E5M2], ids=lambda f: f.name)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200))
def test_cast_of_fp32_numbers_is_that_of_torch(fmt: Format, bits: list[int]) -> None:
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    narrow = torch.ldexp(x.frexp().mantissa.nan_to_num(0.5), torch.tensor(bits) % 40 - 22)
    for numbers in (x, narrow):
        ours, theirs = cast(numbers.double(), fmt.dtype), numbers.to(fmt.dtype)
        assert ours.dtype == fmt.dtype
        assert same(ours.double(), theirs.double())


@every_narrow_format
def test_cast_stores_the_rounded_value(fmt: Format) -> None:
    x = tensor(*numbers_near(fmt))
    assert same(cast(x, fmt.dtype).double(), round_to(x, fmt))


def test_cast_does_not_saturate() -> None:
    assert cast(tensor(500.0, -500.0, math.inf), torch.float8_e4m3fn).float().isnan().all()


# Ordinals


@every_enumerable_format
def test_ordinals_count_the_values(fmt: Format) -> None:
    values = tensor(*finite_values(fmt))
    counted = torch.arange(len(values))
    assert torch.equal(ordinals(values, fmt), counted)
    assert torch.equal(ordinals(-values, fmt), -counted)
    assert same(from_ordinals(counted, fmt), values)
    assert same(from_ordinals(-counted[1:], fmt), -values[1:])
    assert ordinals(tensor(math.inf, -math.inf), fmt).tolist() == [len(values), -len(values)]


@given(fmt=st.sampled_from([FP32, FP64]), data=st.data())
def test_ordinals_of_wide_formats(fmt: Format, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, int(ordinals(tensor(fmt.max), fmt).item()) - 1))
    low, high = from_ordinals(torch.tensor([position, position + 1]), fmt)
    assert same(round_to(low, fmt), low)
    assert high == torch.nextafter(low.to(fmt.dtype), torch.tensor(math.inf, dtype=fmt.dtype))
    assert ordinals(torch.stack([low, high, -high]), fmt).tolist() == [position, position + 1, -position - 1]


@every_format
def test_ordinals_around_zero_and_the_smallest_normal_number(fmt: Format) -> None:
    assert ordinals(tensor(-0.0, 0.0, fmt.quantum, -fmt.quantum), fmt).tolist() == [0, 0, 1, -1]
    hidden = 2 ** (fmt.precision - 1)
    smallest = 2.0**fmt.min_exponent
    at = ordinals(tensor(smallest - fmt.quantum, smallest, smallest + fmt.quantum), fmt)
    assert at.tolist() == [hidden - 1, hidden, hidden + 1]


@every_format
def test_infinity_is_next_to_the_largest_number(fmt: Format) -> None:
    assert ordinals(tensor(math.inf, fmt.max), fmt).diff().item() == -1
