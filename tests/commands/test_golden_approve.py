"""`lastbit golden record` and `approve`: what is written, what is refused, and who is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from golden_bench import FP32_MULTIPLY, OTHER_SUM, SAME_SUM, TRITON, Bench, lastbit, output

from lastbit.errors import UsageError
from lastbit.history.golden_file import read, write


@pytest.fixture
def triton(tmp_path: Path) -> Bench:
    return Bench(tmp_path, TRITON)


@pytest.fixture
def plain(tmp_path: Path) -> Bench:
    return Bench(tmp_path, "mine")


def test_a_failing_kernel_is_refused(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = plain.kernels("fp32_multiply", "native_multiply")
    assert plain("record", wrong, "--cases", plain.lines) == 1
    shown = output(capsys)
    assert "refused" in shown
    assert "fix the kernel, or claim the contract that it keeps" in shown
    assert "explained by fp32_multiply" in shown
    assert "those of the golden" not in shown  # there is none
    assert not (plain.folder / "goldens").exists()


def test_a_golden_is_not_recorded_over(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    before = plain.record().read_bytes()
    assert plain("record", plain.kernels(SAME_SUM, OTHER_SUM)) == 0
    shown = output(capsys)
    assert "has a golden of 2 cases; `lastbit golden approve` brings it up to date, with the same cases" in shown
    assert "to choose cases anew, delete the file" in shown
    assert plain.file.read_bytes() == before


def test_cases_are_chosen_from_every_group(plain: Bench) -> None:
    assert plain("record", plain.kernels(), "--most-elements", 5000) == 0
    lines = [case.line for case in read(plain.file).cases]
    assert len(lines) == len(set(lines)) > 10
    assert {"fp32", "bf16", "fp16"} <= {line.split("x=")[1][:4] for line in lines}
    assert plain("check", plain.kernels()) == 0


@pytest.mark.parametrize("words", [("record",), ("approve", "--yes")], ids=lambda words: words[0])
def test_without_a_case_that_fits_nothing_is_recorded(
    plain: Bench, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    action, *rest = words
    assert plain(action, plain.kernels(), *rest, "--cases-per-group", 0, "--most-elements", 1) == 3
    shown = output(capsys)
    assert "SKIPPED mine no case fits" in shown
    assert "what to do raise --most-elements" in shown
    assert "recorded" not in shown
    assert "1 written" not in shown
    assert not (plain.folder / "goldens").exists()


@pytest.mark.parametrize("option", [("--cases-per-group", "-1", "0"), ("--most-elements", "0", "1")])
def test_selections_that_mean_nothing_are_refused(
    plain: Bench, capsys: pytest.CaptureFixture[str], option: tuple[str, str, str]
) -> None:
    name, value, least = option
    with pytest.raises(SystemExit):
        plain("record", plain.kernels(), name, value)
    assert f"argument {name}: '{value}' is not a whole number from {least} on" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["record", "approve"])
def test_help_says_which_kernels_the_selection_is_for(capsys: pytest.CaptureFixture[str], action: str) -> None:
    with pytest.raises(SystemExit):
        lastbit(action, "--help")
    assert "for kernels without a golden" in output(capsys)


def test_refused_cases_are_counted_without_elements(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = plain.kernels("return product.to(x.dtype)", "return -product.to(x.dtype)")
    assert plain("record", wrong, "--most-elements", 5000) == 1
    shown = output(capsys)
    assert "more cases broken" in shown
    assert "0 elements" not in shown


def test_without_goldens_nothing_is_checked(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert plain("check", plain.kernels()) == 3
    assert "NEW mine" in output(capsys)


def test_approve_writes_what_is_legal(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    plain.record()
    reordered = plain.kernels(SAME_SUM, OTHER_SUM)
    output(capsys)
    assert plain("approve", reordered, "--yes") == 0
    shown = output(capsys)
    assert shown.index("CHANGED mine") < shown.index("1 written or removed"), "shown before it is written"
    assert plain("check", reordered, "--exact") == 0


def test_approve_never_writes_what_is_broken(triton: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    before = triton.record().read_bytes()
    assert triton("approve", triton.kernels(*FP32_MULTIPLY), "--yes") == 1
    assert "0 written or removed" in output(capsys)
    assert triton.file.read_bytes() == before


def test_approve_without_a_terminal_needs_yes(plain: Bench) -> None:
    before = plain.record().read_bytes()
    with pytest.raises(UsageError, match="--yes"):
        plain("approve", plain.kernels(SAME_SUM, OTHER_SUM))
    assert plain.file.read_bytes() == before


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_approve_asks_on_a_terminal(plain: Bench, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    before = plain.record().read_bytes()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert plain("approve", plain.kernels(SAME_SUM, OTHER_SUM)) == code
    assert (plain.file.read_bytes() == before) is (answer != "y")


def test_a_golden_whose_kernel_is_gone(plain: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain.record()
    renamed = plain.kernels('name="mine"', 'name="yours"')
    assert plain("check", renamed) == 1
    shown = output(capsys)
    assert "GONE mine" in shown
    assert "NEW yours" in shown
    assert plain("approve", renamed, "--yes", "--cases", plain.lines) == 0
    assert not path.exists()
    assert plain("check", renamed) == 0


def test_a_new_kind_of_device_gets_the_cases_of_the_others(plain: Bench) -> None:
    file = plain.record()
    golden = read(file)
    write(replace(golden, kind="another-device"), file.parent.parent / "another-device")
    file.unlink()
    assert plain("record", plain.kernels()) == 0
    assert [case.line for case in read(file).cases] == [case.line for case in golden.cases]
