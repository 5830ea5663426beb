"""The terminal: a green run in few lines, a red one that says each thing once, and nothing that is wider."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from lastbit.cli import make_parser
from lastbit.reports import alerts, html, junit, markdown
from lastbit.reports.paper import LOG_WIDTH, make_console, print_table
from lastbit.reports.terminal import MOST_REASONS
from lastbit.result import Finding, Verdict
from lastbit.run import Coverage, NotRun, Power, Run, Spent
from tests.reports.test_explained_reports import explained
from tests.reports.test_reports import CASE, FP32, KERNEL, NATIVE, bare, failed, full_run, passed, shown


def large_run() -> Run:
    """Make a green run as large as that of this repository's kernels, with long names and many reasons."""
    results = tuple(
        passed(op=f"layer_norm_gated_backward_{n % 18}", kernel=f"triton[layer_norm_gated_backward+a_{n}]", seconds=2.0)
        for n in range(92)
        for _ in range(3)
    )
    not_run = tuple(NotRun(f"F.cross_entropy_backward[{n}] on cpu", f"reason {n} that is long " * 5) for n in range(20))
    return Run(results, not_run=not_run, environment={"records": "runs/1", "premises": "documented"})


@pytest.mark.parametrize("width", [80, 120])
def test_a_green_run_of_92_kernels_has_at_most_40_lines(width: int) -> None:
    lines = shown(large_run(), width, 0).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    [row] = [line.split() for line in lines if line.startswith("  layer_norm_gated_backward_3 ")]
    assert (row[1], row[-1]) == ("5", "PASSED")
    told = lines[lines.index("Not run") + 1 : -1]
    assert f"  and for {20 - MOST_REASONS // 2} more reasons" in told, "each takes two lines"
    assert "PASSED  kernels: 92 passed · cases: 276 passed · 552.0 s in cases" in lines[-3]
    assert lines[-2:] == ["records in runs/1", "stages and statistics: lastbit report runs/1 -v"]


def test_a_line_per_op_counts_its_kernels_and_says_how_many_are_worst() -> None:
    few = bare(Verdict.UNSUPPORTED, "no", kernel="few", op="swiglu", declined=True)
    results = (passed(), passed(kernel="other"), failed(kernel="wrong"), passed(op="swiglu", kernel="few"), few)
    rows = [line.split() for line in shown(Run(results), verbose=0).splitlines()]
    assert ["rms_norm", "3", "3", "100", "%", "1.5", "s", "FAILED", "1/3"] in rows
    assert ["swiglu", "1", "2", "100", "%", "1.0", "s", "PASSED", "on", "1", "of", "2", "cases"] in rows


def test_what_has_no_case_has_no_command() -> None:
    """`lastbit verify FILE 'rms_norm (group narrow)'` cannot be run."""
    run = Run((bare(Verdict.ERRORED, "lost", case="rms_norm (group narrow)"),))
    pages = [shown(run, verbose=0), shown(run, verbose=1), markdown.page(run), junit.document(run), html.page(run)]
    pages += [alert.text for alert in alerts.alerts(run)]
    assert all("lost" in page and "lastbit verify" not in page for page in pages)


def test_a_red_run_begins_with_the_verdict() -> None:
    for verbose in range(3):
        assert shown(full_run(), verbose=verbose).startswith("ERRORED  kernels: 2 passed, 2 inconclusive, 1 failed, ")
    green = shown(Run((passed(),)), verbose=0)
    assert green.splitlines()[-1].startswith("PASSED")


def test_a_finding_says_what_is_sure_the_line_the_tensors_and_the_command() -> None:
    result = failed(kernel="wrong[x]")
    small = "rms_norm x=bf16[1,2]:values(0.75,0.5) weight=bf16[2]:values(1,1) eps=1e-06 seed=0"
    explanation = replace(explained(result, "norm.py"), smallest=small)
    run = Run((result,), explanations=(explanation,))
    block = shown(run, verbose=0).split("\n\n")[1].splitlines()
    assert block[:3] == [
        "FAILED  wrong[x] of rms_norm on cpu",
        "  keeps    fp32_multiply where it claims native_multiply",
        "  line     norm.py:3  xhat = x * rstd",
    ]
    assert block[3].startswith("  rounding 0.1486 lies between ")
    assert f"  smallest {small}" in block
    assert block[-2] == f"  lastbit verify 'wrong[x]' '{CASE}' --device cpu"
    assert "mismatched" not in "".join(block)
    assert "mismatched" in shown(run, verbose=1)


@pytest.mark.parametrize("verbose", [0, 1])
def test_values_of_long_tensors_are_left_out_and_it_is_said_where_they_are(verbose: int) -> None:
    small = f"rms_norm x=bf16[1,200]:values({','.join(['0.75'] * 200)}) eps=1e-06 seed=0"
    run = Run((failed(),), explanations=(replace(explained(failed(), "norm.py"), smallest=small),))
    text = " ".join(shown(run, 80, verbose).split())
    assert "smallest rms_norm x=bf16[1,200]:values(…) eps=1e-06 seed=0; `lastbit explain` and run.json" in text
    assert "0.75" not in text
    assert small in shown(run, 600, verbose)


