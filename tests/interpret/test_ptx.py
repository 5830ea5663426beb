"""Registers of PTX snippets: bits that are read and written as numbers of a type."""

from __future__ import annotations

import numpy as np
import pytest

from lastbit.interpret.ptx import Registers, _raw


def registers() -> Registers:
    names = {"b": "bool", "h": "u2", "r": "u4", "d": "u8", "f": "f4"}
    return Registers({name: np.dtype(dtype) for name, dtype in names.items()})


@pytest.mark.parametrize(
    ("operand", "dtype", "value"),
    [
        (5, "i4", 5),
        (-1, "u4", 2**32 - 1),
        (2**16 + 3, "u2", 3),
        (2**32 - 2, "i4", -2),
        (2**63, "i8", -(2**63)),
        (255, "i1", -1),
        (1.0, "u4", 0x3F800000),
        (1.0, "i4", 0x3F800000),
        (1.0, "u8", 0x3FF0000000000000),
        (1.5, "f4", 1.5),
        (3, "f4", 3.0),
        (0.1, "f8", 0.1),
    ],
)
def test_numbers_are_read_by_value_or_by_bits(operand: float, dtype: str, value: float) -> None:
    found = registers().read(operand, np.dtype(dtype))
    assert found.dtype == np.dtype(dtype) and found.tolist() == [value]


def test_registers_that_nothing_was_written_to_have_all_bits_set() -> None:
    held = registers()
    assert held.read("r", np.dtype("u4")).tolist() == [2**32 - 1]
    assert held.read("r", np.dtype("i4")).tolist() == [-1]
    assert held.read("r", np.dtype("u2")).tolist() == [2**16 - 1]
    assert held.read("h", np.dtype("u4")).tolist() == [2**16 - 1]
    assert held.read("b", np.dtype("bool")).tolist() == [True]
    assert np.isnan(held.read("d", np.dtype("f8"))).all()
    with pytest.raises(NotImplementedError, match="register `x`"):
        held.read("x", np.dtype("u4"))


def test_low_bits_are_written_and_numbers_with_a_sign_are_extended() -> None:
    held = registers()
    held.write("r", np.array([-2], np.int16))
    assert held.read("r", np.dtype("i4")).tolist() == [-2] and held.read("r", np.dtype("u2")).tolist() == [2**16 - 2]
    held.write("r", np.array([2**16 - 2], np.uint16))
    assert held.read("r", np.dtype("u4")).tolist() == [2**16 - 2]
    held.write("h", np.array([0x12345678], np.uint32))
    assert held.read("h", np.dtype("u2")).tolist() == [0x5678]
    held.write("f", np.array([1.5, -2], np.float32))
    assert held.read("f", np.dtype("f4")).tolist() == [1.5, -2]
    held.write("r", np.array([7, 8], np.uint32), np.array([True, False]))
    assert held.read("r", np.dtype("u4")).tolist() == [7, 2**16 - 2]
    held.write("_", np.array([1], np.uint32))
    with pytest.raises(NotImplementedError):
        held.read("_", np.dtype("u4"))


def test_widths() -> None:
    held = registers()
    assert [held.width(name) for name in ("h", "r", "d", 5, 1.5)] == [2, 4, 8, 0, 0]
    held.place("new", np.array([3], np.uint16))
    assert held.width("new") == 2 and held.read("new", np.dtype("u2")).tolist() == [3]
    assert _raw(np.dtype("bool")) == np.bool_ and _raw(np.dtype("f4")) == np.dtype("u4")
