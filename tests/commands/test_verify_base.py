"""`lastbit verify --base`: the kernels of another revision beside those of the working tree."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lastbit import cli
from lastbit.commands.running import Interrupted
from lastbit.commands.verify import _print, _shown, _with_base
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.result import CaseResult, Verdict
from lastbit.run import NotRun, Run, Undecidable
from lastbit.trees import MixedTrees
from lastbit.verify.assemble import INTERRUPTED
from tests.reports.test_reports import bare, failed, passed

REFERENCE = """\
from lastbit.ops import op


@op(rows=("x",), rounds={"y": "x"})
def thrice(x, *, contract, stage):
    stage("y", x * 3.0, result=True)
"""

KERNEL = """\
import torch
from lastbit.kernel import kernel


@kernel("thrice")
def triple(x):
    y = x.float() * 3
    return EXPRESSION
"""

RIGHT = "y.to(x.dtype)"
CUTS_OFF = "(y.view(torch.int32) & ~0xFFFF).view(torch.float32).to(x.dtype)"


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.check_output(["git", "-C", str(folder), *settings, *arguments], text=True)


def repository(folder: Path, before: str, after: str) -> Path:
    """Make a project in a repository, with one kernel in the last commit and another in the working tree."""
    for name, text in (
        ("references/thrice.py", REFERENCE),
        ("kernels/thrice.py", KERNEL.replace("EXPRESSION", before)),
        ("lines.txt", "thrice x=bf16[4,64] seed=1\n"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one kernel")
    (folder / "kernels/thrice.py").write_text(KERNEL.replace("EXPRESSION", after))
    return folder


Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Run the command line in this process, and the kernels in others: its exit code, output and errors.

    Nothing is explained.
    """
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("lastbit.commands.explaining.failures_of", lambda run: [])

    def run(folder: Path, *options: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        command = ["verify", "--project", ".", "kernels", "-n", "1", "--cases", "lines.txt"]
        return cli.main([*command, *options]), *capsys.readouterr()

    return run


def test_only_the_working_tree_decides(verify: Verify, tmp_path: Path) -> None:
    found, printed, errors = verify(repository(tmp_path, CUTS_OFF, RIGHT), "--base", "HEAD", "-v")
    assert found == 0, errors
    assert "triple@HEAD on cpu" in printed
    changes = printed.partition("Changes from HEAD")[2]
    assert any(line.startswith("BETTER  triple on cpu") for line in changes.splitlines()), changes
    assert "triple@HEAD '" not in printed, "findings are those of today's kernels"
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1
    [settings] = tmp_path.glob(".lastbit/runs/*/config.json")
    assert Config.load(settings).keep_going, "revisions are compared on the cases that both have"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--base", "v0"), "--base v0 is no commit that git knows"),
        (("--base", "HEAD", "references"), "--base HEAD takes one folder of kernels, not kernels, references"),
        (("--build", "make"), "--build make builds the revision of --base, and none is given"),
        (("--base", "HEAD", "--build", "exit 3"), "--build 'exit 3' ended with status 3"),
    ],
)
def test_a_base_that_means_nothing(verify: Verify, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    code, _, errors = verify(repository(tmp_path, RIGHT, RIGHT), *options)
    assert (code, message in errors) == (2, True), errors


def test_a_base_without_kernels_is_not_compared(verify: Verify, tmp_path: Path) -> None:
    folder = repository(tmp_path, RIGHT, RIGHT)
    git(folder, "rm", "-q", "--cached", "-r", "kernels")
    git(folder, "commit", "-q", "-m", "no kernel")
    code, printed, errors = verify(folder, "--base", "HEAD")
    assert code == 0, errors
    assert ": the kernels of HEAD\n" in printed


def test_a_kernel_that_turns_its_cases_down_is_worse(verify: Verify, tmp_path: Path) -> None:
    folder = repository(tmp_path, RIGHT, RIGHT)
    more = KERNEL.replace("EXPRESSION", RIGHT).replace("triple", "other")
    (folder / "kernels/other.py").write_text(more)
    narrower = KERNEL.replace("EXPRESSION", RIGHT).replace("y = x", "raise UnsupportedCase('no case')\n    y = x")
    narrower = narrower.replace("import kernel", "import UnsupportedCase, kernel")
    (folder / "kernels/thrice.py").write_text(narrower)
    assert verify(folder, "--base", "HEAD")[0] == 1


def test_what_no_order_of_sums_decides_is_known_of_both_revisions(tmp_path: Path) -> None:
    """Otherwise a kernel of the base is INCONCLUSIVE that is not one."""
    open_always = [Undecidable(name, "cpu", "lse", "fp32") for name in ("attention", "attention@HEAD")]
    runs = {one.kernel.partition("@")[2]: Run((), undecidable=(one,)) for one in open_always}
    today = Config(folder=str(tmp_path))
    both = _with_base(lambda config, **_: runs[config.revision], today, replace(today, revision="HEAD"))
    assert both.undecidable == tuple(open_always)


def test_kernels_that_are_in_no_repository(verify: Verify, tmp_path: Path) -> None:
    repository(tmp_path, RIGHT, RIGHT)
    subprocess.run(["rm", "-rf", str(tmp_path / ".git")], check=True)
    code, _, errors = verify(tmp_path, "--base", "HEAD")
    assert code == 2
    assert "--base HEAD needs kernels that are in a git repository" in errors


# Two runs in one


def both_of(first: Run, second: Run | BaseException, folder: Path) -> Run:
    """Return the run of both revisions; an exception takes the place of the second."""
    runs = iter([first, second])

    def run(config: Config, *, explaining: bool = False) -> Run:
        assert explaining is (config.revision == "")
        if isinstance(one := next(runs), BaseException):
            raise one
        return one

    return _with_base(run, Config(folder=str(folder)), Config(folder=str(folder), revision="main", tree=str(folder)))


def test_a_run_holds_what_both_revisions_have_once(tmp_path: Path) -> None:
    note = NotRun("softmax", "no kernel")
    today = Run((passed(),), not_run=(note,), environment={"torch": "2"}, broken="ended")
    base = Run((passed(kernel="k@main"),), not_run=(note, NotRun("k", "gone")), broken="ended")
    both = both_of(today, base, tmp_path)
    assert [result.kernel for result in both.results] == [passed().kernel, "k@main"]
    assert both.not_run == (note, NotRun("k", "gone")) and both.broken == "ended"
    assert both.environment == {"torch": "2", "base": "main"}
    assert both_of(replace(today, broken=""), replace(base, broken="too"), tmp_path).broken == "too"
    assert both_of(today, replace(base, broken="too"), tmp_path).broken == "ended; too"


def test_a_base_that_cannot_be_run_is_not_run(tmp_path: Path) -> None:
    both = both_of(Run((passed(),)), LastbitError(f"no kernels in {tmp_path}/kernels"), tmp_path)
    assert both.not_run == (NotRun("the kernels of main", "no kernels in kernels"),) and len(both.results) == 1


def test_a_base_that_is_interrupted_keeps_what_there_is(tmp_path: Path) -> None:
    for seen, broken in ((Run((passed(kernel="k@main"),)), ""), (None, INTERRUPTED)):
        with pytest.raises(Interrupted) as caught:
            both_of(Run((passed(),)), Interrupted(seen), tmp_path)
        assert caught.value.run is not None and caught.value.run.broken == broken
        assert len(caught.value.run.results) == 2 - (seen is None)


def test_today_is_printed_where_the_base_would_run_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MixedTrees):
        both_of(Run((passed(),)), MixedTrees("mixed"), tmp_path)
    assert "1 passed" in capsys.readouterr().out


