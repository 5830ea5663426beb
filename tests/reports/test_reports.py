"""Records survive the disk, and a reader of the terminal finds what is wrong and what to do."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from lastbit.errors import LastbitError
from lastbit.reports import markdown, records, stage_summary, summary, wording
from lastbit.reports.progress import RunProgress
from lastbit.reports.terminal import print_run
from lastbit.result import ULP_BINS, CaseResult, Comparison, Finding, RowCheck, StageResult, Verdict, Worst
from lastbit.run import COMBINATIONS, Coverage, DeviceAgreement, NotRun, Power, Run

CASE = "rms_norm x=bf16[4,128]@256,1:rows weight=bf16[128] eps=1e-06 seed=17"
NATIVE, FP32 = "native_multiply+rounded_sum", "fp32_multiply+rounded_sum"
KERNEL = f"triton[{NATIVE}]"
SOURCE = str(Path.cwd() / "kernels" / "rms_norm.py") + ":108"


def comparison(outside: int = 0, *, numel: int = 512, mismatched: int = 0, **changes: object) -> Comparison:
    histogram = (numel - mismatched, mismatched, 0, 0, 0, 0)
    whole = Comparison(numel, numel, mismatched, outside, 0, 1e-6, 1.0, 1e-3, -2.0, numel, 1.0, histogram)
    return replace(whole, **changes)  # type: ignore[arg-type]


def stage(name: str = "output", dtype: str = "bf16", outside: int = 0, *, result: bool = True) -> StageResult:
    seen = comparison(outside, mismatched=outside)
    return StageResult(name, dtype, result, seen, seen, f"bits of {name}")


def passed(**changes: object) -> CaseResult:
    stages = (stage("inv_rms", "fp32", result=False), stage())
    base = CaseResult(
        Verdict.PASSED,
        stages,
        case=CASE,
        op="rms_norm",
        kernel=KERNEL,
        contract=NATIVE,
        device="cpu",
        dtypes="bf16",
        source=SOURCE,
        seconds=0.5,
    )
    return replace(base, **{"group": "plain", **changes})  # type: ignore[arg-type]


def failed(**changes: object) -> CaseResult:
    finding = Finding("outside", "output", "7 of 512 elements have a value that is not possible [/b] here.")
    stages = (stage("inv_rms", "fp32", result=False), stage(outside=7))
    rows = RowCheck("inv_rms", 4, 3)
    own = {"verdict": Verdict.FAILED, "stages": stages, "findings": (finding,), "rows": rows, "explained_by": (FP32,)}
    return passed(**{**own, **changes})


def bare(verdict: Verdict, reason: str, **changes: object) -> CaseResult:
    return passed(**{"verdict": verdict, "stages": (), "reason": reason, **changes})


def shown(run: Run, width: int = 100, verbose: int = 2) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_run(run, console, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def everything() -> CaseResult:
    """Make a result in which every field has a value of its own, the awkward floats included."""
    worst = Worst((1, 5), math.inf, -math.inf, -0.0, 5e-324, 0.1, 3.0)
    odd = comparison(3, mismatched=9, worst=worst, max_ulp=math.inf, budget_ratio=1.5)
    stages = (StageResult("inv_rms", "fp32", False, odd, comparison(), "aa"), stage())
    return failed(
        stages=stages, ruled_out={FP32: 3}, reason="why → not\n[red]", fingerprint="ff", counted=False, group="a/b"
    )


# Records


def test_result_survives_a_line() -> None:
    line = records.dump(everything())
    assert "\n" not in line
    assert records.parse(line.encode(), "here") == everything()


def test_results_survive_a_file(tmp_path: Path) -> None:
    results = [everything(), passed(), bare(Verdict.UNSUPPORTED, "no residual")]
    path = tmp_path / "worker.jsonl"
    path.write_text("".join(records.dump(r) + "\n" for r in results))
    assert records.load(path) == results
    loaded = records.load(path)[0]
    assert isinstance(loaded.verdict, Verdict)
    assert isinstance(loaded.stages[0].cumulative.worst, Worst)
    assert math.copysign(1, loaded.stages[0].cumulative.worst.exact) == -1


def test_nan_survives(tmp_path: Path) -> None:
    worst = Worst((0,), math.nan, 1.0, 1.0, 1.0, 1.0, math.inf)
    result = passed(stages=(StageResult("output", "bf16", True, comparison(worst=worst), comparison()),))
    path = tmp_path / "worker.jsonl"
    path.write_text(records.dump(result) + "\n")
    [loaded] = records.load(path)
    assert records.dump(loaded) == records.dump(result)
    found = loaded.stages[0].cumulative.worst
    assert found is not None
    assert math.isnan(found.actual)
    assert found.ulp == math.inf


def test_lines_are_strict_json() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(records.dump(everything()), parse_constant=refuse)


@pytest.mark.parametrize("kept", [1, 40, 200])
def test_truncated_last_line_is_ignored(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "worker.jsonl"
    path.write_text(records.dump(passed()) + "\n" + records.dump(failed())[:kept])
    assert records.load(path) == [passed()]


def test_whole_last_line_without_break_is_read(tmp_path: Path) -> None:
    path = tmp_path / "worker.jsonl"
    path.write_text(records.dump(passed()) + "\n" + records.dump(failed()))
    assert records.load(path) == [passed(), failed()]


@pytest.mark.parametrize(
    "line",
    [
        '{"case": "x", "op"',
        "",
        "[]",
        "7",
        '{"case": "x"}',
        '{"surprise": 1}',
        records.dump(passed()).replace('"PASSED"', '"FINE"'),
        records.dump(passed()).replace('"numel": 512', '"numel": "many"'),
    ],
)
def test_malformed_line_is_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "worker.jsonl"
    path.write_text(f"{records.dump(passed())}\n{line}\n{records.dump(passed())}\n")
    with pytest.raises(LastbitError, match="malformed") as error:
        records.load(path)
    assert f"{path}, line 2" in str(error.value)
    assert line[:200] in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LastbitError, match=r"cannot read .*absent\.jsonl"):
        records.load(tmp_path / "absent.jsonl")


def test_schema_is_the_documented_one() -> None:
    table = records.__doc__ or ""
    documented = [
        name for row in table.splitlines() if row.startswith("| `") for name in row.split("|")[1].split("`")[1::2]
    ]
    assert documented == list(records.COLUMNS)
    assert sum(name.startswith("ulp_") for name in documented) == len(ULP_BINS) + 1


def test_frame_has_one_row_per_stage() -> None:
    frame = records.frame([everything(), bare(Verdict.ERRORED, "boom")])
    assert list(frame.columns) == list(records.COLUMNS)
    assert list(frame["stage"]) == ["inv_rms", "output", ""]
    first, errored = frame.iloc[0], frame.iloc[2]
    assert first["verdict"] == "FAILED"
    assert (first["outside"], first["isolated_outside"]) == (3, 0)
    assert first["rel_l2"] == pytest.approx(1e-3)
    assert (first["ulp_0"], first["ulp_1"], first["ulp_above_16"]) == (503, 9, 0)
    assert json.loads(first["worst_index"]) == [1, 5]
    assert first["worst_actual"] == math.inf
    assert (first["rows"], first["rows_explained"]) == (4, 3)
    assert json.loads(first["ruled_out"]) == {FP32: 3}
    assert first["explained_by"] == FP32
    assert not first["counted"]
    assert errored["reason"] == "boom"
    assert pd.isna(errored["numel"])
    assert errored["findings"] == errored["worst_index"] == ""


def test_types_do_not_depend_on_the_results() -> None:
    frames = [records.frame(r) for r in ([], [passed()], [bare(Verdict.UNSUPPORTED, "no")])]
    assert all(frame.dtypes.equals(frames[0].dtypes) for frame in frames)


def test_half_of_a_surrogate_pair_survives(tmp_path: Path) -> None:
    """As an exception's message may hold: escaped in the table, which is UTF-8, and as it is in the records."""
    run = Run((bare(Verdict.ERRORED, "no file \ud800"),))
    records.write(run, tmp_path)
    assert records.read(tmp_path) == run
    assert pd.read_parquet(tmp_path / "records.parquet").reason.tolist() == ["no file \\ud800"]


