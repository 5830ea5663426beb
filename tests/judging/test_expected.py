"""What stages must have: sameness, what nothing satisfies at once, roundings and counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lastbit.judging.expected import KNOWN, Exact, Numbers, Steps, Trace, known_exactly
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import BF16, FP16, FP32, Integers

INT64 = Integers("int64", torch.int64)


def numbers(lo: list[float], hi: list[float], value: list[float] | None = None) -> Numbers:
    low, high = (torch.tensor(end, dtype=torch.float64) for end in (lo, hi))
    middle = (low + high) / 2 if value is None else torch.tensor(value, dtype=torch.float64)
    return Numbers(Enclosure(torch.stack([middle, middle, low, high])), FP32)


def exact(*values: int) -> Exact:
    return Exact(torch.tensor(values), INT64)


def test_numbers_are_the_same_where_values_and_ends_are() -> None:
    a = numbers([1, 2], [3, 4])
    assert a.same(numbers([1, 2], [3, 4]))
    assert not a.same(numbers([1, 2], [3, 5])) and not a.same(numbers([0, 2], [3, 4]))
    assert not a.same(numbers([1, 2], [3, 4], [1, 3])) and not a.same(exact(1, 2))
    nan = float("nan")
    assert numbers([nan], [nan]).same(numbers([nan], [nan]))


def test_numbers_are_apart_where_no_value_suits_both() -> None:
    a = numbers([1, 2], [3, 4])
    assert not a.apart(numbers([3, 0], [9, 2]))  # an end is common
    assert a.apart(numbers([3.5, 2], [9, 4])) and a.apart(numbers([1, 0], [3, 1.5]))
    assert a.apart(exact(1, 2))


def test_integers_are_the_same_or_apart() -> None:
    assert exact(1, 2).same(exact(1, 2)) and not exact(1, 2).apart(exact(1, 2))
    assert exact(1, 2).apart(exact(1, 3)) and not exact(1, 2).same(exact(1, 3))
    assert not exact(1, 2).same(numbers([1, 2], [1, 2])) and exact(1).apart(numbers([1], [1]))
    assert exact(4, 5).value.tolist() == exact(4, 5).allowed.tolist() == [4, 5]  # type: ignore[union-attr]


def test_numbers_are_rounded_to_what_they_are_stored_as() -> None:
    a = numbers([1 + 2**-20], [1 + 2**-7])
    assert a.stored_as(torch.float32) is a
    stored = a.stored_as(torch.bfloat16)
    assert stored.format == BF16
    assert (stored.enclosure.lo.item(), stored.enclosure.hi.item()) == (1, 1 + 2**-7)
    assert exact(1).stored_as(torch.int32).same(exact(1))


@pytest.mark.parametrize(
    ("value", "lo", "hi", "known"),
    [
        *((1.0, 1.0, 1.0, True), (1.0, 1 - KNOWN / 4, 1 + KNOWN / 4, True), (1.0, 1 - KNOWN, 1 + KNOWN, False)),
        *((0.0, 0.0, 0.0, True), (0.0, -1e-300, 0.0, False), (2.0, 3.0, 3.0, False), (2.0, 1.0, 1.0, False)),
        *((-4.0, -4 - KNOWN, -4 + KNOWN, True), (1.0, 1.0, 1 + KNOWN, True)),
    ],
)
def test_exact_values_are_shown_where_they_are_known(value: float, lo: float, hi: float, known: bool) -> None:
    found = known_exactly(numbers([lo], [hi], [value]))
    assert bool(found.isnan()) != known and (not known or found.item() == value)


def test_integers_are_known() -> None:
    found: Tensor = known_exactly(exact(3, 4))
    assert found.tolist() == [3, 4] and found.dtype is torch.float64


def test_a_trace_has_stages_in_order() -> None:
    trace, a = Trace(), numbers([1, 2], [3, 4])
    trace.record("a", a)
    trace.record("n", exact(1))
    assert trace.formats == {"a": FP32, "n": INT64} and trace.numbers("a") is a and trace.enclosure("a") is a.enclosure
    assert trace.sums == {} and trace.nbytes == a.enclosure.parts.nbytes
    with pytest.raises(AssertionError, match="'n' is of integers"):
        trace.numbers("n")


def test_roundings_add_up_to_a_stage() -> None:
    steps = Steps(formats={"a": FP32, "n": INT64, "b": BF16, "c": FP16})
    assert steps.numbers == {"a": FP32, "b": BF16, "c": FP16}
    assert [steps.roundoff(name) for name in "anb"] == [2**-24, 2**-24, 2**-24 + 2**-8 * 1]
    assert steps.roundoff("c") == 2**-24 + 2**-8 + 2**-11
