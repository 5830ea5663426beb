"""Properties of a kernel's bits on a case: what is asked, what is found, and what that makes of its result."""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from lastbit.case import Case, Chosen, Group, TensorSpec, parse_case
from lastbit.config import Config
from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.inputs import build, chosen_tensor, tensor_choices
from lastbit.invariance.properties import properties_of
from lastbit.kernel import Kernel
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.relations import Independent, Related, Relation
from lastbit.result import CaseResult, Finding, Verdict
from lastbit.verify import property_checks
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project
from lastbit.verify.property_checks import (
    asked_cases,
    findings_of,
    in_a_run,
    ordinary_group,
    properties_on,
    sentence_of,
    with_properties,
)

CPU = torch.device("cpu")
CASE = parse_case("rms_norm x=fp32[40,256] weight=fp32[256] eps=1e-06 seed=1")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
THRESHOLD = 19


def by_number_of_rows(x, weight, *, eps):
    """Sum in halves from some number of rows on."""
    squares = x.square()
    total = squares.sum(-1) if x.shape[0] < THRESHOLD else squares[:, ::2].sum(-1) + squares[:, 1::2].sum(-1)
    return x * torch.rsqrt(total / x.shape[-1] + eps)[:, None] * weight


def in_one_sum(x, weight, *, eps):
    total = x.double().square().sum(-1).float()
    return x * torch.rsqrt(total / x.shape[-1] + eps)[:, None] * weight


def wrong_alone(x, weight, *, eps):
    """Doubles the one row of a call."""
    return in_one_sum(x, weight, eps=eps) * (2 if x.shape[0] == 1 else 1)


def raises_alone(x, weight, *, eps):
    if x.shape[0] == 1:
        raise ValueError("one row")
    return in_one_sum(x, weight, eps=eps)


def subject(function, **declared):
    return Subject(Kernel("planted", "rms_norm", "fp32_multiply", function, **declared), RMS_NORM, CPU)


def asked(of: Subject, *names: str) -> CaseResult:
    return with_properties(of, CASE, verify_case(of, CASE, repeat=False), names or ("rows",))


def test_rows_are_bisected():
    [found] = properties_on(subject(by_number_of_rows, invariant=("rows",)), CASE, ["rows"])
    assert found.outcome is PropertyOutcome.BROKEN and found.fails and found.legal
    assert found.where == f"changes between {THRESHOLD - 1} and {THRESHOLD} rows"


def test_a_case_without_elements_shows_nothing():
    empty = parse_case("rms_norm x=fp32[0,256] weight=fp32[256] eps=1e-06 seed=1")
    for found in properties_on(subject(by_number_of_rows), empty, ["layout", "run to run"]):
        assert found.outcome is PropertyOutcome.NOT_APPLICABLE and "no pair of calls" in found.reason


def test_a_relation_of_two_other_calls_shows_the_first_of_them():
    """The case itself is right; both further calls are at weights of which the kernel makes something else."""

    def kernel(x, weight, *, eps):
        output = by_number_of_rows(x, weight, eps=eps)
        return output * 2 if bool((weight == 3).all()) else output

    def related(tensors, params, random):
        threes = {**tensors, "weight": torch.full_like(tensors["weight"], 3)}
        yield Related("times one", tensors, first=Related("weights of 3", threes))

    asked = Relation("threes", "weights of 3 are as others", related)
    with_relation = replace(RMS_NORM, relations=(asked,))
    planted = Subject(Kernel("planted", "rms_norm", "fp32_multiply", kernel), with_relation, CPU)
    [found] = properties_on(planted, CASE, ["threes"])
    assert found.first == f"{CASE}, weights of 3" and found.second == "times one"
    assert found.legal is False


def test_a_case_that_the_kernel_does_not_take_shows_nothing():
    def refuses(x, weight, *, eps):
        raise UnsupportedCase("40 rows are too many")

    [found] = properties_on(subject(refuses, invariant=("rows",)), CASE, ["rows"])
    assert found.outcome is PropertyOutcome.NOT_APPLICABLE and found.declared
    assert found.reason == "the kernel does not take the case: 40 rows are too many"


