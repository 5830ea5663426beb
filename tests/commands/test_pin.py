"""`lastbit pin` keeps a case once, with where it comes from, and it runs first ever after."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_this_process import InThisProcess

from lastbit import cli
from lastbit.case import Case, parse_case
from lastbit.command_line import Asked, read_words
from lastbit.commands import pin
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.kernel import Kernel
from lastbit.result import Verdict
from lastbit.shrinking.smallest import judged
from lastbit.verify.case_files import add_case, read_cases
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.plan import make_plan
from lastbit.verify.project import open_project
from lastbit.verify.worker import Workplace

CASE = "rms_norm x=bf16[1,2]:values(-1.5,1) weight=bf16[2]:values(1.25,1) eps=1e-06 seed=0"
PASSES = "mine passes the case: not pinned"
KERNEL = """\
import torch
from lastbit.kernel import kernel


@kernel("rms_norm", contract="native_multiply", name="mine")
def mine(x, weight, *, eps):
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a wrong kernel, in which the command is called."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "mine.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pinned(*words: str) -> int:
    return cli.main(["pin", "kernels", "mine", "--reason", "in\nfp32", *words])


def test_a_case_is_kept_once_and_runs_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pinned(CASE) == 0
    file = project / "cases" / "regressions" / "rms_norm.txt"
    comment, line = file.read_text().splitlines()
    assert comment.startswith("# mine (native_multiply+rounded_sum) on cpu, torch ")
    assert comment.endswith(": in fp32")
    assert line == CASE
    printed = capsys.readouterr().out
    assert f"pinned in {file}\n  {CASE}\n" in printed
    [told] = [line for line in printed.splitlines() if line.startswith("  lastbit verify ")]
    words = shlex.split(told)[2:]
    assert read_words(words[: words.index("--project")]) == Asked(("kernels",), ("mine",))
    kept = file.read_text()
    assert pinned(CASE.replace("bf16[2]", "bf16[2]@1")) == 0
    assert file.read_text() == kept
    assert "it is there already: " in capsys.readouterr().out
    config = Config(folder="", projects=(str(project),), kernel_folders=("kernels",), cases=0)
    first = make_plan(config, "cpu").items[0]
    assert first.group.name == "regressions" and parse_case(CASE) in first.group.examples
    subject: Subject = first.subject
    assert verify_case(subject, parse_case(CASE), settled=None).verdict is Verdict.FAILED


