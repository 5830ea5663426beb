"""`lastbit bisect` from outside, on a repository with 40 commits of one kernel."""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
from bisect_demo import COMMITS, Demo, git, make_demo

from lastbit.commands import bisect, parsers
from lastbit.config import Config
from lastbit.errors import LastbitError, UsageError
from lastbit.run import Run
from lastbit.verify.check import verify_case
from lastbit.verify.plan import make_plan

CASE = "rms_norm x=bf16[8,64] weight=bf16[64] eps=1e-06 seed=1"
LONG = "rms_norm x=fp32[16,2048] weight=fp32[2048] eps=1e-06 seed=2"
MOST = math.log2(COMMITS) + 3


@pytest.fixture(scope="module")
def demo_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Demo]:
    """Return the demo of a seed, made once: no command may leave anything in it."""

    @functools.cache
    def made(seed: int, *, drifts: bool) -> Demo:
        return make_demo(tmp_path_factory.mktemp("demo") / "repository", seed, drifts=drifts)

    return made


def run_bisect(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parsers.add_bisect(parser)
    options = parser.parse_args(arguments)
    return int(resolve_name(options.command)(options, []))


def execute_here(config: Config, *, workers: int, quiet: bool) -> Run:
    """Search without processes and records, where it matters how the search goes on and not how it measures."""
    items = make_plan(config, "cpu").items
    return Run(tuple(verify_case(item.subject, case) for item in items for case in item.group.examples))


def searched(demo: Demo, capsys: pytest.CaptureFixture[str], case: str, *options: str) -> str:
    """Return what the command printed about a demo, from a folder elsewhere."""
    before = git(demo.folder, "status", "--porcelain"), git(demo.folder, "worktree", "list")
    where = ("--repository", str(demo.folder), "--good", demo.commits[0], "--bad", "main")
    assert run_bisect(case, *where, *options) == 0
    assert (git(demo.folder, "status", "--porcelain"), git(demo.folder, "worktree", "list")) == before
    return capsys.readouterr().out


def found(printed: str) -> tuple[str, int]:
    """Find the commit that was named, and the number of verifications."""
    commit, verifications = re.findall(r"^First bad commit  (\w+)|^(\d+) verifications", printed, re.MULTILINE)
    return commit[0], int(verifications[1])


def test_the_commit_that_rounds_elsewhere_is_named(
    demo_of: Callable[..., Demo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bisect, "execute", execute_here)
    demo = demo_of(1, drifts=False)
    printed = searched(demo, capsys, CASE)
    commit, verifications = found(printed)
    assert demo.culprit.startswith(commit)
    assert verifications <= MOST
    skipped = re.findall(r"^  –  (\w+)  skipped", printed, re.MULTILINE)
    assert skipped and all(any(name.startswith(s) for name in demo.unbuildable) for s in skipped)
    assert "+    return (xf * inverse * weight.float()).to(x.dtype)" in printed
    assert re.search(rf"before  \w+ .* PASSED\n  after   {commit} .* FAILED", printed)
    assert f"git bisect bad {demo.culprit}" in printed


def test_a_bad_commit_right_after_a_good_one_is_named(
    demo_of: Callable[..., Demo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are verified as by `lastbit verify`, in processes of their own; there is nothing to search for."""
    monkeypatch.chdir(tmp_path)
    demo = demo_of(1, drifts=False)
    good = demo.commits[demo.commits.index(demo.culprit) - 1]
    assert run_bisect(CASE, "--repository", str(demo.folder), "--good", good, "--bad", demo.culprit) == 0
    printed = capsys.readouterr().out
    commit, verifications = found(printed)
    assert demo.culprit.startswith(commit) and verifications == 2
    assert re.search(rf"before  {good[:7]} .* PASSED\n  after   {commit} .* FAILED", printed)


def test_a_drift_that_never_fails_is_found(
    demo_of: Callable[..., Demo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bisect, "execute", execute_here)
    demo = demo_of(7, drifts=True)
    printed = searched(demo, capsys, LONG, "--drift", "1.3")
    commit, verifications = found(printed)
    assert demo.culprit.startswith(commit)
    assert verifications <= MOST
    assert "FAILED" not in printed
    assert "Bad means: rel. error of stage output is at least" in printed


def test_a_drift_is_no_failure(demo_of: Callable[..., Demo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --drift the same history has no bad commit, and the error shows what could be followed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bisect, "execute", execute_here)
    demo = demo_of(7, drifts=True)
    with pytest.raises(UsageError, match=r"PASSED at the good end and PASSED at the bad end.*rel_l2 .* at the good"):
        run_bisect(LONG, "--repository", str(demo.folder), "--good", demo.commits[0], "--bad", "main")


def test_an_end_that_does_not_build_is_named(
    demo_of: Callable[..., Demo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = demo_of(1, drifts=False)
    broken = min(demo.unbuildable, key=demo.commits.index)
    with pytest.raises(LastbitError, match=rf"the good end {broken[:7]} cannot be measured.*kernels/norms.py raised"):
        run_bisect(CASE, "--repository", str(demo.folder), "--good", broken, "--bad", "main")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense x=1", "--good", "a", "--bad", "b"], "unknown op 'nonsense'"),
        (["rms_norm x=bf16[", "--good", "a", "--bad", "b"], "cannot read tensor"),
        ([CASE, "--good", "a", "--bad", "b", "--metric", "rel_12"], "did you mean 'rel_l2'"),
        ([CASE, "--good", "a", "--bad", "b", "--drift", "1"], "factor above 1"),
        ([CASE, "x", "y", "--good", "a", "--bad", "b"], "x, y: a search follows one"),
        ([CASE, "x.py", "y.py", "--good", "a", "--bad", "b"], "x.py, y.py: a search"),
        ([CASE, "--good", "a", "--bad", "b"], "not a git repository"),
        ([CASE, "--good", "1", "--bad", "2", "--package", "p", "--build", "make"], "--build make has no meaning"),
        ([CASE, "--good", "1", "--bad", "2", "--package", "p", "--repository", "x"], "--repository x has no meaning"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        run_bisect(*arguments)
    assert not list(tmp_path.iterdir())
