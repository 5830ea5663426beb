"""Two runs side by side: paired on the same inputs, and nobody is told more than the pairs say."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from lastbit.reports.changes import Changes, Fate, as_json, cells, compare, names_of, print_changes, revisions
from lastbit.result import CaseResult, Comparison, Finding, StageResult, Verdict
from lastbit.run import NotRun, Power, Run

CONTRACT = "native_multiply"


def measured(outside: int = 0, *, mismatched: int = 0, numel: int = 10_000, **changes: object) -> Comparison:
    histogram = (numel - mismatched, mismatched, 0, 0, 0, 0)
    whole = Comparison(numel, numel, mismatched, outside, 0, 1e-6, 1.0, 1e-3, 0.0, numel, 1.0, histogram)
    return replace(whole, **changes)  # type: ignore[arg-type]


def stage(
    name: str = "output", dtype: str = "bf16", *, bits: str = "aa", seen: Comparison | None = None
) -> StageResult:
    found = seen or measured()
    return StageResult(name, dtype, True, found, found, bits)


def result(case: str = "c1", *stages: StageResult, **changes: object) -> CaseResult:
    one = CaseResult(
        case=f"scaled_add x=bf16[4] {case}",
        op="scaled_add",
        kernel="k",
        contract=CONTRACT,
        device="cpu",
        dtypes="bf16",
        verdict=Verdict.PASSED,
        stages=stages or (stage(),),
        group="plain",
        fingerprint=f"inputs of {case}",
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def failed(case: str = "c1", *, outside: int = 7, **changes: object) -> CaseResult:
    seen = measured(outside, mismatched=outside)
    finding = Finding("outside", "output", f"{outside} elements have a value that is not possible.")
    own = {"verdict": Verdict.FAILED, "findings": (finding,), **changes}
    return result(case, stage(bits="ff", seen=seen), **own)


def run(*results: CaseResult, **changes: object) -> Run:
    return Run(results, **changes)  # type: ignore[arg-type]


def only(changes: Changes) -> tuple[Fate, bool]:
    [kernel] = changes.kernels
    return kernel.change, kernel.worse


def shown(changes: Changes, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_changes(changes, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Pairs


def test_equal_bits_are_said_plainly() -> None:
    same = run(result("c1"), result("c2"))
    changes = compare(same, same)
    assert only(changes) == (Fate.UNCHANGED, False)
    assert changes.exit_code(strict=True) == 0
    assert "bits unchanged in 2 of 2 tensors" in shown(changes)


def test_one_other_bit_is_a_change_and_no_fault() -> None:
    changes = compare(run(result("c1"), result("c2")), run(result("c1"), result("c2", stage(bits="bb"))))
    assert only(changes) == (Fate.CHANGED, False)
    assert changes.exit_code(strict=True) == 0
    assert "bits unchanged in 1 of 2 tensors" in shown(changes)


def test_figures_are_those_of_the_common_cases() -> None:
    """A case that only one run has decides nothing, whatever its figures."""
    wild = result("other", stage(seen=measured(mismatched=9000, bias_sum=-5000.0)))
    changes = compare(run(result("c1")), run(result("c1"), wild))
    [kernel] = changes.kernels
    assert kernel.change is Fate.UNCHANGED
    assert (len(kernel.pairs), kernel.unpaired) == (1, (0, 1))
    assert "1 case in both, 1 only in after" in shown(changes)


def test_same_line_on_other_bits_is_no_pair() -> None:
    changes = compare(run(result("c1")), run(result("c1", fingerprint="other")))
    [kernel] = changes.kernels
    assert (kernel.pairs, kernel.unpaired, kernel.other_inputs) == ((), (1, 1), 1)
    assert kernel.change is Fate.UNPAIRED
    assert "1 of the same line but with other input bits" in shown(changes)


def test_case_that_died_is_a_pair() -> None:
    died = result("c1", verdict=Verdict.ERRORED, stages=(), reason="the process died", fingerprint="")
    assert only(compare(run(result("c1")), run(died))) == (Fate.WORSE, True)


def test_cases_tried_while_shrinking_pair_but_do_not_count_alone() -> None:
    tried = failed("small", counted=False)
    [kernel] = compare(run(result("c1"), result("small")), run(result("c1"), tried)).kernels
    assert len(kernel.worse_cases) == 1
    for runs in ((run(result("c1")), run(result("c1"), tried)), (run(result("c1"), tried), run(result("c1")))):
        [kernel] = compare(*runs).kernels
        assert kernel.unpaired == (0, 0)


def test_without_a_common_case_figures_do_not_drift() -> None:
    wild = result("other", stage(seen=measured(mismatched=9000)))
    changes = compare(run(result("c1")), run(wild))
    [kernel] = changes.kernels
    assert (kernel.change, kernel.drifts, kernel.tensors) == (Fate.UNPAIRED, (), 0)
    [only_stage] = kernel.stages
    assert cells(only_stage)[3:6] == ("–", "0", "0 % → 90 %")
    assert changes.exit_code(strict=True) == 0


# Worse and better


@pytest.mark.parametrize(
    ("before", "after", "change", "code"),
    [
        (result(), failed(), Fate.WORSE, 1),
        (failed(), result(), Fate.BETTER, 0),
        (failed(outside=7), failed(outside=8), Fate.WORSE, 1),
        (failed(outside=8), failed(outside=7), Fate.BETTER, 0),
        (failed(), failed(), Fate.UNCHANGED, 0),
        (result(), result(verdict=Verdict.UNSUPPORTED, stages=(), reason="no"), Fate.WORSE, 1),
        (result(verdict=Verdict.ERRORED, stages=(), reason="no"), failed(), Fate.WORSE, 1),
    ],
)
def test_verdicts_and_elements_outside_decide(before: CaseResult, after: CaseResult, change: Fate, code: int) -> None:
    changes = compare(run(before), run(after))
    assert only(changes) == (change, bool(code))
    assert changes.exit_code() == code


def test_one_case_more_that_fails_is_worse_although_the_verdict_is_the_same() -> None:
    errored = result("c2", verdict=Verdict.ERRORED, stages=(), reason="boom")
    changes = compare(run(failed("c1"), failed("c2")), run(failed("c1"), errored))
    assert only(changes) == (Fate.WORSE, True)
    assert "1 case got worse: 1 failed → 1 errored" in shown(changes)


@pytest.mark.parametrize("case", ["c1", "c2"])
def test_a_wrong_result_in_place_of_an_error_is_worse(case: str) -> None:
    """Also where no case is common; a kernel of which the errors alone are mended is better."""
    errored = result("c1", verdict=Verdict.ERRORED, stages=(), reason="boom")
    changes = compare(run(errored), run(failed(case)))
    assert (changes.kernels[0].worse, changes.kernels[0].better, changes.exit_code()) == (True, False, 1)
    assert "it raised before, and gives wrong results now" in shown(changes) and "ERRORED → FAILED" in shown(changes)
    changes = compare(run(errored, failed("c2")), run(result("c1"), failed("c2")))
    assert only(changes) == (Fate.BETTER, False)


@pytest.mark.parametrize("turned_down", [Verdict.UNSUPPORTED, Verdict.INCONCLUSIVE])
def test_a_kernel_that_is_mended_is_better_although_it_turns_a_case_down(turned_down: Verdict) -> None:
    errored = result("c2", verdict=Verdict.ERRORED, stages=(), reason="boom")
    fewer = result("c3", verdict=turned_down, stages=(), reason="no")
    changes = compare(run(result("c1"), errored, result("c3")), run(result("c1"), result("c2"), fewer))
    assert only(changes) == (Fate.BETTER, False)
    assert changes.exit_code() == 0
    assert "1 case got worse" in shown(changes)


def test_worse_and_better_at_once_is_worse() -> None:
    changes = compare(run(result("c1"), failed("c2")), run(failed("c1"), result("c2")))
    assert only(changes) == (Fate.WORSE, True)
    assert "1 case got better: 1 failed → 1 passed" in shown(changes)


def test_kernel_left_inconclusive_is_worse() -> None:
    blind = Power("k", "cpu", "bf16", "fp32_multiply", 3, 0, True)
    text = shown(compare(run(result()), run(result(), power=(blind,))))
    assert "PASSED → INCONCLUSIVE" in text
    assert "its bits are the same" in text


def test_other_cases_that_decided_are_named() -> None:
    text = shown(compare(run(result("c1"), failed("c2")), run(result("c1"), result("c3"))))
    assert "FAILED → PASSED" in text
    assert "every case that both runs have kept its verdict" in text


def test_smallest_case_that_got_worse_can_be_repeated() -> None:
    big, small = "scaled_add x=bf16[64] seed=1", "scaled_add x=bf16[2] seed=1"
    before = run(result(case=big), result(case=small))
    before = run(
        *(replace(r, case=line, fingerprint=line) for r, line in zip(before.results, (big, small), strict=True))
    )
    after = run(
        *(replace(failed(), case=line, fingerprint=line) for line in (big, small)), environment={"options": "-x"}
    )
    assert f"lastbit verify k '{small}' --device cpu -x" in shown(compare(before, after))


def test_nothing_is_wider_than_the_terminal_but_the_command() -> None:
    long = "a_kernel_with_a_name_of_sixty_characters[native_multiply+rounded]"
    before, after = (
        run(result(kernel=long), result("c2", kernel=long)),
        run(failed(kernel=long), failed("c2", kernel=long)),
    )
    wide = [line for line in shown(compare(before, after), 80).splitlines() if len(line) > 80]
    assert all(line.strip().startswith("lastbit verify ") for line in wide) and len(wide) == 1


# New and gone


def test_new_and_gone_kernels() -> None:
    changes = compare(run(result(), result(kernel="old")), run(result(), result(kernel="new")))
    assert [(k.kernel, k.change) for k in changes.kernels] == [
        ("old", Fate.GONE),
        ("new", Fate.NEW),
        ("k", Fate.UNCHANGED),
    ]
    assert (changes.exit_code(), changes.exit_code(strict=True)) == (0, 1)


def test_new_kernel_that_fails_is_worse_and_first() -> None:
    changes = compare(run(result()), run(result(), failed(kernel="new")))
    assert (changes.kernels[0].kernel, changes.kernels[0].change, changes.exit_code()) == ("new", Fate.NEW, 1)
    assert "1 new and failing" in shown(changes)


def test_new_and_gone_stages() -> None:
    before = run(result("c1", stage("sum", "fp32"), stage()))
    after = run(result("c1", stage(), stage("scale", "fp32")))
    [kernel] = compare(before, after).kernels
    rows = {cells(s)[0]: cells(s)[3] for s in kernel.stages}
    assert rows == {"sum": "gone", "scale": "new", "output": "1/1"}
    assert (kernel.change, kernel.tensors) == (Fate.CHANGED, 1)


def test_stage_is_compared_where_both_results_have_it() -> None:
    """A case that errored in one run has no stage there; its figures in the other run must not count."""
    wild = stage(seen=measured(mismatched=9000))
    errored = result("c2", verdict=Verdict.ERRORED, stages=(), reason="boom")
    [kernel] = compare(run(result("c1"), result("c2", wild)), run(result("c1"), errored)).kernels
    [output] = kernel.stages
    assert output.before is not None
    assert (output.before.cases, output.before.total.mismatched, output.drifts) == (1, 0, ())


def test_nothing_in_common() -> None:
    changes = compare(run(result(kernel="a")), run(result(kernel="b")))
    assert changes.exit_code() == 3
    assert "NOTHING COMPARED" in shown(changes)


# Drift


@pytest.mark.parametrize(
    ("before", "after", "figures"),
    [
        (measured(mismatched=100), measured(mismatched=160), ["mismatch"]),
        (measured(mismatched=100), measured(mismatched=129), []),  # less than the factor
        (measured(mismatched=2), measured(mismatched=8), []),  # chance
        (measured(), measured(mismatched=10), ["mismatch"]),
        (measured(squared_error=1e-6), measured(squared_error=2e-6), ["rel. error", "median"]),
        (measured(squared_error=1e-6), measured(squared_error=1.5e-6), []),
        (measured(squared_error=1e-6), measured(squared_error=math.inf), ["rel. error", "median"]),
        (measured(squared_error=math.nan), measured(squared_error=math.nan), []),
        (measured(bias_sum=0.0), measured(bias_sum=-4000.0), ["bias"]),
        (measured(bias_sum=10.0), measured(bias_sum=400.0), []),  # both are negligible
    ],
)
def test_drift(before: Comparison, after: Comparison, figures: list[str]) -> None:
    forth = compare(run(result("c", stage(seen=before))), run(result("c", stage(bits="bb", seen=after))))
    back = compare(run(result("c", stage(seen=after))), run(result("c", stage(bits="bb", seen=before))))
    assert [d.figure for d in forth.kernels[0].drifts] == figures == [d.figure for d in back.kernels[0].drifts]
    assert forth.exit_code() == back.exit_code() == back.exit_code(strict=True) == 0
    assert forth.exit_code(strict=True) == bool(figures)
    assert forth.kernels[0].change is (Fate.DRIFTED if figures else Fate.CHANGED)


def test_drift_factor() -> None:
    runs = [run(result("c", stage(seen=measured(mismatched=m)))) for m in (100, 160)]
    assert compare(*runs, drift=1.7).kernels[0].drifts == ()


def test_drift_is_written_as_in_the_table() -> None:
    runs = [run(result("c", stage(seen=measured(mismatched=m)))) for m in (100, 160)]
    text = shown(compare(*runs))
    assert "output bf16: mismatch drifted for the worse, 1 % → 1.6 %" in text
    assert "but figures drifted" in text.splitlines()[-1]
    worse = compare(runs[0], run(result("c", stage(seen=measured(mismatched=160)), verdict=Verdict.FAILED)))
    assert worse.kernels[0].drifts and worse.kernels[0].worse
    assert "WORSE" in shown(worse) and "drifted" not in shown(worse)


# Devices, settings, revisions


def test_kernels_on_one_device_each_are_compared_across() -> None:
    changes = compare(run(result()), run(result(device="cuda:0", stages=(stage(bits="bb"),))))
    assert changes.across == ("cpu", "cuda:0")
    text = shown(changes)
    assert "Kernels on cpu are compared with the same kernels on cuda:0." in text
    assert "k on cpu → cuda:0" in text


def test_kernels_on_several_devices_are_compared_by_name() -> None:
    both = run(result(), result(device="cuda:0"))
    changes = compare(both, run(result(device="cuda:0"), result(device="cuda:1")))
    assert changes.across is None
    found = {(s.device, k.change) for k in changes.kernels for s in (k.after or k.before,) if s}
    assert found == {("cpu", Fate.GONE), ("cuda:0", Fate.UNCHANGED), ("cuda:1", Fate.NEW)}


def test_settings_that_differ_are_said() -> None:
    before = run(result(), environment={"triton": "3.6", "torch": "2.13", "records": "a", "base": "x"})
    after = run(result(), environment={"triton": "3.7", "torch": "2.13", "records": "b", "accelerators": "H200"})
    assert compare(before, after).settings == (("triton", "3.6", "3.7"), ("accelerators", "", "H200"))


def test_other_contract_is_said() -> None:
    text = shown(compare(run(result()), run(failed(contract="fp32_multiply"))))
    assert f"contract: {CONTRACT} → fp32_multiply" in text


def test_broken_run_is_said_and_is_no_success() -> None:
    changes = compare(run(result()), run(result(), broken="pytest ended early"))
    assert changes.exit_code() == 2
    assert "after did not come to its end: pytest ended early" in shown(changes)


def test_revisions_of_one_run() -> None:
    label = "origin/main"
    old = f"k@{label}"
    both = run(
        failed(),
        result(kernel=old),
        power=(Power(old, "cpu", "bf16", "x", 1, 1, True), Power("k", "cpu", "bf16", "x", 2, 1, True)),
        not_run=(NotRun(f"{old} on cuda", "absent"), NotRun("k on cuda", "absent")),
    )
    base, today = revisions(both, label)
    assert [r.kernel for r in base.results] == ["k"]
    assert (base.power[0].cases, today.power[0].cases) == (1, 2)
    assert today.not_run == (NotRun("k on cuda", "absent"),)
    assert only(compare(base, today)) == (Fate.WORSE, True)
    assert names_of(base)[0] == label


def test_json_of_figures_without_a_number() -> None:
    runs = [run(result("c", stage(seen=measured(squared_error=e)))) for e in (math.nan, math.inf)]
    [kernel] = json.loads(as_json(compare(*runs)), parse_constant=pytest.fail)["kernels"]
    assert kernel["stages"][0]["after"]["worst_rel_l2"] == "Infinity"
