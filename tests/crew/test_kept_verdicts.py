"""Verdicts are kept from run to run, and never across what could change them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lastbit import cli
from lastbit.commands import verify
from lastbit.commands.running import execute
from lastbit.config import Config
from lastbit.crew import kept_verdicts
from lastbit.reports.encoding import encoded
from lastbit.result import Verdict
from lastbit.run import Run
from lastbit.verify import dependencies
from lastbit.verify.plan import make_plan

REFERENCE = """\
from lastbit.ops import op


@op(rows=("x",), rounds={"y": "x"})
def thrice(x, *, contract, stage):
    stage("y", x * 3.0, result=True)
"""
CASES = """\
from lastbit.case import Group, parse_case


def groups(accepts, *, small):
    lines = [f"thrice x={dtype}[{rows},40] seed={rows}" for rows in (1, 5) for dtype in ("bf16", "fp16")]
    yield Group("lines", examples=tuple(map(parse_case, lines)))
    yield Group("more", examples=(parse_case("thrice x=bf16[7,8] seed=1"),))
"""
READS = '''\
"""Reads at every opportunity."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import factors
from lastbit.kernel import kernel

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "package"))
TABLE = json.loads((HERE / "table.json").read_text())


@kernel("thrice")
def reads(x):
    from deep.late import late

    with suppress(FileNotFoundError):
        open(HERE / "more.json").read()
    tiles = json.loads((HERE / "tiles.json").read_text())
    assert tiles and TABLE and late and os.environ.get("TILE", "") != "0"
    return (x.float() * factors.FACTOR).to(x.dtype)