def test_a_kernel_that_no_call_can_follow_is_no_undeclared_property(monkeypatch):
    """What it raised is the outcome of the case, whatever it declares."""
    monkeypatch.setattr(property_checks, "is_lost", lambda device: True)

    def ends(x, weight, *, eps):
        if len(x) < THRESHOLD:
            raise RuntimeError("an illegal memory access was encountered")
        return by_number_of_rows(x, weight, eps=eps)

    with pytest.raises(LastbitError, match="look for rows errored: RuntimeError: an illegal memory access"):
        properties_on(subject(ends), CASE, ["rows"])


# In a run


def test_a_declared_property_that_is_broken_fails() -> None:
    result = asked(subject(by_number_of_rows, invariant=("rows",)))
    [finding] = result.faults
    assert result.verdict is Verdict.FAILED
    assert (finding.kind, finding.stage) == ("broken_property", "rows")
    assert "rows, which the kernel declares, is broken: changes between 18 and 19 rows" in finding.sentence
    assert "the contract allows both" in finding.sentence


def test_one_that_is_not_declared_is_data_even_where_notices_fail() -> None:
    result = asked(replace(subject(by_number_of_rows), strict=True))
    assert result.verdict is Verdict.PASSED and not result.findings
    assert [(one.name, one.outcome) for one in result.properties] == [("rows", PropertyOutcome.BROKEN)]


def test_bits_that_leave_the_contract_fail_whatever_is_declared() -> None:
    result = asked(subject(wrong_alone))
    [finding] = result.faults
    assert result.verdict is Verdict.FAILED
    assert "these are not legal: the contract excludes them" in finding.sentence


@pytest.mark.parametrize(("invariant", "verdict"), [(("rows",), Verdict.ERRORED), ((), Verdict.PASSED)])
def test_what_a_kernel_raises_counts_where_it_promised(invariant: tuple[str, ...], verdict: Verdict) -> None:
    result = asked(subject(raises_alone, invariant=invariant))
    [one] = result.properties
    assert result.verdict is verdict
    assert one.outcome is PropertyOutcome.ERRORED and "one row" in one.reason


def test_a_case_that_failed_before_is_not_asked() -> None:
    def wrong(x, weight, *, eps):
        return x

    result = asked(subject(wrong, invariant=("rows",)))
    assert result.verdict is Verdict.FAILED and not result.properties


def test_the_most_ordinary_case_of_each_dtype_with_most_rows() -> None:
    lines = (
        "rms_norm x=bf16[4,128] weight=bf16[128] eps=1e-06 seed=1",
        "rms_norm x=bf16[9,128] weight=bf16[128] eps=1e-06 seed=2",
        "rms_norm x=bf16[50,128]:huge weight=bf16[128] eps=1e-06 seed=3",
        "rms_norm x=bf16[60,128]@256,1 weight=bf16[128] eps=1e-06 seed=4",
        "rms_norm x=fp16[70,128] eps=1e-06 seed=5",
        "rms_norm x=fp32[2,128]:rows weight=fp32[128] eps=1e-06 seed=6",
    )
    group = ordinary_group(subject(by_number_of_rows), [Group("some", examples=tuple(map(parse_case, lines)))])
    assert group.properties
    assert [case.seed for case in group.examples] == [2, 6]


