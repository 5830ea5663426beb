"""`lastbit report` and `lastbit diff`: which runs they read, and where they write what."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from lastbit import cli
from lastbit.commands import parsers, report
from lastbit.errors import LastbitError, UsageError
from lastbit.reports import alerts, junit, markdown, records
from lastbit.run import Run
from tests.reports.test_changes import failed as worse
from tests.reports.test_changes import result, run
from tests.reports.test_reports import failed, full_run, passed

# Report


def command(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parsers.add_report(parser)
    options = parser.parse_args(arguments)
    return int(resolve_name(options.command)(options, ()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with a run in .lastbit/runs/old."""
    monkeypatch.chdir(tmp_path)
    records.write(full_run(), Path(".lastbit/runs/old"))
    return tmp_path


def test_command_writes_several_reports(folder: Path) -> None:
    files = {"--markdown": "new/a.md", "--junit": "new/a.xml", "--sarif": "new/a.sarif"}
    assert command([".lastbit/runs/old", *(word for pair in files.items() for word in pair)]) == 0
    assert Path("new/a.md").read_text() == markdown.page(full_run())
    assert Path("new/a.xml").read_text() == junit.document(full_run())
    assert Path("new/a.sarif").read_text() == alerts.sarif(full_run())
    assert len(list(Path("new").iterdir())) == 3


