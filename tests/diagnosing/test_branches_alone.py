"""Branches that a kernel takes where it fails, and hardly ever where it passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lastbit.branches.branch_sites import sites_of
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.diagnoses import _told, branches_alone
from lastbit.interpret.decisions import MANY, SOME
from lastbit.verify.worker import Workplace, open_workplace, unwatched

SOURCE = """
from lastbit import kernel

def total(e):
    if e.shape[-1] % 64 == 1:
        return e[..., :-1].sum(-1, keepdim=True)
    return e.sum(-1, keepdim=True)

@kernel("softmax", name="mine")
def softmax(x, scale=1.0):
    s = x.float() * scale
    if x.shape[-1] > 100:
        s = s * 1
    if x.ndim == 2:
        s = s + 0
    if x.stride(-1) == 1:
        s = s - 0
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / total(e)).to(x.dtype)
"""
REMAINDER = "norms.py:5 `if e.shape[-1] % 64 == 1` was true in this case, and in {} of {} that passed."
LONG = "norms.py:12 `if x.shape[-1] > 100` was {} in this case, and in none of 9 that passed."


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    file = tmp_path_factory.mktemp("kernels") / "norms.py"
    file.write_text(SOURCE)
    config = Config(folder="", kernel_folders=(str(file),), lines=(line(65),), device_plan=DevicePlan())
    return open_workplace(config, unwatched, lambda _: None)


def line(*shape: int) -> str:
    return f"softmax x=bf16[{','.join(map(str, (3, *shape)))}] seed=1"


def alone(place: Workplace, failing: str, passed: Sequence[str]) -> list[str]:
    return branches_alone(place, "mine", failing, passed, seconds=60.0)


@pytest.mark.parametrize(
    ("passed", "told"),
    [
        ((8,) * 5, [REMAINDER.format("none", 5)]),
        ((8,) * 4, []),
        ((65, *(8,) * 9), [REMAINDER.format(1, 10)]),
        ((65, *(8,) * 8), []),
        ((*(1025,) * 9, *(8,) * 40), [REMAINDER.format("none", 40)]),
    ],
)
def test_a_branch_is_told_that_at_most_a_tenth_of_five_or_more_took(
    place: Workplace, passed: Sequence[int], told: list[str]
) -> None:
    """Of the cases that passed, the forty most like the failing one are called: rows of 1,025 are not among them."""
    assert alone(place, line(65), [line(n) for n in passed]) == told


def test_what_is_false_is_told_as_well_and_two_at_most(place: Workplace) -> None:
    long = [line(200)] * 9
    assert alone(place, line(8), long) == [LONG.format("false")]
    assert alone(place, line(200), [line(8)] * 9) == [LONG.format("true")]
    folded = "softmax x=bf16[3,2,65]@130,65,0 seed=1"
    first, second, more = alone(place, folded, long)
    assert (first, second) == (REMAINDER.format("none", 9), LONG.format("false"))
    assert more == "2 more branches were taken as rarely."


PROGRAM = """
import triton
import triton.language as tl

@triton.jit
def add(x, y, n, B: tl.constexpr):
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)
"""


@pytest.mark.parametrize("rounds", range(MANY + 1))
def test_every_number_of_rounds_and_kind_of_mask_has_words(tmp_path: Path, rounds: int) -> None:
    file = tmp_path / "add.py"
    file.write_text(PROGRAM)
    loop, mask, *_ = sites_of(str(file))
    decided = [(str(file), site.line, site.column, way) for site, way in ((mask, SOME), (loop, rounds))]
    first, second = (text for _, text in _told(decided))
    assert first.startswith("add.py:7 `for start in range(0, n, B)` ran")
    assert second.endswith("was true for some lanes")