def test_run_survives_a_folder(tmp_path: Path) -> None:
    run = full_run()
    folder = tmp_path / "runs" / "first"
    records.write(run, folder)
    assert records.read(folder) == run
    assert {path.name for path in folder.iterdir()} == {"records.jsonl", "records.parquet", "run.json"}
    table = pq.read_table(folder / "records.parquet")
    assert table.column_names == list(records.COLUMNS)
    assert table.num_rows == sum(max(1, len(r.stages)) for r in run.results)


def test_failed_write_keeps_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write(Run((passed(),)), tmp_path)

    def fill_disk(self: pd.DataFrame, path: Path, **_: object) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fill_disk)
    with pytest.raises(OSError, match="disk full"):
        records.write(Run((passed(), passed())), tmp_path)
    assert pq.read_table(tmp_path / "records.parquet").num_rows == 2
    assert {path.name for path in tmp_path.iterdir()} == {"records.jsonl", "records.parquet", "run.json"}


def test_incomplete_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LastbitError, match=r"no run\.json"):
        records.read(tmp_path)
    (tmp_path / "run.json").write_text('{"power": 3}')
    with pytest.raises(LastbitError, match="malformed"):
        records.read(tmp_path)


# Terminal


def full_run() -> Run:
    """Make a run with one kernel of each fate on two devices."""
    small = CASE.replace("[4,128]@256,1", "[1,2]").replace("[128]", "[2]")
    results = (
        passed(),
        passed(device="cuda:0"),
        failed(kernel="wrong[x]", group="odd [strides]"),
        failed(kernel="wrong[x]", group="odd [strides]", case=small, counted=False),
        bare(Verdict.UNSUPPORTED, "the kernel takes no residual", kernel="wrong[x]"),
        bare(Verdict.ERRORED, "RuntimeError: bad [shape]", kernel="broken"),
        bare(Verdict.INCONCLUSIVE, "no element has a single legal value", kernel="vague"),
        passed(kernel="blind"),
    )
    power = (
        Power("blind", "cpu", "bf16", FP32, 3, 0, True),
        Power(KERNEL, "cpu", "fp32", FP32, 3, 0, False),
        Power(KERNEL, "cpu", "bf16", FP32, 3, 20, True),
    )
    not_run = (NotRun("slow on cpu", "declared for cuda only"), NotRun("slower on cpu", "declared for cuda only"))
    agreement = (
        DeviceAgreement(KERNEL, "inv_rms", ("cpu", "cuda:0"), 10, 7),
        DeviceAgreement(KERNEL, "output", ("cpu", "cuda:0"), 10, 10),
    )
    return Run(results, power, not_run, agreement, {"records": "runs/[1]"})