def test_the_smallest_tensors_are_kept_in_place_of_the_case(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def smallest_of(place: Workplace, name: str, line: str, *, seconds: float) -> Case | None:
        asked.append((place.subjects[name].kernel.name, line, seconds))
        return parse_case(CASE) if "seed=1" in line else None

    monkeypatch.setattr(pin, "Worker", InThisProcess)
    monkeypatch.setattr(pin, "smallest_of", smallest_of)
    larger = "rms_norm x=bf16[2,12] weight=bf16[12] eps=1e-06 seed=1"
    assert pinned(larger, "--smallest", "--seconds", "7") == 0
    assert asked == [("mine", larger, 7.0)]
    assert read_cases(project / "cases" / "regressions" / "rms_norm.txt") == [parse_case(CASE)]
    assert pinned(larger.replace("seed=1", "seed=2"), "--smallest") == 3
    assert "not pinned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("(wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight", 3, PASSES),
        ("1 / 0", 0, "mine raises on the case: ZeroDivisionError: division by zero"),
    ],
)
def test_a_kernel_without_a_wrong_value_is_named_as_that(
    project: Path, body: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, _, _ = KERNEL.rpartition("return ")
    (project / "kernels" / "mine.py").write_text(f"{text}return {body}\n")
    monkeypatch.setattr(pin, "Worker", InThisProcess)
    assert pinned(CASE, "--smallest", "--seconds", "1") == code
    assert said in capsys.readouterr().out
    assert (project / "cases").exists() == (code == 0)


def test_a_case_is_made_smaller_only_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Smaller:
        """A worker in which the kernel fails and a smaller case is found."""

        def do(self, work: object, *args: object, **options: object) -> object:
            return SimpleNamespace(verdict=Verdict.FAILED) if work is judged else parse_case(CASE)

    monkeypatch.setattr(pin, "Worker", lambda config: nullcontext(Smaller()))
    case = parse_case("rms_norm x=bf16[2,12] weight=bf16[12] eps=1e-06 seed=1")
    for devices in ((), ("cpu",), ("cuda", "cpu")):
        kernel = Kernel("mine", "rms_norm", "", print, devices=devices)
        assert pin._smallest(Config(folder=""), kernel, case, 1.0) == (parse_case(CASE), "")
    kernel = Kernel("mine", "rms_norm", "", print, devices=("cuda", "xpu"))
    with pytest.raises(UsageError, match="kernel 'mine' is declared for cuda, xpu only; see --device"):
        pin._smallest(Config(folder=""), kernel, case, 1.0)


def test_without_a_name_the_one_kernel_of_the_op_is_meant(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "kernels" / "other.py").write_text(KERNEL.replace("rms_norm", "softmax").replace('"mine"', '"yours"'))
    opened = open_project(Config(folder="", kernel_folders=("kernels",)))
    case = parse_case(CASE)
    with pytest.raises(UsageError, match="native_multiply"):  # which softmax does not have
        pin._kernel(opened, [], case)
    plain = KERNEL.replace('"rms_norm", contract="native_multiply", name="mine"', '"softmax", name="yours"')
    (project / "kernels" / "other.py").write_text(plain.replace("mine(x, weight, *, eps)", "yours(x)"))
    opened = open_project(Config(folder="", kernel_folders=("kernels",)))
    kernel, contract = pin._kernel(opened, [], case)
    assert (kernel.name, contract) == ("mine", "native_multiply+rounded_sum")
    with pytest.raises(UsageError, match="kernel 'yours' is one of softmax, and the case one of rms_norm"):
        pin._kernel(opened, ["yours"], case)
    with pytest.raises(UsageError, match="pin takes one kernel of rms_norm, not mine, yours; name it: PATH::NAME"):
        pin._kernel(opened, ["mine", "yours"], case)
    (project / "kernels" / "mine.py").unlink()
    opened = open_project(Config(folder="", kernel_folders=("kernels",)))
    with pytest.raises(UsageError, match="pin takes one kernel of rms_norm, not none; name it"):
        pin._kernel(opened, [], case)


def test_an_origin_names_versions() -> None:
    kernel = Kernel("mine", "rms_norm", "", print)
    assert re.fullmatch(r"mine \(once\) on cpu, torch \S+, triton \S+", pin._origin(kernel, "once", "cpu"))
    assert pin._version("no-such-package-here") == "not installed"


def test_a_reason_commands_no_terminal(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pinned(CASE, "--reason", "red \x1b[31m\x07\r\n# new") == 0
    kept = (project / "cases" / "regressions" / "rms_norm.txt").read_text()
    assert kept.splitlines()[0].endswith(": red \\x1b[31m\\x07 # new") and len(kept.splitlines()) == 2
    assert pinned(CASE, "--reason", " \n") == 2
    assert "--reason is empty; say what was wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rms_norm x=bf16[1,1]:values(1.1) weight=bf16[1] eps=1e-06 seed=0",), "bf16 has no 1.1"),
        (("rms_nrom x=bf16[1,1] eps=1e-06 seed=0",), "unknown op 'rms_nrom'; did you mean 'rms_norm'"),
        (("rms_norm x=bf16[1,1] wieght=bf16[1] eps=1e-06 seed=0",), "'wieght'"),
        (("completion_mask ids=int64[1,1] eos_ids=int64[1] seed=0",), "'mine' is one of rms_norm, and the case one of"),
        (("rms_norm x=bf16[1,1] eps=1e-06 seed=0",), "'mine' cannot run the case: the kernel needs weight"),
        ((CASE, "mein"), "pin takes one kernel of rms_norm, not mine, mein"),
        ((CASE, "--project", "gone"), "project folder 'gone' does not exist"),
    ],
)
def test_what_cannot_be_kept(
    project: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pinned(*words) == 2
    assert message in capsys.readouterr().err
    assert not (project / "cases").exists()


def test_a_folder_without_a_project_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pin", CASE, "mine", "--reason", "why"]) == 2
    shown = capsys.readouterr().err
    assert "there is no project here" in shown and "--project . makes it one" in shown


def test_nothing_is_kept_where_lastbit_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "references").mkdir()
    for folder in ("BUILT_IN", "PACKAGE"):
        monkeypatch.setattr(pin, folder, tmp_path.resolve())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is where lastbit is installed"):
        pin._folder(())


def test_a_case_goes_to_the_end_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "op.txt"
    path.write_text("# one\nop x=bf16[1] seed=0")
    assert add_case(path, parse_case("op x=bf16[2] seed=0"), "two")
    assert not add_case(path, parse_case("op seed=0  x=bf16[1]"), "three")
    assert path.read_text() == "# one\nop x=bf16[1] seed=0\n# two\nop x=bf16[2] seed=0\n"
    assert len(read_cases(path)) == 2
