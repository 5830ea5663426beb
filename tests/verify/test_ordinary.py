"""Which items look for the stages of kernels that declare none, in which cases, and what becomes of what they find."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lastbit.case import Case, Group, parse_case
from lastbit.commands.running import with_stages
from lastbit.diagnosing.trace import stages_as_text
from lastbit.kernel import Kernel
from lastbit.result import CaseResult, Comparison, StageResult, Verdict
from lastbit.run import Run
from lastbit.verify.check import Subject
from lastbit.verify.item_run import perform
from lastbit.verify.ordinary import plainest, showing
from lastbit.verify.plan import Item
from tests.harness.test_takes import NORM, norm
from tests.recorded import Recorded

LINE = "rms_norm x=bf16[{shape}]{rest} weight=bf16[8] eps=1e-06 seed={seed}"


def line(shape: str = "16,8", rest: str = "", seed: int = 1) -> str:
    return LINE.format(shape=shape, rest=rest, seed=seed)


def result(case: str, verdict: Verdict = Verdict.PASSED, **changes: Any) -> CaseResult:
    fields = {"op": "rms_norm", "kernel": "mine", "contract": "fp32_multiply", "device": "cpu", "dtypes": "bf16"}
    return CaseResult(**{**fields, "case": case, "verdict": verdict, **changes})  # type: ignore[arg-type]


def item(
    *lines: str, group: str = "g", name: str = "mine", device: str = "cpu", share: tuple[int, int] = (0, 1), **rest: Any
) -> Item:
    declared = Kernel(name, "rms_norm", "fp32_multiply", norm, stages=rest.pop("stages", ()), source="mine.py:7")
    examples = Group(group, examples=tuple(map(parse_case, lines)), **rest)
    return Item(Subject(declared, NORM, torch.device(device)), examples, share=share)


def test_the_plainest_case_of_each_dtype_is_chosen() -> None:
    cases = [line("512,8"), line("16,8", seed=2), line("16,8", seed=3), line("2,8")]
    cases += [line("16,8", ":huge"), line("8,8", "@16,1"), line("8,8").replace("seed", "weight_offset=1.0 seed")]
    fp16 = line("32,8").replace("x=bf16", "x=fp16")
    results = [*map(result, (*cases, fp16)), result(line("9,8"), Verdict.INCONCLUSIVE)]
    for order in (results, results[::-1]):
        assert {str(case) for case in plainest(order)} == {line("16,8", seed=2), fp16}


def test_there_is_none_for_a_kernel_that_shows_stages() -> None:
    shown = StageResult("variance", "fp32", False, Comparison(), Comparison())
    assert plainest([result(line(), stages=(shown,))]) == []


def test_one_item_of_a_kernel_shows_its_stages_and_that_is_known_before_the_run() -> None:
    """It has the ordinary examples of the most dtypes, of its own share; others than on the CPU show nothing."""
    fp16 = line().replace("x=bf16", "x=fp16")
    drawing = {"strategy": lambda chosen: None, "choices": {"x regime": ("integers", "normal")}}
    items = [
        item(line(rest=":huge"), group="a"),
        item(line(), group="b"),
        item(line(), fp16, group="c"),
        item(fp16, line(), group="d"),
        item(line(), line(seed=2), fp16, group="e", name="half", share=(0, 2)),
        item(line(), fp16, line(seed=2), group="f", name="half", share=(0, 2)),
        item(group="g", name="drawn", strategy=lambda chosen: None, choices={"x regime": ("integers",)}),
        item(group="h", name="drawn", **drawing),
        item(line(), name="declares", stages=("variance",)),
        item(line(), name="mine@main"),
        item(line(), name="elsewhere", device="cuda"),
    ]
    found = list(showing(items))
    assert [one.group.name for one in found if one.shows] == ["c", "e", "h"]
    assert [replace(one, shows=False) for one in found] == items


def performed(look: Any, verdict: Verdict = Verdict.PASSED) -> tuple[list[str], list[str]]:
    """Perform an item that shows stages; return verdicts and what was kept."""
    recorded: Any = Recorded()
    perform(replace(item(line()), shows=True), recorded, None, look)
    return [str(one.verdict) for one in recorded.results], recorded.told_of("stages")


def test_stages_that_are_found_are_kept_as_text_and_return_as_traces() -> None:
    verdicts, kept = performed(stages_as_text)
    assert verdicts == ["PASSED"] and len(kept) == 1
    run = with_stages(Run((result(line()),)), [*kept, *kept, kept[0][:-9], "0"])
    [trace] = run.traces
    assert (trace.kernel, trace.case) == ("mine", line())
    assert [step.match.stage for step in trace.stages if step.match][-1] == "output"


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3)])
def test_to_look_for_stages_changes_no_verdict(error: BaseException) -> None:
    def look(subject: Subject, case: Case) -> str:
        raise error

    assert performed(look) == (["PASSED"], [])


def test_traces_are_in_the_order_of_the_results() -> None:
    run = Run(tuple(result(line(), kernel=name) for name in ("b", "a")))
    texts = [
        f'{{"kernel": "{name}", "op": "o", "contract": "c", "case": "{line()}", "device": "cpu", "verdict": "PASSED"}}'
        for name in ("a", "b")
    ]
    assert [trace.kernel for trace in with_stages(run, texts).traces] == ["b", "a"]


def compiling(x: torch.Tensor, *, eps: float) -> torch.Tensor:
    return COMPILED(x) if eps else compiled()(x)


def compiled() -> Any:
    return torch.compile(norm, dynamic=True)


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x)


COMPILED = plain


def test_of_what_torch_compiles_the_text_is_not_what_runs() -> None:
    subject = replace(item(line()).subject, kernel=Kernel("mine", "rms_norm", "fp32_multiply", compiling))
    assert stages_as_text(subject, parse_case(line())) == ""


def test_what_torch_compiles_in_another_module_is_told_by_a_call() -> None:
    elsewhere = SimpleNamespace(norm=torch.compile(norm, backend="eager"))
    case = parse_case(line())

    def called(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> Any:
        return elsewhere.norm(x, weight, eps=eps)

    subject = replace(item(line()).subject, kernel=Kernel("mine", "rms_norm", "fp32_multiply", called))
    called(torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16), eps=1e-6)
    assert stages_as_text(subject, case) == ""
    assert stages_as_text(item(line()).subject, case), "of another kernel of this process it is not so"
