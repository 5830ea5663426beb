"""Where a fault is in the text of a kernel, and which lines take what it gives."""

from __future__ import annotations

import pytest

from tests.faults.lines import consumers, planted_lines
from tests.faults.plant import Edit, Fault
from tests.faults.unrounded import unrounded

TEXT = """\
def kernel(x_ptr, y_ptr, n, SCALE, ROUND):
    columns = arange(n)
    mask = columns < n
    x = load(x_ptr + columns, mask=mask)
    square = x * x
    if ROUND:
        square = square.to(X)
    y = square * SCALE
    store(y_ptr + columns, y, mask=mask)


def call(x, **options):
    y = empty_like(x)
    kernel[grid](x, y, len(x), SCALE=2.0,
                 **options)
    return y


def outer(x, *, exact):
    found = {"y": call(x, ROUND=exact), "x": x}
    return found["y"]
"""
STEPS = (4, 5, 7, 8, 9)  # lines whose values a trace shows


def where(*edits: tuple[str, str]) -> tuple[set[int], set[int]]:
    """The planted lines of a fault, and those that consume what they give."""
    fault = Fault("f", "d", tuple(Edit(old, new, "k.py") for old, new in edits), "", "")
    planted = planted_lines(fault, {"k.py": TEXT})
    taking = consumers(planted, {("k.py", line) for line in STEPS})
    return {line for _, line in planted.lines}, {line for _, line in taking}


def test_a_value_is_consumed_where_its_name_is_used() -> None:
    assert where(("square = x * x", "square = x * x * x")) == ({5}, {5, 7, 8})


def test_an_address_is_consumed_where_something_is_read_or_written() -> None:
    assert where(("mask = columns < n", "mask = columns < n - 1")) == ({3}, {4, 9})


def test_an_argument_is_consumed_in_the_function_that_takes_it() -> None:
    assert where(("SCALE=2.0", "SCALE=3.0")) == ({14}, {8})


def test_options_are_followed_by_their_key() -> None:
    assert where(("ROUND=exact", "ROUND=True")) == ({20}, {7})


def test_names_of_a_comprehension_are_followed() -> None:
    text = "def outer(x):\n    pairs = {'y': ('a', 'b')}\n    return {k: inner(x[v]) for k, v in pairs.items()}\n"
    text += "\n\ndef inner(t):\n    return t + 1\n"
    planted = planted_lines(Fault("f", "d", (Edit("'b'", "'c'", "k.py"),), "", ""), {"k.py": text})
    assert consumers(planted, {("k.py", 7)}) == {("k.py", 7)}


def test_of_what_is_left_out_the_lines_beside_it_count_and_the_names_that_it_assigned() -> None:
    planted, taking = where(("        square = square.to(X)\n", "        pass\n"), ("    square = x * x\n", ""))
    assert {4, 5, 6} <= planted
    assert 7 in taking


NORM = """\
def norm(x, rstd, w):
    xhat = x * rstd
    xhat = xhat.to(w.dtype).to(tl.float32)
    return scaled(xhat, w)


def scaled(value, w):
    return value.to(w.dtype) * w.to(tl.float32)
"""


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("    xhat = xhat.to(w.dtype).to(tl.float32)\n", "", {2}),
        ("xhat.to(w.dtype).to(tl.float32)", "xhat.to(tl.float32)", {2}),
        ("value.to(w.dtype) *", "value *", {3}),  # what is passed for a parameter
        ("scaled(xhat, w)", "scaled(x * rstd, w)", set()),
        ("value.to(w.dtype) *", "value +", set()),  # more than a rounding is left out
        ("w.to(tl.float32)", "w", set()),  # a conversion to fp32 rounds nothing
    ],
)
def test_the_line_whose_value_is_no_longer_rounded_counts(old: str, new: str, lines: set[int]) -> None:
    planted = planted_lines(Fault("f", "d", (Edit(old, new, "k.py"),), "", ""), {"k.py": NORM})
    assert unrounded(planted, {"k.py": NORM}) == {("k.py", line) for line in lines}
