"""Tensors of a case that lie in one storage: views of one tensor, each with its own elements and checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.errors import UsageError
from lastbit.inputs.guards import copied, handed_out
from lastbit.inputs.of_case import Inputs, bare, build, holding

CPU = torch.device("cpu")
HALVES = "op x=bf16[4,8]@16,1:rows up=bf16[4,8]@16,1+8&x ids=int64[3]:counting seed=7"
INTERLEAVED = "op x=bf16[4,8]@16,2:rows up=bf16[4,8]@16,2+1&x ids=int64[3]:counting seed=7"
STACKED = "op x=bf16[4,8]:rows up=bf16[4,8]+32&x ids=int64[3]:counting seed=7"
SWAPPED = "op x=bf16[4,8]+32:rows up=bf16[4,8]&x ids=int64[3]:counting seed=7"
LINES = {HALVES: 8, INTERLEAVED: 1, STACKED: 32, SWAPPED: -32}


def built(line: str) -> Inputs:
    return build(parse_case(line), CPU)


def distance(tensors: dict[str, Tensor]) -> int:
    return (tensors["up"].data_ptr() - tensors["x"].data_ptr()) // 2


@pytest.mark.parametrize("line", LINES)
def test_they_have_the_values_that_they_have_apart(line: str) -> None:
    inputs, alone = built(line), build(parse_case(line).apart(), CPU)
    assert inputs.fingerprint == alone.fingerprint
    assert all(torch.equal(tensor, alone.tensors[name]) for name, tensor in inputs.tensors.items())
    assert inputs.violations() == []


@pytest.mark.parametrize(("line", "apart"), LINES.items())
def test_a_kernel_gets_views_of_one_tensor(line: str, apart: int) -> None:
    inputs = built(line)
    first, second = inputs.hand_out(), inputs.hand_out()
    assert list(first) == ["x", "up", "ids"]
    assert distance(first) == apart
    assert first["x"].untyped_storage().data_ptr() == first["up"].untyped_storage().data_ptr()
    assert first["x"]._base is first["up"]._base is not None and first["ids"]._base is None
    assert first["x"]._base is not second["x"]._base
    assert inputs.rebound(first) == []


@pytest.mark.parametrize(("line", "apart"), LINES.items())
def test_copies_lie_as_the_tensors_do(line: str, apart: int) -> None:
    inputs = built(line)
    others = (
        holding(inputs.case, inputs.tensors, CPU).hand_out(),
        handed_out(copied(inputs.guards)),
        bare(inputs, CPU),
    )
    for other in others:
        assert distance(other) == apart
        assert all(torch.equal(tensor, inputs.tensors[name]) for name, tensor in other.items())
        assert other["x"].data_ptr() != inputs.guards[0].tensor.data_ptr()


def test_elements_in_common_are_refused() -> None:
    with pytest.raises(UsageError, match="tensors 'x' and 'up' share elements of one storage"):
        built(HALVES.replace("+8&x", "+7&x"))


def at(x: Tensor, offset: int, count: int = 1) -> Tensor:
    return x.as_strided((count,), (1,), x.storage_offset() + offset)


@pytest.mark.parametrize(
    ("line", "write", "told"),
    [
        (HALVES, lambda t: t["up"][1].zero_(), {"up": "changed 8 elements of the input up (first up[1, 0])"}),
        (INTERLEAVED, lambda t: t["x"][2, 3:5].zero_(), {"x": "changed 2 elements of the input x (first x[2, 3])"}),
        (
            HALVES,
            lambda t: at(t["x"], 0, 64).zero_(),
            {
                "x": "changed 32 elements of the input x (first x[0, 0])",
                "up": "changed 32 elements of the input up (first up[0, 0])",
            },
        ),
    ],
)
def test_who_may_write_to_one_may_not_write_to_the_other(
    line: str, write: Callable[[dict[str, Tensor]], object], told: dict[str, str]
) -> None:
    inputs = built(line)
    write(inputs.hand_out())
    for expected in ((), ("x",), ("up",), ("x", "up")):
        found = {finding.stage: finding.sentence for finding in inputs.violations(expected)}
        assert found == {name: sentence for name, sentence in told.items() if name not in expected}
    inputs.restore()
    assert inputs.violations() == []


@pytest.mark.parametrize("expected", [(), ("x",), ("up",), ("x", "up")])
def test_what_lies_around_and_between_them_must_stay(expected: tuple[str, ...]) -> None:
    inputs = built("op x=bf16[4,8]@20,1 up=bf16[4,8]@20,1+10&x seed=7")
    x = inputs.hand_out()["x"]
    for offset in (-3, 8, 18, 78, 200):
        at(x, offset).zero_()
    assert [finding.sentence for finding in inputs.violations(expected)] == [
        "wrote 1 element before the start of x (first at element -3 counted from its start)",
        "wrote 1 element between the rows of x (first after x[0, 7])",
        "wrote 1 element between the rows of up (first after up[0, 7])",
        "wrote 2 elements past the end of up (first at element 68 counted from its start)",
    ]


def test_rows_that_are_one_in_memory_may_be_written_to() -> None:
    inputs = built("op x=bf16[4,8]@0,1 up=bf16[4,8]+8&x seed=7")
    inputs.hand_out()["x"][0].zero_()
    assert inputs.violations(("x",)) == []
    assert [finding.sentence for finding in inputs.violations()] == [
        "changed 8 elements of the input x (first x[0, 0])"
    ]


def test_a_storage_that_was_freed_is_told_of_each_tensor_in_it() -> None:
    inputs = built(HALVES)
    handed = inputs.hand_out()
    handed["up"].untyped_storage().resize_(0)
    assert [finding.stage for finding in inputs.rebound(handed)] == ["x", "up"]
    inputs.restore()
    assert inputs.violations() == [] and distance(inputs.hand_out()) == 8
