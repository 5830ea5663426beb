"""After a run its failures are explained and stages are looked for, within limits, and whatever happens then."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from explanations import explained as explanation

from lastbit.commands import explaining, running
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.reports import records
from lastbit.reports.encoding import encoded
from lastbit.reports.explanation import explanation_fields
from lastbit.reports.summary import problems
from lastbit.reports.why import Explanation
from lastbit.result import CaseResult, Finding, Verdict
from lastbit.run import Run
from lastbit.verify.worker import WorkerEnded
from tests.reports.test_reports import bare, failed, passed, stage

SMALL = "rms_norm x=bf16[1,2] weight=bf16[2] eps=1e-06 seed=1"
CONFIG = Config(folder="")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Planned:
    kernel: str


class Explainer:
    """Stands for the process that explains: `kernels` says what each kernel does there."""

    kernels: ClassVar[dict[str, Callable[[CaseResult], Explanation]]] = {}
    configs: ClassVar[list[Config]] = []
    seconds: ClassVar[list[float]] = []
    passed: ClassVar[list[list[str]]] = []

    def __init__(self, config: Config) -> None:
        self.configs.append(config)
        self.planned = [Planned(name) for name in config.kernels]

    def __enter__(self) -> Explainer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def explain(self, kernel: str, line: str, *, seconds: float, passed: Sequence[str]) -> Explanation:
        self.seconds.append(seconds)
        self.passed.append(list(passed))
        return self.kernels[kernel](failed(kernel=kernel, case=line))


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> type[Explainer]:
    for name, value in (("kernels", {}), ("configs", []), ("seconds", []), ("passed", [])):
        monkeypatch.setattr(Explainer, name, value)
    return Explainer


def explained(config: Config, failures: list[CaseResult], clock: Clock) -> list[Explanation]:
    own = explaining.of_run(config, failures)
    return list(explaining.explained(own, failures, explainer=Explainer, clock=clock))  # type: ignore[arg-type]


def raises(error: BaseException) -> Callable[[CaseResult], Explanation]:
    def explain(result: CaseResult) -> Explanation:
        raise error

    return explain


def found(result: CaseResult) -> Explanation:
    return explanation(result, "norm.py")


# What is explained


def test_the_smallest_failing_case_of_each_kernel_and_device() -> None:
    results = (
        failed(kernel="a"),
        failed(kernel="a", case=SMALL, counted=False),
        failed(kernel="a", device="cuda:0"),
        failed(kernel="a@main", case=SMALL),
        bare(Verdict.ERRORED, "it raised", kernel="b"),
        failed(kernel="c", findings=(Finding("guards", "output", "Another result."),)),
        passed(kernel="d"),
    )
    chosen = [(r.kernel, r.device, r.case) for r in explaining.failures_of(Run(results))]
    assert chosen == [("a", "cpu", SMALL), ("a", "cuda:0", failed().case)]


def test_a_failure_is_compared_with_what_its_kernel_passed_on_its_device(
    process: type[Explainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "explained", partial(explaining.explained, explainer=Explainer))
    process.kernels = {"a": found}
    others = (passed(kernel="a", device="cuda:0"), passed(kernel="b"), bare(Verdict.INCONCLUSIVE, "why", kernel="a"))
    results = (failed(kernel="a"), *others, passed(kernel="a", case=SMALL), passed(kernel="a", case=SMALL + "1"))
    explaining.with_explanations(CONFIG, Run(results))
    assert process.passed == [[SMALL, SMALL + "1"]]


def test_a_nan_hides_no_wrong_number_of_the_same_stage() -> None:
    """Each cause has a finding and an explanation of its own, and no kernel has more than a few."""
    special = (Finding("special", "output", "2 of 512 elements are NaN or infinite where they must not be."),)
    results = tuple(failed(kernel="a", case=SMALL.replace("2]", f"{n}]"), findings=special) for n in (2, 3, 4, 5))
    results += (failed(kernel="a"), failed(kernel="b"))
    assert {len(problem.bad) for problem in problems(Run(results)) if problem.smallest.kernel == "a"} == {4, 1}
    chosen = [(r.kernel, r.case) for r in explaining.failures_of(Run(results))]
    assert sorted(chosen) == sorted([("a", SMALL), ("a", failed().case), ("b", failed().case)])
    stages = (stage("one", outside=1), stage("two", outside=1), stage("three", outside=1), stage("four", outside=1))
    many = tuple(failed(stages=(own,)) for own in stages)
    assert len(explaining.failures_of(Run(many))) == explaining.MOST_CAUSES


def test_a_case_with_more_wrong_elements_names_the_line(process: type[Explainer]) -> None:
    """Of few wrong elements no line is sure; then the smallest case with enough of them is explained instead."""
    few, more = failed(kernel="a", case=SMALL), failed(kernel="a", stages=(stage(outside=8),))
    wider = explaining.wider_of(Run((few, more)), [few])
    assert list(wider.values()) == [more]

    def explain(result: CaseResult) -> Explanation:
        said = found(result)
        return said if result.case == more.case else replace(said, trace=replace(said.trace, blamed=None))

    process.kernels["a"] = explain
    for given, case in (({}, SMALL), (wider, more.case)):
        own = explaining.of_run(CONFIG, [few, more])
        [one] = explaining.explained(own, [few], wider=given, explainer=Explainer)  # type: ignore[arg-type]
        assert one.case == case and (one.culprit is not None) == (case == more.case)


def test_a_run_without_failures_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(explaining, "Explainer", start)
    monkeypatch.setattr("subprocess.Popen", start)
    run = Run((passed(), bare(Verdict.ERRORED, "it raised")))
    assert explaining.with_explanations(CONFIG, run) == run


def test_a_process_has_the_cases_and_kernels_of_one_device(process: type[Explainer]) -> None:
    failures = [failed(kernel="a"), failed(kernel="b", case=SMALL), failed(kernel="a", device="cuda:0")]
    process.kernels = dict.fromkeys("ab", found)
    config = replace(CONFIG, ops=("rms_norm",), revisions={"main": "k"}, timeout=1.0)
    assert [(e.kernel, e.case) for e in explained(config, failures, Clock())] == [(f.kernel, f.case) for f in failures]
    cpu, cuda = process.configs
    assert (cpu.devices, cuda.devices) == (("cpu",), ("cuda:0",))
    assert (cpu.kernels, cpu.lines, cpu.ops) == (("a", "b"), (failed().case, SMALL), ())
    assert cpu.revisions == {}
    assert cpu.timeout == explaining.OF_A_KERNEL, "to observe a kernel takes longer than to run it"


# Limits


def test_kernels_for_which_there_was_no_time_say_so(process: type[Explainer]) -> None:
    clock = Clock()

    def slow(result: CaseResult) -> Explanation:
        clock.now += 40
        return found(result)

    process.kernels = dict.fromkeys("abc", slow)
    first, second, third = explained(CONFIG, [failed(kernel=name) for name in "abc"], clock)
    assert process.seconds == [explaining.OF_A_KERNEL] * 2
    assert first.culprit is not None and second.culprit is not None
    assert (third.reason, third.culprit) == (explaining.NO_TIME, None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WorkerEnded("the process died without an exception", SMALL), "the process died without an exception, in"),
        (LastbitError("ValueError: no tile"), "ValueError: no tile"),
        (KeyError("stage"), "this is a bug of lastbit: KeyError: 'stage'"),
    ],
)
def test_what_goes_wrong_is_the_reason_and_the_others_are_explained(
    process: type[Explainer], error: Exception, reason: str
) -> None:
    process.kernels = {"a": raises(error), "b": found}
    first, second = explained(CONFIG, [failed(kernel="a"), failed(kernel="b")], Clock())
    assert first.reason.startswith(reason)
    assert (first.verdict, first.trace.reason) == (Verdict.FAILED, first.reason)
    assert second.culprit is not None


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (Verdict.PASSED, "it passed when it was run again: what it gives is not the same each time"),
        (Verdict.ERRORED, "it gave nothing to compare when it was run again: ValueError: boo"),
    ],
)
def test_a_kernel_that_does_something_else_when_it_runs_again(
    process: type[Explainer], verdict: Verdict, why: str
) -> None:
    def otherwise(result: CaseResult) -> Explanation:
        reason = "" if verdict is Verdict.PASSED else "ValueError: boo"
        return replace(found(result), verdict=verdict, smallest=SMALL, test="a test", reason=reason)

    process.kernels = {"a": otherwise}
    [one] = explained(CONFIG, [failed(kernel="a")], Clock())
    assert (one.verdict, one.smallest, one.test, one.culprit) == (Verdict.FAILED, "", "", None)
    assert one.diagnoses == () and one.explained_by == ()
    assert explanation_fields(one, "")[0] == ("why", f"not explained: {why}")


def test_a_kernel_that_is_gone_is_not_asked(process: type[Explainer]) -> None:
    failures = [failed(kernel="a")]
    [one] = explaining.explained(CONFIG, failures, explainer=Explainer)  # type: ignore[arg-type]
    assert one.reason == "the kernel is not there any more"


def test_an_interruption_ends_explaining_and_keeps_the_run(
    process: type[Explainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    process.kernels = {"a": found, "b": raises(KeyboardInterrupt()), "c": found}
    monkeypatch.setattr(explaining.explained, "__kwdefaults__", {"explainer": Explainer, "clock": Clock()})
    run = explaining.with_explanations(CONFIG, Run(tuple(failed(kernel=name) for name in "abc")))
    told = {one.kernel: one.reason for one in run.explanations}
    assert sorted(told.values()) == ["", explaining.INTERRUPTED, explaining.INTERRUPTED]
    assert (run.broken, run.exit_code) == ("", 1)


def test_a_bug_in_explaining_keeps_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise KeyError("stage")

    monkeypatch.setattr(explaining, "wider_of", broken)
    run = explaining.with_explanations(CONFIG, Run((failed(kernel="a"),)))
    assert [one.reason for one in run.explanations] == ["this is a bug of lastbit: KeyError: 'stage'"]
    assert "KeyError: 'stage'" in capsys.readouterr().err


def test_the_records_gain_what_was_explained_and_results_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run((failed(),))
    records.write(run, tmp_path)
    (tmp_path / "records.parquet").unlink()
    monkeypatch.setattr(
        explaining, "with_explanations", lambda _, run, **__: replace(run, explanations=(found(failed()),))
    )
    got = running.with_why(Config(folder=str(tmp_path)), run)
    assert encoded(records.read(tmp_path)) == encoded(got)
    assert [one.case for one in got.explanations] == [failed().case]
    assert not (tmp_path / "records.parquet").exists()


def test_a_run_of_an_older_lastbit_has_no_explanations(tmp_path: Path) -> None:
    records.write(Run((failed(),), explanations=(found(failed()),), traces=(found(failed()).trace,)), tmp_path)
    text = json.loads((tmp_path / "run.json").read_text())
    del text["explanations"], text["traces"]
    (tmp_path / "run.json").write_text(json.dumps(text))
    assert records.read(tmp_path) == Run((failed(),))
