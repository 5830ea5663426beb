"""Operations of PyTorch as events: what they read and wrote, and that each can be done once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lastbit.interpret.numpy_formats import BFLOAT16
from lastbit.numerics.residues import Residues
from lastbit.tracing import traced
from lastbit.tracing.events import Event, Made
from lastbit.tracing.of_torch import addresses_of, array_of, filled

X = torch.arange(1.0, 7.0).reshape(2, 3)


def recorded(run: Callable[[Tensor], object], x: Tensor = X) -> list[Event]:
    own = x.clone()
    with traced({"x": own}) as log:
        run(own)
    return log.events[1:]


def again(event: Event, *given: Made | None) -> Made:
    assert event.again is not None
    return event.again(given)


def made(*values: float, shape: Sequence[int] = (2, 3), dtype: Any = np.float32, follows: bool = False) -> Made:
    residues = Residues.of(torch.tensor(values).reshape(tuple(shape))) if follows else None
    return Made(np.array(values, dtype).reshape(tuple(shape)), residues)


def test_elements_as_arrays() -> None:
    assert array_of(X.t()).tolist() == X.t().tolist() and array_of(X).dtype == np.float32
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        found = array_of(X.to(dtype).t())
        assert found.astype(np.float64).tolist() == X.t().tolist() and found.shape == (3, 2)
    assert array_of(X.to(torch.bfloat16)).dtype == BFLOAT16
    assert array_of(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    copy = array_of(X)
    copy[0, 0] = 9
    assert X[0, 0] == 1


def test_addresses_are_those_of_the_elements() -> None:
    found = addresses_of(X.t())(np.arange(6)) - X.data_ptr()
    assert found.tolist() == [0, 12, 4, 16, 8, 20]


def test_an_operation_is_done_once_more_on_other_tensors_and_numbers() -> None:
    [product] = recorded(lambda x: x * 3)
    assert product.name == "aten.mul" and product.values.tolist() == (X * 3).tolist()
    given = made(1, 1, 2, 2, 3, 3)
    assert again(product, given, None).values.tolist() == [[3, 3, 6], [6, 9, 9]]
    assert again(product, given, made(5, shape=(1,))).values.tolist() == [[5, 5, 10], [10, 15, 15]]
    assert again(product, None, None).values.tolist() == [[0] * 3] * 2  # of memory that nobody gave
    [limited] = recorded(lambda x: x.clamp(2, 4))
    found = again(limited, given, made(0, shape=(1,)), made(1, shape=(1,)))
    assert found.values.tolist() == [[1] * 3] * 2


def test_operands_that_are_one_tensor_are_given_each() -> None:
    [both] = recorded(lambda x: x + x)
    assert again(both, made(*range(6)), made(*range(6))).values.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_an_operation_in_place_gives_what_it_wrote() -> None:
    added = recorded(lambda x: x.add_(1))[-1]
    assert added.name == "aten.add_"
    assert again(added, made(*range(6)), None).values.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_each_result_of_an_operation_is_an_event() -> None:
    values, places = recorded(lambda x: torch.max(x, -1))
    given = made(5, 1, 2, 0, 3, 9)
    assert again(values, given).values.tolist() == [5, 9] and again(values, given).values.dtype == np.float32
    assert again(places, given).values.tolist() == [0, 2] and again(places, given).values.dtype == np.int64


def test_residues_follow_where_all_that_is_given_has_them() -> None:
    [product] = recorded(lambda x: x * 3)
    found = again(product, made(*range(6), follows=True), None)
    assert found.residues is not None
    assert torch.equal(found.residues.p, Residues.of(torch.arange(0.0, 18.0, 3).reshape(2, 3)).p)
    assert again(product, made(*range(6)), None).residues is None
    _, both = recorded(lambda x: x + x.clone())
    assert again(both, made(*range(6), follows=True), made(*range(6))).residues is None
    [compared] = recorded(lambda x: x > 3)
    assert again(compared, made(*range(6), follows=True), None).residues is None


@pytest.mark.parametrize(
    ("dtype", "values", "wanted", "kept"),
    [
        (torch.bfloat16, [1.0, 2.0], [1.0, 2.0], torch.bfloat16),
        (torch.bfloat16, [1.0, 1.001], [1.0, 1.001], torch.float32),
        (torch.float16, [1.0, float("nan")], [1.0, 0.0], torch.float16),
        (torch.float32, [1.0, 1 + 2.0**-30], [1.0, 1.0], torch.float32),
        (torch.float64, [1.0, 1 + 2.0**-30], [1.0, 1 + 2.0**-30], torch.float64),
        (torch.int8, [1, 3], [1, 3], torch.int8),
        (torch.bool, [1, 0], [1, 0], torch.bool),
    ],
)
def test_a_narrow_argument_is_as_wide_as_its_values_need(
    dtype: torch.dtype, values: list[float], wanted: list[float], kept: torch.dtype
) -> None:
    like = torch.empty((2, 1), dtype=dtype, device="meta")
    found = filled(like, np.array(values, np.float64))
    assert (found.dtype, tuple(found.shape)) == (kept, (2, 1))
    assert found.double().nan_to_num().flatten().tolist() == pytest.approx(wanted)
    given = filled(like, np.array(values, np.float32))
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    assert given.dtype is (torch.float32 if narrow else dtype)
    empty = filled(like, None)
    assert empty.dtype is dtype and not empty.any()


def test_views_are_no_events_and_memory_that_is_empty_has_no_operands() -> None:
    assert recorded(lambda x: x.t().reshape(3, 2)[1:].unsqueeze(0)) == []
    [empty] = recorded(lambda x: torch.empty_like(x))
    assert empty.name == "aten.empty_like" and empty.operands == ()
    [written] = recorded(lambda x: torch.tensor([1.0, 2.0]))
    assert written.values.tolist() == [1.0, 2.0] and written.operands == ()


def test_what_an_operand_is() -> None:
    [chosen] = recorded(lambda x: torch.where(X > 3, x, 0.5))[-1:]
    named = {operand.address for operand in chosen.operands}
    assert named == {True, False}  # the condition says which elements are taken
    [large] = recorded(lambda x: x + 1, torch.zeros(17))
    [small] = recorded(lambda x: x + 1, torch.zeros(16))
    assert large.operands[0].values is None and large.operands[0].size == 17
    assert small.operands[0].values is not None and small.operands[0].size == 16
    assert small.operands[1].values is not None and small.operands[1].values.tolist() == [1]


def test_only_elements_that_were_put_are_written() -> None:
    own = X.clone()
    with traced({"x": own}) as log:
        own[:, 1:2] = torch.zeros(2, 1)
        own.index_put_((torch.tensor([0]), torch.tensor([0])), torch.tensor([9.0]))
    last = log.last(addresses_of(own)(np.arange(6)), log.next())
    found = {write.event.name: at.tolist() for write, at, _ in last if write.event}
    assert found["aten.index_put_"] == [0] and found["aten.copy_"] == [1, 4] and found["input x"] == [2, 3, 5]
