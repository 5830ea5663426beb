"""The command line where the world is hostile: what cannot be read, written or encoded ends with 2 and a sentence."""

from __future__ import annotations

import argparse
import errno
import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
import safetensors.torch
import torch

import lastbit
from lastbit import cli
from lastbit.commands import report, verify
from lastbit.errors import LastbitError
from lastbit.reports.characters import visible

CASE = "rms_norm x=bf16[2,8] weight=bf16[8] eps=1e-06 seed=1"

Main = Callable[..., tuple[int, str]]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Run the command line in this process, in an empty folder; return its exit code and what standard error says."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        return cli.main(arguments), capsys.readouterr().err

    return call


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_run", lambda *_, **__: 0)


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `lastbit diff` raise."""

    def raising(*_: object) -> None:
        raise error

    monkeypatch.setattr(report, "read_run", raising)


# What cannot be read


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("x=bf16[2,8]@8,1+" + "9" * 5000, "has 5,000 digits"),
        ("x=bf16[" + "9" * 5000 + ",8]", "has 5,000 digits"),
        ("x=bf16[2,8]@" + "9" * 5000 + ",1", "has 5,000 digits"),
        ("x=bf16[999999999999,999999999]", "more than 2**62 bytes"),
        ("x=bf16[9]@999999999999999999+999999999999999999", "more than 2**62 bytes"),
        ("x=bf16[2,8]@8,1+99999999999999999999", "has 20 digits"),
        ("x=bf16[" + "1," * 5000 + "1]", "5001 dimensions"),
        ("seed=" + "9" * 5000, "cannot read 'seed=999"),
        ("eps=" + "(" * 5000, "cannot read 'eps=((("),
        ("eps=" + "-" * 100_000 + "1", "cannot read 'eps=---"),
        ("eps=" + "9" * 5000, "cannot read 'eps=999"),
        ("x=bf16[2]:\x1b[31m", r"cannot read 'x=bf16[2]:\x1b[31m'"),
        ("\ud800=3", r"cannot read '\ud800=3'"),
    ],
)
@pytest.mark.usefixtures("no_run")
def test_a_case_line_that_cannot_be_read(main: Main, word: str, message: str) -> None:
    code, said = main("verify", f"rms_norm {word}")
    assert code == 2
    assert said.startswith("lastbit: ")
    assert message in said
    assert len(said) < 2000, "a message shows a part of a long line"


@pytest.mark.usefixtures("no_run")
def test_a_file_of_cases_that_is_no_text(main: Main) -> None:
    Path("lines.txt").write_bytes(b"rms_norm x=bf16[2,8]:caf\xe9 seed=1\n")
    code, said = main("verify", "--cases", "lines.txt")
    assert (code, said.startswith("lastbit: case file 'lines.txt' cannot be read: 'utf-8' codec")) == (2, True), said


@pytest.mark.usefixtures("no_run")
def test_a_line_of_a_file_is_named(main: Main) -> None:
    Path("lines.txt").write_text(f"# two\n\n{CASE}\nrms_norm x=bf16[2\n")
    code, said = main("verify", "--cases", "lines.txt")
    assert code == 2
    assert "lines.txt, line 4: cannot read tensor" in said


@pytest.mark.usefixtures("no_run")
def test_a_mark_of_byte_order_is_no_part_of_a_line(main: Main) -> None:
    Path("lines.txt").write_bytes(b"\xef\xbb\xbf" + CASE.encode())
    assert main("verify", "F.rms_norm", "--cases", "lines.txt") == (0, "")


@pytest.mark.parametrize("seconds", ["1e300", "inf", "nan", "10000001"])
@pytest.mark.parametrize("command", [("verify", CASE), ("verify",), ("golden", "check")])
def test_a_timeout_beyond_every_clock(main: Main, command: tuple[str, ...], seconds: str) -> None:
    code, said = main(*command, "--timeout", seconds)
    assert code == 2
    assert "must be a number of seconds above 0 and at most 10,000,000" in said


DEEP = "[" * 100_000


@pytest.mark.parametrize("file", ["run.json", "records.jsonl"])
def test_records_that_are_nested_too_deeply(main: Main, file: str) -> None:
    Path("run").mkdir()
    Path("run/run.json").write_text(json.dumps({"results_count": 1}))
    Path("run/records.jsonl").write_text("{}\n")
    Path("run", file).write_text(DEEP + "\n")
    code, said = main("report", "run")
    assert code == 2
    assert f"{file}" in said
    assert "is malformed" in said
    assert len(said) < 1000


def test_a_golden_that_is_nested_too_deeply(main: Main) -> None:
    header = b'{"__metadata__":' + DEEP.encode()
    Path("header.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    code, said = main("golden", "diff", "header.safetensors", "header.safetensors")
    assert code == 2
    assert "damaged golden, or no safetensors file" in said


@pytest.mark.parametrize("document", [DEEP, "[]", "{}", "no JSON"])
def test_a_golden_with_another_document(main: Main, document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum fits: another program wrote the file."""
    monkeypatch.setattr("lastbit.history.golden_file._sum_of", lambda _: "0" * 64)
    described = {"lastbit golden": document, "checksum": "0" * 64}
    Path("g.safetensors").write_bytes(safetensors.torch.save({"0/y": torch.zeros(2)}, described))
    code, said = main("golden", "diff", "g.safetensors", "g.safetensors")
    assert code == 2
    assert "golden g.safetensors is malformed" in said


# What cannot be written


