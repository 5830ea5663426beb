"""The kernels that compare, through the interpreter, against the definition in torch; and when they are used."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lastbit import trust
from lastbit.interpret import install
from lastbit.judging import fused_compare, torch_compare
from lastbit.judging.compare import Begun, finished
from lastbit.judging.fused_compare import FLOATS, ComparedPair, FloatFigures, LaunchShape, Sort, agree, walk_of
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import BF16, FP32, Format
from lastbit.result import ULP_BINS, Comparison
from tests.comparisons import comparisons

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def faithful_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles Triton kernels (TRITON_INTERPRET is not 1)")
    install()


def pair_of(actual: Tensor, expected: Enclosure | Tensor, large: bool) -> ComparedPair:
    pair = ComparedPair.of(actual, expected, large=large)
    assert pair is not None
    return pair


def compared(actual: Tensor, expected: Enclosure, fmt: Format) -> Comparison:
    return finished([pair_of(actual, expected, True).begin(fmt)])[0]


# The same figures


@settings(max_examples=40)
@given(comparisons(), st.booleans())
def test_the_kernels_agree_with_the_definition(drawn: tuple[Tensor, Enclosure, Format], large: bool) -> None:
    actual, expected, fmt = drawn
    if (pair := ComparedPair.of(actual, expected, large=large)) is None:
        return
    [fused], defined = finished([pair.begin(fmt)]), torch_compare.compare(actual, expected, fmt)
    assert agree(fused, defined), f"{fused}\n{defined}"
    assert pair.outside_count() == defined.outside


def test_several_programs_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_compare, "STATISTICS", LaunchShape(32, 3, 1))
    monkeypatch.setattr(fused_compare, "COUNT", LaunchShape(32, 3, 1))
    monkeypatch.setattr(fused_compare, "FINISH", LaunchShape(2, 1, 1))
    actual, expected = fused_compare.specials(torch.bfloat16, 4)
    for start in (0, 100, 300):  # the worst elements are in other programs
        a, e = actual[start:], expected[slice(start, None),]
        assert agree(compared(a, e, BF16), torch_compare.compare(a, e, BF16))
        assert pair_of(a, e, True).outside_count() == torch_compare.outside_count(a, e)


def test_several_programs_of_several_blocks_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_compare, "STATISTICS", LaunchShape(32, 3, 1))
    monkeypatch.setattr(fused_compare, "COUNT", LaunchShape(32, 3, 1))
    monkeypatch.setattr(fused_compare, "FINISH", LaunchShape(2, 1, 1))
    expected = torch.arange(300) % 11
    for worst in (0, 40, 290):
        actual = expected + torch.arange(300) % 3
        actual[worst] = 1000
        pair, defined = pair_of(actual, expected, True), torch_compare.compare_integers(actual, expected)
        assert finished([pair.begin_integers()]) == [defined] and pair.outside_count() == defined.outside


@pytest.mark.parametrize("at", [(3, 40), (40, 3), (95, 96), (0, 99)])
def test_of_equally_bad_elements_the_first_is_worst(at: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_compare, "STATISTICS", LaunchShape(32, 3, 1))
    actual = torch.zeros(100)
    actual[list(at)] = 1.0
    for compare in (compared, torch_compare.compare):
        worst = compare(actual, Enclosure.point(torch.zeros(100)), FP32).worst
        assert worst is not None
        assert worst.index == (min(at),)


def test_the_sums_are_those_of_many_terms() -> None:
    generator = torch.Generator().manual_seed(5)
    exact = torch.randn(40, 301, generator=generator, dtype=torch.float64)
    actual = exact.to(torch.bfloat16)
    expected = Enclosure(torch.stack([exact, actual.to(torch.float64)]))
    fused, defined = (compare(actual, expected, BF16) for compare in (compared, torch_compare.compare))
    assert agree(fused, defined)
    assert fused.squared_error > 0
    assert fused.bias_sum == pytest.approx(defined.bias_sum)


def test_comparisons_that_are_begun_together_are_finished_each_for_itself() -> None:
    actual, expected = fused_compare.specials(torch.bfloat16, 4)
    whole = torch.arange(7)
    pairs = pair_of(actual, expected, False), pair_of(whole, whole % 5, False)
    begun = [pairs[0].begin(BF16), Comparison(), pairs[1].begin_integers()]
    assert repr(finished(begun)) == repr([finished([one])[0] for one in begun])
    assert finished([Comparison()]) == [Comparison()]


integers = st.sampled_from([0, 1, 2, 3, 5, 17, 100, 127])


@settings(max_examples=40)
@given(st.lists(st.tuples(integers, integers), min_size=1, max_size=70), st.sampled_from(["int64", "uint8", "bool"]))
def test_integers_agree_with_the_definition(pairs: list[tuple[int, int]], name: str) -> None:
    actual, expected = (torch.tensor(side).to(getattr(torch, name)) for side in zip(*pairs, strict=True))
    pair, defined = pair_of(actual, expected, False), torch_compare.compare_integers(actual, expected)
    assert finished([pair.begin_integers()]) == [defined]
    assert pair.outside_count() == defined.outside


@pytest.mark.parametrize(("flat", "large"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("expected", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_special_integers_agree(expected: torch.dtype, flat: bool, large: bool) -> None:
    assert not fused_compare.difference(Sort(CPU, torch.int64, expected, flat, large))


@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str), ids=str)
def test_special_values_agree(dtype: torch.dtype) -> None:
    assert not fused_compare.difference(Sort(CPU, dtype, 4, flat=dtype.itemsize > 1, large=True))


def test_special_values_of_any_number_of_parts_agree() -> None:
    assert not fused_compare.difference(Sort(CPU, torch.bfloat16, 4, flat=False, large=False))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str), ids=str)
def test_no_set_of_special_values_is_empty(dtype: torch.dtype, parts: int) -> None:
    sets = fused_compare.sets_of(*fused_compare.specials(dtype, parts))
    assert min(int(chosen.sum()) for chosen in sets.values()) > 10


def test_the_kernels_know_the_bins_of_the_histogram() -> None:
    names = [name for name in FloatFigures._fields if name.startswith("beyond")]
    assert names == [f"beyond_{edge}" for edge in ULP_BINS]


# Which tensors they are for


@pytest.mark.parametrize(
    ("actual", "expected", "flat"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4), True),
        (torch.zeros(()), torch.zeros(()), True),
        (torch.zeros(3, 1, 4), torch.zeros(4), False),
        (torch.zeros(3, 4), torch.zeros(3, 1), False),
        (torch.zeros(4, 3).T, torch.zeros(3, 4), False),
        (torch.zeros(4, 3).T, torch.zeros(4, 3).T, False),
        (torch.zeros(6, 8)[:, ::2], torch.zeros(6, 4), False),
        (torch.zeros(9)[::3], torch.zeros(()), False),
    ],
)
def test_rows_and_columns_in_row_major_order(actual: Tensor, expected: Tensor, flat: bool) -> None:
    walk = walk_of(actual, Enclosure.point(expected))
    assert walk is not None
    assert walk.flat == flat
    e = expected.to(torch.float64).expand(actual.shape)
    for i, index in enumerate(itertools.product(*map(range, actual.shape))):
        row, column = divmod(i, walk.width)
        assert row * walk.a_row + column * walk.a_column == sum(map(int.__mul__, index, actual.stride()))
        assert row * walk.e_row + column * walk.e_column == sum(map(int.__mul__, index, e.stride()))


def test_there_is_no_kernel_for_three_strides_other_dtypes_or_two_devices() -> None:
    a = torch.zeros(4, 3, 2).permute(2, 0, 1)[:, ::2]
    assert ComparedPair.of(a, Enclosure.point(torch.zeros(a.shape))) is None
    assert ComparedPair.of(torch.zeros(3, dtype=torch.complex64), Enclosure.point(torch.zeros(3))) is None
    assert ComparedPair.of(torch.zeros(3), torch.zeros(3, dtype=torch.int64)) is None
    assert ComparedPair.of(torch.zeros(3), Enclosure.point(torch.zeros(3, device="meta"))) is None


# Trust


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tested yet, and one format to test."""
    monkeypatch.setattr(fused_compare, "TESTED", (BF16,))
    monkeypatch.setattr(trust, "_trusted", {})


