"""The command `lastbit identify` and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from in_this_process import InThisProcess
from rich.console import Console

from lastbit.commands import identify as command
from lastbit.commands import parsers
from lastbit.errors import UsageError
from lastbit.identifying.kept_contracts import identify_kernel
from lastbit.reports.identification import (
    Answer,
    Candidate,
    ContractTally,
    Identification,
    elements,
    print_identification,
    print_overview,
)
from lastbit.verify.worker import WorkerEnded, Workplace

# What is printed


BF16 = "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 seed=1"
FP16 = "rms_norm x=fp16[24,96] weight=fp16[96] eps=1e-06 seed=2"
OFFSET = "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 weight_offset=1.0 seed=6"


def printed(show: Callable[[Console], None], width: int = 120) -> str:
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as capture:
        show(console)
    return capture.get()


def test_the_table() -> None:
    kept = Candidate(("a+b", "a+c"), "a", ("second",), {"bf16": ContractTally(2, elements=9_000, rows=12)})
    other = Candidate(("d+b",), "d+b", (), {"bf16": ContractTally(2, 1, elements=9_000, outside=1_234)})
    answers = (Answer("bf16", 2, (kept,)),)
    found = Identification("mine", "op", "cpu", "d+b", (kept, other), answers, cases=2, contracts=3)
    said = [
        "mine on cpu  keeps a. The claim d+b is wrong: 1,234 of 9,000 elements are not possible under it.",
        "  2 cases.",
        "  Nearest other: d+b, outside of which 1,234 of 9,000 elements lie.",
    ]
    assert printed(lambda console: print_identification(found, console)).splitlines() == said
    lines = printed(lambda console: print_identification(found, console, every=True)).splitlines()
    assert lines[:3] == said
    assert lines[4].split() == ["a", "0", "of", "9,000", "0", "of", "2", "0", "of", "12"]
    assert lines[5].split() == ["d+b", "1,234", "of", "9,000", "1", "of", "2", "–"]


def test_no_figure_is_wrapped_on_a_narrow_terminal() -> None:
    """All that decides is there: what is left out is of how many each figure is."""
    figures = ContractTally(
        39, 27, elements=414_800, outside=75_416, rows=1_249, unexplained=373, followed=16_917, differing=1
    )
    one = Candidate(("native_multiply+rounded_inverse",), "native_multiply+rounded_inverse", (), {"bf16": figures})
    found = Identification("mine", "op", "cpu", "d+b", (one,), cases=39, contracts=9, followed=17)
    lines = printed(lambda console: print_identification(found, console, every=True), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line.split() for line in lines if line.startswith("  native_multiply")) == [
        one.fixed,
        "75,416",
        "27",
        "373",
        "1",
    ]
    assert "of up to 414,800 elements in 39 cases" in " ".join(lines)
    assert "75,416 of 414,800" in printed(lambda console: print_identification(found, console, every=True))


def test_one_error_of_many_cases_is_said_once() -> None:
    errors = tuple(f"ImportError: no {name} in op x=fp32[{n}]" for n in range(9) for name in ("a", "b"))
    found = Identification("mine", "op", "cpu", "once", errors=errors)
    lines = printed(lambda console: print_identification(found, console)).splitlines()
    assert lines[1:] == [f"  errored in 9 cases, such as op x=fp32[0]: ImportError: no {name}" for name in ("a", "b")]


def test_two_other_roundings_that_fit_are_both_named() -> None:
    """No case is known that tells them apart, as there may be one for two contracts of the op."""
    one, other = (
        Candidate((f"{name}, s unrounded",), name, (), {"bf16": ContractTally(2, elements=9)}, True, ("s unrounded",))
        for name in "ab"
    )
    answers = (Answer("bf16", 2, (one, other)),)
    found = Identification("mine", "op", "cpu", "", (one, other), answers, cases=2, contracts=3)
    first, *_ = printed(lambda console: print_identification(found, console)).splitlines()
    assert first == "mine on cpu  keeps a, s unrounded, or b, s unrounded: these cases do not tell them apart."


def test_an_answer_takes_few_lines_however_many_contracts_fit() -> None:
    options = tuple(f"option{n}" for n in range(9))
    fits = Candidate(("a+b", *(f"a+b{n}" for n in range(200))), "", (), {"bf16": ContractTally(2, elements=90)})
    found = Identification("mine", "op", "cpu", "a+b", (fits,), cases=2, contracts=900, untold=options)
    lines = printed(lambda console: print_identification(found, console), 160).splitlines()
    assert lines == [
        "mine on cpu  keeps a+b, as it claims.",
        "  2 cases.",
        f"  These options fit all of them as well: {', '.join(options)}.",
    ]


def test_columns_of_an_overview_are_left_out_before_a_name_is_broken() -> None:
    name = "native_multiply+rounded_inverse"
    others = (Candidate((name,), name, (), {"bf16": ContractTally(1, 1, elements=9, outside=9)}),)
    fits = Candidate(("fp32_multiply",), "fp32_multiply", (), {"bf16": ContractTally(1, elements=9)})
    found = Identification("a_long_name_of_mine", "op", "cpu", "fp32_multiply", (fits, *others), cases=1, contracts=2)
    console = Console(width=80)
    with console.capture() as capture:
        print_overview([found], console)
    assert name in capture.get() and "elements outside it" not in capture.get()


def test_figures_of_contracts_that_were_left_are_lower_bounds() -> None:
    assert elements(ContractTally(3, 3, elements=90, outside=5, untried=2)) == "at least 5 of 90"


# The command


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (
            Identification("mine", "op", "cpu", "once", errors=("ValueError: no", "ValueError: no")),
            "errored in 2 cases",
        ),
        (Identification("mine", "op", "cpu", "once", unsupported={"takes no z": 3}), "takes none of 3 cases"),
        (Identification("mine", "op", "cpu", "once"), "there was no case"),
    ],
)
def test_a_kernel_that_was_not_judged_is_not_said_to_keep_nothing(found: Identification, why: str) -> None:
    row = printed(lambda console: print_overview([found], console)).splitlines()[1]
    assert row.split() == ["mine", "not", "judged:", *why.split(), "–"]
    assert f"mine on cpu  not judged: {why}." in printed(lambda console: print_identification(found, console))


def test_errors_beside_judged_cases_are_said() -> None:
    tally = ContractTally(cases=1, elements=4)
    fits = Candidate(("once",), "once", (), {"bf16": tally})
    found = Identification("mine", "op", "cpu", "once", (fits,), cases=1, errors=("ValueError: no",))
    assert "yes, but it errored in 1 case" in printed(lambda console: print_overview([found], console))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Worker", InThisProcess)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parsers.add_identify(parser)
    options = parser.parse_args(arguments)
    return int(command.run(options, []))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "cases.txt"
    cases.write_text(f"{BF16}\n{FP16}\n")
    assert run("F.rms_norm", "eager[native_multiply+rounded_sum]", "--cases", str(cases)) == 0
    text = capsys.readouterr().out
    assert text.count("as it claims") == 2
    assert "as claimed" in text


def test_cases_that_no_kernel_is_for_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "cases.txt"
    cases.write_text(BF16)
    assert run("--op", "completion_mask", "--cases", str(cases)) == 3
    assert "no kernel of these ops is here" in capsys.readouterr().out


def test_the_command_with_generated_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eager[completion_mask]", "--cases-per-group", "1") == 0
    assert "keeps default, as it claims" in capsys.readouterr().out


def test_the_exit_code_of_a_wrong_claim(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lastbit.kernel import kernel\nimport torch.nn.functional as F\n\n"
        '@kernel("rms_norm", contract="native_multiply")\n'
        "def mine(x, weight=None, *, eps):\n    return F.rms_norm(x, x.shape[-1:], weight, eps)\n"
    )
    cases = tmp_path / "cases.txt"
    cases.write_text(BF16)
    assert run("mine", str(tmp_path), "--cases", str(cases)) == 1
    cases.write_text(OFFSET)
    assert run("mine", str(tmp_path), "--cases", str(cases)) == 3


PLAIN = """
import torch

