"""`lastbit verify --base`: the kernels of another revision beside those of the working tree."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lastbit import cli
from lastbit.commands.verify import _with_base
from lastbit.config import Config
from lastbit.run import Run, Undecidable

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
def verify(forked_runs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
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
