"""Bisecting commits without running a kernel: what is measured where, and what is left behind in the repository."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bisect_demo import git
from bisect_histories import commit_all, line_of, result

from lastbit import cli
from lastbit.errors import LastbitError, UsageError
from lastbit.history.bisection import BisectQuestion, bisect
from lastbit.history.revisions import kernels_at, open_revisions
from lastbit.reports.bisection import Bisection, Mark
from lastbit.run import Run

FIRST_BAD = 11


class Measured:
    """A `measure` that reads the number of a revision in its worktree; it keeps the settings that it was asked with."""

    def __init__(self, first_bad: int = FIRST_BAD, broken: Mapping[int, BaseException] | None = None) -> None:
        self.first_bad, self.broken = first_bad, broken or {}
        self.asked: list[Mapping[str, Any]] = []

    def __call__(self, name: str, changes: Mapping[str, Any]) -> Run:
        self.asked.append(changes)
        [folder] = changes["kernel_folders"]
        assert Path(folder).is_relative_to(changes["tree"])
        return Run((self._result(Path(folder)),))

    def _result(self, kernels: Path) -> Any:
        number = int(re.findall(r"REVISION = (\d+)", (kernels / "norms.py").read_text())[0])
        if number in self.broken:
            raise self.broken[number]
        return result(failed=number >= self.first_bad)


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, list[str]]:
    return tmp_path / "repository", commit_all(tmp_path / "repository", line_of(20))


def found_in(folder: Path, good: str, bad: str, measure: Measured, **options: str) -> Bisection:
    with open_revisions(folder, good, bad, **{"kernels": "kernels", **options}) as space:
        found = bisect(space, BisectQuestion(), measure, lambda criterion, step: None)
        return replace(found, log=space.log(), change=space.change(found.after.point.name))


def state_of(folder: Path) -> list[str]:
    """Everything of a user's repository that a search could disturb; git itself rewrites its index and packed refs."""
    commands = ["rev-parse HEAD", "symbolic-ref HEAD", "status --porcelain", "worktree list", "for-each-ref"]
    commands += ["stash list", "config --list --local"]
    own = folder / ".git" / "BISECT_LOG"
    files = sorted(p.name for p in (folder / ".git").iterdir() if p.name not in ("index", "packed-refs"))
    return [git(folder, *command.split()) for command in commands] + [own.read_text() if own.exists() else "", *files]


@pytest.fixture
def undisturbed(repository: tuple[Path, list[str]]) -> Iterator[None]:
    """Change a file, stage another and begin a bisection, as a user may have, and check that all of it stays."""
    folder, commits = repository
    git(folder, "bisect", "start", commits[15], commits[2])
    (folder / "kernels" / "norms.py").write_text("REVISION = 99\n")
    (folder / "staged.py").write_text("")
    git(folder, "add", "staged.py")
    git(folder, "symbolic-ref", "HEAD", "refs/heads/main")
    before = state_of(folder)
    assert "bisect" in "".join(before)
    yield
    assert state_of(folder) == before


@pytest.mark.usefixtures("undisturbed")
def test_the_commit_is_found_and_the_checkout_left_alone(repository: tuple[Path, list[str]]) -> None:
    folder, commits = repository
    measure = Measured()
    found = found_in(folder, commits[0], commits[-1], measure)
    assert found.culprit is not None and found.culprit.name == commits[FIRST_BAD]
    assert found.culprit.title == f"c{FIRST_BAD:05d}"
    assert found.culprit.date == "2001-09-09"
    assert "-REVISION = 10\n+REVISION = 11" in found.change
    assert f"git bisect bad {commits[FIRST_BAD]}" in found.log
    assert found.verifications == len(measure.asked) <= 7
    folders = [changes["kernel_folders"][0] for changes in measure.asked]
    assert len(set(folders)) == len(folders), "two revisions in one folder can share bytecode"
    assert not any(Path(folder).exists() for folder in folders)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("error", [LastbitError("no"), RuntimeError("no"), KeyboardInterrupt()])
def test_an_end_that_raises_leaves_nothing_behind(repository: tuple[Path, list[str]], error: BaseException) -> None:
    folder, commits = repository
    with pytest.raises(type(error)):
        found_in(folder, commits[0], commits[-1], Measured(broken={19: error}))


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_an_exception_in_the_middle_leaves_nothing_behind(
    repository: tuple[Path, list[str]], error: BaseException
) -> None:
    folder, commits = repository
    with pytest.raises(type(error)):
        found_in(folder, commits[0], commits[-1], Measured(broken=dict.fromkeys(range(1, 19), error)))


