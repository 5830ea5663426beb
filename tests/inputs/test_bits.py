"""Hashes of 64 bits, the bits of tensors, and distances in ulp."""

from __future__ import annotations

import hashlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import lastbit.inputs.bits as module
from lastbit.inputs.bits import (
    bits_of,
    bits_of_float,
    bits_with_one_nan,
    distance,
    finalize,
    hashed,
    key_of,
    numbers,
    shift_right,
    signed,
    unequal,
    unequal_flags,
)

MASK = 2**64 - 1
NAN = math.nan


def splitmix64(state: int) -> int:
    """Compute the finaliser in Python's integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0, 0),
        (1, 1),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (MASK, -1),
        (2**64, 0),
        (-1, -1),
        (-(2**63) - 1, MASK >> 1),
    ],
)
def test_words_as_int64(word: int, value: int) -> None:
    assert signed(word) == value


@pytest.mark.parametrize(
    ("value", "bits"),
    [(0.0, 0), (-0.0, -(2**63)), (1.0, 0x3FF << 52), (5e-324, 1), (math.inf, 0x7FF << 52), (-2.0, -(2**62))],
)
def test_the_bits_of_a_number(value: float, bits: int) -> None:
    assert bits_of_float(value) == bits


def test_a_key_depends_on_every_word_and_their_order() -> None:
    assert key_of("a", 1) == int.from_bytes(hashlib.sha256(b"('a', 1)").digest()[:8], "little")
    assert len({key_of("a", 1), key_of(1, "a"), key_of("a"), key_of("a", "1"), key_of("a1")}) == 5


def test_zeros_are_shifted_in() -> None:
    words = torch.tensor([-1, 1, 2**40, -(2**63)])
    assert shift_right(words, 30).tolist() == [2**34 - 1, 0, 2**10, 2**33]
    assert shift_right(words, 1).tolist() == [2**63 - 1, 0, 2**39, 2**62]
    assert words.tolist() == [-1, 1, 2**40, -(2**63)]


def test_words_are_finalized_where_they_are() -> None:
    words = torch.tensor([0, 1, -1, 12345678901234567])
    wanted = [signed(splitmix64(word & MASK)) for word in words.tolist()]
    assert finalize(words) is words
    assert words.tolist() == wanted


@pytest.mark.parametrize(("lane", "lanes"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_a_word_of_a_lane_is_that_of_the_sequence(lane: int, lanes: int) -> None:
    key, counter = key_of("key"), torch.arange(5)
    wanted = [signed(splitmix64((key + module.INCREMENT * (n * lanes + lane)) & MASK)) for n in range(5)]
    assert hashed(counter, key, lane=lane, lanes=lanes).tolist() == wanted
    assert counter.tolist() == [0, 1, 2, 3, 4]
    if (lane, lanes) == (0, 1):
        assert hashed(counter, key).tolist() == wanted


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float64, 0x3FF << 52),
        (torch.float32, 0x3F800000),
        (torch.bfloat16, 0x3F80),
        (torch.float16, 0x3C00),
        (torch.float8_e4m3fn, 0x38),
        (torch.float8_e5m2, 0x3C),
        (torch.int8, 1),
    ],
)
def test_bits_are_a_view(dtype: torch.dtype, bits: int) -> None:
    x = torch.ones(3, 2).to(dtype).t()
    seen = bits_of(x)
    assert seen.tolist() == [[bits] * 3] * 2
    assert seen.stride() == x.stride() and seen.data_ptr() == x.data_ptr()
    assert seen.dtype is {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]


def test_bits_of_sixteen_bytes_are_refused() -> None:
    with pytest.raises(KeyError):
        bits_of(torch.ones(1, dtype=torch.complex128))


def test_numbers_come_in_order_and_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers([]) == []
    assert numbers([torch.tensor(3), torch.tensor([True]), torch.tensor([[-5]])]) == [3, 1, -5]
    stacked: list[int] = []

    def stack(tensors: list[SimpleNamespace]) -> SimpleNamespace:
        stacked.append(len(tensors))
        return SimpleNamespace(tolist=lambda: [t.value for t in tensors])

    def on(device: str, value: int) -> SimpleNamespace:
        held = SimpleNamespace(device=torch.device(device), value=value)
        held.reshape = lambda shape: held if shape == () else None
        return held

    monkeypatch.setattr(module.torch, "stack", stack)
    there = [on("cuda:0", 1), on("cuda:1", 2), torch.tensor(7), on("cuda:0", 3)]
    assert numbers(there) == [1, 2, 7, 3]  # type: ignore[arg-type]
    assert sorted(stacked) == [1, 2]


def test_pairs_differ_in_a_bit() -> None:
    zero, minus, nan = torch.zeros(4), torch.tensor([0.0, 0.0, -0.0, 0.0]), torch.full((4,), NAN)
    empty = torch.empty(0)
    assert unequal([(zero, zero.clone()), (zero, minus), (nan, nan.clone()), (empty, empty.clone())]) == [
        False,
        True,
        False,
        False,
    ]
    assert unequal([]) == []
    left = torch.tensor([1 + 2j, 3 - 4j])
    assert unequal([(left, left.clone()), (left, left.conj().resolve_conj())]) == [False, True]
    assert unequal([(torch.ones(3, dtype=torch.complex128), torch.ones(3, dtype=torch.complex128))]) == [False]


def compared(a: Tensor, b: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.dtype, bool]:
    """Return the dtype that two tensors are compared in, and whether they differ."""
    seen: list[torch.dtype] = []
    equal = torch.equal
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "equal", lambda x, y: seen.append(x.dtype) or equal(x, y))
        [flag] = unequal_flags(a, b)
    return seen[0], bool(flag)


@pytest.mark.parametrize(
    ("count", "start", "dtype"),
    [(8, 0, torch.int64), (7, 0, torch.int16), (8, 4, torch.int64), (8, 2, torch.int16), (12, 0, torch.int64)],
)
def test_eight_bytes_are_compared_at_a_time_where_that_is_possible(
    count: int, start: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.arange(32).to(torch.bfloat16)
    here, there = memory[start : start + count], memory.clone()[:count] + start
    assert compared(here, there, monkeypatch) == (dtype, False)
    assert compared(there, here, monkeypatch) == (dtype, False)
    there[count - 1] += 1
    assert compared(here, there, monkeypatch) == (dtype, True)


def test_strided_tensors_are_compared_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(16).to(torch.int32).view(4, 4)
    assert compared(x.t(), x.t().contiguous(), monkeypatch) == (torch.int32, False)
    assert compared(x.t(), x, monkeypatch) == (torch.int32, True)


def test_one_pattern_stands_for_every_nan() -> None:
    for dtype, ones in (
        (torch.float32, -1),
        (torch.bfloat16, -1),
        (torch.float8_e5m2, 255),
        (torch.float8_e4m3fn, 255),
    ):
        nans = bits_of(torch.tensor([NAN, NAN, 1.0]).to(dtype)).clone()
        nans[1] |= torch.tensor(1, dtype=nans.dtype)  # another payload, where there is one
        seen = bits_with_one_nan(nans.view(dtype))
        assert seen.tolist() == [ones, ones, int(bits_of(torch.ones(1).to(dtype)))]
    integers = torch.tensor([-1, 5], dtype=torch.int32)
    assert bits_with_one_nan(integers).tolist() == [-1, 5]


@pytest.mark.parametrize(
    ("dtype", "a", "b", "ulps"),
    [
        (torch.bfloat16, 1.0, 1.0078125, 1.0),
        (torch.bfloat16, 1.0078125, 1.0, 1.0),
        (torch.bfloat16, 0.0, -0.0, 0.0),
        (torch.float16, 65504.0, math.inf, 1.0),
        (torch.float16, -math.inf, -65504.0, 1.0),
        (torch.float32, 2.0**-149, -(2.0**-149), 2.0),
        (torch.float32, math.inf, math.inf, 0.0),
        (torch.float32, NAN, 1.0, math.inf),
        (torch.float32, 1.0, NAN, math.inf),
        (torch.int32, 7, -3, 10.0),
        (torch.bool, 0, 1, 1.0),
    ],
)
def test_distances_in_ulp(dtype: torch.dtype, a: float, b: float, ulps: float) -> None:
    found = distance(torch.tensor([a]).to(dtype), torch.tensor([b]).to(dtype))
    assert found.dtype is torch.float64
    assert found.tolist() == [ulps]
