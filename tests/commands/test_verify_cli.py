"""The command line from outside: exit codes, messages, and kernels that take their process with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from lastbit import cli
from lastbit.case import parse_case
from lastbit.commands import verify
from lastbit.config import Config
from lastbit.devices import DevicePlan, plan_devices
from lastbit.errors import UsageError
from lastbit.files import IMPORTED_FROM
from lastbit.inputs import build
from lastbit.verify.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]

REFERENCE = """\
from lastbit.ops import op


@op(rows=("x",), rounds={"y": "x"})
def thrice(x, *, contract, stage):
    stage("y", x * 3.0, result=True)
"""

KERNELS = """\
import ctypes

import torch

from lastbit.kernel import kernel


@kernel("thrice")
def right(x):
    return (x.float() * 3).to(x.dtype)


@kernel("thrice")
def truncates(x):
    y = x.float() * 3
    return (y.view(torch.int32) & ~0xFFFF).view(torch.float32).to(x.dtype)


@kernel("thrice")
def raises(x):
    raise ValueError(f"no tile for {x.shape[0]} rows")


@kernel("thrice")
def segfaults(x):
    if x.shape[0] == 4:
        ctypes.string_at(0)
    return right(x)


@kernel("thrice")
def hangs(x):
    if x.shape[0] == 4:
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock
    return right(x)


@kernel("thrice", name="elsewhere", devices=("cuda",))
def for_another_device(x):
    return right(x)