def test_a_run_folder_below_a_file(main: Main) -> None:
    Path("file").write_text("")
    code, said = main("verify", CASE, "F.rms_norm", "--run-folder", "file/run")
    assert (code, said) == (2, "lastbit: 'file/run': Not a directory\n")


def test_a_full_disk(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert main("diff", "a", "b") == (2, "lastbit: No space left on device\n")


def test_a_full_standard_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(verify, "_run", lambda *_, **__: print("text") or 0)
        assert cli.main(["verify", CASE]) == 2
    assert capsys.readouterr().err == "lastbit: No space left on device\n"


def test_a_reader_that_has_read_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["list", "layouts"]) == 2
    assert capsys.readouterr().err == ""


def test_what_is_imported_is_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lastbit", "list", "layouts"])
    frozen = gc.get_freeze_count()
    assert cli.main() == 0
    assert gc.isenabled() and gc.get_freeze_count() > frozen
    gc.unfreeze()


# What is wrong with lastbit itself


@pytest.mark.parametrize(
    "error", [ValueError("some\x1b[31m thing"), MemoryError(), RecursionError(), OSError("no errno")]
)
def test_a_bug_is_called_one_and_is_no_finding(main: Main, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fails(monkeypatch, error)
    code, said = main("diff", "a", "b")
    assert code == 2
    assert said.startswith("lastbit: this is a bug of lastbit")
    assert f"{type(error).__name__}" in said.splitlines()[-1]
    assert "\x1b" not in said


# What would command the terminal


def test_an_error_shows_what_it_holds_and_does_nothing(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, LastbitError("kernel '\x1b]0;title\x07\ud800' raised:\nsecond line"))
    assert main("diff", "a", "b") == (2, "lastbit: kernel '\\x1b]0;title\\x07\\ud800' raised:\nsecond line\n")


def test_what_the_encoding_of_a_stream_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(verify, "_run", lambda *_, **__: print("‖exact‖ \ud800") or 0)
    assert cli.main(["verify", CASE]) == 0
    assert narrow.buffer.getvalue() == b"\\u2016exact\\u2016 \\ud800\n"


def test_visible_keeps_text_and_shows_the_rest() -> None:
    assert visible("‖x‖ ✅ 漢字 é") == "‖x‖ ✅ 漢字 é"
    assert visible("\x1b[31m\x00\x9b\u202e\ud800\n") == "\\x1b[31m\\x00\\x9b\\u202e\\ud800\\n"
    assert visible("a\nb", keep="\n") == "a\nb"


# What it is


@pytest.mark.parametrize(
    ("command", "also"),
    [("import lastbit", ""), ("cli.make_parser(())", ""), ("cli.make_parser()", "rich")],
    ids=["the package", "lastbit --help", "lastbit COMMAND --help"],
)
def test_what_only_says_something_imports_nothing_that_takes_long(command: str, also: str) -> None:
    """Help answers at once, of every command, and so does `import lastbit` in a program that needs no verdict."""
    program = f"from lastbit import cli; {command}; import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "lastbit" in loaded
    slow = {"torch", "numpy", "triton", "pandas", "pyarrow", "hypothesis", "rich", "pytest"}
    assert slow.intersection(loaded) <= {also}


def test_what_starts_a_run_and_what_hands_out_its_items_leave_torch_to_those_that_run_them() -> None:
    program = "import lastbit.commands.verify, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "triton", "pandas", "hypothesis", "rich"}.intersection(loaded)


def test_what_explains_a_case_and_asserts_a_contract_draws_nothing() -> None:
    """Hypothesis takes as long to import as all of lastbit, and so do the ops that a case does not name."""
    program = """if True:
        import sys
        import lastbit.commands.explain, lastbit.verify.assertion
        from lastbit.config import Config
        from lastbit.verify.project import open_project
        open_project(Config(folder="")).op("rms_norm")
        print(*sys.modules)"""
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"hypothesis", "sympy", "pandas", "torch._dynamo", "lastbit.references._silu"}.intersection(loaded)


def test_names_of_the_package_are_there_when_they_are_asked_for() -> None:
    assert lastbit.assert_contract.__module__ == "lastbit.verify.assertion"
    assert {*lastbit.__all__} <= {*dir(lastbit)}
    assert lastbit.kernel is sys.modules["lastbit.kernel"].kernel
    with pytest.raises(AttributeError, match="no attribute 'assert_contracts'"):
        lastbit.assert_contracts  # noqa: B018


def test_every_command_has_a_function_that_runs_it() -> None:
    [listed] = (action for action in cli.make_parser()._actions if action.choices)
    assert [*listed.choices] == [*cli.COMMANDS]
    ahead = [*listed.choices.values()]
    for parser in ahead:
        actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        ahead += [choice for action in actions for choice in action.choices.values()]
        assert actions or callable(resolve_name(parser.get_default("command")))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"lastbit {lastbit.__version__}\n")


def test_what_ends_a_process_interrupts_it_once_and_only_meanwhile() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    received: list[int] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with pytest.raises(KeyboardInterrupt), cli._terminable(received):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        with cli._terminable(received), pytest.raises(KeyboardInterrupt):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # changes nothing
        assert len(received) == 2 and signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_threads_leave_signals_alone() -> None:
    seen: list[object] = []

    def thread() -> None:
        with cli._terminable([]):
            seen.append(signal.getsignal(signal.SIGTERM))

    started = threading.Thread(target=thread)
    started.start()
    started.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
