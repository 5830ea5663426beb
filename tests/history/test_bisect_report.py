"""What a search for the first bad commit prints."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from bisect_histories import FAILS, result
from rich.console import Console

from lastbit.reports.bisection import (
    MOST_LINES,
    Bisection,
    BisectStep,
    Criterion,
    Mark,
    Point,
    Recipe,
    print_bisection,
    print_extent,
    print_step,
)

POINTS = [Point(f"{i}" * 40, f"{i}" * 7, f"Change {i}", "2024-05-06") for i in range(4)]
STEPS = (
    BisectStep(POINTS[0], Mark.GOOD, 1, result(failed=False), left=3),
    BisectStep(POINTS[3], Mark.BAD, 1, result(failed=True, outside=1200, mismatched=250), left=3),
    BisectStep(POINTS[1], Mark.SKIPPED, reason="kernels/norms.py raised SyntaxError", left=3),
    BisectStep(POINTS[2], Mark.BAD, 2, result(failed=True, outside=1100, mismatched=240), left=2),
)
FOUND = Bisection("commit", FAILS, (POINTS[2],), STEPS, "+new\n-old", "git bisect start", Recipe("git worktree add /w"))


def printed(bisection: Bisection = FOUND, options: str = "", *, terminal: bool = False) -> str:
    color = "standard" if terminal else "auto"
    console = Console(file=io.StringIO(), width=120, highlight=False, force_terminal=terminal, color_system=color)
    print_bisection(bisection, console, options)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def step_line(step: BisectStep, criterion: Criterion = FAILS) -> str:
    console = Console(file=io.StringIO(), width=40, highlight=False)
    print_step(criterion, step, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_culprit_with_the_figures_before_and_after() -> None:
    text = printed(options="--project mine")
    assert "First bad commit  2222222  2024-05-06  Change 2" in text
    assert "2 verifications; 1 commit skipped" in text
    [before] = [line for line in text.splitlines() if line.startswith("  before")]
    [after] = [line for line in text.splitlines() if line.startswith("  after")]
    assert before.split()[1:3] == ["0000000", "0"] and before.endswith("PASSED")
    assert "24 %" in after and "1,100" in after and after.endswith("FAILED")
    assert text.index("git worktree add /w") < text.index("lastbit verify norm case")
    assert "--project mine" in text


def test_figures_of_values_that_must_not_be_nan_are_infinite() -> None:
    steps = (*STEPS[:3], replace(STEPS[3], result=result(failed=True, outside=3, special=3, mismatched=3)))
    [after] = [line for line in printed(replace(FOUND, steps=steps)).splitlines() if line.startswith("  after")]
    assert after.split()[2:6] == ["inf", "inf", "inf", "3"]


def test_several_candidates_are_all_named_and_no_culprit() -> None:
    text = printed(replace(FOUND, candidates=(POINTS[1], POINTS[2]), change=""))
    assert "First bad commit " not in text
    assert "The first bad commit is one of these 2" in text
    assert "  1111111  2024-05-06  Change 1\n  2222222  2024-05-06  Change 2\n" in text


def test_a_long_difference_is_cut() -> None:
    change = "\n".join(f"+line {i}" for i in range(MOST_LINES + 5))
    text = printed(replace(FOUND, change=change))
    assert f"+line {MOST_LINES - 1}\n" in text and f"+line {MOST_LINES}\n" not in text
    assert "… and 5 more lines" in text


def test_colours_only_on_terminals() -> None:
    assert "\x1b[" not in printed()
    assert "\x1b[32m+new" in printed(terminal=True)


@pytest.mark.parametrize(
    ("step", "criterion", "expected"),
    [
        (STEPS[3], FAILS, "  2  2222222  bad      FAILED  outside 1,100     Change 2  (2 left)\n"),
        (
            STEPS[3],
            Criterion("mismatch", "output"),
            "  2  2222222  bad      FAILED  mismatch 24 %      Change 2  (2 left)\n",
        ),
        (
            BisectStep(POINTS[2], Mark.BAD, 2, result(failed=True, special=1), left=2),
            Criterion("rel_l2", "output"),
            "  2  2222222  bad      FAILED  rel. error inf       Change 2  (2 left)\n",
        ),
        (STEPS[2], FAILS, "  –  1111111  skipped  Change 1  kernels/norms.py raised SyntaxError  (3 left)\n"),
    ],
)
def test_a_step_is_one_line_however_long(step: BisectStep, criterion: Criterion, expected: str) -> None:
    assert step_line(step, criterion) == expected


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (FAILS, "the verdict is FAILED"),
        (Criterion("rel_l2", "output", 0.002, drift=1.3), "at least 0.002, 1.3 times that of 0000000"),
        (
            Criterion("mismatch", "output", 0.25, choice="why"),
            "mismatch of stage output (why) is at least 25 %, nearer to 3333333",
        ),
        (
            Criterion("bias", "output", 0.5, falling=True),
            "the size of the bias of stage output is below 0.5, nearer to",
        ),
        (Criterion("rel_l2", "output", math.inf), "rel. error of stage output is inf, nearer to 3333333"),
        (Criterion("rel_l2", "output", math.inf, falling=True), "rel. error of stage output is finite, nearer to"),
        (Criterion("outside", "output"), "outside of stage output is above 0, nearer to"),
        (Criterion("outside", "output", falling=True), "outside of stage output is 0, nearer to"),
    ],
)
def test_the_criterion_is_said(criterion: Criterion, expected: str) -> None:
    assert expected in " ".join(printed(replace(FOUND, criterion=criterion)).split())


@pytest.mark.parametrize(("left", "runs"), [(1, "2 verifications"), (39, "8 verifications"), (64, "8 verifications")])
def test_the_extent_says_how_long_it_takes(left: int, runs: str) -> None:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    print_extent("commit", left, "v1", "main", console)
    assert console.file.getvalue().endswith(f"after v1, up to main: about {runs}\n")  # type: ignore[attr-defined]
