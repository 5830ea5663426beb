"""Why the bits of rows change: numbers of rows, places in a launch, other rows. Launches are functions here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.invariance import launches
from lastbit.invariance.launches import Profile, causes_of, sizes_up_to

CPU = torch.device("cpu")

# The bits of a row: what the row is, in how many it is launched, at which place, beside which others.
Bits = Callable[[int, int, int, frozenset[int]], int]


class Launches:
    """Launches of rows whose bits a function gives; sizes that are refused give None."""

    def __init__(self, count: int, bits: Bits, refused: Sequence[int] = ()) -> None:
        self.count, self.bits, self.refused, self.made = count, bits, refused, list[list[int]]()
        self.basis = SimpleNamespace(device=CPU)
        self.pairs = SimpleNamespace(without_left_out=lambda matched: matched)

    def rows(self, copies: Sequence[int]) -> Tensor:
        others = frozenset(copies)
        own = [self.bits(row, len(copies), place, others) for place, row in enumerate(copies)]
        return torch.tensor(own, dtype=torch.int32)[:, None]

    def launch(self, copies: Sequence[int], text: str) -> Any:
        self.made.append(list(copies))
        return None if len(copies) in self.refused else SimpleNamespace(rows=self.rows(copies))

    def matched(self, found: Tensor, copies: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
        return {"output": (self.rows(range(self.count)), found)}


def causes(
    count: int, bits: Bits, rows: Sequence[int] = (0, 1, 2, 3, 4, 5), refused: Sequence[int] = ()
) -> tuple[str, int]:
    made: Any = Launches(count, bits, refused)
    return causes_of(made, rows)


# Sizes


@pytest.mark.parametrize(
    ("count", "few", "sizes"),
    [
        (1, False, []),
        (2, False, [1]),
        (10, False, [1, 2, 3, 4, 5, 7, 8, 9]),
        (10, True, [1, 2, 3, 4, 8, 9]),
        (16, True, [1, 2, 3, 4, 8, 15]),
        (17, False, [1, 2, 3, 4, 5, 7, 8, 9, 15, 16]),
    ],
)
def test_sizes_are_powers_and_their_neighbours(count: int, few: bool, sizes: list[int]) -> None:
    assert sizes_up_to(count, CPU, few=few) == sizes


def test_a_gpu_adds_multiples_of_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=22)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cuda = torch.device("cuda", 0)
    assert (launches.processors(cuda), launches.processors(CPU)) == (22, 0)
    powers = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129}
    assert set(sizes_up_to(200, cuda)) == powers | {21, 22, 23, 43, 44, 45, 87, 88, 89, 175, 176, 177, 199}
    assert sizes_up_to(200, cuda, few=True) == [1, 2, 3, 4, 8, 16, 22, 23, 32, 64, 128, 199]


# What is found


@pytest.mark.parametrize("threshold", [1, 4, 11, 18, 38])
def test_a_number_of_rows_is_found_exactly(threshold: int) -> None:
    found = causes(40, lambda row, size, place, others: row + 100 * (size > threshold))
    assert found == (f"changes between {threshold} and {threshold + 1} rows", threshold)


def test_several_numbers_are_listed_and_of_many_the_first_and_the_last() -> None:
    found = causes(40, lambda row, size, place, others: row + 100 * (size > 5) + 100 * (size > 20))
    assert found == ("changes between 5 and 6, 20 and 21 rows", 20)
    steps = (1, 3, 7, 12, 20, 36)
    found = causes(40, lambda row, size, place, others: row + 100 * sum(size > step for step in steps))
    assert found[0] == "changes between 1 and 2, 3 and 4, 7 and 8, 36 and 37 rows, and 2 more times"
    assert found[1] == 36


@pytest.mark.parametrize("divisor", [2, 4, 8])
def test_multiples_of_a_block_are_told(divisor: int) -> None:
    found = causes(40, lambda row, size, place, others: row + 100 * (size % divisor == 0))
    assert found[0] == f"changes between multiples of {divisor} rows and other numbers of rows"
    assert found[1] == 39  # 40 is a multiple


def test_places_of_a_launch_are_told() -> None:
    found = causes(40, lambda row, size, place, others: row + 100 * (place == 0 and size > 1))
    places = "changes with the place of a row in its launch: the first row"
    assert found == (f"changes between 1 and 2 rows, and {places}", 1)
    refused = range(17, 31)  # where the number that matters is cannot be found then
    found = causes(40, lambda row, size, place, others: row + 100 * (place == 0) * (size > 20), refused=refused)
    assert found == (places, 16)
    found = causes(40, lambda row, size, place, others: row + 100 * (place >= size - 2 and size == 40))
    assert found[0] == "changes with the place of a row in its launch: the last 2 rows"


def test_other_rows_are_told() -> None:
    found = causes(40, lambda row, size, place, others: row + 100 * (len(others) > 1))
    assert found == ("changes with what the other rows hold", 0)


def test_nothing_is_said_of_what_does_not_change_or_cannot_be_launched() -> None:
    assert causes(40, lambda row, size, place, others: row) == ("", 0)
    assert causes(9, lambda row, size, place, others: row, refused=range(10)) == ("", 0)
    refused = range(17, 31)
    found = causes(40, lambda row, size, place, others: row + 100 * (size > 20), refused=refused)
    assert found == ("", 16)  # between 16 and 31 no number of rows can be launched


def test_more_rows_than_are_copied_are_followed() -> None:
    found = causes(40, lambda row, size, place, others: row + 100 * (row == 5 and size > 11))
    assert found == ("changes between 11 and 12 rows", 11)


def test_rows_are_followed_together_where_they_do_without_each_other() -> None:
    made: Any = Launches(40, lambda row, size, place, others: row)
    assert launches._together(made, (7, 8, 9), 2) is not None
    assert made.made == [[7, 8], [9, 9]]
    made.made.clear()
    assert launches._together(made, (7, 8, 9), 5) == tuple(int(n).to_bytes(4, "little") for n in (7, 8, 9))
    assert made.made == [[7, 8, 9, 7, 8]]
    made.refused = [2]
    assert launches._together(made, (7, 8, 9), 2) is None


def test_a_profile_has_one_launch_for_each_row() -> None:
    made: Any = Launches(
        6, lambda row, size, place, others: row + 50 * (place == row and size == 6) * (len(others) == 1)
    )
    found = launches._profile(made, (1, 2), 6)
    assert made.made == [[1] * 6, [2] * 6]
    assert found == Profile(6, tuple(int(n).to_bytes(4, "little") for n in (1, 2)), (1, 2), own=False)
    small = launches._profile(made, (1, 2), 3)
    assert small is not None and small.own and small.other == ()
    made.refused = [3]
    assert launches._profile(made, (1,), 3) is None


@pytest.mark.parametrize(
    ("rows", "places"),
    [
        ([5, 5, 5, 5], []),
        ([9, 5, 5, 5], [0]),
        ([5, 5, 9, 5, 5], [2]),  # the one in the middle is another
        ([5, 9, 5, 9, 5], [1, 3]),
        ([5, 5, 9, 9], [0, 1]),
        ([1], []),
    ],
)
def test_places_unlike_most(rows: list[int], places: list[int]) -> None:
    assert launches._unlike_most(torch.tensor(rows)[:, None]) == places


@pytest.mark.parametrize(
    ("other", "size", "words"),
    [
        ((0,), 40, ": the first row"),
        ((0, 1, 2), 40, ": the first 3 rows"),
        ((39,), 40, ": the last row"),
        ((38, 39), 40, ": the last 2 rows"),
        ((7,), 8, " of 8: the last row"),
        ((1, 3), 8, " of 8: 2 of the rows"),
        ((0, 2), 40, ": 2 of the rows"),
    ],
)
def test_places_in_words(other: tuple[int, ...], size: int, words: str) -> None:
    said = launches._places(Profile(size, (), other), 40)
    assert said == f"changes with the place of a row in its launch{words}"


def test_a_divisor_needs_two_of_either_kind_that_are_alike() -> None:
    one, two, three = (b"1",), (b"2",), (b"3",)
    assert launches._divisor({2: one, 3: two, 4: one, 5: two}) == 2
    assert launches._divisor({2: one, 3: two, 4: one}) == 0
    assert launches._divisor({2: one, 3: two, 5: two}) == 0
    assert launches._divisor({2: one, 3: two, 4: one, 5: three}) == 0
    assert launches._divisor({2: one, 3: one, 4: one, 5: one}) == 0
    assert launches._divisor({4: one, 6: two, 8: one, 5: two}) == 4
    assert launches._divisor({256: one, 512: one, 128: two, 384: two}) == 256


def test_halving_ends_where_bits_change_or_a_launch_is_refused() -> None:
    asked: list[int] = []

    def following(size: int) -> tuple[bytes, ...] | None:
        asked.append(size)
        return (b"low",) if size <= 6 else (b"high",)

    assert launches._halved(1, 16, following) == 6 and asked[0] == 1
    assert launches._halved(6, 7, following) == 6
    assert launches._halved(1, 16, lambda size: None if size == 8 else (b"",)) == 0