"""

SMALL, LARGE = "thrice x=bf16[2,64] seed=1", "thrice x=bf16[4,64] seed=2"


@dataclass(frozen=True)
class Done:
    """A run that has ended: exit code, what it printed, and its records by kernel."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def text(self) -> str:
        """Everything printed, as one line, however wide the terminal is."""
        return " ".join((self.stdout + self.stderr).split())

    def records(self) -> dict[str, dict[str, Any]]:
        """Kernel → case line → record."""
        found: dict[str, dict[str, Any]] = {}
        for line in (self.folder / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            found.setdefault(record["kernel"], {})[record["case"]] = record
        return found


def command(folder: Path, name: str, *options: str) -> list[str]:
    """Return the command line of a run of the project in `folder`, which keeps the records in `folder`/run."""
    return [name, f"{folder}/kernels", *options, "--project", str(folder), "--run-folder", f"{folder}/run"]


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run lastbit on a project: the command line in this process, the kernels in others; nothing is explained."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("lastbit.commands.explaining.failures_of", lambda run: [])

    def call(folder: Path, name: str, *options: str) -> Done:
        monkeypatch.chdir(folder)
        return Done(cli.main(command(folder, name, *options)), *capsys.readouterr(), folder / "run")

    return call


def make_project(folder: Path) -> Path:
    for name, source in (("references/thrice.py", REFERENCE), ("kernels/thrice.py", KERNELS)):
        path = folder / name
        path.parent.mkdir()
        path.write_text(source)
    (folder / "lines.txt").write_text(f"# two sizes\n\n{SMALL}\n  {LARGE}\n")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One run of all kernels, of which two take their process with them; the command line has one of its own, too."""
    folder = make_project(tmp_path_factory.mktemp("project"))
    arguments = command(folder, "verify", "--cases", str(folder / "lines.txt"), "--timeout", "3", "-n", "1")
    environment = {**os.environ, "PYTHONPATH": str(IMPORTED_FROM), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "lastbit", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr, folder / "run")


# One run of everything

slow = pytest.mark.slow  # each worker that dies is replaced, which takes seconds


@slow
def test_a_run_with_something_broken_ends_with_2(everything: Done) -> None:
    assert everything.code == 2, everything.text
    assert set(everything.records()) == {"right", "truncates", "raises", "segfaults", "hangs"}


@slow
def test_the_results_of_other_kernels_are_kept(everything: Done) -> None:
    verdicts = {case: r["verdict"] for case, r in everything.records()["right"].items()}
    assert verdicts == {SMALL: "PASSED", LARGE: "PASSED"}
    verdicts = {case: r["verdict"] for case, r in everything.records()["truncates"].items()}
    assert verdicts == {SMALL: "FAILED", LARGE: "FAILED"}


@slow
def test_a_kernel_that_raises_is_errored_with_its_message(everything: Done) -> None:
    record = everything.records()["raises"][LARGE]
    assert (record["verdict"], record["reason"]) == ("ERRORED", "ValueError: no tile for 4 rows")
    assert "no tile for" in everything.text


@slow
def test_a_kernel_that_ends_its_process_is_errored_with_the_case(everything: Done) -> None:
    records = everything.records()["segfaults"]
    assert records[SMALL]["verdict"] == "PASSED", "what it did before is kept"
    assert records[LARGE]["verdict"] == "ERRORED"
    assert "the process died" in records[LARGE]["reason"]


@slow
def test_a_kernel_that_hangs_is_stopped_after_the_timeout(everything: Done) -> None:
    records = everything.records()["hangs"]
    assert records[SMALL]["verdict"] == "PASSED"
    assert records[LARGE]["verdict"] == "ERRORED"
    assert "no result after 3 s (--timeout)" in records[LARGE]["reason"]
    assert Path(records[LARGE]["reason"].rpartition("see ")[2]).is_file()


@slow
def test_the_report_names_broken_kernels_and_their_cases(everything: Done) -> None:
    for kernel in ("segfaults", "hangs", "raises", "truncates"):
        assert kernel in everything.text
    assert LARGE in everything.text


@slow
def test_what_was_not_run_is_listed_with_the_reason(everything: Done) -> None:
    assert "elsewhere on cpu" in everything.text
    assert "declared for cuda only" in everything.text
    assert "elsewhere" not in everything.records()


@slow
def test_what_failed_is_explained_and_what_raised_is_not(everything: Done) -> None:
    [one] = json.loads((everything.folder / "run.json").read_text())["explanations"]
    assert (one["kernel"], one["case"]) == ("truncates", SMALL)
    last = one["trace"]["steps"][-1]
    assert Path(last["file"]).name == "thrice.py"
    assert KERNELS.splitlines()[last["line"] - 1].strip().startswith("return (y.view(torch.int32)")
    assert "explaining truncates on cpu" in everything.text


# Exit codes


def test_passing_kernels_end_with_0(run: Run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of pytest choose nothing."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    done = run(project, "verify", "--cases", "lines.txt", "-n", "1", "right")
    assert done.code == 0, done.text
    assert set(done.records()) == {"right"}


def test_k_selects_and_says_which_kernels_are_left_out(run: Run, project: Path) -> None:
    done = run(project, "verify", "--cases", "lines.txt", "-n", "1", "-k", "right")
    assert done.code == 3, done.text
    assert set(done.records()) == {"right"}
    assert "4 kernels were not verified: truncates on cpu, raises on cpu, segfaults on cpu, hangs on cpu" in done.text


def test_x_stops_the_run_and_says_what_did_not_run(run: Run, project: Path) -> None:
    done = run(project, "verify", "--cases", "lines.txt", "-n", "1", "-x", "-k", "right or truncates or raises")
    assert done.code in (1, 2), done.text
    assert len(done.records()) < 3
    assert "-x or --maxfail stopped pytest" in done.text
    assert "left out by -k, --deselect or another option" in done.text


def test_lf_runs_what_has_failed_before(run: Run, project: Path) -> None:
    words = "verify", "--cases", "lines.txt", "-n", "1", "right", "truncates"
    done = run(project, *words, "--junitxml", "out.xml")
    assert set(done.records()) == {"right", "truncates"}
    suite = ElementTree.parse(project / "out.xml").getroot()[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["2", "1", "0"]
    [failure] = suite.iter("failure")
    assert (failure.text or "").startswith("FAILED: truncates")
    shutil.rmtree(project / "run")
    assert set(run(project, *words, "--lf").records()) == {"truncates"}


def test_an_option_that_pytest_does_not_know_is_an_error_in_its_words(run: Run, project: Path) -> None:
    done = run(project, "verify", "--cases", "lines.txt", "right", "--no-such-option")
    assert done.code == 2
    assert "unrecognized arguments: --no-such-option" in done.stderr


def test_the_plan_of_devices_that_is_printed_is_the_one_of_the_run(
    run: Run, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    done = run(project, "verify", "--cases", "lines.txt", "-n", "1", "right", "--device", "auto")
    device_plan = plan_devices("auto")
    assert device_plan.leftovers, "WORLD_SIZE contradicts it"
    assert done.stdout.startswith(str(device_plan)), done.text
    assert Config.load(done.folder / "config.json").device_plan == device_plan
    assert json.loads((done.folder / "run.json").read_text())["environment"]["device_plan"] == str(device_plan)
    assert {r["device"] for r in done.records()["right"].values()} == set(device_plan.devices)


def test_a_failure_is_reproduced_with_the_same_input_bits(run: Run, project: Path) -> None:
    done = run(project, "verify", LARGE, "truncates", "-n", "1")
    assert done.code == 1, done.text
    fingerprint = build(parse_case(LARGE), "cpu").fingerprint
    assert f"input bits on cpu: {fingerprint}" in done.text
    assert done.records()["truncates"][LARGE]["fingerprint"] == fingerprint
    assert "have a value that is not possible" in done.text


def test_nothing_to_run_ends_with_3(run: Run, project: Path) -> None:
    done = run(project, "verify", "elsewhere", "-n", "1")
    assert done.code == 3, done.text
    assert "elsewhere on cpu" in done.text


def test_a_usage_error_of_the_plan_ends_with_2_and_its_own_message(run: Run, project: Path) -> None:
    done = run(project, "verify", "wright", "-n", "1")
    assert done.code == 2
    assert done.stderr.startswith(
        "lastbit: no kernel is called 'wright', and no file or folder here; did you mean 'right'?"
    )
    assert "Traceback" not in done.text


# Usage errors


def config(project: Path, **settings: Any) -> Config:
    return Config(
        folder=str(project / "run"),
        **{"projects": (str(project),), "kernel_folders": (str(project / "kernels"),), **settings},
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": ("nobody",)}, "no kernel is called 'nobody'"),
        ({"ops": ("thrise",)}, "unknown op 'thrise'; did you mean 'thrice'?"),
        ({"profile": "nightley"}, "unknown profile 'nightley'; did you mean 'nightly'?"),
        ({"lines": ("thrise x=bf16[4]",)}, "unknown op 'thrise'"),
        ({"lines": ("thrice x=bf61[4]",)}, "unknown dtype 'bf61'"),
        ({"kernel_folders": ("/no/such/folder",)}, "kernel file or folder '/no/such/folder' does not exist"),
        ({"projects": ("/no/such/folder",)}, "project folder '/no/such/folder' does not exist"),
    ],
)
def test_a_plan_that_cannot_be_made(project: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(config(project, **settings), "cpu")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ('kernel("thrise")', "unknown op 'thrise'"),
        ('kernel("thrice", contract="loose")', "unknown contract option of thrice 'loose'"),
        ('kernel("thrice", name="right")', "kernel names must be unique"),
    ],
)
def test_a_kernel_that_is_declared_wrongly(project: Path, declaration: str, message: str) -> None:
    source = f"from lastbit.kernel import kernel\n\n\n@{declaration}\ndef another(x):\n    return x\n"
    (project / "kernels" / "another.py").write_text(source)
    with pytest.raises(UsageError, match=message):
        make_plan(config(project), "cpu")


def test_the_plan_in_full(project: Path) -> None:
    plan = make_plan(config(project, lines=(SMALL, LARGE), kernels=("right", "elsewhere")), "cpu")
    assert [item.id for item in plan.items] == ["thrice-right-cpu-lines"]
    assert [n.what for n in plan.not_run] == ["elsewhere on cpu"]
    assert [item.cases for item in plan.planned] == [2]


Main = Callable[..., tuple[int, str]]


@pytest.fixture
def main(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Run the command line in this process, up to where a run would start."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(verify, "_run", lambda *_, **__: 0)

    def call(*arguments: str) -> tuple[int, str]:
        return cli.main(arguments), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--profile", "quick"), "unknown profile 'quick'"),
        (("verify", "--device", "cpo"), "unknown device 'cpo'"),
        (("verify", "--device", "cpu,cpo"), "unknown device 'cpo'"),
        (("verify", "--cases", "no_such_file.txt"), "case file 'no_such_file.txt' does not exist"),
        (("verify", "--cases", "malformed.txt"), "'bf16[4'"),
        (("verify", "thrice x=bf16[4 seed=1"), "'bf16[4'"),
        (("verify", "thrice x=bf16[4] seed=one"), "seed='one'"),
        (("verify", SMALL, "--device", "cpo"), "unknown device 'cpo'"),
    ],
)
def test_arguments_that_mean_nothing(main: Main, project: Path, arguments: tuple[str, ...], message: str) -> None:
    (project / "malformed.txt").write_text(f"{SMALL}\nthrice x=bf16[4 seed=1\n")
    code, error = main(*arguments)
    assert code == 2
    assert error.startswith("lastbit: ")
    assert message in error


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("command", [("verify",), ("verify", SMALL)])
def test_a_device_that_is_not_there(main: Main, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    code, error = main(*command, "--device", "cuda")
    assert (code, error) == (2, "lastbit: device 'cuda' was asked for, but this machine has only cpu\n")


def test_a_file_without_cases_is_not_taken_for_no_file(main: Main, project: Path) -> None:
    """Otherwise the run would be of generated cases."""
    (project / "empty.txt").write_text("# nothing yet\n")
    code, _ = main("verify", "--cases", "empty.txt")
    assert code != 0


def test_an_unknown_option_ends_with_2(main: Main) -> None:
    with pytest.raises(SystemExit) as caught:
        main("explain", SMALL, "--no-such-option")
    assert caught.value.code == 2


def test_options_that_are_not_listed_go_to_pytest(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], int]] = []
    monkeypatch.chdir(project)
    monkeypatch.setattr(verify, "_run", lambda _, words, *, workers, **__: seen.append((list(words), workers)) or 0)
    assert cli.main(["verify", "-k", "right", "-x", "--junitxml=out.xml", "-n", "3"]) == 0
    assert seen == [(["-x", "-k", "right", "--junitxml", "out.xml"], 3)]


def test_every_setting_reaches_the_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.chdir(project)
    monkeypatch.setattr(verify, "_run", lambda settings, *_, **__: seen.append(settings) or 0)
    options = "--profile smoke right --op thrice hangs --seed 5 --cases-per-group 7 --timeout 9"
    files = "--cases lines.txt --project . kernels/ --run-folder r --device cpu:0 --keep-going"
    cli.main(["verify", *options.split(), *files.split()])
    assert seen == [
        Config(
            folder="r",
            profile="smoke",
            device_plan=plan_devices("cpu:0"),
            ops=("thrice",),
            kernels=("right", "hangs"),
            projects=(".",),
            kernel_folders=("kernels/",),
            lines=(SMALL, LARGE),
            seed=5,
            cases=7,
            timeout=9.0,
            keep_going=True,
        )
    ]


def test_a_config_is_read_back(tmp_path: Path) -> None:
    why = "from --device cpu", "from --device cuda:1"
    device_plan = DevicePlan(("cpu", "cuda:1"), why, ("RANK=1 is one process of several",))
    settings = Config(
        folder=str(tmp_path / "run"),
        lines=(SMALL,),
        device_plan=device_plan,
        timeout=1.5,
        revisions={"main": "k"},
        site=("s",),
    )
    assert Config.load(settings.save()) == settings


def test_a_run_folder_that_holds_another_run_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "used").mkdir()
    (project / "used" / "config.json").write_text("{}")
    monkeypatch.chdir(project)
    assert cli.main(["verify", "--run-folder", "used"]) == 2
    assert "run folder 'used' is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--timeout=0", "timeout 0.0 must be"),
        ("--cases-per-group=-1", "-1 generated cases"),
    ],
)
def test_numbers_out_of_range_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    monkeypatch.chdir(project)
    assert cli.main(["verify", option]) == 2
    assert message in capsys.readouterr().err


def test_a_number_of_processes_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", "-n-1"])
    assert caught.value.code == 2
    assert "'-1' is not a whole number from 1 on, nor auto" in capsys.readouterr().err


def test_the_command_line_leaves_triton_to_whoever_knows_the_device() -> None:
    """Triton decides at its import whether it compiles or interprets."""
    program = "import lastbit.cli, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=dict(os.environ, PYTHONPATH=str(IMPORTED_FROM)), check=True)