def rms_norm(x, weight, *, eps, weight_offset=0.0):
    v = x.float()
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * (weight.float() + weight_offset)).to(x.dtype)
"""


@pytest.mark.parametrize("declared", ["", '@kernel("rms_norm", takes={"weight_offset": 1.0})\n'])
def test_a_kernel_that_claims_nothing(declared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one without a declaration, and where the default contract has no meaning in any of its cases."""
    path, cases = tmp_path / "plain.py", tmp_path / "cases.txt"
    path.write_text("from lastbit import kernel\n" + PLAIN.replace("def ", f"{declared}def "))
    cases.write_text(f"{OFFSET}\n{BF16}\n")
    asked = [str(path), "--cases", str(cases), *["--op", "rms_norm"] * (not declared)]
    assert run(*asked) == 0
    printed = capsys.readouterr().out
    assert "rms_norm on cpu  keeps fp32_multiply." in printed
    assert "wrong" not in printed and "errored" not in printed


def test_a_function_without_an_op_is_told_how_to_name_it(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("def norm(x, weight, *, eps):\n    return x\n")
    with pytest.raises(UsageError, match=r"declares no kernel; decorate .*, or name the op of a function without it"):
        run(str(path))


def test_a_kernel_that_ends_its_process_is_an_error_and_the_next_one_is_identified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_ends(place: Workplace, name: str, *, most: int) -> Identification:
        if name == "eager[completion_mask]":
            raise WorkerEnded("the process died without an exception", "completion_mask ids=int64[2,3]")
        return identify_kernel(place, name, most=most)

    monkeypatch.setattr(command, "identify_kernel", one_ends)
    assert run("--op", "completion_mask", "--cases-per-group", "0") == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "in 1 case, such as completion_mask ids=int64[2,3]: the process died without an exception" in shown
    assert "triton[completion_mask] on cpu keeps default, as it claims." in shown