@pytest.mark.parametrize("width", [80, 100, 120])
def test_stage_table_and_counts(width: int) -> None:
    text = shown(Run((passed(), passed())), width)
    [row] = [line.split() for line in text.splitlines() if line.startswith("  output")]
    counts, mismatch = (["2", "0"], ["0", "%"]) if width > 80 else ([], [])
    assert row == ["output", "bf16", *counts, "1.0e-03", "–", "1", *mismatch, "0", "-0.0039", "PASSED"]
    assert ("columns that this width has no room for: cases, extreme, mismatch" in text) is (width == 80)
    assert "  (inv_rms)" in text
    assert f"{KERNEL} on cpu  PASSED  kernels/rms_norm.py:108" in text
    assert f"contract {NATIVE} of rms_norm  2 cases: 2 passed" in text
    assert "outside" in text
    assert text.splitlines()[-1] == "PASSED  kernels: 1 passed · cases: 2 passed · 1.0 s in cases"
    assert "Not run" not in text


def test_finding_is_complete() -> None:
    text = shown(full_run())
    block = text[text.index("FAILED  wrong[x] of rms_norm on cpu, group odd [strides]") :].split("\n\n")[0]
    assert f"claims      {NATIVE} of rms_norm" in block
    assert "first wrong stage output (bf16)" in block
    assert "7 of 512 elements have a value that is not possible [/b] here." in block
    assert "bias -0.0039 ulp; 1.4 % of 512 elements mismatched (1 ulp: 7); 3 of 4 rows" in block
    assert f"keeps       {FP32}" in block
    assert "kernels/rms_norm.py:108" in block
    assert "1 failed of 1 case in this group, on cpu" in block


@pytest.mark.parametrize("width", [40, 100])
def test_repro_line_is_the_smallest_case_and_unwrapped(width: int) -> None:
    small = "rms_norm x=bf16[1,2]:rows weight=bf16[2] eps=1e-06 seed=17"
    lines = [line.strip() for line in shown(full_run(), width).splitlines()]
    assert f"lastbit verify 'wrong[x]' '{small}' --device cpu" in lines


def test_repro_line_says_where_the_kernels_are() -> None:
    run = replace(full_run(), environment={"options": "--kernels 'my kernels'"})
    assert "lastbit verify 'my kernels::wrong[x]' '" in shown(run)


