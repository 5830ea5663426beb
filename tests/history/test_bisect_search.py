"""The search for the first bad commit or version, on random histories and without running a kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bisect_histories import FAILS, History, commit_all, line_of, random_history, result, with_merges

from lastbit.errors import LastbitError, UsageError
from lastbit.history.bisection import BisectQuestion, RevisionPlace, Space, bisect, search
from lastbit.history.packages import Versions
from lastbit.history.revisions import open_revisions
from lastbit.reports.bisection import Bisection, BisectStep, Criterion, Mark
from lastbit.result import CaseResult, Verdict
from lastbit.run import Run

COMMITS = 40
MOST = math.log2(COMMITS) + 3
VERSIONS = [f"{i}.0" for i in range(COMMITS)]


def searched(space: Space, history: History) -> tuple[list[BisectStep], int]:
    """Return the steps, and the number of verifications with that of the ends."""
    steps = search(space, FAILS, history.look, history.ends(space), lambda criterion, step: None)
    return steps, max([2, *(step.run for step in steps)])


@pytest.mark.parametrize("seed", range(140))
def test_first_bad_version_is_found_in_few_verifications(seed: int) -> None:
    history = random_history(seed, VERSIONS, line_of(COMMITS))
    space = Versions("package", VERSIONS, "cpu")
    _, runs = searched(space, history)
    assert space.candidates() == [history.culprit]
    assert runs <= MOST


@pytest.mark.parametrize("merges", [False, True])
def test_first_bad_commit_is_found_in_few_verifications(tmp_path: Path, merges: bool) -> None:
    for seed in range(6):
        shape = with_merges(seed, COMMITS) if merges else line_of(COMMITS)
        names = commit_all(tmp_path / str(seed), shape)
        history = random_history(seed, names, shape)
        with open_revisions(tmp_path / str(seed), names[0], names[-1], kernels="kernels") as space:
            steps, runs = searched(space, history)
            assert space.candidates() == [history.culprit], f"seed {seed}"
            assert f"# first bad commit: [{history.culprit}]" in space.log()
        assert runs <= MOST, f"seed {seed}"
        assert {s.point.name for s in steps if s.mark is Mark.SKIPPED} <= history.unbuildable
        assert all(step.run == 0 for step in steps if step.mark is Mark.SKIPPED)


def test_only_skipped_ones_left_names_the_set() -> None:
    names = VERSIONS[:9]
    history = History(names, {n: names[:i][-1:] for i, n in enumerate(names)}, "5.0", frozenset({"3.0", "4.0", "5.0"}))
    space = Versions("package", names, "cpu")
    steps, runs = searched(space, history)
    assert space.candidates() == ["3.0", "4.0", "5.0", "6.0"]
    assert {s.point.name for s in steps if s.mark is Mark.SKIPPED} == {"3.0", "4.0", "5.0"}
    assert runs == 2 + sum(step.mark is not Mark.SKIPPED for step in steps)


def test_only_skipped_commits_left_names_the_set(tmp_path: Path) -> None:
    names = commit_all(tmp_path / "repository", line_of(9))
    history = History(names, {n: names[:i][-1:] for i, n in enumerate(names)}, names[5], frozenset(names[3:6]))
    with open_revisions(tmp_path / "repository", names[0], names[8], kernels="kernels") as space:
        searched(space, history)
        assert space.candidates() == names[3:7]
        assert "only skipped commits left to test" in space.log()


def test_equal_files_are_measured_once() -> None:
    class Same(Versions):
        def key(self, name: str) -> str:
            return "old" if VERSIONS.index(name) < 25 else "new"

    history = random_history(1, VERSIONS, line_of(COMMITS))
    history = History(history.names, history.parents, "25.0", frozenset())
    space = Same("package", VERSIONS, "cpu")
    steps, runs = searched(space, history)
    assert space.candidates() == ["25.0"]
    assert runs == 2
    assert {step.reason for step in steps} == {"the same files as 0.0", "the same files as 39.0"}


class Runs:
    """A `measure` whose results follow from the version that `site` names; it keeps what it was asked."""

    def __init__(self, look: Mapping[str, CaseResult | str]) -> None:
        self.look = look
        self.asked: list[Mapping[str, Any]] = []

    def __call__(self, name: str, changes: Mapping[str, Any]) -> Run:
        self.asked.append(changes)
        found = self.look[name]
        if isinstance(found, str):
            raise LastbitError(found)
        return Run((found,))


class Placed(Versions):
    """Versions that need no installation."""

    def place(self, name: str) -> Any:
        return nullcontext(RevisionPlace(f"/place/{name}", site=f"/place/{name}"))


def look_of(count: int, first_bad: int, **others: CaseResult | str) -> dict[str, CaseResult | str]:
    """Versions `0.0`, `1.0`, … of which the later ones fail; `v4=` gives 4.0 another result or an error."""
    found: dict[str, CaseResult | str] = {f"{i}.0": result(failed=i >= first_bad) for i in range(count)}
    return found | {f"{name.removeprefix('v')}.0": value for name, value in others.items()}


def found_by(look: Mapping[str, CaseResult | str]) -> tuple[Bisection, Runs]:
    runs = Runs(look)
    space = Placed("package", list(look), "cpu")
    return bisect(space, BisectQuestion(), runs, lambda criterion, step: None), runs


def test_versions_are_measured_one_by_one_with_the_kernel_of_the_ends() -> None:
    found, runs = found_by(look_of(10, 4))
    assert found.culprit and found.culprit.name == "4.0"
    assert found.before.point.name == "3.0" and found.after.point.name == "4.0"
    assert found.verifications == len(runs.asked) == 2 + len(found.steps[2:])
    assert [changes["site"] for changes in runs.asked[:2]] == [("/place/0.0",), ("/place/9.0",)]
    assert all(changes["kernels"] == ("norm",) for changes in runs.asked[2:])


def test_a_version_whose_run_cannot_begin_is_skipped_with_its_reason() -> None:
    trace = 'Traceback\n  File "/place/4.0/package.py", line 1\nImportError: no name /place/4.0/x'
    found, _ = found_by(look_of(10, 6, v4=trace))
    assert found.culprit and found.culprit.name == "6.0"
    [skipped] = found.skipped
    assert (skipped.point.name, skipped.reason) == ("4.0", "ImportError: no name x")


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [("ERRORED", "ERRORED: no tile"), ("UNSUPPORTED", "UNSUPPORTED: no tile"), ("absent", "no kernel 'norm'")],
)
def test_a_kernel_without_figures_is_skipped(verdict: str, expected: str) -> None:
    other = result(failed=False, kernel="other" if verdict == "absent" else "norm")
    other = other if verdict == "absent" else replace(other, verdict=Verdict(verdict), reason="no tile", stages=())
    found, _ = found_by(look_of(10, 6, v4=other))
    [skipped] = found.skipped
    assert expected in skipped.reason
    assert found.culprit and found.culprit.name == "6.0"


def test_an_end_that_cannot_be_measured_is_an_error() -> None:
    with pytest.raises(LastbitError, match=r"the bad end 9\.0 cannot be measured.*no compiler"):
        found_by(look_of(10, 6, v9="no compiler"))
    with pytest.raises(LastbitError, match=r"the good end 0\.0 cannot be measured.*no compiler"):
        found_by(look_of(10, 6, v0="no compiler"))


def test_the_kernel_must_be_told_where_there_are_several() -> None:
    class Two(Runs):
        def __call__(self, name: str, changes: Mapping[str, Any]) -> Run:
            kernels = changes.get("kernels", ("a", "b"))
            return Run(tuple(result(failed=name == "9.0", kernel=kernel) for kernel in kernels))

    space = Placed("package", VERSIONS[:10], "cpu")
    with pytest.raises(UsageError, match=r"choose one by name: a, b"):
        bisect(space, BisectQuestion(), Two({}), lambda criterion, step: None)
    assert bisect(space, BisectQuestion(kernel="b"), Two({}), lambda criterion, step: None).culprit


def test_every_step_is_told_at_once() -> None:
    told: list[tuple[Criterion, BisectStep]] = []
    space = Placed("package", VERSIONS, "cpu")
    found = bisect(space, BisectQuestion(), Runs(look_of(COMMITS, 11)), lambda *step: told.append(step))
    assert [step for _, step in told] == list(found.steps)
    assert {criterion for criterion, _ in told} == {found.criterion}
    left = [step.left for step in found.steps]
    assert left == sorted(left, reverse=True) and left[-1] == 1


def test_best_takes_the_middle() -> None:
    space = Versions("package", VERSIONS, "cpu")
    untried = space.candidates()
    assert space.best(untried) in ("19.0", "20.0")
    space.mark("20.0", Mark.BAD)
    assert space.best([name for name in untried if name != "10.0"]) in ("9.0", "11.0")
