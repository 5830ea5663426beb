"""The tensors of a launch as ranges of addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lastbit.interpret.address_ranges import BYTE, Given, given, view

MEMORY = torch.zeros(400, dtype=torch.int16)
START = MEMORY.data_ptr()


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Tensor:
    return MEMORY.as_strided(shape, strides, offset)


def one(tensor: Tensor) -> Given:
    [found] = given([("x", tensor)], lambda tensor: None)
    return found


@pytest.mark.parametrize(
    ("tensor", "start", "stop", "layout"),
    [
        (strided((5,), (1,)), 0, 10, (10, [])),
        (strided((2, 5), (5, 1), 3), 6, 26, (20, [])),
        (strided((), ()), 0, 2, (2, [])),
        (strided((2, 5), (7, 1)), 0, 24, (10, [(14, 2)])),
        (strided((5, 2), (1, 7)), 0, 24, (10, [(14, 2)])),
        (strided((5, 2), (1, 5)), 0, 20, (20, [])),
        (strided((3, 2, 2), (20, 4, 1)), 0, 92, (4, [(40, 3), (8, 2)])),
        (strided((3, 2, 2), (20, 2, 1)), 0, 88, (8, [(40, 3)])),
        (strided((3,), (2,)), 0, 10, (2, [(4, 3)])),
        (strided((2, 3), (6, 2)), 0, 22, (2, [(12, 2), (4, 3)])),
        (strided((9, 3), (0, 1)), 0, 6, (6, [])),
        (strided((1, 3), (9, 2)), 0, 10, (2, [(4, 3)])),
        (strided((3, 4), (3, 1)), 0, 20, (20, [])),  # its windows overlap
        (strided((2, 3), (4, 2)), 0, 18, (18, [])),
        (strided((2, 3), (5, 2)), 0, 20, (2, [(10, 2), (4, 3)])),
    ],
)
def test_where_elements_are(tensor: Tensor, start: int, stop: int, layout: tuple[int, list[tuple[int, int]]]) -> None:
    found = one(tensor)
    assert (found.start - START, found.stop - START, found.layout) == (start, stop, layout)
    assert found.itemsize == 2


@pytest.mark.parametrize(
    ("tensor", "width"),
    [
        (strided((5,), (1,), 3), 2),
        (strided((5,), (1,), 3), 4),
        (strided((2, 5), (7, 1), 3), 2),
        (strided((2, 5), (7, 1), 3), 4),
        (strided((3, 2, 2), (20, 4, 1), 1), 2),
        (strided((3,), (2,), 1), 1),
    ],
)
def test_addresses_of_elements_are_held_and_others_not(tensor: Tensor, width: int) -> None:
    found = one(tensor)
    where = np.arange(START, START + 120, dtype=np.uint64)
    bytes_of = {
        int(place) * 2 + byte
        for place in torch.arange(400).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()
        for byte in range(2)
    }
    wanted = [all(n + byte in bytes_of for byte in range(width)) for n in range(120)]
    assert found.holds(where, width).tolist() == wanted


def test_memory_is_seen_as_numbers_and_bytes() -> None:
    memory = torch.arange(8, dtype=torch.int32)
    whole, part = given([("a", memory[2:]), ("b", memory[4:6])], lambda tensor: tensor.numel())
    assert (whole.blank, part.blank) == (6, 2)
    seen = part.view(np.dtype(np.int32))
    assert seen.tolist() == [4, 5] and part.view(np.dtype(np.int32)) is seen
    assert part.view(np.dtype(np.int64)).shape == (1,) and part.view(BYTE).shape == (8,)
    seen[0] = 77
    assert int(memory[4]) == 77
    assert whole.shared_bytes().shape == part.shared_bytes().shape == (24,)
    assert part.shared_bytes().view(np.int32).tolist() == [2, 3, 77, 5, 6, 7]
    assert view(memory.data_ptr(), 3, np.dtype(np.int32)).tolist() == [0, 1, 2]


def grouped(*tensors: Tensor) -> list[tuple[int, int, int, int]]:
    """Return region, shared range and unit of each tensor, addresses counted from the first of the memory."""
    found = given([(f"x{n}", tensor) for n, tensor in enumerate(tensors)], lambda tensor: None)
    return [(x.region, x.shared[0] - START, x.shared[1] - START, x.unit) for x in found]


def test_tensors_that_overlap_share_a_region() -> None:
    a, b, c = MEMORY[:4], MEMORY[4:8], MEMORY[2:6]
    assert grouped(b, a) == [(1, 8, 16, 2), (0, 0, 8, 2)]  # neighbours do not
    assert grouped(a, b, c) == [(0, 0, 16, 2)] * 3
    assert grouped(MEMORY[:20], MEMORY[2:4], MEMORY[10:12]) == [(0, 0, 40, 2)] * 3
    wide = MEMORY[4:8].view(torch.int32)
    assert grouped(wide) == [(0, 8, 16, 4)]
    assert grouped(wide, MEMORY[4:6]) == [(0, 8, 16, 2)] * 2
    assert grouped(wide, MEMORY[4:6].view(torch.uint8)) == [(0, 8, 16, 1)] * 2
    later = MEMORY.view(torch.uint8)[9:13].view(torch.uint8)
    assert grouped(MEMORY[4:8], later) == [(0, 8, 16, 1)] * 2
    raw = np.zeros(16, np.uint8)
    apart = [torch.from_numpy(raw[begin : begin + 8].view(np.int16)) for begin in (0, 1)]
    assert {x.unit for x in given(zip("ab", apart, strict=True), lambda tensor: None)} == {1}  # by no whole elements


def test_tensors_are_found_within_arguments() -> None:
    x, y = torch.zeros(2), torch.zeros(3)
    descriptor: Any = SimpleNamespace(base=y)
    arguments = [("a", 5), ("b", x), ("c", (1, [y, None, "s"])), ("d", descriptor), ("e", torch.empty(0)), ("f", 2.5)]
    arguments += [("g", SimpleNamespace(base=7)), ("h", object())]
    found = given(arguments, lambda tensor: None)
    assert [(one.name, one.tensor.data_ptr()) for one in found] == [
        ("b", x.data_ptr()),
        ("c", y.data_ptr()),
        ("d", y.data_ptr()),
    ]
    assert given([], lambda tensor: None) == []


def test_a_tensor_in_words() -> None:
    assert str(one(strided((2, 5), (5, 1)))) == "x (int16 [2, 5])"
    assert str(one(strided((2, 5), (7, 1)))) == "x (int16 [2, 5], strides [7, 1])"
