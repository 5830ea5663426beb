"""Accesses as runs of neighbours, and what arrays of all programs are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lastbit.interpret.coalescing import (
    Lanes,
    OffsetAddresses,
    advanced,
    alike,
    broadcast,
    core,
    filled,
    first_of,
    histogram,
    lanes_of,
    programs_of,
    ranges_of,
    taken,
    windows,
)
from lastbit.interpret.numpy_formats import Array

U = np.uint64


def at(*addresses: int, shape: tuple[int, ...] | None = None) -> Array:
    found = np.array(addresses, U)
    return found if shape is None else found.reshape(shape)


def counts(*numbers: int, shape: tuple[int, ...] | None = None) -> Array:
    found = np.array(numbers, np.int32)
    return found if shape is None else found.reshape(shape)


def test_repetitions_are_left_out() -> None:
    plain = np.arange(6).reshape(2, 3)
    assert core(plain) is plain
    assert core(np.broadcast_to(plain, (4, 2, 3))).tolist() == [plain.tolist()]
    assert core(np.broadcast_to(plain[:, :1], (2, 5))).tolist() == [[0], [3]]


def test_arrays_are_broadcast_as_by_numpy() -> None:
    x = np.arange(3)
    assert broadcast(x, (3,)) is x
    for shape, wanted in (((3, 1), (2, 3, 4)), ((1, 1, 1), (2, 3, 4)), ((3, 4), (2, 3, 4)), ((2, 0, 1), (2, 0, 4))):
        made = np.arange(int(np.prod(shape))).reshape(shape)
        found = broadcast(made, wanted)
        assert np.array_equal(found, np.broadcast_to(made, wanted)) and found.base is not None
        assert found.shape == wanted


def test_addresses_move_by_elements() -> None:
    assert advanced(at(100, 200), counts(3, -2), 4).tolist() == [112, 192]
    assert OffsetAddresses(at(100, 200), counts(3, -2), 4).all.tolist() == [112, 192]
    base = at(100, 200)
    assert OffsetAddresses(base, None, 4).all is base


@pytest.mark.parametrize(
    ("base", "count", "width", "starts"),
    [
        (at(100), counts(0, 1, 2), 4, 100),
        (at(100), counts(5, 6), 4, 120),
        (at(100), counts(0, 1, 3), 4, None),
        (at(100), counts(0, 2), 4, None),
        (at(100), counts(1, 0), 4, None),
        (at(100), counts(7), 4, None),  # one lane has no neighbour
        (at(100, 104, 108), counts(2), 4, 108),
        (at(100, 101, 102), counts(2), 4, None),
        (at(100, 104), counts(0, 1), 4, None),  # both move
        (at(100, 300, shape=(2, 1)), counts(0, 1, shape=(1, 2)), 4, [100, 300]),
        (at(100), counts(0, 1, 10, 11, shape=(2, 2)), 4, [100, 140]),
        (at(100), counts(0, 1, 10, 12, shape=(2, 2)), 4, None),
        (at(100), None, 4, None),
    ],
)
def test_where_neighbours_begin(base: Array, count: Array | None, width: int, starts: Any) -> None:
    found = OffsetAddresses(base, count, width).starts
    assert (None if found is None else found.tolist()) == starts


def test_starts_have_every_row() -> None:
    base = np.broadcast_to(at(100), (3, 2))
    assert OffsetAddresses(base, counts(4, 5), 8).starts.tolist() == [132] * 3  # type: ignore[union-attr]


def test_axes_are_swapped_where_neighbours_are_along_the_other() -> None:
    base, count = at(100, 200, shape=(1, 2)), counts(0, 1, 2, shape=(3, 1))
    turned = OffsetAddresses(base, count, 4).turned
    assert turned is not None and turned.starts is not None
    assert turned.starts.tolist() == [100, 200] and turned.width == 4
    assert turned.all.tolist() == [[100, 104, 108], [200, 204, 208]]
    assert OffsetAddresses(base, count * 2, 4).turned is None
    assert OffsetAddresses(base, None, 4).turned is None
    assert OffsetAddresses(base[0], count, 4).turned is None
    assert OffsetAddresses(base, count[:, 0], 4).turned is None
    along = OffsetAddresses(at(100, 200, shape=(2, 1)), counts(0, 1, shape=(1, 2)), 4)
    assert along.starts is not None and along.turned is None


def lanes(mask: Array | None, base: Array | None = None, count: Array | None = None) -> tuple[Any, int, Any]:
    base = at(100, 200, shape=(2, 1)) if base is None else base
    found = lanes_of(OffsetAddresses(base, counts(0, 1, 2, shape=(1, 3)) if count is None else count, 4), mask)
    return found.starts.tolist(), found.run, None if found.live is None else found.live.tolist()


def test_lanes_are_runs_where_every_row_begins_with_as_many() -> None:
    def mask(*rows: tuple[int, int, int]) -> Array:
        return np.array(rows, np.bool_)

    every = [[100, 104, 108], [200, 204, 208]]
    assert lanes(None) == ([100, 200], 3, None)
    assert lanes(mask((1, 1, 1), (1, 1, 1))) == ([100, 200], 3, None)
    assert lanes(mask((1, 1, 0), (1, 1, 0))) == ([100, 200], 2, None)
    assert lanes(mask((1, 1, 0), (0, 0, 0))) == ([100, 200], 2, [True, False])
    single = [[True, False, False], [True, False, False]]
    assert lanes(mask((1, 0, 0), (1, 0, 0))) == (every, 1, single)
    assert lanes(mask((1, 1, 0), (1, 0, 0)))[1] == 1
    assert lanes(mask((0, 1, 1), (0, 1, 1)))[1] == 1
    assert lanes(mask((1, 1, 0), (1, 0, 1)))[1] == 1
    assert lanes(mask((0, 0, 0), (0, 0, 0)))[1] == 1
    assert lanes(None, count=counts(0, 2, 4, shape=(1, 3))) == ([[100, 108, 116], [200, 208, 216]], 1, None)
    moving = lanes(None, base=at(100, 104, 108), count=counts(1))
    assert moving == (104, 3, None)


def test_runs_lack_an_axis_and_single_lanes_none() -> None:
    assert (Lanes(at(0), 1, None).axes, Lanes(at(0), 2, None).axes, Lanes(at(0), 3, None).axes) == (0, 1, 1)


def test_windows_are_rows_of_neighbours() -> None:
    view = np.arange(5)
    rows = windows(view, 3)
    assert rows.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    rows[0, 1] = 9
    assert view[1] == 9
    assert windows(view, 5).shape == (1, 5)


def test_the_first_lane_that_is_not_masked() -> None:
    def live(*flags: int, shape: tuple[int, ...]) -> Array:
        return np.array(flags, np.bool_).reshape(shape)

    assert first_of(Lanes(at(7, 8), 1, None)) == 7
    assert first_of(Lanes(at(7, 8, 9), 1, live(0, 0, 1, shape=(3,)))) == 9
    assert first_of(Lanes(at(7, 8, 9), 1, live(0, 0, 0, shape=(3,)))) is None
    starts = at(1, 2, 3, 4, shape=(2, 2))
    assert first_of(Lanes(starts, 2, live(0, 0, 0, 1, shape=(2, 2)))) == 4
    assert first_of(Lanes(at(5, 6), 1, live(0, 0, 0, 1, shape=(2, 2)))) == 6  # of every program alike
    assert first_of(Lanes(starts, 2, live(0, 1, shape=(2,)))) == 2  # the first program's


def test_ranges_of_indices() -> None:
    index, live = np.array([[5, 3], [8, 1]]), np.array([[True, False], [True, True]])

    def ranges(lanes: Lanes, rank: int | None) -> list[Any]:
        return [np.asarray(end).tolist() for end in ranges_of(index, lanes, rank)]

    assert ranges(Lanes(at(0), 1, None), None) == [1, 8]
    assert ranges(Lanes(at(0), 1, live), None) == [1, 8]
    assert ranges(Lanes(at(0), 1, live), 1) == [[5, 1], [5, 8]]
    assert ranges(Lanes(at(0), 1, None), 1) == [[3, 1], [5, 8]]
    assert ranges(Lanes(at(0), 2, None), 2) == [[3, 1], [5, 8]]  # the run is an axis of its own
    assert ranges(Lanes(at(0), 1, ~live | live & False), None) == [3, 3]
    assert ranges(Lanes(at(0), 1, np.zeros((2, 2), np.bool_)), None) == [1 << 58, -1]


def test_elements_are_taken_and_masked_ones_are_others() -> None:
    view = np.arange(10, 20)
    other = np.array(-1)
    index = np.array([2, 30])
    assert taken(view, index, Lanes(at(0), 1, None), None, other).tolist() == [12, 19]
    mask = np.array([True, False])
    assert taken(view, index, Lanes(at(0), 1, mask), mask, other).tolist() == [12, -1]
    starts = np.array([0, 4])
    assert taken(view, starts, Lanes(at(0), 3, None), None, other).tolist() == [[10, 11, 12], [14, 15, 16]]
    mask = np.array([[True, True, False]] * 2)
    assert taken(view, starts, Lanes(at(0), 2, None), mask, other).tolist() == [[10, 11, -1], [14, 15, -1]]
    live = np.array([False, True])
    mask = np.array([[False] * 3, [True, True, False]])
    assert taken(view, starts, Lanes(at(0), 2, live), mask, np.array([7, 8, 9])).tolist() == [[7, 8, 9], [14, 15, 9]]
    found = taken(view, np.array(3), Lanes(at(0), 2, live), mask, other)
    assert found.tolist() == [[-1, -1, -1], [13, 14, -1]] and found.dtype == view.dtype


def test_axes_of_programs() -> None:
    x = np.zeros((2, 3, 4))
    assert (programs_of(x, 1), programs_of(x, 2), programs_of(x, 3), programs_of(x, 0)) == ((2, 3), (2,), (), (2, 3, 4))
    assert filled(np.array([5.0]), (2, 2)).tolist() == [[5, 5], [5, 5]]
    assert filled(np.array([[5.0], [6.0]]), (3,)).tolist() == [[5, 5, 5], [6, 6, 6]]
    one, many = alike(1, np.array([1, 2]), np.array([[3, 4, 5], [6, 7, 8]]))
    assert one.tolist() == [[1, 2], [1, 2]] and many.shape == (2, 3)
    assert [x.shape for x in alike(0, np.zeros(()), np.zeros(3))] == [(3,), (3,)]


def test_histograms_count_what_is_inside() -> None:
    found = histogram(3, np.array([0, 2, 2, 3, -1, 1]))
    assert found.tolist() == [1, 1, 2] and found.dtype == np.int32
    assert histogram(3, np.array([0, 2, 2]), np.array([True, False, True])).tolist() == [1, 0, 1]
    rows = np.array([[[0, 1], [1, 1]], [[5, 0], [0, 0]]])
    assert histogram(2, rows).tolist() == [[[1, 1], [0, 2]], [[1, 0], [2, 0]]]
    mask = np.array([[True, False]])
    assert histogram(2, rows[0], mask).tolist() == [[1, 0], [0, 1]]
