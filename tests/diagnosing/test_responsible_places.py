"""Whose a rounding or a number is: that of the line, of the call that passes a flag, or of the launch."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from lastbit.diagnosing.responsible import (
    _call,
    alias,
    chain_of_address,
    deciding,
    definition,
    is_given,
    is_index,
    lines_of,
    place_of_node,
    tree_of_file,
)
from lastbit.interpret.places import Place
from lastbit.tracing import Event, Operand
from lastbit.tracing.events import Origin

SOURCE = """\
def helper(value, dtype, ROUND):
    if ROUND:
        value = value.to(dtype)
    return value


def plain(value, dtype, ROUND):
    value = value.to(dtype)
    if ROUND:
        value = value * 2
    return value


def late(value, dtype, *, ROUND):
    more = value + 1
    made = more * 2
    flag = ROUND
    if flag:
        made = made.to(dtype)
    return made


def middle(x, FLAG):
    own = FLAG
    return helper(x, 1, own)


def kernel(x, n, MODE):
    a = helper(x, 2, True)
    b = middle(x, MODE)
    c = late(x, 3, ROUND=False)
    d = late(x, 3, ROUND=MODE)
    size = n
    other = size
    e = a / size
    f = other / b
    g = a / n
    h = g = a / b
    g += other
    return e
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    return str(path)


def place(file: str, text: str, function: str = "") -> Place:
    """Return the only place of a text, or the first within a function."""
    begin = SOURCE.index(f"def {function}(") if function else 0
    at = SOURCE.index(text, begin)
    line, column = SOURCE.count("\n", 0, at) + 1, at - SOURCE.rfind("\n", 0, at) - 1
    return Place(file, line, column, line, column + len(text), function)


@pytest.mark.parametrize(
    ("calls", "level"),
    [
        ([("value.to(dtype)", "helper"), ("helper(x, 2, True)", "kernel")], 1),
        ([("value.to(dtype)", "helper"), ("helper(x, 1, own)", "middle"), ("middle(x, MODE)", "kernel")], None),
        ([("value.to(dtype)", "helper"), ("helper(x, 1, own)", "middle")], None),
        ([("value.to(dtype)", "helper")], None),
        ([("value.to(dtype)", "plain"), ("helper(x, 2, True)", "kernel")], 0),
        ([("a / n", "kernel")], 0),
        ([("made.to(dtype)", "late"), ("late(x, 3, ROUND=False)", "kernel")], 1),
        ([("made.to(dtype)", "late"), ("late(x, 3, ROUND=MODE)", "kernel")], None),
        ([("made.to(dtype)", "late"), ("a / n", "kernel")], None),
    ],
)
def test_who_decides_on_a_rounding(file: str, calls: list[tuple[str, str]], level: int | None) -> None:
    """The index of the place among the calls around it; None where the launch does, or nobody knows."""
    assert deciding(tuple(place(file, *call) for call in calls)) == level


@pytest.mark.parametrize(
    ("calls", "level"),
    [
        ([("more * 2", "late"), ("late(x, 3, ROUND=False)", "kernel")], 1),
        ([("more * 2", "late"), ("late(x, 3, ROUND=MODE)", "kernel")], None),
        ([("value * 2", "plain"), ("helper(x, 2, True)", "kernel")], 0),
        ([("value.to(dtype)", "plain"), ("helper(x, 2, True)", "kernel")], 0),
        ([("a / n", "kernel")], 0),
    ],
)
def test_who_decides_on_a_rounding_that_was_left_out(
    file: str, calls: list[tuple[str, str]], level: int | None
) -> None:
    assert deciding(tuple(place(file, *call) for call in calls), left_out=True) == level


def test_where_the_variable_of_an_expression_is_assigned(file: str) -> None:
    use = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if "other = size" in text)
    size = definition(Place(file, use, 12, use, 16, "kernel"))
    assert size is not None and (size.line, size.text) == (use - 1, "n")
    assert definition(place(file, "a / n", "kernel")) is None  # one is a parameter
    assert definition(place(file, "a / size", "kernel")) is None  # two are assigned


def test_another_name_of_an_operand(file: str) -> None:
    line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if "other / b" in text)
    here = place(file, "other / b", "kernel")
    found = alias(here, "left", [1])
    assert found is not None and (found.text, found.line) == ("size", line - 2)
    assert alias(here, "left", [line - 2]) is None  # it is computed where it gets its name
    assert alias(here, "right", [1]) is None  # a call gives it
    assert alias(place(file, "a / n", "kernel"), "right", [1]) is None  # a parameter
    assert alias(place(file, "g += other", "kernel"), "right", [1]) is not None


def test_files_that_are_no_python(tmp_path: Path) -> None:
    path = tmp_path / "text.py"
    path.write_text("no python at all")
    assert tree_of_file(str(path)).body == [] and tree_of_file(str(tmp_path / "none.py")).body == []


def event(number: int, name: str, *operands: Operand, origin: Origin = Origin.ARGUMENTS, line: int = 1) -> Event:
    return Event(number, name, (Place("f", line, 0, line, 1, ""),), 0, "", np.zeros(1), operands, origin=origin)


def operand(of: Event | None = None, name: str = "", *, address: bool = False) -> Operand:
    return Operand(lambda lanes: lanes, event=of, name=name, address=address)


def test_arguments_of_a_launch_and_indices_of_programs() -> None:
    given = event(1, "int_cast", operand(name="n"))
    assert is_given(given) and is_given(event(2, "splat", operand(given)))
    assert not is_given(event(3, "int_cast", operand())) and not is_given(event(4, "add", operand(name="n")))
    assert not is_given(event(5, "int_cast", operand(name="n"), operand(name="m"))) and not is_given(event(6, "splat"))
    index = event(7, "get_program_id")
    assert is_index(index) and is_index(event(8, "splat", operand(index)))
    assert not is_index(event(9, "add", operand(index))) and not is_index(given)


def test_what_computes_an_address_and_a_mask() -> None:
    start = event(1, "get_program_id", line=1)
    scaled = event(2, "mul", operand(start), operand(name="stride"), line=2)
    moved = event(3, "addptr", operand(scaled), line=3)
    mask = event(4, "cmplt", operand(start), line=4)
    fixed = event(5, "constant", origin=Origin.CONSTANTS, line=5)
    load = event(6, "load", operand(moved, address=True), operand(mask, address=True), operand(fixed, address=True))
    assert sorted(chain_of_address(load)) == [1, 2, 3, 4] and sorted(chain_of_address(load, pointer=True)) == [1, 2, 3]
    assert chain_of_address(event(7, "load", operand(moved))) == {}
    assert lines_of(chain_of_address(load)) == {("f", 2), ("f", 4)}


def test_a_call_is_found_in_a_line_with_other_characters_before_it(tmp_path: Path) -> None:
    """Python's trees count bytes, and places count characters."""
    file = tmp_path / "mine.py"
    file.write_text('s = "é"; n = cast(x * y, True)\n', encoding="utf-8")
    tree = tree_of_file(str(file))
    [call] = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    place = place_of_node(Place(str(file), 1, 0, 1, 0, ""), call)
    assert place.text == "cast(x * y, True)"
    assert _call(tree, place) is call