def sort(dtype: torch.dtype = torch.bfloat16) -> Sort:
    return Sort(CPU, dtype, 4, flat=True, large=True)


@pytest.mark.usefixtures("untested")
def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ComparedPair.begin

    def wrong(pair: ComparedPair, fmt: Format) -> Begun:
        begun = right(pair, fmt)
        begun.figures[FloatFigures._fields.index("special")] += 1
        return begun

    monkeypatch.setattr(ComparedPair, "begin", wrong)
    with pytest.warns(RuntimeWarning, match=r"comparing torch.bfloat16 on cpu: all special values in bf16: .* instead"):
        assert not fused_compare.trusted(sort())


@pytest.mark.usefixtures("untested")
def test_right_kernels_are_used_in_silence() -> None:
    assert fused_compare.trusted(sort(torch.float16))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"squared_error": 4.0 + 2.0**-50}, True),
        ({"squared_error": 4.0 + 2.0**-40}, False),
        ({"squared_exact": math.nan}, False),
        ({"squared_contract": 2.0 + 2.0**-50}, True),
        ({"squared_contract": 2.0 + 2.0**-40}, False),
        ({"bias_sum": 1.0 + 2.0**-40}, False),
        ({"outside": 1}, False),
        ({"max_error": 1.0 + 2.0**-52}, False),
        ({"ulp_histogram": (1, 0, 0, 0, 0, 0)}, False),
    ],
)
def test_what_agrees(change: dict[str, object], same: bool) -> None:
    sums = {"squared_error": 4.0, "squared_exact": 9.0, "squared_contract": 2.0, "bias_sum": 1.0}
    some = Comparison(numel=8, bias_count=8, max_error=1.0, **sums)  # type: ignore[arg-type]
    assert agree(replace(some, **change), some) == same  # type: ignore[arg-type]
