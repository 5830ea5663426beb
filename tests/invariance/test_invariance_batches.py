"""Planted: kernels whose bits depend on the order of rows, on further rows, or on what these hold."""

import torch

from lastbit.errors import UnsupportedCase
from lastbit.property_result import PropertyOutcome
from tests.property_kernels import GRADIENTS, found_in, found_on, gradients, nudged, rms_norm, some


def test_order_and_further_rows_change_nothing():
    for name in ("permutation", "padding"):
        found = found_in(rms_norm, 12, name)
        assert found.outcome is PropertyOutcome.HOLDS and found.pairs >= 3 and not found.reason


def test_a_place_that_is_special_shows_in_other_orders():
    found = found_in(nudged(lambda x: some(x, 3) & (torch.arange(len(x)) < 2)), 12, "permutation")
    assert found.outcome is PropertyOutcome.BROKEN and found.second == "the same rows from last to first"


def test_the_order_of_one_row_does_not_matter():
    assert found_in(rms_norm, 1, "permutation").outcome is PropertyOutcome.NOT_APPLICABLE
    assert found_in(rms_norm, 1, "padding").outcome is PropertyOutcome.HOLDS
    assert found_in(rms_norm, 0, "padding").outcome is PropertyOutcome.NOT_APPLICABLE


def test_the_number_of_rows_is_told_from_what_they_hold():
    found = found_in(nudged(lambda x: torch.full((len(x),), len(x) % 4 == 0)), 12, "padding")
    assert found.where == "changes with the number of rows"


def test_rows_of_nan_that_reach_others_are_told():
    def shared(x, weight, *, eps):
        return rms_norm(x, weight, eps=eps) + 0 * x.sum()

    found = found_in(shared, 12, "padding")
    assert found.where == "changes with what further rows hold (NaN, infinities, the largest numbers)"
    assert found.second == "a row of NaN after the same rows" and found.ulp == torch.inf and not found.legal


def test_a_mean_of_all_rows_is_no_matter_of_their_number():
    def centered(x, weight, *, eps):
        return rms_norm(x - x.mean(0), weight, eps=eps)

    everything = "zeros, copies of the last one, NaN, infinities, the largest numbers"
    assert found_in(centered, 12, "padding").where == f"changes with what further rows hold ({everything})"


def test_a_scale_of_all_rows_is_told():
    def scaled(x, weight, *, eps):
        scale = x.abs().nan_to_num(0, 0).amax()
        return rms_norm(x / scale, weight, eps=eps)

    assert found_in(scaled, 12, "padding").where == "changes with what further rows hold (the largest numbers)"


def test_sums_over_rows_are_noted_apart():
    def with_means(x, **inputs):
        return {**(found := gradients(x, **inputs)), "dw": found["dw"] / len(x)}

    found = found_on(gradients, GRADIENTS.format(rows=12), "padding")
    assert found.outcome is PropertyOutcome.HOLDS and not found.reason
    found = found_on(with_means, GRADIENTS.format(rows=12), "padding")
    assert found.outcome is PropertyOutcome.HOLDS
    assert found.reason == "dw: other bits with rows of zeros, which add nothing to a sum"


def test_what_is_not_taken_is_said():
    def even(x, weight, *, eps):
        if len(x) % 2:
            raise UnsupportedCase(f"{len(x)} rows are no pairs")
        return rms_norm(x, weight, eps=eps)

    found = found_in(even, 12, "padding")
    assert found.outcome is PropertyOutcome.HOLDS and "13 rows are no pairs" in found.reason
