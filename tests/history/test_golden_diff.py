"""`lastbit golden diff`: two goldens, or two folders of them, side by side; nothing is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_bench import lastbit, output
from torch import Tensor

from lastbit.errors import LastbitError, UsageError
from lastbit.history.golden_file import Golden, RecordedCase, RecordedStage, store, write
from lastbit.reports.golden import Figures

VALUES = torch.linspace(-2, 2, 24).reshape(4, 6)
PROVENANCE = {"source": "00", "revision": "aa", "device": "a CPU", "torch": "2.13.0"}


def golden(values: Tensor = VALUES, *, kernel: str = "mine", unordered: bool = False, seed: int = 1) -> Golden:
    stage = RecordedStage(store(values), unordered, Figures(24, 0, 0, 0.0, 0.0))
    cases = (RecordedCase(f"op x=fp32[4,6] seed={seed}", "00ff", {"output": stage}),)
    return Golden(kernel, "op", "default", "cpu", PROVENANCE, cases)


def moved() -> Tensor:
    other = VALUES.clone()
    other[2, 3] = torch.nextafter(other[2, 3], torch.tensor(9.0))
    return other


def test_equal_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in "ab":
        write(golden(), tmp_path / folder)
    assert lastbit("diff", tmp_path / "a", tmp_path / "b") == 0
    assert "SAME mine 1 case equal" in output(capsys)


def test_elements_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(golden(), tmp_path / "a")
    second = write(replace(golden(moved()), provenance={**PROVENANCE, "torch": "2.11.0"}), tmp_path / "b")
    assert lastbit("diff", first, second) == 1
    shown = output(capsys)
    assert "CHANGED mine 1 case differs" in shown
    assert "output fp32[4,6]: 1 of 24 elements changed, by at most 1 ulp; farthest at [2, 3]" in shown
    assert "provenance torch 2.13.0 → 2.11.0" in shown


def test_the_revision_alone_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(golden(), tmp_path / "a")
    second = write(replace(golden(moved()), provenance={**PROVENANCE, "revision": "bb"}), tmp_path / "b")
    assert lastbit("diff", first, second) == 1
    shown = output(capsys)
    assert "provenance same code, packages, device, driver, torch and triton" in shown


def test_results_of_atomic_additions_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(golden(unordered=True), tmp_path / "a")
    second = write(golden(moved(), unordered=True), tmp_path / "b")
    assert lastbit("diff", first, second) == 0
    shown = output(capsys)
    assert "SAME mine 1 case equal unordered output: summed by atomic additions" in shown


@pytest.mark.parametrize("after", [True, False])
def test_a_change_is_not_hidden_by_declaring_it_unordered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: bool
) -> None:
    first = write(golden(unordered=not after), tmp_path / "a")
    second = write(golden(moved(), unordered=after), tmp_path / "b")
    assert lastbit("diff", first, second) == 1
    word = "now" if after else "no longer"
    shown = output(capsys)
    assert f"output fp32[4,6]: {word} declared unordered; 1 of 24 elements changed, by at most 1 ulp" in shown
    assert "not bit for bit" not in shown
    second = write(golden(unordered=after), tmp_path / "b")
    assert lastbit("diff", first, second) == 1
    assert f"output fp32[4,6]: {word} declared unordered; the same bits" in output(capsys)


def test_cases_of_other_shapes_are_counted_without_elements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def many(values: Tensor) -> Golden:
        cases = tuple(golden(values, seed=seed).cases[0] for seed in range(5))
        return replace(golden(), cases=cases)

    first, second = write(many(VALUES), tmp_path / "a"), write(many(VALUES[:3]), tmp_path / "b")
    assert lastbit("diff", first, second) == 1
    shown = output(capsys)
    assert "and 3 more cases changed" in shown
    assert "0 of 0 elements" not in shown


def test_what_only_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kernel, folder in (("mine", "a"), ("mine", "b"), ("old", "a"), ("young", "b")):
        write(golden(kernel=kernel), tmp_path / folder)
    assert lastbit("diff", tmp_path / "a", tmp_path / "b") == 1
    shown = output(capsys)
    assert "GONE old only in the first" in shown
    assert "NEW young only in the second" in shown


def test_cases_that_only_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(golden(seed=1), tmp_path / "a"), write(golden(seed=2), tmp_path / "b")
    assert lastbit("diff", first, second) == 1
    shown = output(capsys)
    assert "gone op x=fp32[4,6] seed=1" in shown
    assert "new op x=fp32[4,6] seed=2" in shown


def test_another_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(golden(), tmp_path / "a")
    second = write(replace(golden(), contract="another"), tmp_path / "b")
    assert lastbit("diff", first, second) == 1
    assert "contract default → another" in output(capsys)


def test_two_kernels_are_not_compared(tmp_path: Path) -> None:
    first, second = write(golden(kernel="one"), tmp_path), write(golden(kernel="two"), tmp_path)
    with pytest.raises(UsageError, match=r"is a golden of 'one', but .* one of 'two'"):
        lastbit("diff", first, second)


def test_a_folder_of_folders_is_explained(tmp_path: Path) -> None:
    write(golden(), tmp_path / "cpu")
    with pytest.raises(UsageError, match="holds no golden; folders in it: cpu"):
        lastbit("diff", tmp_path, tmp_path / "cpu")


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LastbitError, match="none"):
        lastbit("diff", tmp_path / "none", tmp_path / "none")