@pytest.mark.usefixtures("undisturbed")
def test_sigterm_leaves_nothing_behind(repository: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends it twice; the second comes while worktrees are removed."""
    folder, commits = repository
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Path] = []

    def terminated(options: argparse.Namespace, rest: list[str]) -> int:
        assert signal.getsignal(signal.SIGTERM) is not before
        with open_revisions(folder, commits[0], commits[-1], kernels="kernels") as space:
            seen.append(space.temporary)
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr("lastbit.commands.bisect.run", terminated)
    assert cli.main(["bisect", "norm", "--good", "a", "--bad", "b"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert not seen[0].exists()


def test_commits_that_do_not_build_are_skipped(repository: tuple[Path, list[str]]) -> None:
    folder, commits = repository
    broken = {i: LastbitError(f"kernel {i} raised SyntaxError") for i in (8, 9)}
    found = found_in(folder, commits[0], commits[-1], Measured(broken=broken))
    assert found.culprit is not None and found.culprit.name == commits[FIRST_BAD]
    assert {s.point.name for s in found.skipped} <= {commits[8], commits[9]}
    assert found.skipped and "SyntaxError" in found.skipped[0].reason


def test_equal_files_are_measured_once(repository: tuple[Path, list[str]]) -> None:
    """A commit whose files are those of another, as after a revert, needs no run."""
    folder, commits = repository
    git(folder, "revert", "--no-edit", commits[-1])
    git(folder, "revert", "--no-edit", "HEAD")
    with open_revisions(folder, commits[0], "HEAD", kernels="kernels") as space:
        assert space.key(commits[-1]) == space.key("HEAD") != space.key("HEAD~1")
        measure = Measured(first_bad=20)
        with pytest.raises(UsageError, match="PASSED at the good end and PASSED at the bad end"):
            bisect(space, BisectQuestion(), measure, lambda criterion, step: None)
    found = found_in(folder, commits[0], "HEAD", Measured(first_bad=19))
    assert [step.reason for step in found.steps if step.point.name == commits[19]] == [
        f"the same files as {found.steps[1].point.short}"
    ]


def test_a_commit_beside_the_kernels_can_be_the_first_bad_one(repository: tuple[Path, list[str]]) -> None:
    """Kernels may import what it changes."""
    folder, commits = repository
    (folder / "engine.py").write_text("A commit beside the kernels.\n")
    git(folder, "add", "engine.py")
    git(folder, "commit", "--quiet", "--message", "engine")
    with open_revisions(folder, commits[0], "HEAD", kernels="kernels") as space:
        assert len(space.candidates()) == 20
        assert space.key("HEAD") != space.key("HEAD~1")


def test_kernels_below_a_folder_and_from_a_subfolder(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    commits = commit_all(folder, line_of(8), kernels="python/package/kernels")
    inside = folder / "python"
    found = found_in(inside, commits[0], "main", Measured(5), kernels="./python/package/kernels/")
    assert found.culprit is not None and found.culprit.name == commits[5]
    assert "python/package/kernels/norms.py" in found.change


@pytest.mark.parametrize("kernels", ["{root}/python/kernels", "kernels", "../python/kernels", "python/kernels"])
def test_kernels_may_be_named_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    folder = tmp_path / "repository"
    commits = commit_all(folder, line_of(3), kernels="python/kernels")
    monkeypatch.chdir(folder / "python")
    with open_revisions(Path(), commits[0], "main", kernels=kernels.format(root=folder)) as space:
        assert space.kernels == "python/kernels"


def test_build_runs_in_each_worktree_and_its_failure_skips(repository: tuple[Path, list[str]]) -> None:
    folder, commits = repository
    command = "echo building; echo no compiler; ! grep -q 'REVISION = 9$' kernels/norms.py && touch kernels/built.so"

    class Built(Measured):
        def _result(self, kernels: Path) -> Any:
            assert (kernels / "built.so").exists()
            return super()._result(kernels)

    found = found_in(folder, commits[0], commits[-1], Built(), build=command)
    assert found.culprit is not None and found.culprit.name == commits[FIRST_BAD]
    assert all(commits[9] == step.point.name for step in found.skipped)
    assert [step.reason for step in found.skipped] == [f"--build {command!r} ended with status 1: no compiler"]


def test_an_end_whose_build_fails_is_named(repository: tuple[Path, list[str]]) -> None:
    folder, commits = repository
    with pytest.raises(LastbitError, match=r"the bad end \w+ cannot be measured.*--build .* ended with status 1: it"):
        found_in(folder, commits[0], commits[-1], Measured(), build="! grep -q 'REVISION = 19' kernels/norms.py")


def test_a_file_of_kernels_as_other_commands_print_it(
    repository: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commits = repository
    monkeypatch.chdir(folder / "kernels")
    for named in ("kernels/norms.py", "norms.py"):
        with open_revisions(folder, commits[0], commits[-1], kernels=named) as space, space.place(commits[4]) as place:
            assert Path(place.kernels).read_text() == "REVISION = 4\n"
            assert space.recipe(commits[4]).options.endswith("/kernels/norms.py")


def test_variables_of_a_git_hook_are_ignored(
    repository: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commits = repository
    before = state_of(folder)
    commit_all(tmp_path / "other", line_of(3))
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
        patch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
        found = found_in(folder, commits[0], commits[-1], Measured())
    assert found.culprit is not None and found.culprit.name == commits[FIRST_BAD]
    assert state_of(folder) == before


def test_hooks_of_the_user_do_not_run(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, commits = repository
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    found_in(folder, commits[0], commits[-1], Measured())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("good", "bad", "options", "message"),
    [
        ("nowhere", "main", {}, "--good nowhere is no commit that git knows"),
        ("main~3", "nowhere", {}, "--bad nowhere is no commit that git knows"),
        ("main", "main~3", {}, "--good main is no ancestor of --bad main~3"),
        ("main", "main", {}, "no commit lies between --good and --bad"),
        ("main~3", "main", {"kernels": "elsewhere"}, "--good main~3 has no folder or file 'elsewhere'"),
        ("main~3", "main", {"kernels": "kernels/absent.py"}, "has no folder or file 'kernels/absent.py'"),
        ("main~3", "main", {"kernels": "../kernels"}, "has no folder or file '../kernels'"),
        ("main~3", "main", {"kernels": "/kernels"}, "has no folder or file '/kernels'"),
    ],
)
def test_bad_input_is_an_error_that_says_what(
    repository: tuple[Path, list[str]], good: str, bad: str, options: dict[str, str], message: str
) -> None:
    folder, _ = repository
    before = state_of(folder)
    measure = Measured()
    with pytest.raises(UsageError, match=re.escape(message)):
        found_in(folder, good, bad, measure, **options)
    assert not measure.asked
    assert state_of(folder) == before


def test_a_folder_that_is_in_no_repository(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a git repository"):
        found_in(tmp_path, "a", "b", Measured())
    with pytest.raises(UsageError, match="does not exist"):
        found_in(tmp_path / "absent", "a", "b", Measured())


def test_kernels_at_gives_the_folder_of_another_revision(repository: tuple[Path, list[str]]) -> None:
    folder, commits = repository
    before = state_of(folder)
    with kernels_at(commits[4], [folder / "kernels"], build="touch built") as place:
        kernels = Path(place.kernels)
        assert (kernels / "norms.py").read_text() == "REVISION = 4\n"
        assert kernels.parent == Path(place.root) and Path(place.root, "built").exists()
    assert not kernels.exists()
    assert state_of(folder) == before
    with pytest.raises(UsageError, match="--base nowhere is no commit"), kernels_at("nowhere", [folder / "kernels"]):
        pass
    with pytest.raises(UsageError, match="takes one folder"), kernels_at(commits[4], [folder, folder / "kernels"]):
        pass


def test_marks_are_those_of_git(repository: tuple[Path, list[str]]) -> None:
    folder, commits = repository
    with open_revisions(folder, commits[0], commits[-1], kernels="kernels") as space:
        for mark, number in ((Mark.SKIPPED, 9), (Mark.GOOD, 8), (Mark.BAD, 12)):
            space.mark(commits[number], mark)
        assert space.candidates() == commits[9:13]
        lines = [line for line in space.log().splitlines() if line.startswith("git bisect ")]
        assert lines[1:] == [f"git bisect {mark} {commits[i]}" for mark, i in (("skip", 9), ("good", 8), ("bad", 12))]
