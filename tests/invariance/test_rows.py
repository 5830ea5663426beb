"""Planted: kernels whose bits depend on the number of rows of a launch, or on the place of a row in it."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from lastbit.case import parse_case
from lastbit.errors import UnsupportedCase
from lastbit.inputs import build
from lastbit.invariance import launches
from lastbit.property_result import PropertyOutcome
from tests.property_kernels import CPU, GRADIENTS, ahead, found_in, found_on, gradients, nudged, rms_norm, some


@pytest.fixture(autouse=True)
def nobody_blamed(monkeypatch):
    """Which operation of torch breaks a property is asked in test_library.py, and takes most of the time."""
    monkeypatch.setattr("lastbit.invariance.library.breaking", lambda *asked: "")


def x_of(rows):
    return build(parse_case(f"rms_norm x=fp32[{rows},16] weight=fp32[16] eps=1e-06 seed=3"), CPU).tensors["x"]


def test_rows_that_hold_are_told_with_the_pairs():
    found = found_in(rms_norm, 64)
    assert found.outcome is PropertyOutcome.HOLDS and not found.fails
    assert 64 + 32 + 22 + 16 < found.pairs < 400


def test_quick_takes_few_calls():
    calls = []

    def counted(x, weight, *, eps):
        calls.append(len(x))
        return rms_norm(x, weight, eps=eps)

    assert found_in(counted, 4096, thorough=False).outcome is PropertyOutcome.HOLDS
    assert len(calls) < 40


def test_a_block_size_by_rows_is_found_in_the_few_rows_that_show_it():
    def changes(x):
        return some(x, 37) & (len(x) < 256)

    found = found_in(nudged(changes), 4096)
    assert found.where == "changes between 255 and 256 rows"
    assert found.first == "rms_norm x=fp32[4096,16] weight=fp32[16] eps=1e-06 seed=3"
    assert found.second == "rms_norm x=fp32[255,16] weight=fp32[16] eps=1e-06 seed=3"
    x = x_of(4096)
    assert found.rows == found.elements == int(some(x, 37).sum()) and found.numel == x.numel() and found.ulp == 1
    assert found.fails


def test_the_few_calls_of_a_run_find_it_too():
    def changes(x):
        return some(x, 37) & (len(x) < 256)

    found = found_in(nudged(changes), 4096, thorough=False)
    assert found.where == "changes between 255 and 256 rows" and found.rows == int(some(x_of(4096), 37).sum())


def test_a_change_in_one_row_of_thousands_is_found():
    marked = x_of(4096)[2717, 0]

    def changes(x):
        return (x[:, 0] == marked) & (len(x) < 100)

    found = found_in(nudged(changes), 4096)
    assert found.where == "changes between 99 and 100 rows" and (found.rows, found.elements) == (1, 1)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
def test_every_threshold_is_exact(data):
    rows = data.draw(st.integers(3, 30))
    threshold = data.draw(st.integers(2, rows))
    row = data.draw(st.integers(0, rows - 1))
    marked = x_of(rows)[row, 0]
    found = found_in(nudged(lambda x: (x[:, 0] == marked) & (len(x) < threshold)), rows)
    assert found.where == f"changes between {threshold - 1} and {threshold} rows" and found.rows == 1


def test_several_thresholds_are_found():
    def changes(x):
        return torch.full((len(x),), 11 <= len(x) < 37)

    assert found_in(nudged(changes), 64).where == "changes between 10 and 11, 36 and 37 rows"


def test_a_middle_size_that_no_power_of_two_is_near_shows_between_two_that_agree_only_if_it_is_tried():
    def changes(x):
        return torch.full((len(x),), len(x) == 24)

    assert found_in(nudged(changes), 64).outcome is PropertyOutcome.HOLDS


def test_split_by_occupancy_is_found(monkeypatch):
    monkeypatch.setattr(launches, "processors", lambda device: 12)

    def split(x, weight, *, eps):
        if x.ndim != 2:
            raise UnsupportedCase("two dimensions")
        parts = max(min(launches.processors(CPU) // len(x), 4), 1)
        squares = x.square().unflatten(-1, (parts, -1))
        totals = torch.zeros(len(x), parts)
        for column in range(squares.shape[-1]):
            totals = totals + squares[..., column]
        mean = sum(totals.unbind(-1)[1:], start=totals[:, 0]) / x.shape[-1]
        return x * torch.rsqrt(mean + eps)[:, None] * weight

    found = found_in(split, 64, width=48)
    assert found.where == "changes between 3 and 4, 4 and 5, 6 and 7 rows"


def test_multiples_are_told_from_other_numbers():
    def changes(x):
        return torch.full((len(x),), len(x) % 4 == 0)

    assert found_in(nudged(changes), 64).where == "changes between multiples of 4 rows and other numbers of rows"


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        (40, "changes between 15 and 16 rows, and changes with the place of a row in its launch: the last 8 rows"),
        (48, "the place of a row in its launch of 47: the last 15 rows"),
    ],
)
def test_the_last_tile_is_found(rows, where):
    def changes(x):
        return torch.arange(len(x)) >= len(x) // 16 * 16

    found = found_in(nudged(changes), rows)
    assert found.outcome is PropertyOutcome.BROKEN and found.where.endswith(where)


def test_the_first_row_is_found():
    found = found_in(nudged(lambda x: torch.arange(len(x)) == 0), 40, thorough=False)
    assert found.where == "changes with the place of a row in its launch: the first row"


@pytest.mark.parametrize("row", [0, 9, 21, 33])
def test_a_place_that_is_special_to_few_rows_is_found(row):
    marked = x_of(40)[row, 0]

    def changes(x):
        return (x[:, 0] == marked) & (torch.arange(len(x)) // 4 == 5) & (len(x) == 40)

    found = found_in(nudged(changes), 40)
    assert found.where == "changes with the place of a row in its launch: 4 of the rows"


def test_rows_that_depend_on_the_others_are_told():
    def scaled_by_the_largest(x, weight, *, eps):
        return rms_norm(x, weight, eps=eps) / x.abs().max()

    assert "changes with what the other rows hold" in found_in(scaled_by_the_largest, 40).where


def test_a_change_with_leading_dimensions_is_told():
    def by_dimensions(x, weight, *, eps):
        output = rms_norm(x, weight, eps=eps)
        return ahead(output) if x.ndim > 2 else output

    found = found_in(by_dimensions, "2,3,16", thorough=False)
    assert found.where == "changes with the shape of the leading dimensions" and found.elements == 96


def test_rows_of_a_strided_case_are_compared_with_contiguous_ones():
    def strided(x, weight, *, eps):
        output = rms_norm(x, weight, eps=eps)
        return output if x.is_contiguous() else ahead(output)

    assert found_in(strided, "12,16", layout="@32,1+16").outcome is PropertyOutcome.HOLDS


def test_a_sum_over_rows_has_no_rows_however_many_there_are():
    found = found_on(gradients, GRADIENTS.format(rows=16), "rows")
    assert found.outcome is PropertyOutcome.HOLDS and found.pairs > 16


@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row_have_no_batch(rows):
    found = found_in(rms_norm, rows)
    assert found.outcome is PropertyOutcome.NOT_APPLICABLE and found.reason == f"the case has {rows} rows; 2 are needed"


def test_unordered_results_are_left_out():
    changing = nudged(lambda x: torch.full((len(x),), len(x) < 8))
    found = found_in(changing, 16, invariant=(), thorough=False, unordered=("output",))
    assert (
        found.outcome is PropertyOutcome.NOT_APPLICABLE
        and found.reason == "not compared: output, declared as unordered"
    )


def test_what_the_kernel_raises_is_told_and_fails_what_it_declares():
    def refuses_odd(x, weight, *, eps):
        if len(x) == 3:
            raise RuntimeError("three rows")
        return rms_norm(x, weight, eps=eps)

    found = found_in(refuses_odd, 16)
    assert (
        found.outcome is PropertyOutcome.ERRORED and found.fails and found.reason == "errored: RuntimeError: three rows"
    )


def test_sizes_that_the_kernel_does_not_take_are_told():
    def not_three(x, weight, *, eps):
        if len(x) == 3:
            raise UnsupportedCase("three rows")
        return rms_norm(x, weight, eps=eps)

    found = found_in(not_three, 16)
    assert found.outcome is PropertyOutcome.HOLDS
    assert found.reason == "not tried: rows 0 to 2 in a launch of their own: three rows"


def test_every_nan_is_the_same():
    def other_nans(x, weight, *, eps):
        output = rms_norm(x, weight, eps=eps).clone()
        if x.ndim != 2:
            raise UnsupportedCase("two dimensions")
        output[:, 0] = torch.nan if len(x) < 8 else -torch.nan
        output.view(torch.int32)[:, 1] = 0x7FC00000 + len(x)
        return output

    assert found_in(other_nans, 16).outcome is PropertyOutcome.HOLDS


def test_signs_of_zero_are_bits():
    def signs(x, weight, *, eps):
        if x.ndim != 2:
            raise UnsupportedCase("two dimensions")
        output = rms_norm(x, weight, eps=eps)
        output[:, 0] = 0.0 if len(x) < 8 else -0.0
        return output

    found = found_in(signs, 16)
    assert found.outcome is PropertyOutcome.BROKEN and found.ulp == 0 and found.where == "changes between 7 and 8 rows"


def test_bits_that_are_not_legal_are_found_behind_legal_ones():
    """The first pairs that differ, of many rows, are legal; 3 rows are not."""

    def kernel(x, weight, *, eps):
        turned = len(x) < 33  # the columns are added from last to first
        output = rms_norm(*(t.flip(-1) if turned else t for t in (x, weight)), eps=eps)
        return (output.flip(-1) if turned else output) * (2 if len(x) == 3 else 1)

    found = found_in(kernel, 40, width=64, thorough=False, invariant=())
    assert found.legal is False and found.fails
    assert found.second.startswith("rms_norm x=fp32[3,64]")


def test_a_result_with_rows_that_nobody_gave_is_wrong():
    def padded(x, weight, *, eps):
        return torch.nn.functional.pad(rms_norm(x, weight, eps=eps), (0, 0, 0, -len(x) % 8))

    found = found_in(padded, 40)
    assert found.outcome is PropertyOutcome.ERRORED and "shape" in found.reason