def outcome(**changes: object) -> PropertyResult:
    broken = PropertyResult("rows", PropertyOutcome.BROKEN, declared=True, pairs=4, result="output", legal=True)
    one = replace(broken, second="row 0 alone", elements=1007, numel=2000, ulp=2.5)
    return replace(one, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (
            outcome(),
            "rows, which the kernel declares, is broken; 1,007 of 2,000 elements of output differ by up to 2.5 ulp, "
            "first seen with row 0 alone; the contract allows both.",
        ),
        (
            outcome(declared=False, where="changes at 19", rows=1200, legal=False),
            "rows, which the kernel does not declare, is broken: changes at 19; 1,007 of 2,000 elements of output in "
            "1,200 rows differ by up to 2.5 ulp, first seen with row 0 alone, and these are not legal: the contract "
            "excludes them.",
        ),
        (
            outcome(legal=None, library="torch.sum does it."),
            "rows, which the kernel declares, is broken; 1,007 of 2,000 elements of output differ by up to 2.5 ulp, "
            "first seen with row 0 alone. torch.sum does it.",
        ),
        (
            PropertyResult("rows", PropertyOutcome.ERRORED, reason="ValueError: one row"),
            "whether rows holds, nobody knows: ValueError: one row",
        ),
    ],
)
def test_a_property_that_fails_in_words(one: PropertyResult, sentence: str) -> None:
    assert sentence_of(one) == sentence


def test_findings_are_of_properties_that_fail() -> None:
    fails, data = outcome(), outcome(declared=False)
    assert list(findings_of([data, fails])) == [Finding("broken_property", "rows", sentence_of(fails))]


def test_a_run_asks_what_is_quick_or_declared() -> None:
    quick = [name for name, one in properties_of(RMS_NORM).items() if one.quick]
    slow = [name for name, one in properties_of(RMS_NORM).items() if not one.quick]
    assert quick and slow
    assert list(in_a_run(subject(by_number_of_rows))) == quick
    assert set(in_a_run(subject(by_number_of_rows, invariant=(slow[0], quick[0])))) == {*quick, slow[0]}