def test_an_interrupted_run_is_printed_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(run: Run | None) -> None:
        raise Interrupted(run)

    for run, shown in ((Run((passed(),)), True), (None, False)):
        with pytest.raises(Interrupted):
            _shown(lambda run=run: interrupted(run))  # type: ignore[misc]
        assert ("1 passed" in capsys.readouterr().out) is shown


def test_the_exit_code_is_that_of_today_or_1_if_it_got_worse(capsys: pytest.CaptureFixture[str]) -> None:
    def code(*results: CaseResult) -> int:
        return _print(Run(results, environment={"base": "main"}))

    assert code(passed(kernel="k"), passed(kernel="k@main")) == 0
    assert code(failed(kernel="k"), passed(kernel="k@main")) == 1
    assert code(failed(kernel="k"), failed(kernel="k@main")) == 1  # it fails
    assert code(passed(kernel="k"), failed(kernel="k@main")) == 0
    assert code(bare(Verdict.ERRORED, "died", kernel="k"), passed(kernel="k@main")) == 2
    assert "WORSE" in capsys.readouterr().out
    _print(Run((passed(fingerprint="abc"), passed(fingerprint="abc"), passed(fingerprint=""))), show_inputs=True)
    assert capsys.readouterr().out.count("input bits on cpu: abc") == 1
    _print(Run((passed(fingerprint="abc"),)))
    assert "input bits" not in capsys.readouterr().out
