"""Where a fault is in the text of a kernel."""

from __future__ import annotations

import pytest

from tests.faults.lines import planted_lines
from tests.faults.plant import Edit, Fault
from tests.faults.unrounded import unrounded

TEXT = """\
def kernel(x_ptr, y_ptr, n):
    columns = arange(n)
    x = load(x_ptr + columns)
    square = x * x
    store(y_ptr + columns, square)
"""


def where(*edits: tuple[str, str]) -> set[int]:
    """Return the planted lines of a fault."""
    fault = Fault("f", "d", tuple(Edit(old, new, "k.py") for old, new in edits), "", "")
    return {line for _, line in planted_lines(fault, {"k.py": TEXT}).lines}


def test_lines_that_are_changed_or_added_are_planted() -> None:
    assert where(("square = x * x", "square = x * x * x")) == {4}
    assert where(("    square = x * x\n", "    x = x + 1\n    square = x * x\n")) == {4}


def test_of_what_is_left_out_the_lines_beside_it_count() -> None:
    assert where(("    square = x * x\n", "")) == {3, 4}


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
