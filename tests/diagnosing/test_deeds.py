"""Words for a wrong number: another rounding is named where all that is wrong came of it, and the right ones too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lastbit.diagnosing.worked import deed, in_ulp, neighbours, rounded, ways_of_all
from lastbit.numerics.formats import BF16, E4M3, FP16, FP32, Format, round_to

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("value", "fmt", "below", "above"),
    [
        (1.0, BF16, 1.0, 1.0),
        (1.001, BF16, 1.0, 1.0078125),
        (-1.001, BF16, -1.0078125, -1.0),
        (0.0, BF16, 0.0, 0.0),
        (2.0**-150, FP32, 0.0, 2.0**-149),
        (65504.5, FP16, 65504.0, INF),
        (-65505.0, FP16, -INF, -65504.0),
        (INF, BF16, INF, INF),
        (1.9999, BF16, 1.9921875, 2.0),
    ],
)
def test_numbers_on_both_sides(value: float, fmt: Format, below: float, above: float) -> None:
    assert neighbours(value, fmt) == (below, above)
    assert all(math.isnan(end) for end in neighbours(NAN, fmt))


def test_rounding_one_number() -> None:
    assert (rounded(1.006, BF16), rounded(1.006, BF16.toward("zero"))) == (1.0078125, 1.0)


@pytest.mark.parametrize(
    ("actual", "expected", "fmt", "ulp"),
    [
        (1.0, 1.0, BF16, 0.0),
        (NAN, NAN, BF16, 0.0),
        (INF, INF, BF16, 0.0),
        (INF, 1.0, BF16, INF),
        (NAN, 1.0, BF16, INF),
        (1.0, NAN, BF16, INF),
        (1.0078125, 1.0, BF16, 1.0),
        (1.0, 2.0, BF16, 64.0),
        (2.0, 1.0, BF16, 128.0),
        (3 * 2.0**-149, 0.0, FP32, 3.0),
        (2.0**-126, 2.0**-140, FP32, 2.0**23 - 2.0**9),
        (-1.0, 1.0, FP16, 2048.0),
    ],
)
def test_distances_in_ulp_of_what_is_expected(actual: float, expected: float, fmt: Format, ulp: float) -> None:
    assert in_ulp(actual, expected, fmt) == ulp


def exact_numbers(count: int = 400) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def said(
    actual: Tensor, exact: Tensor, fmt: Format = BF16, *, rounds: bool = True, dtype: str = "bf16"
) -> tuple[str, ...]:
    legal = torch.stack([exact, *[round_to(exact, fmt)] * 3]) if rounds else torch.stack([exact] * 4)
    return ways_of_all(actual, legal, fmt, rounds=rounds, dtype=dtype)


TIES = torch.arange(1.0, 2.0, 2.0**-6).double() + 2.0**-8


@pytest.mark.parametrize(
    ("actual", "exact", "fmt", "rounds", "dtype", "ways"),
    [
        (lambda x: round_to(x, BF16), exact_numbers(), BF16, True, "bf16", ()),
        (lambda x: round_to(x, BF16.toward("zero")), exact_numbers(), BF16, True, "bf16", ("cuts off",)),
        (lambda x: round_to(x, E4M3), exact_numbers(), BF16, True, "bf16", ("rounds to e4m3",)),
        (lambda x: round_to(x, E4M3.toward("zero")), exact_numbers(), BF16, True, "bf16", ("cuts off to e4m3",)),
        (lambda x: round_to(x, BF16), exact_numbers(), FP32, False, "fp32", ("rounds to bf16",)),
        (lambda x: round_to(x, BF16), exact_numbers(), FP32, False, "bf16", ("rounds to bf16",)),
        (lambda x: round_to(x, FP16.toward("zero")), exact_numbers(), FP32, False, "fp32", ("cuts off to fp16",)),
        (lambda x: x + 1.0, exact_numbers(), BF16, True, "bf16", ()),
        (lambda x: round_to(x, BF16.toward("ties_away")), TIES, BF16, True, "bf16",
         ("rounds the tie the other way",)),
        (lambda x: x.clamp(-65504, 65504), torch.tensor([7e4, 1e5, -3e5]).double(), FP16, True, "fp16", ("saturates",)),
    ],
)  # fmt: skip
def test_what_all_wrong_elements_have_in_common(
    actual: object, exact: Tensor, fmt: Format, rounds: bool, dtype: str, ways: tuple[str, ...]
) -> None:
    assert said(actual(exact), exact, fmt, rounds=rounds, dtype=dtype) == ways  # type: ignore[operator]


def test_numbers_that_were_rounded_twice() -> None:
    """1 + 2^-8 + 2^-12 is above the tie of bf16, and is the tie after a rounding to fp16, which goes to even."""
    exact = torch.tensor([1 + 2.0**-8 + 2.0**-12, 1 + 2.0**-8 - 2.0**-12 + 2.0**-7]).double()
    twice = round_to(round_to(exact, FP16), BF16)
    assert said(twice, exact) == ("rounds twice (by way of fp16)",) and bool((twice != round_to(exact, BF16)).all())
    assert said(twice[:1], exact[:1]) == ()  # four bits of evidence of one element, where eight are asked


@pytest.mark.parametrize(("wrong", "named"), [(7, False), (8, True)])
def test_eight_bits_of_evidence(wrong: int, named: bool) -> None:
    """Each element that was cut off is one bit."""
    exact = exact_numbers()
    cut, near = round_to(exact, BF16.toward("zero")), round_to(exact, BF16)
    taken = (cut != near).nonzero()[:wrong, 0]
    assert (said(cut[taken], exact[taken]) == ("cuts off",)) == named


@pytest.mark.parametrize(("others", "named"), [(1, True), (30, False)])
def test_right_elements_must_be_explained_too(others: int, named: bool) -> None:
    """All but one in fifty."""
    exact = exact_numbers()
    cut, near = round_to(exact, BF16.toward("zero")), round_to(exact, BF16)
    up, same = (cut != near).nonzero()[:, 0], (cut == near).nonzero()[:, 0][:100]
    own = torch.cat([cut[up[:50]], near[same], near[up[50 : 50 + others]]])
    kept = torch.cat([up[:50], same, up[50 : 50 + others]])
    assert (said(own, exact[kept]) == ("cuts off",)) == named


def test_what_is_not_finite_says_nothing() -> None:
    exact = torch.tensor([1.001, INF, NAN]).double()
    assert said(torch.tensor([1.0, 5.0, 1.0]).double(), exact) == ()
    assert said(torch.tensor([NAN, INF, NAN]).double(), exact) == ()


@pytest.mark.parametrize(
    ("actual", "exact", "expected", "rounds", "dtype", "ways", "words"),
    [
        (NAN, 1.0, 1.0, True, "bf16", (), "gives nan"),
        (1.0, NAN, NAN, True, "bf16", ("cuts off",), "gives 1"),
        (1.5, 1.6, 1.6015625, True, "bf16", ("cuts off",), "cuts off, and gives 1.5"),
        (1.5, 1.6, 1.6015625, True, "bf16", ("a", "b"), "a or b, and gives 1.5"),
        (1.001, 1.001, 1.0, True, "fp32", (), "does not round, and holds 1.00100005 in fp32"),
        (1.001, 1.001, 1.0, True, "", (), "does not round, and holds 1.00100005 in more digits"),
        (1.0009765625, 1.001, 1.0, True, "fp16", (), "holds 1.00097656 in fp16"),
        (1.001, 1.02, 1.0234375, True, "fp32", (), "gives 1.00100005, 2.872 ulp away"),
        (1.001, 1.001, 1.0, False, "fp32", (), "gives 1.00100005, 0.128 ulp away"),
        (1.125, 1.0, 1.0, True, "bf16", (), "gives 1.125, 16 ulp away"),
        (1.1328125, 1.0, 1.0, True, "bf16", (), "gives 1.1328125"),
    ],
)
def test_what_a_kernel_did(
    actual: float, exact: float, expected: float, rounds: bool, dtype: str, ways: tuple[str, ...], words: str
) -> None:
    own = float(torch.tensor(actual))
    legal = exact, expected, expected, expected
    assert deed(own, legal, BF16, rounds=rounds, dtype=dtype, ways=ways).replace("\N{NO-BREAK SPACE}", " ") == words