def test_a_format_that_cannot_be_made_stops_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library that is missing and a file that cannot be written get a sentence each; a bug is told as one."""
    monkeypatch.setitem(sys.modules, "altair", None)
    Path("taken").touch()
    words = ["report", "--html", "a.html", "--sarif", "taken/a.sarif", "--markdown", "a.md", "--junit", "a.xml"]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "lastbit: --html is not written: " in said and "--sarif is not written: cannot write taken/a.sarif" in said
    assert Path("a.md").read_text() == markdown.page(full_run()) and Path("a.xml").exists()

    def wrong(run: Run) -> str:
        raise KeyError("dtypes")

    Path("a.md").unlink()
    monkeypatch.setattr(junit, "document", wrong)
    assert cli.main(["report", "--junit", "b.xml", "--markdown", "a.md"]) == 2
    said = capsys.readouterr().err
    assert "not written: --junit" in said and "KeyError: 'dtypes'" in said and "bug of lastbit" in said
    assert Path("a.md").exists() and not Path("b.xml").exists()


def test_a_reader_who_has_read_enough_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(target: str, text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(report, "write_text", closed)
    cli.main(["report", "--markdown", "-"])
    assert capsys.readouterr().err == ""


def test_command_takes_the_newest_complete_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(".lastbit/runs/unfinished").mkdir()
    records.write(Run((passed(kernel="newest"),)), Path(".lastbit/runs/1-new"))
    assert command(["--markdown", "-"]) == 0
    assert "PASSED newest on cpu" in capsys.readouterr().out


def test_command_without_a_format_prints_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([]) == 0
    assert "Stages on cpu" not in capsys.readouterr().out
    assert command(["-v"]) == 0
    assert "Stages on cpu" in capsys.readouterr().out


def test_command_compares_with_a_base(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.write(Run((passed(kernel="wrong[x]"),)), Path("base"))
    assert command([".lastbit/runs/old", "--base", "base", "--markdown", "-"]) == 0
    assert r"#### WORSE wrong\[x\] PASSED → FAILED" in capsys.readouterr().out
    assert command([".lastbit/runs/old", "--base", "base"]) == 0
    assert "Changes from the base to this run" in capsys.readouterr().out


def test_command_compares_with_the_revision_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only today's kernels are reported on; those of the base are what they are compared with."""
    results = (failed(kernel="k"), failed(kernel="gone@main"), passed(kernel="k@main"))
    records.write(Run(results, environment={"base": "main"}), Path("both"))
    assert command(["both", "--markdown", "-"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("## ❌ FAILED · kernels: 1 failed · ")
    assert "### Against main: WORSE" in page
    assert command(["both", "--annotations"]) == 0
    assert capsys.readouterr().out.count("::error") == 1


def test_two_reports_to_one_place_are_refused(folder: Path) -> None:
    for arguments in (
        ["--annotations", "--sarif", "-"],
        ["--sarif", "a", "--junit", "a"],
        ["--sarif", "a", "--html", "./a"],
    ):
        with pytest.raises(UsageError, match="more than one report"):
            command(arguments)


def test_failed_write_keeps_the_old_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.md").write_text("old")

    def fill_disk(self: Path, text: str, **_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(LastbitError, match=r"cannot write a\.md: No space left"):
        command(["--markdown", "a.md"])
    assert Path("a.md").read_text() == "old"


def test_report_into_a_folder_is_an_error(folder: Path) -> None:
    """Nothing else is written then."""
    Path("sub").mkdir()
    for target in ("sub", "sub/", "."):
        with pytest.raises(UsageError, match=f"--html '{target}' is a folder; name a file in it"):
            command(["--html", target, "--markdown", "a.md"])
        with pytest.raises(UsageError, match="is a folder"):
            command(["--markdown", "a.md", "--html", target])
    assert not Path("a.md").exists()
    assert not list(Path("sub").iterdir())


@pytest.mark.parametrize("kept", [0, 1])
def test_run_that_lost_records_is_refused(folder: Path, kept: int) -> None:
    path = Path(".lastbit/runs/old/records.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:kept]))
    with pytest.raises(LastbitError, match=f"records.jsonl has {kept} results, but the run had {len(lines)}"):
        command([])


def test_run_of_an_older_lastbit_does_not_say_how_many_records_it_has(folder: Path) -> None:
    path = Path(".lastbit/runs/old/run.json")
    rest = json.loads(path.read_text())
    assert rest.pop("results_count") == len(full_run().results)
    path.write_text(json.dumps(rest))
    assert records.read(path.parent) == full_run()


def test_without_a_run_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LastbitError, match="run `lastbit verify` first"):
        command([])


def test_the_newest_run_is_the_one_that_ended_last(folder: Path) -> None:
    records.write(full_run(), Path(".lastbit/runs/new"))
    old, new = (Path(".lastbit/runs", name) for name in ("old", "new"))
    for first, second in ((old, new), (new, old)):
        os.utime(first / "run.json", (1000, 1000))
        os.utime(second / "run.json", (2000, 2000))
        assert report.newest_run() == second
    with pytest.raises(LastbitError, match="'elsewhere' holds no complete run; name one"):
        report.newest_run(Path("elsewhere"))


def test_a_file_of_the_folder_stands_for_the_run(folder: Path) -> None:
    place = Path(".lastbit/runs/old")
    assert report.read_run(place) == report.read_run(place / "records.jsonl") == full_run()
    with pytest.raises(LastbitError, match=r"there is no run '\.lastbit/runs/older'; give the folder"):
        report.read_run(Path(".lastbit/runs/older"))


def test_every_report_that_cannot_be_written_is_named(folder: Path) -> None:
    def fails(error: Exception) -> str:
        raise error

    texts = {
        "--a": ("a", lambda: fails(LastbitError("no a"))),
        "--b": ("b", lambda: "b"),
        "--c": ("c", lambda: fails(OSError("no c"))),
    }
    with pytest.raises(LastbitError, match=r"^--a is not written: no a\n--c is not written: no c$"):
        report._write_each(texts)
    assert Path("b").read_text() == "b" and not Path("a").exists()
    bug = ValueError("bug")
    with pytest.raises(ExceptionGroup, match="not written: --a, --c, --d") as caught:
        report._write_each(texts | {"--d": ("d", lambda: fails(bug))})
    assert caught.value.exceptions == (bug,)
    report._write_each({})


def test_two_reports_to_standard_output_are_refused_and_one_is_not(folder: Path) -> None:
    report._check_targets({"html": "-", "junit": "a"}, annotations=False)
    with pytest.raises(UsageError, match="more than one report to '-'; give each a file of its own"):
        report._check_targets({"html": "-", "junit": "-"}, annotations=False)
    report._check_targets({"junit": "a"}, annotations=True)


# Diff


def differ(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parsers.add_diff(parser)
    options = parser.parse_args(arguments)
    return int(resolve_name(options.command)(options, ()))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    records.write(run(result()), tmp_path / "a")
    records.write(run(worse()), tmp_path / "b")
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_a_verdict_that_got_worse(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert differ(folders) == 1
    assert differ([folders[1], f"{folders[0]}/records.jsonl"]) == 0
    assert "WORSE" in capsys.readouterr().out


def test_command_writes_json(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert differ([*folders, "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    [kernel] = found["kernels"]
    assert (found["exit_code"], kernel["change"], kernel["cases_in_both"]) == (1, "WORSE", 1)
    assert kernel["stages"][0]["after"]["outside"] == 7


def test_command_compares_the_kernels_of_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.write(run(result(), worse(kernel="k@main"), environment={"base": "main"}), tmp_path / "a")
    assert differ([str(tmp_path / "a")] * 2) == 0
    assert "kernels: 1 unchanged" in capsys.readouterr().out


def test_command_names_a_run_that_is_not_there(folders: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(LastbitError, match="there is no run"):
        differ([folders[0], str(tmp_path / "absent")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(LastbitError, match=r"no run\.json"):
        differ([folders[0], str(tmp_path / "empty")])


@pytest.mark.parametrize("factor", ["0.5", "nan", "x"])
def test_drift_must_be_a_factor(folders: tuple[str, str], factor: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        differ([*folders, "--drift", factor])
    assert f"{factor!r} is no factor" in capsys.readouterr().err


def test_a_factor_may_be_1() -> None:
    assert (parsers._factor("1"), parsers._factor("2.5")) == (1.0, 2.5)


def test_strict_also_minds_kernels_that_are_gone(tmp_path: Path) -> None:
    records.write(run(result(), replace(result(), kernel="other")), tmp_path / "a")
    records.write(run(result()), tmp_path / "b")
    words = [str(tmp_path / name) for name in ("a", "b")]
    assert differ(words) == 0
    assert differ([*words, "--strict"]) == 1
    assert differ([*words, "--json"]) == 0
    assert differ([*words, "--json", "--strict"]) == 1
