"""The tensors of a case: how they are built, what a kernel changed of them, and copies without guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lastbit.inputs.of_case as module
from lastbit.case import parse_case
from lastbit.devices import Machine
from lastbit.errors import UnsupportedCase, UsageError
from lastbit.inputs.fingerprint import fingerprint
from lastbit.inputs.guards import guard
from lastbit.inputs.of_case import Inputs, bare, build, device_of, fingerprints, holding, rebound, refilled
from lastbit.result import Finding

CPU = torch.device("cpu")
LINE = "op x=bf16[4,6]@8,1+3:rows index=int64[5]:below_9 seed=7"


def built(line: str = LINE) -> Inputs:
    return build(parse_case(line), CPU)


# What a kernel was handed


def test_handed_out_tensors_are_new_objects_in_shared_memory() -> None:
    inputs = built()
    first, second = inputs.hand_out(), inputs.hand_out()
    assert list(first) == ["x", "index"]
    assert first["x"] is not second["x"] is not inputs.guards[0].tensor
    first["x"][0, 0] = 99.0
    assert second["x"][0, 0] == inputs.guards[0].tensor[0, 0] == 99
    assert inputs.tensors["x"][0, 0] != 99  # nothing reaches the reference's
    assert first["x"].stride() == inputs.tensors["x"].stride() == (8, 1)
    assert inputs.rebound(first) == []


def lies_elsewhere(x: Tensor) -> None:
    x.data = torch.empty_strided((4, 6), (8, 1), dtype=x.dtype)


def moves(by: int) -> Callable[[Tensor], None]:
    def set_(x: Tensor) -> None:
        x.set_(x.untyped_storage(), x.storage_offset() + by, x.shape, x.stride())

    return set_


def becomes_another(x: Tensor) -> None:
    x.data = torch.zeros(2, 12, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (lies_elsewhere, "other memory"),
        (moves(1), "its first element 1 elements after the one that it had"),
        (moves(-2000), "its first element 2,000 elements before the one that it had"),
        (lambda x: x.t_(), "shape [6, 4] in place of [4, 6], strides [1, 8] in place of [8, 1]"),
        (
            becomes_another,
            "other memory, dtype float32 in place of bfloat16, shape [2, 12] in place of [4, 6], "
            "strides [12, 1] in place of [8, 1]",
        ),
    ],
    ids=["elsewhere", "after", "before", "transposed", "everything"],
)
def test_a_tensor_that_was_rebound(changes: Callable[[Tensor], object], told: str) -> None:
    inputs = built()
    handed = inputs.hand_out()
    assert rebound(handed["x"], inputs.guards[0]) is None
    changes(handed["x"])
    [found] = inputs.rebound(handed)
    assert found == Finding("rebound_input", "x", f"rebound x: it now has {told}")
    assert all(check.violations() == [] for check in inputs.checks())  # the memory is as it was


def test_a_storage_that_was_freed_is_told_and_given_back() -> None:
    inputs = built()
    size, handed = inputs.guards[0].words.nbytes, inputs.hand_out()
    original = inputs.tensors["x"].clone()
    handed["x"].untyped_storage().resize_(0)
    [found] = inputs.rebound(handed)
    assert found.sentence == f"rebound x: it now has a storage of 0 bytes in place of {size:,}"
    assert [check.guards[0].name for check in inputs.checks()] == ["index"]  # x has nothing to look at
    inputs.restore()
    assert inputs.rebound(inputs.hand_out()) == []
    assert len(inputs.checks()) == 2
    assert torch.equal(inputs.hand_out()["x"], original)


def test_changed_elements_are_violations_unless_expected() -> None:
    inputs = built()
    assert inputs.violations() == []
    inputs.hand_out()["index"][2] = 77
    [found] = inputs.violations()
    assert found == Finding("mutated_input", "index", "changed 1 element of the input index (first index[2])")
    assert inputs.violations(expect=("index",)) == []
    assert len(inputs.violations(expect=("x",))) == 1
    with pytest.raises(UsageError, match=r"unknown input 'y'\. Known: index, x\."):
        inputs.violations(expect=("y",))
    inputs.restore()
    assert inputs.violations() == []


# How they are built


def test_inputs_have_canaries_of_their_own() -> None:
    """The first tensor has those of number 67, each further one two more."""
    inputs = built("op a=int8[8] b=int8[8] c=int8[8] seed=0")
    found = [int(guarded.words[0]) for guarded in inputs.guards]
    wanted = [
        int(guard("", (8,), strides=(1,), offset=0, dtype=torch.int8, device=CPU, number=number).words[0])
        for number in (67, 69, 71)
    ]
    assert found == wanted
    held = holding(inputs.case, inputs.tensors, CPU)
    assert [int(guarded.words[0]) for guarded in held.guards] == wanted


def test_a_fingerprint_is_of_names_and_values() -> None:
    inputs = built()
    assert inputs.fingerprint == fingerprints(inputs.tensors) == fingerprints(holding_of(inputs).tensors)
    assert len(inputs.fingerprint) == 16
    assert fingerprints({"y": inputs.tensors["x"]}) != fingerprints({"x": inputs.tensors["x"]})
    assert fingerprints({"x": inputs.tensors["x"]}) != fingerprint(inputs.tensors["x"])
    assert fingerprints({"x": inputs.tensors["x"].contiguous()}) == fingerprints({"x": inputs.tensors["x"]})


def holding_of(inputs: Inputs) -> Inputs:
    return holding(inputs.case, inputs.tensors, CPU)


def test_memory_is_filled_anew_for_another_case() -> None:
    inputs = built()
    other = replace(inputs.case, seed=8)
    place = inputs.guards[0].words.data_ptr()
    again = refilled(inputs.guards, other, names=("index",))
    assert torch.equal(again.tensors["x"], inputs.tensors["x"])
    assert not torch.equal(again.tensors["index"], inputs.tensors["index"])
    assert again.case is other and again.guards[0].words.data_ptr() == place
    everything = refilled(inputs.guards, other)
    assert everything.fingerprint == build(other, CPU).fingerprint != inputs.fingerprint
    assert everything.violations() == []


@pytest.mark.parametrize("line", ["op x=fp32[3,4]@3,1 seed=0", "op x=fp32[2,2]@1,1 seed=0"])
def test_elements_that_overlap_are_refused(line: str) -> None:
    with pytest.raises(UsageError, match=r"of tensor 'x' .* make its elements overlap"):
        built(line)
    with pytest.raises(UsageError, match=r"of tensor 'x' .* make its elements overlap"):
        holding(parse_case(line), {"x": torch.zeros(3, 4)}, CPU)


def test_given_values_are_held_once_where_a_stride_is_0() -> None:
    case = parse_case("op x=fp32[3,2]@0,1 y=fp32[2] seed=0")
    held = holding(case, {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "y": torch.ones(2)}, CPU)
    assert held.tensors["x"].tolist() == [[1.0, 2.0]] * 3
    assert held.tensors["x"].stride() == (0, 1)
    assert held.tensors["y"].tolist() == [1.0, 1.0]
    assert held.violations() == []


def test_the_device_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Machine("cuda", 2)
    here, peer, named = parse_case("op x=fp32[4] y=fp32[4]~peer z=fp32[4]~cuda:1 seed=0").tensors
    cuda = torch.device("cuda", 0)
    assert device_of(here, CPU, two) == CPU
    assert device_of(peer, cuda, two) == torch.device("cuda", 1)
    assert device_of(named, CPU, two) == torch.device("cuda", 1)
    with pytest.raises(UnsupportedCase, match="y belongs on a peer of cuda:0, but this machine has cpu and cuda:0"):
        device_of(peer, cuda, Machine("cuda", 1))
    asked: list[bool] = []
    monkeypatch.setattr(module, "machine", lambda: asked.append(True) or Machine())
    built()
    assert not asked  # a case without devices does not ask
    with pytest.raises(UnsupportedCase, match="x belongs on a peer of cpu, but this machine has only cpu"):
        built("op x=fp32[4]~peer seed=0")
    assert asked == [True]


# Copies without guards


def test_bare_copies_end_with_their_last_element() -> None:
    inputs = built("op x=bf16[4,6]@8,1+3 y=fp32[3,2]@0,1 z=fp64[0,3]+2 s=int32[] seed=7")
    copies = bare(inputs, CPU)
    assert list(copies) == ["x", "y", "z", "s"]
    for name, copy in copies.items():
        original = inputs.tensors[name]
        assert torch.equal(copy, original) and copy.stride() == original.stride() and copy.dtype is original.dtype
    elements = {name: copy.untyped_storage().nbytes() // copy.element_size() for name, copy in copies.items()}
    assert elements == {"x": 3 + 3 * 8 + 6, "y": 2, "z": 2, "s": 1}
    assert [copy.storage_offset() for copy in copies.values()] == [3, 0, 2, 0]
    copies["x"][0, 0] = 99.0
    assert inputs.violations() == []