'''
ALONE = """\
from lastbit.kernel import kernel


@kernel("thrice")
def alone(x):
    return (x.float() * 3).to(x.dtype)
"""
FILES = {
    "references/thrice.py": REFERENCE,
    "cases/thrice.py": CASES,
    "kernels/alone.py": ALONE,
    "kernels/reads.py": READS,
    "kernels/factors.py": "FACTOR = 3\n",
    "package/deep/__init__.py": "",
    "package/deep/late.py": "from .later import late\n",
    "package/deep/later.py": "late = True\n",
    "kernels/table.json": "[1]",
    "kernels/tiles.json": "[1]",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def project(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the project anew, where it always is, and go there."""
    project = place / "project"
    shutil.rmtree(project, ignore_errors=True)
    for name, text in FILES.items():
        path = project / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    monkeypatch.chdir(project)
    return project


Verifies = Callable[..., Run]


@pytest.fixture
def run(project: Path) -> Verifies:
    """Run the project's kernels, with settings that differ from the usual ones."""
    count = itertools.count()

    def call(**changes: object) -> Run:
        settings = {"projects": (".",), "kernel_folders": ("kernels",), "kept": "kept", **changes}
        os.environ.pop("PYTEST_CURRENT_TEST", None)  # it differs each time
        time.sleep(0.05)  # what was written a moment ago may have been written during the run
        return execute(Config(folder=f"runs/{next(count)}", **settings), workers=1, quiet=True)

    return call


@pytest.fixture
def judged(place: Path, run: Verifies) -> Run:
    """Have the verdicts kept that the first of these tests has made."""
    if (place / "kept").exists():
        shutil.copytree(place / "kept", "kept")
        return run()
    first = run()
    shutil.copytree("kept", place / "kept")
    return first


def kept(run: Run) -> dict[str, str]:
    """Kernel → the run that its verdict is of; empty where it was judged."""
    return {one.kernel: one.run.partition(" of ")[0] for one in run.origins}


def why(run: Run) -> dict[str, str]:
    return {one.kernel: one.why for one in run.origins}


def test_an_unchanged_kernel_has_the_records_of_the_run_that_judged_it(run: Verifies) -> None:
    first, second, third = run(), run(), run()
    assert kept(first) == {"alone": "", "reads": ""}
    assert why(first) == dict.fromkeys(("alone", "reads"), kept_verdicts.CHANGED)
    assert kept(second) == kept(third) == {"alone": "0", "reads": "0"}, why(second)  # the run that judged it
    assert first.exit_code == second.exit_code == 0

    def plain(run: Run) -> Any:
        environment = {name: text for name, text in run.environment.items() if name != "records"}
        return encoded(replace(run, origins=(), spent=first.spent, environment=environment))

    assert first.results and first.unreached is not None
    assert plain(second) == plain(first)


CHANGES = [
    ("kernels/reads.py", READS + "\n", {"reads"}),
    ("kernels/alone.py", ALONE + "\n", {"alone"}),
    ("kernels/factors.py", "FACTOR = 3.0\n", {"reads"}),
    ("package/deep/later.py", "late = 1\n", {"reads"}),
    ("package/deep/more.py", "late = 1\n", set()),
    ("kernels/table.json", "[2]", {"reads"}),
    ("kernels/tiles.json", "[2]", {"reads"}),
    ("kernels/more.json", "{}", {"reads"}),
    ("kernels/sets.py", "import torch\n\ntorch.backends.mkldnn.flags = None\n", {"alone", "reads"}),
    ("kernels/other.py", "SIZE = 1\n", set()),
    ("references/thrice.py", REFERENCE + "\n", {"alone", "reads"}),
    ("references/more.txt", "", {"alone", "reads"}),
    ("cases/thrice.py", CASES.replace("seed=1", "seed=2"), {"alone", "reads"}),
    ("cases/regressions/thrice.txt", "thrice x=bf16[1,3] seed=5\n", {"alone", "reads"}),
]


def test_a_changed_file_judges_the_kernels_that_depend_on_it(project: Path, judged: Run, run: Verifies) -> None:
    found, expected = {}, {name: anew for name, _, anew in CHANGES}
    for name, text, _ in CHANGES:
        path = project / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        again = run()
        assert again.overall is Verdict.PASSED
        found[name] = {kernel for kernel, origin in kept(again).items() if not origin}
    assert found == expected


def told(project: Path, **changes: object) -> dict[str, str]:
    """Return what the verdict on the kernel alone depends on."""
    kernels = (str(project / "kernels" / "alone.py"),)
    settings = {"projects": (str(project),), "kernel_folders": kernels, "kept": "kept", **changes}
    config = Config(**{"folder": "runs", **settings})
    watched = dependencies.Dependencies(config)
    [alone] = watched.of(make_plan(config, "cpu"))
    return {**alone["depends"], "cases": str(alone["items"])}


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"strict": True}, {"cases": 2}, {"profile": "smoke"}, {"timeout": 60.0}], ids=str
)
def test_other_settings_are_told_apart(changes: dict[str, object], project: Path) -> None:
    assert {f"setting {name}" for name in changes} <= differing(told(project), told(project, **changes))


@pytest.mark.parametrize(
    "changes",
    [{"ops": ("thrice",)}, {"keep_going": True}, {"fresh": True}, {"kept": "elsewhere"}, {"folder": "other"}],
    ids=str,
)
def test_what_changes_no_verdict_is_no_part_of_it(changes: dict[str, object], project: Path) -> None:
    assert not differing(told(project), told(project, **changes))


@pytest.mark.parametrize("changes", [{"random": True}, {"lines": ("thrice x=bf16[1,3] seed=5",)}, {"kept": ""}])
def test_what_differs_each_time_keeps_nothing(changes: dict[str, object], judged: Run, run: Verifies) -> None:
    assert run(**changes).origins == ()


def test_a_fresh_run_keeps_what_it_judged(run: Verifies) -> None:
    run()
    run(fresh=True)
    assert kept(run()) == {"alone": "1", "reads": "1"}


def test_a_choice_of_kernels_keeps_for_all_of_them(run: Verifies) -> None:
    run(kernels=("alone",))
    assert kept(run()) == {"alone": "0", "reads": ""}
    assert kept(run(kernels=("reads",))) == {"reads": "1"}


def _changed_mark(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plain = getattr(dependencies, name)
    monkeypatch.setattr(dependencies, name, lambda *args: (plain(*args), "changed"))


def _other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("code").mkdir()
    Path("code/judging.py").write_text("")
    monkeypatch.setattr(dependencies, "NOT_OWN", (*dependencies.NOT_OWN, Path("code").absolute()))


def _other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    about = Path("more", "package-2.0.dist-info")
    about.mkdir(parents=True)
    (about / "RECORD").write_text("package.py,sha256=0,0")
    monkeypatch.syspath_prepend("more")


AROUND: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "the code of lastbit": _other_code,
    "installed packages": _other_package,
    "torch": lambda patch: patch.setattr(torch, "__version__", "3.0"),
    "processor": lambda patch: _changed_mark(patch, "_processor"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 99),
    "driver": lambda patch: _changed_mark(patch, "_driver"),
    "its device": lambda patch: _changed_mark(patch, "_device"),
    "premises": lambda patch: _changed_mark(patch, "load_premises"),
    "Python": lambda patch: patch.setattr("platform.libc_ver", lambda: ("glibc", "99")),
    "working folder": lambda patch: patch.chdir("kernels"),
    "the variable TRITON_DEBUG": lambda patch: patch.setenv("TRITON_DEBUG", "1"),
    "the variable OMP_DYNAMIC": lambda patch: patch.setenv("OMP_DYNAMIC", "1"),
    "the variable TORCHINDUCTOR_COMPILE_THREADS": lambda patch: patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1"),
    "the variable CUDA_VISIBLE_DEVICES": lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", "1"),
    "the variable MKL_CBWR": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    "the variable PYTHONHASHSEED": lambda patch: patch.setenv("PYTHONHASHSEED", "1"),
    "the variable LD_PRELOAD": lambda patch: patch.setenv("LD_PRELOAD", "lib.so"),
}


@pytest.mark.parametrize("ingredient", AROUND)
def test_what_is_around_a_kernel_is_told_apart(ingredient: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told apart judges anew, as the tests of files show."""
    before = told(project)
    assert told(project) == before
    AROUND[ingredient](monkeypatch)
    assert ingredient in differing(before, told(project))


def test_a_variable_that_a_kernels_file_names_judges_it_alone(
    judged: Run, run: Verifies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOBODYS", "64")
    again = run()
    assert kept(again)["alone"] and not kept(again)["reads"], "one of its files may ask for any"
    monkeypatch.setenv("TILE", "64")
    again = run()
    assert kept(again)["alone"] and not kept(again)["reads"]


WRONG = ALONE.replace("alone", "wrong").replace("* 3)", "* 2)")
DECLINES = """\
from lastbit import UnsupportedCase
from lastbit.kernel import kernel


@kernel("thrice")
def declines(x):
    if x.shape[0] != 7:
        raise UnsupportedCase("rows")
    return (x.float() * 3).to(x.dtype)
"""


def test_what_did_not_pass_is_judged_again(project: Path, run: Verifies) -> None:
    (project / "kernels/wrong.py").write_text(WRONG)
    (project / "kernels/declines.py").write_text(DECLINES)
    first, second = run(), run()
    assert first.verdict("wrong", "cpu") is Verdict.FAILED
    assert first.verdict("declines", "cpu") is Verdict.INCONCLUSIVE
    assert kept(second) == {"alone": "0", "declines": "", "reads": "0", "wrong": ""}
    assert second.exit_code == first.exit_code == 1


BEYOND = {
    "starts a program": "subprocess.run(['true'])",
    "opens a socket": "socket.socket()",
    "opens a database": "sqlite3.connect(':memory:')",
    "asks by exists": "os.path.exists('more.json')",
    "writes ": "open(os.devnull, 'w').close()",
    "written during the run": "os.utime(HERE / 'table.json') or (HERE / 'table.json').read_text()",
}


def test_what_a_reference_imports_and_reads_counts_for_all_kernels(project: Path, run: Verifies) -> None:
    text = 'from pathlib import Path\n\nOUT = (Path(__file__).parents[1] / "more.txt").read_text()\n'
    (project / "references/thrice.py").write_text(text + REFERENCE)
    (project / "more.txt").write_text("1")
    run()
    assert kept(run()) == {"alone": "0", "reads": "0"}
    (project / "more.txt").write_text("2")
    assert kept(run()) == {"alone": "", "reads": ""}


def test_what_cannot_be_followed_is_not_kept_and_the_reason_is_said(project: Path, run: Verifies) -> None:
    imports = "import json, socket, sqlite3, subprocess, threading\n"
    does = "".join(f"    {line}\n" for line in BEYOND.values())
    (project / "kernels/reads.py").write_text(
        READS.replace("import json\n", imports).replace("    tiles =", f"{does}    tiles =")
    )
    first = run()
    assert [reason for reason in ("not kept, since it", *BEYOND) if reason not in why(first)["reads"]] == []
    assert kept(run()) == {"alone": "0", "reads": ""}


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _emptied(data: bytes) -> bytes:
    return gzip.compress(json.dumps({**json.loads(gzip.decompress(data)), "results": {}}).encode())


def _unknown(data: bytes) -> bytes:
    return gzip.compress(gzip.decompress(data).replace(b'"ruled_out"', b'"ruled"'))


def test_a_damaged_file_is_judged_anew_and_then_whole_again(project: Path, judged: Run, run: Verifies) -> None:
    damages: list[Callable[[bytes], bytes]] = [_cut, _flipped, _emptied, _unknown, lambda data: b""]
    for damage in damages:
        for path in (project / "kept").glob("*.gz"):
            path.write_bytes(damage(path.read_bytes()))
        again = run()
        assert kept(again) == {"alone": "", "reads": ""}
        assert all("damaged" in reason for reason in why(again).values())
        assert again.overall is Verdict.PASSED
    assert all(kept(run()).values())


def test_a_folder_that_cannot_be_written_is_said_and_fails_nothing(
    project: Path, run: Verifies, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "kept").write_text("a file")
    first = run()
    assert first.overall is Verdict.PASSED
    assert "verdicts cannot be kept in kept: " in capfd.readouterr().err
    assert kept(run()) == {"alone": "", "reads": ""}


def test_the_verdicts_used_last_stay_when_there_are_too_many(
    project: Path, run: Verifies, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    sizes = [path.stat().st_size for path in (project / "kept").glob("*.gz")]
    monkeypatch.setattr(kept_verdicts, "MOST", sum(sizes) + min(sizes) // 2)
    for number in (1, 2):
        run(seed=number)
    assert sum(path.stat().st_size for path in (project / "kept").iterdir()) <= kept_verdicts.MOST
    assert "" not in kept(run(seed=2)).values()
    assert "" in kept(run(seed=1)).values()


def test_the_command_keeps_verdicts_and_says_so_in_its_last_lines(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.KEPT == "", "no test keeps verdicts by accident"
    monkeypatch.setattr(verify, "KEPT", ".lastbit/cache/verdicts")
    words = ["verify", "kernels/alone.py", "--project", ".", "-n", "1"]
    assert cli.main(words) == 0
    first = capsys.readouterr().out
    assert "kernels: 1 passed · " in first and "kept from" not in first
    assert cli.main(words) == 0
    [name] = [path.name for path in Path(".lastbit/runs").iterdir() if path.name in first]
    assert f"kernels: 1 passed (1 kept from {name}) · " in " ".join(capsys.readouterr().out.split())
    assert cli.main([*words, "-v", "--fresh"]) == 0
    assert "judged: --fresh asks for it" in capsys.readouterr().out


def test_what_a_thread_of_a_kernel_reads_counts(project: Path, run: Verifies) -> None:
    text = READS.replace("import json\n", "import json\nfrom concurrent.futures import ThreadPoolExecutor\n")
    reads = "    ThreadPoolExecutor(1).submit((HERE / 'alone.txt').read_text).result()\n    tiles ="
    (project / "kernels/reads.py").write_text(text.replace("    tiles =", reads))
    (project / "kernels/alone.txt").write_text("1")
    run()
    assert kept(run())["reads"] == "0"
    (project / "kernels/alone.txt").write_text("2")
    assert kept(run())["reads"] == ""


def test_modules_in_folders_without_a_file_of_their_own_count(project: Path, run: Verifies) -> None:
    (project / "package/a/b").mkdir(parents=True)
    (project / "package/a/b/c.py").write_text("one = 1\n")
    text = READS.replace("    from deep", "    from a.b.c import one\n    from deep")
    (project / "kernels/reads.py").write_text(text)
    run()
    assert kept(run())["reads"] == "0"
    (project / "package/a/b/c.py").write_text("one = 2\n")
    assert kept(run())["reads"] == ""


def test_a_module_that_no_import_names_is_not_followed(project: Path, run: Verifies) -> None:
    """Once it is compiled, Python does not open its text any more."""
    (project / "package/unnamed.py").write_text("")
    body = "    importlib.import_module('unnamed')\n    from deep"
    (project / "kernels/reads.py").write_text("import importlib\n\n" + READS.replace("    from deep", body))
    run()
    assert "not kept, since it runs code by import_module" in why(run())["reads"]


def test_a_file_that_changes_lastbit_belongs_to_all_kernels(project: Path, run: Verifies) -> None:
    run()
    (project / "kernels/sets.py").write_text("import lastbit.kernel\n\nlastbit.kernel.EXTRA = 1\n")
    assert kept(run()) == {"alone": "", "reads": ""}
