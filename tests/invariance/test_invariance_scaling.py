"""Planted: kernels whose results do not scale with their inputs, and results where a range ends."""

from random import Random

import pytest
import torch

from lastbit.invariance.properties import result_of
from lastbit.invariance.property import of_relation
from lastbit.property_result import PropertyOutcome
from lastbit.relations import NotApplicable, scaled
from lastbit.verify.property_checks import basis_of
from tests.property_kernels import GRADIENTS, gradients, subject_of

SCALED = scaled(("dy",), {"dx": 1, "dw": 1})
NUMBERS = torch.tensor([1.5, -0.375, 0.0, 3.0])


def related(dtype=torch.float32, relation=SCALED, **tensors):
    inputs = {"dy": NUMBERS.to(dtype), **tensors}
    return {one.what: one for one in relation.related(inputs, {}, Random(0))}


def differs(one, first, second):
    return any(not torch.equal(a, b) for a, b in one.matched({"dx": first}, {"dx": second}).values())


def test_inputs_are_scaled_and_negated():
    calls = related()
    assert [*calls] == ["dy negated", "dy times 2^1", "dy times 2^-1", "dy times 2^5", "dy times 2^-5"]
    assert calls["dy times 2^-5"].tensors["dy"].tolist() == (NUMBERS / 32).tolist()


def test_only_exact_powers_are_tried():
    subnormal = torch.tensor([2.0**-24])
    assert [*related(torch.float16, dy=subnormal.half())] == ["dy negated", "dy times 2^1", "dy times 2^5"]
    assert [*related(dy=torch.tensor([448.0]).to(torch.float8_e4m3fn))] == [
        *("dy negated", "dy times 2^-1", "dy times 2^-5"),
    ]


def test_a_result_scales_by_its_power():
    one = related(relation=scaled(("dy",), {"dx": 2}))["dy times 2^5"]
    assert not differs(one, NUMBERS, NUMBERS * 2**10)
    assert differs(one, NUMBERS, NUMBERS * 2**5)
    unchanged = related(relation=scaled(("dy",), {"dx": 0}))["dy times 2^5"]
    assert not differs(unchanged, NUMBERS, NUMBERS) and differs(unchanged, NUMBERS, NUMBERS * 2)


def test_elements_where_a_range_ends_are_not_compared():
    up, down = related()["dy times 2^5"], related()["dy times 2^-5"]
    largest, smallest = torch.tensor([3e38]), torch.tensor([2.0**-126])
    assert not differs(up, largest, torch.tensor([torch.inf]))
    assert not differs(down, smallest, torch.tensor([0.0]))
    assert not differs(up, torch.tensor([0.0]), torch.tensor([2.0**-130]))
    assert not differs(related()["dy negated"], torch.tensor([0.0]), torch.tensor([0.0]))
    assert not differs(up, torch.tensor([torch.inf]), torch.tensor([3e38]))


def test_a_number_that_may_have_been_subnormal_before_it_was_rounded_is_not_compared():
    """2^-126 - 2^-134 is rounded to 2^-126 in bf16; twice that number has one digit more, and is exact."""
    exact = torch.tensor([2.0**-126 - 2.0**-134])
    first, second = exact.bfloat16(), (2 * exact).bfloat16()
    assert first == 2.0**-126 and second != 2 * first
    assert not differs(related()["dy times 2^1"], first, second)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 0.0, 48.000004])
def test_other_elements_are_compared(wrong):
    assert differs(related()["dy times 2^5"], torch.tensor([1.5]), torch.tensor([wrong]))


def test_a_number_in_place_of_zero_is_compared():
    assert differs(related()["dy times 2^5"], torch.tensor([0.0]), torch.tensor([1.0]))


def test_values_near_the_ends_of_the_range_are_not_scaled():
    with pytest.raises(NotApplicable, match=r"from 2\^-109 to 2\^2"):
        related(x=torch.tensor([2.0**-108, 1.0]))
    with pytest.raises(NotApplicable, match="no dz"):
        related(relation=scaled(("dz",), {}))


def flushing(x, dy, **inputs):
    """Take small gradients for zero."""
    return gradients(x, torch.where(dy.abs() < 2**-5, 0.0, dy), **inputs)


def scaling_of(function):
    """Check the property of a planted kernel of an op that declares the relation."""
    subject, case = subject_of(function, GRADIENTS.format(rows=12), ("scaling",))
    return result_of(of_relation(SCALED), basis_of(subject, case))


def test_gradients_scale():
    assert scaling_of(gradients).outcome is PropertyOutcome.HOLDS and scaling_of(gradients).pairs == 5


def test_a_kernel_with_a_range_of_its_own_does_not():
    found = scaling_of(flushing)
    assert found.outcome is PropertyOutcome.BROKEN and found.fails and found.second.startswith("dy times 2^")
