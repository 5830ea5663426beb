"""Every statistic of a comparison on tensors made by hand."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lastbit.judging import compare as comparing
from lastbit.judging.compare import Begun, compare, finished, outside_count
from lastbit.judging.torch_compare import outside_mask
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import BF16, E4M3, FORMATS, FP16, FP32, FP64, Format
from lastbit.result import ULP_BINS, Comparison
from tests import whole_compare
from tests.comparisons import comparisons

INF, NAN = math.inf, math.nan
ULP = 2.0**-7  # of bf16 in [1, 2)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def points(*values: float) -> Enclosure:
    """Elements for which exactly one value is allowed."""
    return Enclosure.point(tensor(*values))


def allowed(*elements: tuple[float, float, float, float]) -> Enclosure:
    """Elements given as exact, value, lo, hi."""
    return Enclosure(tensor(*[part for element in elements for part in element]).reshape(-1, 4).T.clone())


ANYTHING = (0.0, 0.0, -INF, INF)


# What is outside


@pytest.mark.parametrize(
    ("actual", "lo", "hi", "outside"),
    [
        (1.0, 1.0, 1.0, False),
        (1.5, 1.0, 2.0, False),
        (2.0, 1.0, 2.0, False),
        (2.1, 1.0, 2.0, True),
        (0.9, 1.0, 2.0, True),
        (NAN, 1.0, 2.0, True),
        (INF, 1.0, 2.0, True),
        (INF, 1.0, INF, False),
        (NAN, 1.0, INF, True),
        (-INF, 1.0, INF, True),
        (INF, INF, INF, False),
        (3e38, INF, INF, True),
        (NAN, NAN, NAN, False),
        (0.0, NAN, NAN, True),
        (INF, NAN, NAN, True),
        (NAN, -INF, INF, False),
        (-INF, -INF, INF, False),
        (0.0, -INF, INF, False),
        (-0.0, 0.0, 0.0, False),
        (0.0, -0.0, -0.0, False),
    ],
)
def test_what_an_enclosure_forbids(actual: float, lo: float, hi: float, outside: bool) -> None:
    enclosure = allowed((0.0, 0.0, lo, hi))
    assert outside_mask(tensor(actual), enclosure).tolist() == [outside]
    assert compare(tensor(actual), enclosure, FP32).outside == outside


# Counts


def test_equal_tensors() -> None:
    values = (1.0, -2.0, 0.0, INF, -INF, NAN)
    comparison = compare(tensor(*values), points(*values), FP32)
    assert (comparison.numel, comparison.decided) == (6, 6)
    assert (comparison.mismatched, comparison.outside, comparison.special) == (0, 0, 0)
    assert (comparison.max_ulp, comparison.max_error, comparison.rel_l2, comparison.bias) == (0.0, 0.0, 0.0, 0.0)
    assert comparison.ulp_histogram == (6, 0, 0, 0, 0, 0)
    assert comparison.budget_ratio == 0.0


def test_decided_elements_have_one_value() -> None:
    enclosure = allowed(
        (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.5), (NAN, NAN, NAN, NAN), ANYTHING, (INF, INF, INF, INF)
    )
    assert compare(tensor(1.0, 1.0, NAN, 0.0, INF), enclosure, FP32).decided == 3


def test_mismatched_elements_differ_from_the_value_although_they_may_be_allowed() -> None:
    enclosure = allowed((1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0))
    comparison = compare(tensor(1.0, 1.5, 2.5), enclosure, FP32)
    assert (comparison.mismatched, comparison.outside) == (2, 1)


def test_a_zero_of_the_other_sign_is_no_mismatch() -> None:
    comparison = compare(tensor(-0.0, 0.0), points(0.0, -0.0), FP32)
    assert (comparison.mismatched, comparison.outside, comparison.max_ulp) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("actual", "expected", "special"),
    [
        (NAN, 1.0, 1),
        (1.0, NAN, 1),
        (INF, 1.0, 1),
        (1.0, INF, 1),
        (-INF, INF, 1),
        (NAN, INF, 1),
        (1.0, 2.0, 0),
        (INF, INF, 0),
        (NAN, NAN, 0),
    ],
)
def test_special_elements_have_the_wrong_class(actual: float, expected: float, special: int) -> None:
    comparison = compare(tensor(actual, 7.0), points(expected, 7.0), FP32)
    assert comparison.special == special
    assert comparison.outside == (actual != expected and not (math.isnan(actual) and math.isnan(expected)))


# Errors


def test_errors_are_measured_from_the_exact_part() -> None:
    enclosure = allowed((3.0, 100.0, 0.0, 200.0), (-4.0, 100.0, 0.0, 200.0))
    comparison = compare(tensor(3.5, -6.0), enclosure, FP32)
    assert comparison.max_error == 2.0
    assert (comparison.squared_error, comparison.squared_exact) == (0.25 + 4.0, 25.0)
    assert comparison.rel_l2 == pytest.approx(math.sqrt(4.25 / 25))


def test_the_error_of_the_contract_is_measured_on_the_same_elements() -> None:
    enclosure = allowed((3.0, 3.5, 0.0, 9.0), (-4.0, -4.0, -9.0, 9.0), (2.0, INF, 0.0, INF), (INF, 1.0, 0.0, INF))
    comparison = compare(tensor(3.0, -6.0, 2.5, 1.0), enclosure, FP32)
    assert (comparison.squared_error, comparison.squared_contract, comparison.squared_exact) == (4.0, 0.25, 25.0)
    assert comparison.contract_l2 == 0.1
    assert compare(tensor(3.0), points(3.0), FP32).contract_l2 == 0.0
    assert compare(tensor(9.0), points(3.0), FP32).squared_contract == 0.0, "one number is exact and the contract's"


def test_a_kernel_with_the_values_of_the_contract_has_its_error() -> None:
    comparison = compare(tensor(3.5, -4.0), allowed((3.0, 3.5, 0.0, 9.0), (-4.0, -4.0, -9.0, 9.0)), FP32)
    assert comparison.squared_error == comparison.squared_contract == 0.25


def test_elements_that_are_not_finite_on_either_side_count_in_no_error() -> None:
    enclosure = points(INF, 1.0, NAN, 2.0)
    comparison = compare(tensor(1.0, NAN, 3.0, 2.5), enclosure, FP32)
    assert (comparison.squared_error, comparison.squared_exact, comparison.max_error) == (0.25, 4.0, 0.5)
    assert compare(tensor(1.0, NAN, 3.0, 2.0), enclosure, FP32).bias_count == 1


def test_rel_l2_of_zeros() -> None:
    assert compare(tensor(0.0), points(0.0), FP32).rel_l2 == 0.0
    assert compare(tensor(1.0), points(0.0), FP32).rel_l2 == INF


@pytest.mark.parametrize(
    ("actual", "exact", "bias"),
    [
        ((1 + ULP, 1 + ULP), (1.0, 1.0), 1.0),
        ((-1 - ULP, 1 - ULP), (-1.0, 1.0), 0.0),
        ((1.0, -1.0), (1 + ULP / 2, -1 - ULP / 2), -0.5),
        ((4 + 4 * ULP, 1.0), (4.0, 1.0), 0.5),
    ],
)
def test_bias_is_in_ulp_and_negative_toward_zero(
    actual: tuple[float, ...], exact: tuple[float, ...], bias: float
) -> None:
    enclosure = allowed(*[(e, e, -10.0, 10.0) for e in exact])
    assert compare(tensor(*actual), enclosure, BF16).bias == bias


def test_elements_far_from_the_exact_value_say_nothing_about_rounding() -> None:
    """As where the contract overflows to 0: an error of 2**23 ulp would be the bias of all the others."""
    enclosure = allowed((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 2.0), (1.0, 1.0, 0.0, 2.0))
    assert compare(tensor(0.0, 1 + ULP, 1.0), enclosure, BF16).bias == 0.5
    assert math.isnan(compare(tensor(0.0, 0.0, 1.0), enclosure, BF16).bias), "most elements say nothing"


def test_bias_below_the_normal_numbers_is_in_subnormal_steps() -> None:
    assert compare(tensor(2 * FP16.quantum), points(FP16.quantum), FP16).bias == 1.0


def test_bias_where_the_exact_value_is_zero_is_in_subnormal_steps() -> None:
    assert compare(tensor(2 * FP16.quantum), points(0.0), FP16).bias == 2.0


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16, E4M3], ids=lambda f: f.name)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 17])
def test_distance_in_ulp_of_the_format(fmt: Format, steps: int) -> None:
    value = 1.0 + steps * fmt.epsilon if steps * fmt.epsilon <= 1 else 1.0
    expected = steps if value != 1.0 else 0
    for sign in (-1.0, 1.0):
        assert compare(tensor(sign * value), points(sign), fmt).max_ulp == expected


def test_distance_across_zero_and_to_infinity() -> None:
    quantum = FP16.quantum
    assert compare(tensor(-quantum), points(2 * quantum), FP16).max_ulp == 3
    assert compare(tensor(INF), points(FP16.max), FP16).max_ulp == 1
    assert compare(tensor(NAN), points(1.0), FP16).max_ulp == INF


def test_histogram_of_distances() -> None:
    steps = [0, 0, 1, 2, 3, 4, 5, 16, 17, 1000]
    actual = tensor(*[1.0 + s * FP32.epsilon for s in steps], NAN)
    comparison = compare(actual, points(*[1.0] * 11), FP32)
    assert ULP_BINS == (0, 1, 2, 4, 16)
    assert comparison.ulp_histogram == (2, 1, 1, 2, 2, 3)


def test_budget_ratio_is_one_at_the_ends() -> None:
    free = (1.5, 1.5, 1.0, 2.0)
    for actual, ratio in ((1.5, 0.0), (2.0, 1.0), (1.0, 1.0), (1.75, 0.5), (3.0, 3.0)):
        assert compare(tensor(actual), allowed(free), FP32).budget_ratio == ratio
    assert compare(tensor(5.0), points(1.0), FP32).budget_ratio == 0.0, "no budget, no ratio"
    assert compare(tensor(NAN, 5.0), allowed(free, ANYTHING), FP32).budget_ratio == 0.0


# The worst element


def test_the_worst_element_in_full() -> None:
    exact = torch.zeros(2, 3, 4, dtype=torch.float64) + 1.25
    enclosure = Enclosure(torch.stack([exact, exact + 0.25, exact - 0.25, exact + 0.5]))
    actual = exact + 0.25
    actual[1, 0, 2] = 3.0
    worst = compare(actual, enclosure, BF16).worst
    assert worst is not None
    assert worst.index == (1, 0, 2)
    assert (worst.actual, worst.expected, worst.exact, worst.lo, worst.hi) == (3.0, 1.5, 1.25, 1.0, 1.75)
    assert worst.ulp == 64 + 64


def worst_index(actual: Tensor, enclosure: Enclosure, fmt: Format) -> tuple[int, ...]:
    worst = compare(actual, enclosure, fmt).worst
    assert worst is not None
    return worst.index


def test_an_element_outside_is_worse_than_any_inside() -> None:
    enclosure = allowed((1.0, 1.0, 0.0, 100.0), (1.0, 1.0, 1.0, 1.0))
    assert worst_index(tensor(100.0, 1.0 + FP32.epsilon), enclosure, FP32) == (1,)


def test_among_elements_outside_the_farthest_is_worst() -> None:
    assert worst_index(tensor(1.0, 1 + ULP, 1 + 100 * ULP, 1 + 5 * ULP), points(1.0, 1.0, 1.0, 1.0), BF16) == (2,)


def test_among_elements_inside_the_farthest_is_worst() -> None:
    free = (1.0, 1.0, -10.0, 10.0)
    assert worst_index(tensor(1.0, 1 + ULP, -3.0, 2.0), allowed(free, free, free, free), BF16) == (2,)


def test_a_nan_where_anything_is_allowed_is_not_worse_than_an_element_outside() -> None:
    enclosure = allowed(ANYTHING, (1.0, 1.0, 1.0, 1.0))
    assert worst_index(tensor(NAN, 2.0), enclosure, BF16) == (1,)


def test_a_nan_that_is_forbidden_is_worst() -> None:
    assert worst_index(tensor(5.0, NAN, 9.0), points(1.0, 1.0, 1.0), FP32) == (1,)


# Sums of comparisons


parts = st.lists(
    st.tuples(
        st.sampled_from([1.0, 1 + ULP, 1 + 5 * ULP, 1 - ULP, 2.0, -1.0, 0.0, INF, NAN]),
        st.sampled_from(
            [(1.0, 1.0, 1.0, 1.0), (1.1, 1.0, 1.0, 1.5), ANYTHING, (NAN, NAN, NAN, NAN), (INF, INF, INF, INF)]
        ),
    ),
    min_size=2,
    max_size=12,
)


@given(elements=parts, data=st.data())
def test_comparisons_of_two_parts_add_up_to_the_whole(
    elements: list[tuple[float, tuple[float, ...]]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(elements) - 1))

    def compared(some: list[tuple[float, tuple[float, ...]]]) -> Comparison:
        return compare(tensor(*[a for a, _ in some]), allowed(*[e for _, e in some]), BF16)  # type: ignore[misc]

    whole, together = compared(elements), compared(elements[:cut]) + compared(elements[cut:])
    for name in ("numel", "decided", "mismatched", "outside", "special", "bias_count", "ulp_histogram"):
        assert getattr(together, name) == getattr(whole, name), name
    for name in ("max_error", "max_ulp", "budget_ratio"):
        assert getattr(together, name) == getattr(whole, name), name
    for name in ("squared_error", "squared_exact", "squared_contract", "bias_sum"):
        assert getattr(together, name) == pytest.approx(getattr(whole, name)), name
    assert together.worst is not None
    assert whole.worst is not None
    assert together.worst.ulp == whole.worst.ulp


def test_the_empty_comparison_is_neutral() -> None:
    empty = compare(torch.zeros(0, 8), Enclosure.point(torch.zeros(0, 8)), FP32)
    assert empty == Comparison()
    some = compare(tensor(1.0, 3.0), points(1.0, 2.0), FP32)
    assert empty + some == some + empty == some


# Shapes and dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float64])
def test_the_actual_tensor_may_have_any_dtype_and_strides(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, 2.0, -4.0], [0.5, 0.0, 8.0]])
    comparison = compare(values.T.to(dtype), Enclosure.point(values.T), FP32)
    assert (comparison.numel, comparison.mismatched, comparison.max_error) == (6, 0, 0.0)


def test_an_enclosure_broadcasts_to_the_actual_shape() -> None:
    comparison = compare(torch.tensor([[1.0, 2.0], [1.0, 3.0]]), points(1.0, 2.0), FP32)
    assert (comparison.numel, comparison.outside) == (4, 1)
    assert comparison.worst is not None
    assert comparison.worst.index == (1, 1)


def test_a_scalar() -> None:
    comparison = compare(torch.tensor(2.0), Enclosure.point(torch.tensor(1.0)), FP32)
    assert comparison.worst is not None
    assert (comparison.numel, comparison.worst.index) == (1, ())


# Every statistic at once


@settings(max_examples=250)
@given(comparisons(list(FORMATS.values())))
def test_all_figures_are_bit_for_bit_those_of_whole_tensors(drawn: tuple[Tensor, Enclosure, Format]) -> None:
    actual, expected, fmt = drawn
    found, whole = compare(actual, expected, fmt), whole_compare.compare(actual, expected, fmt)
    assert repr(found) == repr(whole)
    mask = whole_compare.outside_mask(actual, expected)
    assert torch.equal(outside_mask(actual, expected), mask)
    assert outside_count(actual, expected) == found.outside == int(mask.sum())


def test_the_number_outside_of_nothing() -> None:
    assert outside_count(torch.zeros(0, 8), Enclosure.point(torch.zeros(0, 8))) == 0


def test_a_comparison_on_the_cpu_does_not_load_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lastbit.judging.fused_compare", None)
    assert compare(tensor(1.0), points(1.0), FP32).numel == 1


# Who compares


def test_fused_kernels_compare_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    fused = Comparison(numel=7)

    class Pair:
        """Stands for a pair that a device compares."""

        def begin(self, fmt: Format) -> Comparison:
            asked.append(fmt)
            return fused

        def begin_integers(self) -> Comparison:
            return fused

        def outside_count(self) -> Tensor:
            return torch.tensor(5)

    expected, whole = points(1.0), torch.tensor([1])
    monkeypatch.setattr(comparing, "_pair", lambda actual, expected: Pair())
    assert comparing.begin(tensor(1.0), expected, BF16) is fused
    assert comparing.begin_integers(whole, whole) is fused
    assert int(outside_count(tensor(1.0), expected)) == 5
    for fmt in (FP64, replace(BF16, direction="either")):  # the kernels have no such formats
        found = comparing.begin(tensor(1.0), expected, fmt)
        assert isinstance(found, Comparison) and found.numel == 1
    assert asked == [BF16]
    assert comparing.begin(tensor(), points(), BF16) == comparing.begin_integers(whole[:0], whole[:0]) == Comparison()
    assert int(outside_count(tensor(), points())) == 0
    monkeypatch.setattr(comparing, "_pair", lambda actual, expected: None)
    assert comparing.begin(tensor(1.0), expected, BF16).numel == 1  # type: ignore[union-attr]
    assert comparing.begin_integers(whole, whole).numel == 1  # type: ignore[union-attr]
    assert int(outside_count(tensor(2.0), expected)) == 1


def test_a_device_is_waited_for_once_for_all_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*figures: float) -> Begun:
        return Begun(torch.tensor(figures), lambda values: Comparison(numel=len(values), max_ulp=sum(values)))

    here = Comparison(numel=9)
    waited: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(comparing.torch, "cat", lambda parts: waited.append(len(parts)) or cat(parts))
    found = finished([begun(1.0, 2.0), here, begun(), begun(4.0)])
    assert [(one.numel, one.max_ulp) for one in found] == [(2, 3.0), (9, 0.0), (0, 0.0), (1, 4.0)]
    assert waited == [3]
    assert finished([here]) == [here] and finished([]) == [] and waited == [3]
