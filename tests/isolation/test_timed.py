"""Timed calls of a kernel process: which memory its allocations get, and what is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.isolation.runner import Bare, Offers, Prepared, nothing, placed_in, same

FP32 = torch.float32
PLACE = torch.zeros(4, 2)
EMPTY, EMPTY_LIKE, EMPTY_STRIDED, NEW_EMPTY = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty


@pytest.fixture
def offers() -> Iterator[Offers]:
    """Offer memory of shape [4, 2] in fp32, and a transposed one of shape [3, 5] in bf16."""
    turned = EMPTY_STRIDED((3, 5), (1, 3), dtype=torch.bfloat16)
    with Offers({((4, 2), FP32): PLACE, ((3, 5), torch.bfloat16): turned}) as made:
        yield made


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.empty(4, 2),
        lambda: torch.empty((4, 2)),
        lambda: torch.empty([4, 2], dtype=FP32, device="cpu"),
        lambda: torch.empty(torch.Size((4, 2)), device=torch.device("cpu")),
        lambda: torch.empty_like(torch.zeros(4, 2)),
        lambda: torch.empty_like(torch.zeros(4, 2, dtype=torch.int64), dtype=FP32),
        lambda: torch.empty_like(torch.zeros(2, 4).t(), memory_format=torch.contiguous_format),
        lambda: torch.empty_strided((4, 2), (2, 1)),
        lambda: torch.empty_strided([4, 2], [2, 1], dtype=FP32, device="cpu"),
        lambda: torch.zeros(1).new_empty(4, 2),
        lambda: torch.zeros(1).new_empty((4, 2)),
        lambda: torch.zeros(1, dtype=torch.int64).new_empty((4, 2), dtype=FP32),
    ],
)
def test_a_result_is_offered_where_just_its_memory_is_asked_for(ask: Callable[[], Tensor], offers: Offers) -> None:
    assert ask() is PLACE
    again = ask()
    assert again is not PLACE and again.shape == (4, 2) and again.dtype is FP32  # it is offered once


@pytest.mark.parametrize(
    ("ask", "shape", "dtype"),
    [
        (lambda: torch.empty(2, 4), (2, 4), FP32),
        (lambda: torch.empty(4), (4,), FP32),
        (lambda: torch.empty(4, 2, dtype=torch.int64), (4, 2), torch.int64),
        (lambda: torch.empty(4, 2, device="meta"), (4, 2), FP32),
        (lambda: torch.empty(4, 2, requires_grad=True), (4, 2), FP32),
        (lambda: torch.empty_like(torch.zeros(4, 2), device="meta"), (4, 2), FP32),
        (lambda: torch.empty_like(torch.zeros(2, 4).t()), (4, 2), FP32),
        (lambda: torch.empty_like(torch.zeros(4, 2), dtype=torch.int32), (4, 2), torch.int32),
        (lambda: torch.empty_strided((4, 2), (1, 4)), (4, 2), FP32),
        (lambda: torch.empty_strided((4, 3), (3, 1)), (4, 3), FP32),
        (lambda: torch.empty_strided((4, 2), (2, 1), requires_grad=True), (4, 2), FP32),
        (lambda: torch.empty_strided((4, 2), (2, 1), device="meta"), (4, 2), FP32),
        (lambda: torch.zeros(1).new_empty((4, 2), requires_grad=True), (4, 2), FP32),
        (lambda: torch.zeros(1).new_empty(4, 2, dtype=torch.int32), (4, 2), torch.int32),
        (lambda: torch.zeros(1, dtype=torch.int32).new_empty(4, 2), (4, 2), torch.int32),
    ],
)
def test_other_memory_is_torchs_own(
    ask: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, offers: Offers
) -> None:
    found = ask()
    assert found is not PLACE and (tuple(found.shape), found.dtype) == (shape, dtype)
    assert ((4, 2), FP32) in offers.now


def test_a_strided_result_is_offered_with_its_strides(offers: Offers) -> None:
    assert torch.empty_strided((3, 5), (5, 1), dtype=torch.bfloat16).stride() == (5, 1)
    assert len(offers.now) == 2
    assert torch.empty_strided((3, 5), (1, 3), dtype=torch.bfloat16).stride() == (1, 3)
    assert len(offers.now) == 1


def test_torch_is_itself_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), Offers({}):
        assert torch.empty is not EMPTY and Tensor.new_empty is not NEW_EMPTY
        1 / 0  # noqa: B018
    now = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty
    assert now == (EMPTY, EMPTY_LIKE, EMPTY_STRIDED, NEW_EMPTY)


def described(name: str, at: int, *shape: int) -> dict[str, Any]:
    strides = list(torch.empty(shape, device="meta").stride())
    return {"name": name, "dtype": "float32", "shape": list(shape), "strides": strides, "at": at, "start": at}


def message(**other: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"kernel": "k", "params": {"scale": 2.0}, "device": "cpu", "threaded": False, "frames": 0}
    own |= {"arguments": [described("x", 2, 3)], "results": [described("y", 1, 3), described("z", 5, 2)]}
    return own | {"close": [], "into": 1, "inputs": 2} | other


def words(*numbers: float) -> Tensor:
    held = torch.zeros(8, dtype=torch.int64)
    held.view(FP32)[: len(numbers)] = torch.tensor(numbers)
    return held


def into_new(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x * scale, x[:2] + 1


def in_place(x: Tensor, scale: float) -> dict[str, Tensor]:
    y, z = torch.empty(3), x.new_empty(2)
    torch.mul(x, scale, out=y)
    torch.add(x[:2], 1, out=z)
    return {"z": z, "y": y}


@pytest.mark.parametrize(
    ("call", "copied"), [(into_new, 2), (in_place, 0), (lambda x, scale: (in_place(x, scale)["y"], x[:2] + 1), 1)]
)
def test_results_lie_where_they_are_to_lie(call: Callable[..., Any], copied: int) -> None:
    into = words()
    prepared = Prepared(message(), call, into)
    assert prepared.called(words(0, 0, 5, 6, 7)) == {"copied": copied}
    assert into.view(FP32)[:8].tolist() == [0, 10, 12, 14, 0, 6, 7, 0]
    assert prepared.called(words(0, 0, 1, 1, 1)) == {"copied": copied}
    assert into.view(FP32)[:8].tolist() == [0, 2, 2, 2, 0, 2, 2, 0]


def test_results_that_a_kernel_leaves_out_stay() -> None:
    into = words(*[9.0] * 8)
    assert Prepared(message(), lambda x, scale: x * scale, into).called(words(0, 0, 5, 6, 7)) == {"copied": 1}
    assert into.view(FP32)[:8].tolist() == [9, 10, 12, 14, 9, 9, 9, 9]
    assert Prepared(message(), nothing, into).called(words()) == {"copied": 0}
    assert Prepared(message(), lambda x, scale: {"y": None}, into).called(words()) == {"copied": 0}


def test_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    Prepared(message(), nothing, words()).called(words())
    assert not waited
    Prepared(message(device="cuda:1"), nothing, words()).called(words())
    assert waited == [torch.device("cuda", 1)]


def test_a_worker_prepares_a_call_and_makes_it() -> None:
    closed: list[int] = []
    held = {1: words(), 2: words(0, 0, 5, 6, 7), 3: words(0, 0, 1, 1, 1)}
    memory: Any = SimpleNamespace(close=closed.append, whole=held.__getitem__)
    worker = Bare(memory)
    worker.call_of = {"k": into_new}
    assert worker.prepare(message(close=[7, 8])) == {} and closed == [7, 8]
    assert worker.go(message()) == {"copied": 2} and held[1].view(FP32)[1:4].tolist() == [10, 12, 14]
    assert worker.go(message(inputs=3)) == {"copied": 2} and held[1].view(FP32)[1:4].tolist() == [2, 2, 2]
    worker.prepare(message(kernel=None))
    assert worker.go(message()) == {"copied": 0}


def test_what_lies_at_its_place_already() -> None:
    x = torch.zeros(4, 4)
    assert same(x, x.view(4, 4)) and not same(x, x.t()) and not same(x[1:], x[:3]) and not same(x, torch.zeros(4, 4))
    found = placed_in([described("x", 2, 3), described("y", 0, 2)], words(1, 2, 3, 4, 5))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"x": [3, 4, 5], "y": [1, 2]}