def test_repro_line_is_quoted_for_a_shell() -> None:
    assert "'it'\"'\"'s'" in summary.repro_line(passed(case="it's"))


def test_errored_kernel_shows_its_reason() -> None:
    text = shown(full_run())
    block = text[text.index("ERRORED  broken") :].split("\n\n")[0]
    assert "RuntimeError: bad [shape]" in block
    assert f"lastbit verify broken '{CASE}' --device cpu" in block


def test_what_was_not_run() -> None:
    text = shown(full_run())
    assert "slow on cpu, slower on cpu: declared for cuda only" in text
    assert "1 case unsupported: the kernel takes no residual (wrong[x])" in text


def test_what_could_not_be_seen() -> None:
    text = shown(full_run(), 200)
    assert "blind on cpu  INCONCLUSIVE" in text
    assert f"blind on cpu with bf16 was never told from {FP32} (in 3 cases)" in text
    assert "--cases-per-group" in text
    assert f"nothing to see: {FP32} = {NATIVE} (fp32)." in text
    assert "1 case inconclusive: no element has a single legal value (vague)" in text


def test_coverage_is_what_every_kernel_was_judged_on_that_did_not_fail() -> None:
    coverage = (
        Coverage(KERNEL, "cpu", "x regime", "bf16", ("rows", "huge")),
        Coverage(KERNEL, "cpu", "x layout", "bf16", ("contiguous",), ("half",)),
        Coverage(KERNEL, "cpu", "eps", "", ("1e-06", "0.1")),
        Coverage("blind", "cpu", "x regime", "bf16", ("rows",), (), ("huge",)),
        Coverage(KERNEL, "cpu", "x regime", "fp16", ("rows",), (), ("huge",)),
        Coverage(KERNEL, "cpu", "x layout", "fp16", ("contiguous",)),
        Coverage("blind", "cpu", "x layout", "fp16", (), ("contiguous",)),
        Coverage("wrong[x]", "cpu", "x regime", "bf16", (), (), ("rows", "huge")),
    )
    run = replace(full_run(), coverage=coverage)
    lines = [line.split() for line in shown(run, 200).splitlines()]
    at = lines.index(["Coverage", "of", "rms_norm", "on", "cpu"])
    assert lines[at + 1] == ["of", "dtype", "regimes", "layouts", "values"]
    assert lines[at + 2] == ["x", "bf16", "fp16", "1/2", "1/1"]
    assert lines[at + 3] == ["eps", "2/2"]
    gaps = ["x regime in bf16: huge never judged (blind)", f"x layout in bf16: half turned down ({KERNEL})"]
    gaps.append(f"x regime in fp16: huge never judged ({KERNEL})")
    assert [" ".join(line) for line in lines[at + 4 : at + 7]] == gaps
    text = markdown.page(run)
    assert "| x | bf16 fp16 | 1/2 | 1/1 |" in text and "huge never judged (blind)" in text


def test_options_that_did_not_meet_are_named_with_the_reason() -> None:
    pairs = tuple(f"x=bf16 × {name}" for name in "abcdefghij")
    coverage = Coverage(KERNEL, "cpu", COMBINATIONS, "", ("x=bf16 × eps",), ("no weight",), pairs)
    run = replace(full_run(), coverage=(coverage,))
    assert "combinations 1/11" in " ".join(shown(run, 200).split())
    for text in (shown(run, 200), markdown.page(run)):
        said = " ".join(text.split())
        assert f"combinations: {', '.join(pairs[:8])} and 2 more without a case in this run (" in said
        assert "combinations: no weight not taken (" in said


def test_agreement_and_summary() -> None:
    text = shown(full_run(), 200)
    assert "17 of 20 tensors are equal to the last bit" in text
    assert f"{KERNEL}: inv_rms 7/10 equal" in text
    first, *_, last = text.splitlines()
    assert first.startswith("ERRORED  kernels: 2 passed, 2 inconclusive, 1 failed, 1 errored")
    assert "cases: 3 passed, 1 unsupported, 1 inconclusive, 1 failed, 1 errored" in first
    assert last == "records in runs/[1]"


def test_empty_run() -> None:
    assert shown(Run(())).strip() == "NOTHING VERIFIED  kernels: none · cases: none · 0.0 s in cases"


def test_failures_of_a_kernel_at_one_stage_are_one_problem() -> None:
    results = [failed(kernel="k", group=f"g{g}") for g in range(5)]
    [problem] = summary.problems(Run(tuple(results)))
    assert problem.groups == ("g0", "g1", "g2", "g3", "g4")
    assert "FAILED  k of rms_norm on cpu, groups g0, g1, g2, g3 and 1 more" in shown(Run(tuple(results)))