def test_where_no_line_is_proven_the_place_is_said() -> None:
    explanation = explained(failed(), "norm.py")
    between = replace(explanation.trace, steps=(), blamed=None, between=("norm.py:3 to 5",), until="output")
    text = shown(Run((failed(),), explanations=(replace(explanation, trace=between),)), verbose=0)
    assert "line      not found; between" in text
    assert f"diagnosis {explanation.diagnoses[0].split()[0]}" in text
    assert "source   kernels/rms_norm.py:108" in shown(Run((failed(),)), verbose=0)


def test_where_no_rounding_is_missing_it_is_said_what_would_be_right() -> None:
    """Right under the line and its value, once."""
    explanation = explained(failed(), "norm.py")
    assert explanation.culprit is not None
    culprit = replace(explanation.culprit, mend="with 1e-06 in place of 2e-06")
    trace = replace(explanation.trace, blamed=culprit)
    gives = replace(explanation, trace=trace, arithmetic=(replace(explanation.arithmetic[0], did="gives 0.2"),))
    text = " ".join(shown(Run((failed(),), explanations=(gives,)), verbose=0).split())
    assert re.search(
        r"line norm.py:3 .*? value normalized is .*?\. should be: with 1e-06 in place of 2e-06; done", text
    )
    rounding = shown(Run((failed(),), explanations=(replace(explanation, trace=trace),)), verbose=0)
    assert "rounding" in rounding and "should be" not in rounding


def test_values_of_another_contract_hide_no_other_fault() -> None:
    own = failed().findings
    torn = Finding("nondeterministic", "output", "1 of 17 elements differ between two calls.")
    assert "not possible" not in shown(Run((failed(),)), verbose=0)
    assert torn.sentence in shown(Run((failed(findings=(*own, torn)),)), verbose=0)
    assert "not possible" in shown(Run((failed(explained_by=()),)), verbose=0)


def test_a_finding_of_several_kernels_is_told_once() -> None:
    both = [failed(kernel=kernel, dtypes=dtype) for kernel in ("a", "b") for dtype in ("bf16", "fp16")]
    text = shown(Run(tuple(both)), verbose=0)
    assert "FAILED  a, b of rms_norm on cpu" in text
    assert text.count("lastbit verify") == 1


def test_kernels_with_one_wrong_line_are_one_finding_with_what_each_keeps() -> None:
    claims = {"a": NATIVE, "b": FP32}
    both = [failed(kernel=k, contract=c, explained_by=(f"other_{k}",), source=f"{k}.py:1") for k, c in claims.items()]
    explanations = tuple(explained(result, "norm.py") for result in both)
    text = shown(Run(tuple(both), explanations=explanations), verbose=0)
    assert "FAILED  a, b of rms_norm on cpu" in text
    assert all(f"other_{kernel} where it claims {contract}" in text for kernel, contract in claims.items())
    assert shown(Run(tuple(both)), verbose=0).count("lastbit verify") == 2, "where no line is proven they are two"


def test_an_inconclusive_op_has_a_line_with_what_would_decide_it() -> None:
    run = Run((passed(),), power=(Power(KERNEL, "cpu", "bf16", FP32, 3, 0, True),))
    lines = shown(run, verbose=0).splitlines()
    at = lines.index("Inconclusive")
    said = f"  rms_norm, 1 of 1 kernel: no case tells its contract from {FP32}; run more cases (--cases-per-group)"
    said += f" ({KERNEL})"
    assert " ".join(lines[at + 1 : lines.index("", at)]).split() == said.split()
    vague = shown(Run((bare(Verdict.INCONCLUSIVE, "no element decided"),)), verbose=0)
    assert f"  rms_norm, 1 of 1 kernel: no element decided ({KERNEL})" in vague
    assert "Inconclusive" not in shown(Run((passed(),)), verbose=0)


def test_what_was_not_run_is_wrapped_and_not_cut() -> None:
    reason = "the module is that of another revision, and it needs a package that is not here"
    text = shown(replace(large_run(), not_run=(NotRun("the kernels of main", reason),)), 60, verbose=0)
    assert f"{reason}: the kernels of main" in " ".join(text.split())


