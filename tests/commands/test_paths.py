"""Kernels are named by their paths, as tests are to pytest; a word that names nothing is told at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lastbit import cli
from lastbit.commands import verify
from lastbit.config import Config
from lastbit.crew.travel import packed, unpacked
from lastbit.errors import UsageError
from lastbit.kernel import load_kernels

KERNEL = """\
from lastbit import kernel

@kernel("rms_norm", contract="fp32_multiply")
def {name}(x, weight=None, *, eps):
    return x
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with two folders of kernels, one of which has two files."""
    for path, text in {
        "my_kernels/norms.py": KERNEL.format(name="one"),
        "my_kernels/others.py": "import norms\n" + KERNEL.format(name="two"),
        "more/third.py": KERNEL.format(name="three"),
        "notes.txt": "",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "paths", "for_pytest"),
    [
        (["my_kernels"], ["my_kernels"], []),
        (["my_kernels/norms.py", "more"], ["my_kernels/norms.py", "more"], []),
        (["-x", "my_kernels", "--lf", "more"], ["my_kernels", "more"], ["-x", "--lf"]),
        (["-k", "one or two", "my_kernels", "--tb=short"], ["my_kernels"], ["-k", "one or two", "--tb", "short"]),
        (["my_kernels", "--junitxml", "x.xml", "--op", "rms_norm", "-n", "3"], ["my_kernels"], ["--junitxml", "x.xml"]),
        (["-k=one", "-rs", "--op", "rms_norm", "more"], ["more"], ["-k", "one", "-r", "s"]),
    ],
)
def test_words_that_belong_to_no_option_are_paths(
    words: Sequence[str], paths: list[str], for_pytest: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Config, list[str]]] = []
    monkeypatch.setattr(verify, "_run", lambda config, arguments, **_: seen.append((config, list(arguments))) or 0)
    assert cli.main(["verify", *words]) == 0
    [(config, arguments)] = seen
    assert (list(config.kernel_folders), arguments) == (paths, for_pytest)


@pytest.mark.parametrize("words", [[], ["--op", "rms_norm"], ["rms_norm x=bf16[1,70] eps=1e-06 seed=11"]])
def test_without_a_kernel_verify_takes_those_of_the_working_directory(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(verify, "_run", lambda config, arguments, **_: seen.append(config) or 0)
    (here / "kernels").mkdir()
    (here / "kernels" / "foreign.py").write_text("raise SystemExit")
    assert cli.main(["verify", *words]) == 2
    assert capsys.readouterr().err.strip().endswith("name a file or folder: lastbit verify more")
    (here / "kernels" / "norms.py").write_text(KERNEL.format(name="one"))
    assert cli.main(["verify", *words]) == 0
    (here / "references").mkdir()
    (here / "references" / "own.py").write_text("from lastbit import op")
    assert cli.main(["verify", *words]) == 0
    assert [(config.kernel_folders, config.projects) for config in seen] == [(("kernels",), ()), (("kernels",), (".",))]


def test_without_a_kernel_verify_takes_those_of_lastbit_in_its_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(verify, "_run", lambda config, arguments, **_: seen.append(config) or 0)
    monkeypatch.chdir(Path(__file__).parent)
    assert cli.main(["verify"]) == 0
    assert [(config.kernel_folders, config.projects) for config in seen] == [((), ())]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify my_kernel/", "kernel file or folder 'my_kernel' does not exist; did you mean 'my_kernels'?"),
        ("verify my_kernel/a.py", "'my_kernel/a.py' does not exist; did you mean 'my_kernels'?"),
        ("verify my_kernels/norm.py", "'my_kernels/norm.py' does not exist; did you mean 'my_kernels/norms.py'?"),
        ("verify my_kernels -x ./nosuch --device cuda", "kernel file or folder 'nosuch' does not exist."),
        ("verify notes.txt", "'notes.txt' is no Python file"),
        ("verify .", "folders in it are not searched; name one of more, my_kernels"),
        ("verify --project nosuch", "project folder 'nosuch' does not exist"),
        ("verify --profil smoke", "unrecognized arguments: --profil; did you mean '--profile'?"),
        ("verify nosuch::norm 'rms_norm'", "'nosuch' does not exist"),
        ("explain nosuch.py 'rms_norm'", "'nosuch.py' does not exist"),
        ("golden check nosuch/a.py", "'nosuch/a.py' does not exist"),
        ("verify my_kernels x=bf16[2,2] eps=1", "'x=bf16[2,2]' is a part of a case; put quotes around all of its line"),
        ("verify my_kernels/norms.py::one more", "name those of the other path, too, as in more::NAME"),
    ],
)
def test_a_word_that_names_nothing_is_told_before_torch_is_imported(words: str, said: str, here: Path) -> None:
    """Whatever takes seconds comes later; what was meant is named where something is called nearly so."""
    words = words.replace("'rms_norm'", "'rms_norm x=bf16[2,2] eps=1e-06 seed=1'")
    code = f"import shlex, sys; from lastbit.cli import main; code = main(shlex.split({words!r}))"
    ended = "if code is not None: assert code == 2 and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{ended}"], cwd=here, capture_output=True, text=True)
    assert said in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_the_beginning_of_an_option_is_no_option(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of a command nor of an action of one."""
    for words in (["identify", "--combination=3"], ["report", "--htm=x.html"], ["golden", "check", "--exac"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        assert f"unrecognized arguments: {words[-1]}; did you mean" in capsys.readouterr().err


def test_a_file_stands_for_its_own_kernels(here: Path) -> None:
    """It may import its siblings, whose kernels are left out."""
    assert [kernel.name for kernel in load_kernels(Path("my_kernels"))] == ["one", "two"]
    assert [kernel.name for kernel in load_kernels(Path("my_kernels/others.py"))] == ["two"]
    with pytest.raises(UsageError, match=r"'notes.py' declares no kernel"):
        Path("notes.py").touch()
        load_kernels(Path("notes.py"))


def test_a_file_travels_with_its_siblings(here: Path) -> None:
    with packed(Config(folder="run", kernel_folders=("my_kernels/others.py",))) as folder:
        [path] = unpacked(folder, ["cpu"]).config.kernel_folders
        assert [kernel.name for kernel in load_kernels(Path(path))] == ["two"]
