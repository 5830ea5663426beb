"""Tensors of a golden: every change of bits is seen, and said where it is, also outside the sample."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lastbit.dtypes import DTYPES
from lastbit.history.golden_file import WHOLE, change, same, store
from lastbit.reports.golden import Change

LARGE = (64, 1024)


def values(shape: tuple[int, ...] = LARGE, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def changed(before: Tensor, after: Tensor) -> Change:
    """Find the change between two tensors that must not count as the same."""
    first, second = store(before), store(after)
    assert not same(first, second)
    return change("output", first, second)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (9, 1000)], ids=str)
def test_equal_tensors_are_the_same_in_every_format(name: str, shape: tuple[int, ...]) -> None:
    x = (values(shape) * 4).to(DTYPES[name])
    assert same(store(x), store(x.clone()))
    if x.numel():
        other = x.clone()
        other.reshape(-1).view(torch.uint8)[-1] ^= 1
        assert not same(store(x), store(other)), "the last byte differs in its last bit"


def test_strides_do_not_matter() -> None:
    x = values((300, 40))
    assert same(store(x), store(x.t().contiguous().t()))


def test_dtype_and_shape_do() -> None:
    ones = torch.ones(4, 6)
    for other in (ones.to(torch.bfloat16), ones.reshape(6, 4)):
        found = changed(ones, other)
        assert (found.before, found.after) == ("fp32[4,6]", str(store(other)))
        assert found.compared == 0


def test_nan_is_nan() -> None:
    """Payloads and signs of NaN mean nothing, and differ between devices."""
    x = values()
    x[3, 7] = math.nan
    negative = torch.where(torch.isnan(x), torch.tensor(-1, dtype=torch.int32).view(torch.float32), x)
    assert (x.view(torch.int32) != negative.view(torch.int32)).sum() == 1
    assert same(store(x), store(negative))
    assert changed(x, torch.where(torch.isnan(x), 0.0, x)).max_ulp in (0.0, math.inf)


def test_a_small_tensor_is_compared_element_by_element() -> None:
    x = values((4, 6))
    other = x.clone()
    other[2, 5] = torch.nextafter(x[2, 5], torch.tensor(math.inf))
    other[1, 1] = -x[1, 1]
    found = changed(x, other)
    assert (found.changed, found.compared, found.blocks, found.spans) == (2, 24, (0, 0), ())
    assert found.farthest is not None
    assert found.farthest.index == (1, 1)
    assert found.farthest.before == -found.farthest.after == float(x[1, 1])
    other[1, 1] = x[1, 1]
    assert changed(x, other).max_ulp == 1


def test_a_zero_that_changes_its_sign_changes_at_a_distance_of_0() -> None:
    found = changed(torch.zeros(3), torch.tensor([0.0, -0.0, 0.0]))
    assert (found.changed, found.max_ulp) == (1, 0)


def test_integers_are_counted_in_steps_of_1() -> None:
    found = changed(torch.tensor([1, 2, 3]), torch.tensor([1, 7, 3]))
    assert (found.changed, found.max_ulp) == (1, 5)


def test_a_large_tensor_is_stored_as_a_sample() -> None:
    stored = store(values())
    assert stored.values.numel() < WHOLE
    assert stored.values[0] == values()[0, 0]
    assert stored.values[-1] == values()[-1, -1]


def outside_the_sample(x: Tensor) -> tuple[int, int]:
    """Find an element of `x` whose neighbours are not stored either."""
    kept = set(store(x).values.tolist())
    return next((row, 500) for row in range(30, len(x)) if not kept & set(x[row, 490:510].tolist()))


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda x: x.neg_(), id="flipped sign"),
        pytest.param(lambda x: x.copy_(torch.nextafter(x, torch.tensor(math.inf))), id="one ulp"),
    ],
)
def test_a_change_outside_the_sample_is_seen_and_located(edit: object) -> None:
    x = values()
    row, column = outside_the_sample(x)
    other = x.clone()
    edit(other[row, column])  # type: ignore[operator]
    found = changed(x, other)
    assert found.changed == 0
    assert found.blocks == (1, 32)
    [(first, last)] = found.spans
    assert first <= (row, column) <= last
    assert last[0] - first[0] <= 2, "a block is two rows here"


def test_swapped_rows_are_seen_even_if_the_sample_is_the_same() -> None:
    x = values()
    other = x.clone()
    rows = [31, 37]
    other[rows] = x[rows[::-1]]
    found = changed(x, other)
    assert found.blocks == (2, 32)
    assert [(first[0], last[0]) for first, last in found.spans] == [(30, 31), (36, 37)]


def test_blocks_side_by_side_are_one_stretch_up_to_the_end() -> None:
    x = values()
    other = x.clone()
    other[57:] += 1
    assert changed(x, other).spans == (((56, 0), (63, 1023)),)


def test_a_stage_that_comes_or_goes_is_a_change() -> None:
    x = store(values())
    assert (change("a", None, x).before, change("a", None, x).after) == ("", "fp32[64,1024]")
    assert (change("a", x, None).before, change("a", x, None).after) == ("fp32[64,1024]", "")