def test_seconds_of_the_questions_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(property_checks.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(property_checks, "properties_on", lambda *_, **__: (outcome(), outcome(declared=False)))
    before = CaseResult(
        case=str(CASE),
        op="rms_norm",
        kernel="k",
        device="cpu",
        verdict=Verdict.PASSED,
        seconds=1.0,
        contract="",
        dtypes="fp32",
        findings=(Finding("depth", "", "deep"),),
        reason="why",
    )
    after = with_properties(subject(in_one_sum), CASE, before)
    assert (after.seconds, after.verdict, after.reason) == (3.5, Verdict.FAILED, "why")
    assert [finding.kind for finding in after.findings] == ["broken_property", "depth"]
    assert len(after.properties) == 2
    turned_down = replace(before, verdict=Verdict.UNSUPPORTED)
    assert with_properties(subject(in_one_sum), CASE, turned_down) is turned_down


def test_a_device_that_is_lost_ends_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verify_case(subject(in_one_sum), CASE, repeat=False)
    monkeypatch.setattr(property_checks, "properties_on", lambda *_, **__: ())
    monkeypatch.setattr(property_checks, "is_lost", lambda device: True)
    after = with_properties(subject(in_one_sum), CASE, result)
    assert after.verdict is Verdict.ERRORED
    assert "the device cannot be used any more after calls that look for properties" in after.reason

    def interrupted(*_: object, **__: object) -> tuple[PropertyResult, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr(property_checks, "properties_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with_properties(subject(in_one_sum), CASE, result)


def test_the_clock_is_restarted_before_each_property() -> None:
    started: list[int] = []
    found = properties_on(subject(in_one_sum), CASE, ["rows", "layout"], begins=lambda: started.append(1))
    assert {one.name for one in found} == {"rows", "layout"}
    assert len(started) == 2


# Cases


def ordinary(*lines: str) -> list[int]:
    """Return the seeds of the cases that are chosen."""
    group = Group("some", examples=tuple(map(parse_case, lines)))
    return [case.seed for case in ordinary_group(subject(by_number_of_rows), [group]).examples]


def test_ordinary_values_and_layouts_count_more_than_rows() -> None:
    line = "rms_norm x=fp32{} weight=fp32[128]{} eps=1e-06 seed={}"
    assert ordinary(line.format("[2,128]", "", 1), line.format("[9,128]", ":ones", 2)) == [1]
    assert ordinary(line.format("[2,128]+4", "", 1), line.format("[1,128]", "", 2)) == [2]
    assert ordinary(line.format("[2,3,128]", "", 1), line.format("[5,128]", "", 2)) == [1]
    assert ordinary(line.format("[2,128]:huge", ":huge", 1), line.format("[1,128]:huge", "", 2)) == [2]
    assert ordinary(line.format("[2,128]~peer", "", 1)) == []
    assert ordinary("rms_norm x=fp32[2,128] eps=1e-06 seed=1") == []  # the kernel needs the weight
    assert ordinary(line.format("[4,128]", "", 1), line.format("[4,128]", "", 2)) == [1]


def test_groups_made_for_properties_are_asked_alone() -> None:
    cases = [parse_case(f"rms_norm x=fp32[{rows},64] weight=fp32[64] eps=1e-06 seed=1") for rows in (2, 3, 4)]
    plain, own = Group("plain", examples=(cases[2],)), Group("own", examples=(*cases[:2], cases[0]), properties=True)
    of = subject(by_number_of_rows)
    assert asked_cases(of, [plain, own]) == cases[:2]
    assert asked_cases(of, [plain]) == [cases[2]]
    unfit = Group("own", examples=(parse_case("rms_norm x=fp32[2,64] eps=1e-06 seed=1"),), properties=True)
    assert asked_cases(of, [plain, unfit]) == []


def test_as_many_ordinary_tensors_as_there_are_are_as_good_as_fewer() -> None:
    def with_residual(x, weight, residual=None, *, eps):
        return x

    lines = ("x=fp32[9,128] weight=fp32[128]", "x=fp32[2,128] weight=fp32[128] residual=fp32[2,128]")
    cases = [parse_case(f"rms_norm {line} eps=1e-06 seed={seed}") for seed, line in enumerate(lines)]
    chosen = ordinary_group(subject(with_residual), [Group("some", examples=tuple(cases))])
    assert chosen.examples == (cases[0],)


def test_where_a_group_can_choose_ordinary_cases_are_drawn() -> None:
    choices = tensor_choices("x", ("fp32",), ("huge", "normal"), ("padded", "contiguous"))

    @st.composite
    def cases(draw: st.DrawFn, chosen: Chosen) -> Case:
        x = chosen_tensor("x", chosen, (draw(st.integers(1, 9)), 64))
        return Case("rms_norm", (x, TensorSpec("weight", "fp32", (64,))), {"eps": 1e-6}, 1)

    [case] = ordinary_group(subject(by_number_of_rows), [Group("drawn", cases, choices=choices)]).examples
    assert (case["x"].regime, case["x"].strides) == ("normal", None)


def test_independent_inputs_are_cut_to_one_where_names_of_results_are_asked_for() -> None:
    inputs = build(CASE, CPU)
    plain = subject(in_one_sum).problem(inputs)
    assert property_checks._small(plain) is plain
    rows = Independent("rows of x", "they are independent", ("x",), ("output",))
    of = replace(subject(in_one_sum), op=replace(RMS_NORM, relations=(rows,)))
    small = property_checks._small(of.problem(inputs))
    assert {name: tuple(tensor.shape) for name, tensor in small.tensors.items()} == {"x": (1, 256), "weight": (256,)}


def test_the_basis_calls_a_kernel_of_this_process_directly() -> None:
    basis = property_checks.basis_of(subject(in_one_sum), CASE, thorough=True)
    assert basis.direct and basis.thorough
    assert torch.equal(basis.results["output"], basis.call(basis.inputs)["output"])
    assert basis.allows(basis.inputs, basis.results)
    assert not basis.allows(basis.inputs, {"output": basis.results["output"] * 2})


def test_inputs_beyond_what_a_kernel_declares_to_take_are_unsupported() -> None:
    of = subject(in_one_sum, takes={"x columns": (64,)})
    [found] = properties_on(of, CASE, ["rows"])
    assert found.outcome is PropertyOutcome.NOT_APPLICABLE
    assert found.reason.startswith("the kernel does not take the case: the kernel declares that it takes less: ")