@pytest.mark.parametrize("width", [40, 100])
def test_every_kernel_that_does_not_pass_is_named_with_a_reason(width: int) -> None:
    """40 findings, 9 kernels with one of them, 9 that are open for two reasons and 9 that took no case."""
    apart = [failed(kernel=f"apart_{n}", source=f"{n}.py:1") for n in range(40)]
    alike = [failed(kernel=f"alike_{n}", source="alike.py:1", explained_by=()) for n in range(9)]
    vague = [bare(Verdict.INCONCLUSIVE, f"reason {n % 2}", kernel=f"vague_{n}") for n in range(9)]
    never = [bare(Verdict.UNSUPPORTED, "no", kernel=f"never_{n}") for n in range(9)]
    run = Run((*apart, *alike, *vague, *never))
    words = re.split(r"[^\w]+", shown(run, width, verbose=0))
    assert [r.kernel for r in run.results if r.kernel not in words] == []
    text = " ".join(shown(run, width, verbose=0).split())
    assert "and 31 more findings" in text
    told = "fp32_multiply where it claims native_multiply"
    assert (text.count(f"keeps {told}"), text.count(f"rms_norm on cpu: {told}")) == (9, 31)
    assert "5 of 67 kernels: reason 0 (vague_0, vague_2, vague_4, vague_6, vague_8)" in text


def test_sentences_that_are_not_shown_are_counted() -> None:
    torn = [Finding("nondeterministic", "output", f"sentence {n}.") for n in range(4)]
    text = shown(Run((failed(findings=tuple(torn), explained_by=()),)), verbose=0)
    assert "sentence 1." in text and "sentence 2." not in text
    assert "and 2 more sentences with -v" in text


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_nothing_is_wider_than_the_terminal_but_lines_to_copy(width: int, verbose: int) -> None:
    coverage = (Coverage(KERNEL, "cpu", "x regime", "bf16", ("rows", "huge"), (), ("a long name",) * 30),)
    long = failed(
        kernel="triton[" + "long_contract+" * 9 + "end]", case=CASE.replace("rms_norm", "rms_norm " + "y=1 " * 30)
    )
    full = full_run()
    run = replace(full, results=(*full.results, long), coverage=coverage, spent=Spent({"references": 9.0}, 2))
    for line in shown(replace(run, explanations=(explained(long, "norm.py"),)), width, verbose).splitlines():
        assert len(line) <= width or re.match(r"\s*(lastbit |rms_norm )", line), line


def test_more_is_said_with_each_v() -> None:
    run = replace(full_run(), coverage=(Coverage(KERNEL, "cpu", "x regime", "bf16", ("rows",)),))
    run = replace(run, environment={"premises": "documented", "records": "runs/1"}, spent=Spent({"references": 9.0}, 2))
    marks = {
        "Stages on cpu": 1,
        "Bits on cpu and cuda:0": 1,
        "mismatched": 1,
        "Coverage of rms_norm on cpu": 2,
        "What this run could not have seen": 2,
        "Error bounds: documented": 2,
        "Time: references": 2,
    }
    for verbose in range(3):
        text = shown(run, verbose=verbose)
        assert {mark: mark in text for mark in marks} == {mark: verbose >= least for mark, least in marks.items()}


def test_v_is_an_option_of_verify_and_not_of_pytest() -> None:
    options, rest = make_parser().parse_known_args(["verify", "my_kernels", "-vv", "-x"])
    assert (options.verbose, rest) == (2, ["-x"])


def test_a_log_is_as_wide_as_it_says_or_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width == LOG_WIDTH == 100
    monkeypatch.setenv("COLUMNS", "80")
    assert make_console().width == 80


def test_a_table_that_is_too_wide_loses_spare_columns_and_then_wraps_the_widest_cells_alike() -> None:
    console = Console(file=io.StringIO(), width=41)
    rows = [[Text(cell) for cell in ("word " * 6, "word " * 6, "7", "8")]]
    assert print_table(console, ("one", "two", "count", "spare"), rows, spare=("spare",)) == ["spare"]
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "  one              two              count",
        "  word word word   word word word       7",
        "  word word word   word word word",
    ]


def test_a_table_breaks_no_word_as_long_as_columns_can_be_left_out_or_wrapped() -> None:
    console = Console(file=io.StringIO(), width=34)
    rows = [[Text(cell) for cell in ("normalized", "0.784463942 to 0.784464657", "0x3f48d2a7")]]
    assert print_table(console, ("stage", "allowed", "bits"), rows, spare=("bits",), wrap_first=True) == ["bits"]
    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue().split()
    assert words == ["stage", "allowed", "normalized", "0.784463942", "to", "0.784464657"]
    wide = Console(file=io.StringIO(), width=40)
    assert print_table(wide, ("stage", "allowed", "bits"), rows, spare=("bits",), wrap_first=True) == []


@pytest.mark.parametrize(
    ("kept", "claimed", "said"),
    [
        (("a+c", "b+c"), "d+c", "a or b where it claims d"),
        (("a+c+more",), "a+c", "a+c+more where it claims a+c"),
        (("eager",), "fused+x", "eager where it claims fused+x"),
    ],
)
def test_options_that_what_is_kept_and_claimed_share_are_left_out(
    kept: tuple[str, ...], claimed: str, said: str
) -> None:
    text = shown(Run((failed(contract=claimed, explained_by=kept),)), verbose=0)
    assert f"  keeps    {said}\n" in text