def test_every_failing_kernel_comes_before_a_second_stage() -> None:
    def at(stage: str, kernel: str) -> CaseResult:
        findings = (Finding("rows", stage, "wrong"),)
        return failed(kernel=kernel, stages=passed().stages, findings=findings, source=f"{kernel}.py:1")

    results = [at(f"s{s}", f"k{k}") for k in range(4) for s in range(5)]
    found = summary.problems(Run(tuple(results)))
    assert [p.smallest.kernel for p in found[:4]] == ["k0", "k1", "k2", "k3"]
    text = shown(Run(tuple(results)))
    assert text.count("lastbit verify") == 10
    assert "and 10 more findings; the records have all of them\n  FAILED  k2 of rms_norm on cpu" in text


def test_errors_and_wrong_results_come_first_and_then_what_most_cases_show() -> None:
    guard = Finding("wrote_outside", "allocation 0", "wrote 1 element past the end")
    fine = {"stages": (stage(),), "findings": (guard,), "rows": None}
    results = [
        failed(kernel="guard", **fine),
        failed(kernel="guard", **fine),
        failed(kernel="once"),
        *(failed(kernel="often") for _ in range(3)),
        bare(Verdict.ERRORED, "ValueError", kernel="raises"),
        bare(Verdict.ERRORED, "ValueError", kernel="once"),
    ]
    order = [(p.smallest.kernel, p.smallest.verdict.value) for p in summary.problems(Run(tuple(results)))]
    first_of_each = [("once", "ERRORED"), ("raises", "ERRORED"), ("often", "FAILED"), ("guard", "FAILED")]
    assert sorted(order[:2]) == first_of_each[:2]
    assert order[2:] == [*first_of_each[2:], ("once", "FAILED")]
    assert "The worst of each kernel first: errors before wrong results" in " ".join(shown(Run(tuple(results))).split())


def test_findings_do_not_depend_on_the_order_in_which_workers_record() -> None:
    results = [
        failed(kernel=kernel, group=group, case=case)
        for kernel in ("a", "b")
        for group, case in (("wide", CASE), ("narrow", CASE), ("narrow", CASE.replace("seed=17", "seed=18")))
    ]
    found, other = (summary.problems(Run(tuple(order))) for order in (results, results[3:] + results[2::-1]))
    assert [p.groups for p in found] == [("narrow", "wide")] * 2 == [p.groups for p in other]
    assert [p.smallest.kernel for p in found] == [p.smallest.kernel for p in other]
    assert {p.smallest.group for p in (*found, *other)} == {"narrow"}


def test_the_order_of_findings_is_not_explained_where_there_is_one() -> None:
    assert "The worst of each kernel" not in shown(Run((failed(),)))


def test_a_failure_that_no_value_shows_stands_beside_the_values() -> None:
    """Otherwise every row of the table would say PASSED below a kernel that FAILED."""
    guard = Finding("wrote_outside", "allocation 0", "wrote 1 element past the end")
    clean = failed(stages=(stage(),), findings=(guard,), rows=None)
    text = shown(Run((clean, clean, passed(kernel=clean.kernel))))
    table = text[text.index("Stages on") :]
    assert "beside the values below, 2 cases failed for wrote outside" in table
    [row] = [line for line in table.splitlines() if line.startswith("  output ")]
    assert row.endswith("PASSED")
    assert list(stage_summary.STAGE_COLUMNS)[-1] == "values"
    assert "beside the values below" not in shown(full_run())
    assert "beside the values below, 2 cases failed for wrote outside" in markdown.page(Run((clean, clean)))


def cases_field(*results: CaseResult) -> str:
    [problem] = summary.problems(Run(results))
    return dict(wording.problem_fields(problem))["cases"]


def test_cases_that_were_tried_while_shrinking_are_told_from_counted_ones() -> None:
    shrunk = failed(counted=False)
    assert (
        cases_field(failed(), passed(kernel=failed().kernel, group=failed().group))
        == "1 failed of 2 cases in this group, on cpu"
    )
    said = "1 failed of 1 case in this group, on cpu; 2 more while a failure was shrunk"
    assert cases_field(failed(), shrunk, shrunk) == said
    assert cases_field(shrunk) == "only in 1 case that another failure was shrunk to, on cpu"
    explained = dict(wording.problem_fields(summary.problems(Run((failed(), shrunk)))[0]))["keeps"]
    assert explained.endswith("allows every bit of all 2 failed results, those tried while shrinking included")


