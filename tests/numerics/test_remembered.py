"""A remembered call is one with the same bits, numbers, layout and premises; anything else is computed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure, Groups, Premises, Tensor, remembered, remembering, using
from lastbit.numerics.formats import BF16
from lastbit.numerics.remembered import _alike, _CallCache, _RememberedCall
from lastbit.references.rms_norm import rms_norm

Made = list[tuple[object, ...]]


@pytest.fixture
def made() -> Made:
    """Note the arguments of all calls that are computed."""
    return []


@pytest.fixture
def function(made: Made) -> Iterator[Callable[..., Tensor]]:
    """Yield a remembered function, within `remembering`."""

    @remembered
    def doubled(x: object, *others: object) -> Tensor:
        made.append((x, *others))
        return (x.value if isinstance(x, Enclosure) else torch.as_tensor(x)) * 2

    with remembering():
        yield doubled


def test_the_same_bits_are_computed_once(function: Callable[..., Tensor], made: Made) -> None:
    x = torch.tensor([1.0, float("nan"), -0.0])
    assert function(x) is function(x) is function(x.clone())
    assert function(Enclosure.point(x)) is function(Enclosure.point(x))
    assert len(made) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.5])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2, 2), torch.zeros(4)),
        (torch.zeros(2, 2), torch.zeros(2, 2).t()),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (Enclosure(torch.zeros(1, 2)), Enclosure(torch.zeros(2, 2))),
    ],
)
def test_what_differs_is_computed(one: object, other: object, made: Made, function: Callable[..., Tensor]) -> None:
    for value in (one, other, one, other):
        function(torch.zeros(1), value, slice(0, 1), (2,), None)
    assert len(made) == 2


def test_a_tensor_that_was_written_to_is_another(function: Callable[..., Tensor], made: Made) -> None:
    x = torch.ones(3)
    function(x)
    x += 1
    assert function(x).tolist() == [4.0] * 3
    assert function(torch.ones(3)).tolist() == [2.0] * 3
    assert len(made) == 3


def test_other_premises_are_another_call(function: Callable[..., Tensor], made: Made) -> None:
    x = torch.ones(3)
    for premises in (Premises(), Premises(exact_sums=True), Premises(), Premises(exact_sums=True)):
        with using(premises):
            function(x)
    assert len(made) == 2


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits must not be compared."""

    def fail(*_: object) -> bool:
        raise AssertionError("bits were compared")

    monkeypatch.setattr(torch, "equal", fail)


@pytest.mark.usefixtures("unread")
def test_the_same_memory_is_not_read(function: Callable[..., Tensor], made: Made) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    for _ in range(2):
        for view in (x, x.T, x[1], x.view(3, 2)):
            function(view.detach())
    assert len(made) == 4


@pytest.mark.usefixtures("unread")
def test_on_an_accelerator_no_bits_are_compared() -> None:
    x = torch.ones(3)
    call = _RememberedCall([x], ((x.data_ptr(), x._version),), None)
    assert _alike([call], [torch.ones(3, device="meta")]) is None
    with pytest.raises(AssertionError, match="bits were compared"):
        _alike([call], [torch.ones(3)])


def test_what_follows_is_found_again_by_its_memory(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    monkeypatch.setitem(_CallCache.call.__globals__, "_alike", lambda calls, operands: None)

    @remembered
    def noting(x: Enclosure) -> Enclosure:
        made.append((x,))
        return x + x

    x, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([False])
    with remembering():
        for _ in range(2):
            start = Enclosure.point(x)
            noting((noting(start) * 3.0).rounded(BF16)[:, 0].zero_where(mask))
    assert len(made) == 2


def test_outside_nothing_is_remembered(made: Made) -> None:
    function = remembered(lambda x: made.append((x,)))
    function(1)
    with remembering():
        function(1)
        with remembering():
            function(1)
    with remembering():
        function(1)
    assert len(made) == 3


@pytest.mark.parametrize("limit", ["_LARGE", "_MOST"])
def test_what_is_large_is_not_kept(
    limit: str, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor], made: Made
) -> None:
    monkeypatch.setitem(_CallCache.call.__globals__, limit, 4)
    for _ in range(2):
        function(torch.ones(8))
    assert len(made) == 2


def test_groups_are_told_apart_by_their_rows(function: Callable[..., Tensor], made: Made) -> None:
    for numbers in ([0, 1], [0, 0], [0, 1]):
        function(1.0, Groups(torch.tensor(numbers), 2))
    assert len(made) == 2


def test_what_a_kernel_gave_is_read_anew() -> None:
    """A kernel writes to memory without torch's knowledge, so that the version of its tensor stays what it was."""
    tensors = {"x": torch.randn(4, 64), "weight": torch.ones(64)}
    problem = Problem(rms_norm, rms_norm.contract("fp32_multiply+rounded_sum"), tensors, {"eps": 1e-6})
    inverse, other = torch.ones(4, 1), torch.full((4, 1), 2.0)
    with remembering():
        before = problem.evaluate({"inv_rms": inverse}).enclosure("output").value
        ctypes.memmove(inverse.data_ptr(), other.data_ptr(), other.nbytes)
        after = problem.evaluate({"inv_rms": inverse}).enclosure("output").value
    assert torch.equal(after, 2 * before)