def test_a_bias_without_meaning_is_left_out() -> None:
    wild = comparison(7, mismatched=7, bias_sum=-6e9, bias_count=3)
    stages = (StageResult("output", "bf16", True, wild, wild),)
    fields = dict(wording.problem_fields(summary.problems(Run((failed(stages=stages, rows=None),)))[0]))
    assert fields["statistics"] == "output: 1.4 % of 512 elements mismatched (1 ulp: 7)"


def test_explanation_holds_for_every_failed_result() -> None:
    [problem] = summary.problems(Run((failed(explained_by=("a", "b")), failed(explained_by=("b",)))))
    assert problem.explained_by == ("b",)
    text = shown(Run((failed(explained_by=("a",)), failed(explained_by=()))))
    assert "explained by a" not in text


def test_row_finding_without_an_element_outside() -> None:
    finding = Finding("rows", "inv_rms", "1 of 4 rows cannot come from one fp32 inv_rms.")
    text = shown(Run((failed(stages=passed().stages, findings=(finding,)),)))
    assert "1 of 4 rows cannot come" in text
    [row] = [line for line in text.splitlines() if line.startswith("  (inv_rms)")]
    assert row.endswith("FAILED")


def test_stages_have_the_order_of_the_reference() -> None:
    shown_stages = ("scale quantized", "variance output", "sum output", "output scale", "sum variance")
    results = [passed(stages=tuple(map(stage, names.split()))) for names in shown_stages]
    assert stage_summary.stage_order(results) == ["sum", "variance", "output", "scale", "quantized"]


def test_contradicting_orders_do_not_break_the_table() -> None:
    results = [passed(stages=tuple(map(stage, names.split()))) for names in ("a b", "b c a")]
    assert stage_summary.stage_order(results) == ["a", "b", "c"]


def test_parts_of_one_order_are_merged() -> None:
    parts = [["a", "d"], ["a", "b", "c", "d"], ["b", "d", "e"]]
    assert stage_summary.in_one_order(parts) == ["a", "b", "c", "d", "e"]


def test_one_overflowing_case_does_not_decide_the_bias() -> None:
    cases = [passed(stages=(replace(stage(), cumulative=comparison(bias_sum=b)),)) for b in (512.0, 512.0, -5e9)]
    [only] = stage_summary.stage_summaries(cases, ["output"])
    assert only.typical_bias == 1.0


def test_errors_without_a_number_do_not_break_the_table() -> None:
    odd = comparison(squared_error=math.nan, max_ulp=math.inf, ulp_histogram=(511, 0, 0, 0, 0, 1))
    cases = [passed(stages=(StageResult("output", "bf16", True, c, c),)) for c in (odd, Comparison())]
    [only] = stage_summary.stage_summaries(cases, ["output"])
    assert math.isnan(only.worst_error)
    assert math.isnan(only.typical_error)
    assert "0.2 % of elements beyond 16 ulp, up to inf" in shown(Run(tuple(cases)))


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(4, 1_000_000, "0.0004 %"), (0, 5, "0 %"), (5, 5, "100 %"), (0, 0, "–")]
)
def test_share(part: int, whole: int, text: str) -> None:
    assert summary.share(part, whole) == text


def test_elements_of_a_case_line() -> None:
    assert summary.elements(CASE) == 4 * 128 + 128
    assert summary.elements("op x=fp32[] y=fp32[0,3] n=3 seed=0") == 1


# Progress


def test_progress_in_a_log_is_sparse() -> None:
    """A run may add cases to those that were planned."""
    now = 0.0
    console = Console(file=io.StringIO(), width=100)
    with RunProgress(console, clock=lambda: now) as progress:
        progress.set_total(2)
        progress.advance(passed())
        progress.advance(failed())
        now = 29.0
        progress.advance(failed(counted=False))
        now = 31.0
        progress.advance(passed())
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first == f"1 of 2 cases: 1 passed, 0 failed; {KERNEL}"
    assert second == f"3 of 3 cases: 2 passed, 1 failed; {KERNEL}"


def test_progress_on_a_terminal_shows_the_kernel() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with RunProgress(console) as progress:
        progress.set_total(2)
        progress.advance(passed())
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "1 passed, 0 failed" in text
    assert KERNEL in text
