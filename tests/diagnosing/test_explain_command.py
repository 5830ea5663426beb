"""`lastbit explain`: the arithmetic of the worst element, what decides it, the line, and what is printed."""

from __future__ import annotations

import argparse
import io
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from explanations import explained as explained_result
from in_this_process import InThisProcess
from rich.console import Console

from lastbit.case import parse_case
from lastbit.commands import explain as command
from lastbit.commands import parsers
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing import explainer as explaining
from lastbit.diagnosing import mends, relaunches
from lastbit.diagnosing.explainer import Explainer, explain_case
from lastbit.diagnosing.worked import FormulaTrace, deed, in_ulp, neighbours, number_of, of_match, ways_of_all
from lastbit.inputs import build
from lastbit.interpret import install
from lastbit.judging.expected import Numbers
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel
from lastbit.numerics import FORMATS, Enclosure, round_to
from lastbit.ops import op
from lastbit.reports.encoding import encoded
from lastbit.reports.explanation import NO_TEST, computed, decision, explanation_lines, print_explanation
from lastbit.reports.why import Element, Explanation, KernelTrace, Source, StageMatch, Step, WorkedStage
from lastbit.result import Verdict, Worst
from lastbit.verify.check import Subject
from lastbit.verify.worker import WorkerEnded
from tests.diagnosing.test_trace_command import BF16, RIGHT, TORCH, TRITON, kernel_of
from tests.faults import hunt
from tests.reports.test_reports import failed

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()


def explained(kernel: Kernel, line: str = BF16, seconds: float = math.inf) -> Explanation:
    """Explain a case with as much time for mends as they take, so that a slow machine names the same lines."""
    subject = Subject(kernel, hunt.project().op(kernel.op), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mends, "SECONDS", 60.0)
        patch.setattr(relaunches, "SECONDS", 60.0)
        return explain_case(subject, parse_case(line), seconds=seconds)


def fp32(bits: str) -> float:
    return float(struct.unpack(">f", bytes.fromhex(bits[2:]))[0])


def bf16_neighbours(value: float) -> tuple[float, float]:
    """Return the numbers of bf16 on both sides of one of fp32 or more digits, by its bits."""
    cut = struct.unpack(">I", struct.pack(">f", value))[0] >> 16
    ends = (struct.unpack(">f", struct.pack(">I", bits << 16))[0] for bits in (cut, cut + 1))
    below, above = sorted(ends)
    return below, above


def test_the_arithmetic_of_a_triton_kernel_follows_by_hand(tmp_path: Path) -> None:
    found = explained(kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT))
    assert (found.verdict, found.exit_code, found.reason) == (Verdict.FAILED, 1, "")
    row, column = found.worst.index if found.worst is not None else (0, 0)
    tensors = build(parse_case(BF16), torch.device("cpu")).tensors
    x, weight = float(tensors["x"][row, column]), float(tensors["weight"][column])
    inputs = {source.name: float(source.first[0].decimal) for source in found.inputs}
    assert inputs == {f"x[{row}, {column}]": x, f"weight[{column}]": weight, "eps": 1e-06}

    stages = {worked.stage: worked for worked in found.arithmetic}
    assert list(stages) == ["variance", "inv_rms", "normalized", "product", "output"]
    own = {name: fp32(w.actual.bits) for name, w in stages.items() if w.actual and w.dtype == "fp32"}
    squares = sum(Fraction(float(v)) ** 2 for v in tensors["x"][row])
    assert stages["variance"].exact == pytest.approx(float(squares / 40), rel=1e-15)
    assert stages["inv_rms"].exact == pytest.approx(1 / math.sqrt(own["variance"] + 1e-06), rel=1e-12)
    assert stages["normalized"].exact == x * own["inv_rms"]

    below, above = bf16_neighbours(x * own["inv_rms"])
    normalized = stages["normalized"]
    assert (normalized.below, normalized.above) == (below, above)
    nearest = min((below, above), key=lambda end: abs(end - x * own["inv_rms"]))
    assert normalized.lo == normalized.hi == normalized.expected == nearest
    assert normalized.ulp == pytest.approx(abs(own["normalized"] - nearest) / (above - below))
    assert (normalized.format, normalized.rounds, normalized.dtype, normalized.line) == ("bf16", True, "fp32", 17)


def test_the_rounding_that_decides_and_its_line(tmp_path: Path) -> None:
    found = explained(kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT))
    deciding = found.deciding
    assert deciding is not None and deciding.actual is not None and deciding.stage == "normalized"
    said = decision(deciding, sure=True)
    assert said == (
        f"{deciding.exact:.9g} lies between {deciding.below:.9g} and {deciding.above:.9g} (neighbours in bf16); the "
        f"contract rounds normalized here, to {deciding.expected:.9g}; line 17 does not round, and holds "
        f"{deciding.actual.decimal} in fp32."
    )
    assert found.culprit is not None
    assert (found.culprit.line, found.culprit.code) == (17, f"normalized = {RIGHT['normalized']}")
    lines = explanation_lines(found, "--kernels my_kernels")
    assert [label for label, _ in lines if label][:2] == ["line", "rounding"]
    assert lines[0][1].endswith(f"mine.py:17  normalized = {RIGHT['normalized']}")
    assert lines[-1] == ("see more", f"lastbit explain my_kernels::mine '{BF16}'")
    assert len(lines) <= 8


def test_the_formulas_of_the_reference(tmp_path: Path) -> None:
    found = explained(kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT))
    assert {worked.stage: worked.formula for worked in found.arithmetic} == {
        "variance": "mean_of_squares(x[..., :])",
        "inv_rms": "rsqrt(variance + eps)",
        "normalized": "x * inv_rms",
        "product": "normalized * weight",
        "output": "product",
    }


def total(a: Enclosure, b: Enclosure) -> Enclosure:
    return a + b


@op(rows=("x",))
def rebinding(x, *, contract, stage) -> None:  # type: ignore[no-untyped-def]
    """Bind variables in every way that a reference can."""
    y = x * 2
    y += x
    stage("augmented", y - x)
    low, high = x - 1, x + 1
    stage("unpacked", high * low)
    before = x * 3
    x = stage("again", x + 4)
    stage("rebound", before)
    z = x + 6
    z = total(
        z,
        x,
    )
    stage(
        "lines",
        z * 2,
    )
    stage("taken", before if contract is None else x + 7, result=True)


def test_a_formula_has_the_names_of_what_its_variables_hold() -> None:
    """A variable that holds an input or stage is called like that, and any other as the reference calls it."""
    problem = Problem(rebinding, rebinding.contract(""), {"x": torch.ones(1, 2)}, {})
    assert FormulaTrace(problem=problem).evaluate().formulas == {
        "augmented": "y - x",
        "unpacked": "high * low",
        "again": "x + 4",
        "rebound": "",
        "lines": "z * 2",
        "taken": "again + 7",
    }


def test_a_stage_that_the_contract_does_not_round(tmp_path: Path) -> None:
    change = {**RIGHT, "variance": f"({RIGHT['variance']}).to(tl.bfloat16).to(tl.float32)"}
    found = explained(kernel_of(tmp_path, TRITON, contract="fp32_multiply", **change))
    deciding = found.deciding
    assert deciding is not None and deciding.actual is not None
    assert (deciding.stage, deciding.format, deciding.rounds) == ("variance", "fp32", False)
    assert deciding.did == f"rounds to bf16, and gives {deciding.actual.decimal}"
    assert float(deciding.actual.decimal) in bf16_neighbours(deciding.exact)
    assert f"the contract allows {deciding.lo:.9g} to {deciding.hi:.9g} in fp32; line 16 rounds to bf16" in decision(
        deciding, sure=True
    )


def test_a_kernel_in_pytorch(tmp_path: Path) -> None:
    body = "return (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + eps) * weight.float()).to(x.dtype)"
    found = explained(kernel_of(tmp_path, TORCH, contract="native_multiply", body=body))
    deciding = found.deciding
    assert deciding is not None and (deciding.stage, deciding.line) == ("normalized", 7)
    below, above = bf16_neighbours(deciding.exact)
    assert (deciding.below, deciding.above) == (below, above)
    assert found.culprit is not None and found.culprit.line == 7


CANCELLING = "cross_entropy logits=bf16[1,70]:gates labels=int64[1]:labels_70 logit_scale=-1.0 z_loss=1e-40 seed=19"
CROSS_ENTROPY = """
import torch
from lastbit.kernel import kernel

@kernel("cross_entropy", contract="from_lse")
def mine(logits, labels, *, logit_scale, z_loss):
    x = logits.float() * logit_scale
    lse = torch.logsumexp(x, -1)
    return lse - x.gather(-1, labels[:, None])[:, 0] + {more}
"""


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_an_exact_value_that_fp64_does_not_tell_is_not_shown(tmp_path: Path, more: float) -> None:
    """Here lse - x[label] is 0 in fp64 and 2e-27 in truth."""
    found = explained(kernel_of(tmp_path, CROSS_ENTROPY, more=str(more)), CANCELLING)
    assert (found.verdict is Verdict.FAILED) == bool(more)
    assert found.worst is not None and math.isnan(found.worst.exact)
    stages = {worked.stage: worked for worked in found.arithmetic}
    assert stages["lse"].exact == pytest.approx(171.0) and math.isnan(stages["losses"].exact)
    matched = {step.match.stage: step.match.exact for step in found.trace.stages if step.match}
    assert matched["lse"] == pytest.approx(171.0) and math.isnan(matched["losses"])
    if more:
        assert found.deciding is not None
        said = "of losses the contract allows 0 to 2.92408417e-36 in fp32; the kernel gives 1."
        assert decision(found.deciding, sure=False) == said


def test_a_kernel_that_keeps_its_contract(tmp_path: Path) -> None:
    found = explained(kernel_of(tmp_path, TRITON, contract="fp32_multiply", **RIGHT))
    assert (found.verdict, found.exit_code) == (Verdict.PASSED, 0)
    assert (found.deciding, found.culprit, found.diagnoses) == (None, None, ())
    assert all(not worked.did for worked in found.arithmetic) and len(found.arithmetic) == 5
    assert explanation_lines(found) == []


def test_a_kernel_that_raises_one_of_another_shape_and_one_that_declines(tmp_path: Path) -> None:
    raising = explained(kernel_of(tmp_path / "a", TORCH, contract="fp32_multiply", body="raise ValueError('no')"))
    assert (raising.exit_code, raising.reason, raising.worst) == (2, "ValueError: no", None)
    narrow = explained(kernel_of(tmp_path / "b", TORCH, contract="fp32_multiply", body="return x[:, :-1]"))
    assert narrow.exit_code == 2 and "output" in narrow.reason and not narrow.arithmetic
    declining = kernel_of(tmp_path / "c", TORCH, contract="fp32_multiply", body="return x")
    assert explained(declining, BF16.replace(" weight=bf16[40]", "")).exit_code == 3


def test_of_what_is_compiled_the_result_alone_is_worked_out(tmp_path: Path) -> None:
    body = "y = torch.empty_like(x); y.view(torch.int16).numpy()[:] = 0; return y"
    found = explained(kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=body))
    assert "there is nothing to see inside" in found.trace.reason
    assert [worked.stage for worked in found.arithmetic if worked.actual] == ["output"]
    assert found.deciding is not None and found.deciding.stage == "output" and found.deciding.line == 0
    assert found.worst is not None
    row, column = found.worst.index
    assert [source.name for source in found.inputs] == [f"x[{row}, {column}]", f"weight[{column}]", "eps"]
    assert "; the kernel gives 0" in decision(found.deciding, sure=True)


def test_a_value_of_another_element(tmp_path: Path) -> None:
    y = "(x.float() * torch.rsqrt(x.float().square().mean(-1, True) + eps) * weight.float()).to(x.dtype)"
    found = explained(kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=f"return torch.roll({y}, 1, -1)"))
    assert found.worst is not None
    row, column = found.worst.index
    needed = [f"x[{row}, {column}]", f"weight[{column}]"]
    taken = [f"x[{row}, {(column - 1) % 40}]", f"weight[{(column - 1) % 40}]"]
    assert [source.name for source in found.inputs] == [*needed, "eps"]
    tensors = build(parse_case(BF16), torch.device("cpu")).tensors
    assert float(found.inputs[0].first[0].decimal) == float(tensors["x"][row, column])
    stages = {worked.stage: worked.exact for worked in found.arithmetic}
    assert stages["normalized"] == pytest.approx(float(tensors["x"][row, column]) * stages["inv_rms"], rel=1e-6)
    assert found.elsewhere == tuple(taken)
    assert all(stage.actual is None for stage in found.arithmetic if stage.stage != found.stage)  # of that element
    out = io.StringIO()
    print_explanation(found, Console(file=out, width=200))
    assert f"note      the kernel's value came from {' and '.join(taken)}\n" in out.getvalue()


def test_no_time_for_the_way(tmp_path: Path) -> None:
    found = explained(kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT), seconds=0.0)
    assert not found.trace.steps and "the way of the element" in found.reason
    assert found.deciding is not None and found.deciding.stage == "output"


def test_no_stage_is_blamed_where_no_value_is_wrong_but_the_line_that_wrote_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "y = (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + eps) * weight.float()).to(x.dtype)"
    kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=f"{body}; x.zero_(); return y")
    assert run(BF16, "mine", str(tmp_path)) == 1
    text = capsys.readouterr().out
    assert "as the contract allows" in text and "✗" not in text.replace("✗: its", "")
    assert "\n  line " in text and "x.zero_() = 120 elements" in text
    assert text.count("  finding ") == 1 and "  rounding " not in text


# What a kernel does in place of the contract


@pytest.mark.parametrize(
    ("actual", "exact", "fmt", "dtype", "did"),
    [
        (1.003, 1.003, "bf16", "fp32", "does not round, and holds 1.003 in fp32"),
        (1.0029296875, 1.0015, "bf16", "fp16", "holds 1.00292969 in fp16"),
        (1.5, 1.01, "bf16", "bf16", "gives 1.5"),
        (1.0234375, 1.01, "bf16", "bf16", "gives 1.0234375, 2 ulp away"),
        (math.inf, 1.01, "bf16", "bf16", "gives inf"),
        (-2040.0, -2035.53018, "bf16", "bf16", "gives -2040, 1 ulp away"),
    ],
)
def test_what_a_kernel_does_in_place_of_a_rounding(actual: float, exact: float, fmt: str, dtype: str, did: str) -> None:
    expected = float(torch.tensor(exact, dtype=torch.float64).to(torch.float32).to(torch.bfloat16))
    assert deed(actual, (exact, expected, expected, expected), FORMATS[fmt], rounds=True, dtype=dtype) == did


def elements_of(made: Any, fmt: str, count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a kernel makes of exact values of a stage in a format, and what the contract allows."""
    exact = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 1.0
    value = round_to(exact, FORMATS[fmt])
    return made(exact), torch.stack([exact, value, value, value])


BF, FP16, SINGLE = FORMATS["bf16"], FORMATS["fp16"], FORMATS["fp32"]
WAYS: dict[str, tuple[Any, str, str, int, tuple[str, ...]]] = {
    "cut": (lambda x: round_to(x, BF.toward("zero")), "bf16", "bf16", 256, ("cuts off",)),
    "of a number a little too small": (lambda x: round_to(x * (1 - 2.0**-10), BF), "bf16", "bf16", 256, ()),
    "coarse": (lambda x: round_to(x, BF), "fp16", "fp16", 256, ("rounds to bf16",)),
    "coarse by chance, 1 in 8 is": (lambda x: round_to(x, BF), "fp16", "fp16", 1, ()),
    "coarse and off": (lambda x: round_to(x * (1 + 2.0**-8), FP16), "fp16", "fp16", 256, ()),
    "coarser than fp32": (lambda x: round_to(x, BF), "fp32", "fp32", 1, ("rounds to bf16",)),
    "cut to another": (lambda x: round_to(x, BF.toward("zero")), "fp32", "bf16", 256, ("cuts off to bf16",)),
    "twice": (
        lambda x: round_to(round_to(x, FP16), BF), "bf16", "bf16", 4096, ("rounds twice (by way of fp16)",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_rounding_is_said_of_one_element_only_if_it_gives_all_that_are_wrong(name: str) -> None:
    made, fmt, dtype, count, ways = WAYS[name]
    actual, legal = elements_of(made, fmt, count)
    found = ways_of_all(actual, legal, FORMATS[fmt], rounds=fmt != "fp32", dtype=dtype)
    assert found == ways
    one = int((actual != legal[1]).nonzero()[0])
    element: Any = tuple(legal[:, one].tolist())
    did = deed(float(actual[one]), element, FORMATS[fmt], rounds=True, dtype=dtype, ways=found)
    assert did.startswith(ways or ("gives", "holds"))


def test_ties_saturation_and_a_rounding_that_is_left_out() -> None:
    """0.557252411 is nearest to 0.55859375; the contract, which rounded before, has the other neighbour."""
    tie = 1.00390625 + 2.0**-7 * torch.arange(0, 32, 2, dtype=torch.float64)
    even = round_to(tie, BF)
    other = 2 * tie - even
    huge = torch.full((1,), 3.9e38, dtype=torch.float64)
    inf, most = torch.full((1,), torch.inf, dtype=torch.float64), torch.full((1,), BF.max, dtype=torch.float64)
    left = torch.full((1,), 0.557252411, dtype=torch.float64) + 2.0**-20 * torch.arange(8)
    before = torch.full((8,), 0.5546875, dtype=torch.float64)
    for actual, exact, value, way in (
        (other, tie, even, "rounds the tie the other way"),
        (most, huge, inf, "saturates"),
        (round_to(left, BF), left, before, "leaves out a rounding before this one, and rounds"),
    ):
        legal = torch.stack([exact, value, value, value])
        assert way in ways_of_all(actual, legal, BF, rounds=True, dtype="bf16")


def test_the_contract_is_not_said_to_round_away_from_the_nearest() -> None:
    """20.989 is nearer to 20; the contract has 22 because it rounded a stage before that was not seen."""
    worked = WorkedStage("output", (0,), 20.989, 22.0, 22.0, 22.0, "e4m3", rounds=True, below=20.0, above=22.0,
                    did="leaves out a rounding before this one, and rounds, and gives 20")  # fmt: skip
    said = decision(worked, sure=False)
    assert "lies between" not in said and "rounds output here" not in said
    assert said == (
        "without a rounding before it output is 20.989, and with those of the contract 22; the kernel leaves out a "
        "rounding before this one, and rounds, and gives 20."
    )


@pytest.mark.parametrize(
    ("value", "fmt", "ends"),
    [
        (-0.83512, "bf16", (-0.8359375, -0.83203125)),
        (0.5, "bf16", (0.5, 0.5)),
        (3e-8, "fp16", (0.0, 2.0**-24)),
        (65505.0, "fp16", (65504.0, math.inf)),
        (math.inf, "fp16", (math.inf, math.inf)),
    ],
)
def test_neighbours(value: float, fmt: str, ends: tuple[float, float]) -> None:
    assert neighbours(value, FORMATS[fmt]) == ends


def test_a_stage_of_other_rows_stands_as_its_match_says() -> None:
    said = "gives 1.25"
    match = StageMatch("up", 1.005, 1.0, 1.01, 1, 8, expected=1.0078125, format="bf16")
    step = Step("up", dtype="fp32", line=7, count=1, first=(Element("1.25", "0x3fa00000"),), match=match)
    expected = Numbers(Enclosure.point(torch.zeros(8)), FORMATS["bf16"])
    found = of_match(step, expected, rounds=True)
    assert found is not None and found.actual == step.first[0]
    assert (found.stage, found.index, found.line, found.did) == ("up", (), 7, said)
    assert of_match(replace(step, direct=False), expected, rounds=True) is None
    assert of_match(Step(""), expected, rounds=True) is None


def test_the_number_of_an_element() -> None:
    assert number_of(Element("0.100000001", "0x3dcccccd"), "fp32") == fp32("0x3dcccccd")
    assert number_of(Element("0.10000000000000001", "0x3fb999999999999a"), "fp64") == 0.1
    assert [number_of(Element(text), "int1") for text in ("True", "False", "-3")] == [1.0, 0.0, -3.0]


def test_distance_in_ulp() -> None:
    bf16 = FORMATS["bf16"]
    assert in_ulp(1.0 + 2.0**-9, 1.0, bf16) == 0.25
    assert in_ulp(2.0**-133, 0.0, bf16) == 1.0
    assert (in_ulp(math.inf, math.inf, bf16), in_ulp(math.nan, math.nan, bf16)) == (0.0, 0.0)
    assert in_ulp(math.inf, 1.0, bf16) == math.inf


def test_an_expression_with_its_values() -> None:
    step = Step("x * rstd", dtype="fp32", count=1, first=(Element("6", "0x40c00000"),))
    names = [Source("", 1, (Element(text),)) for text in ("2", "3")]
    assert computed(replace(step, sources=tuple(names))) == "x * rstd = 2 * 3 = 6 in fp32"
    assert computed(replace(step, text="tl.f(x)", sources=(names[0],))) == "tl.f(x) = 6 in fp32, from 2"


# The command


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "Worker", InThisProcess)
    monkeypatch.setattr(explaining, "SHRINKING", 0.0)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parsers.add_explain(parser)
    options = parser.parse_args(arguments)
    return int(command.run(options, []))


def test_the_command_prints_the_arithmetic_and_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT)
    assert run(BF16, "mine", str(tmp_path)) == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("mine on cpu  contract native_multiply") and lines[0].endswith("FAILED")
    [wrong] = [line.split() for line in lines if line.strip().startswith("✗ normalized")]
    assert wrong[-1] == "17" and wrong[-3] == "fp32"
    assert any(line.startswith("  line ") and "mine.py:17" in line for line in lines)
    assert "line 17 does not round" in " ".join(text.split())
    assert "no time was left for smaller tensors" in text
    assert max(map(len, lines)) <= 120 or len(str(tmp_path)) > 60


def test_the_command_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT)
    assert run(BF16, "mine", str(tmp_path), "--format", "json") == 1
    [found] = json.loads(capsys.readouterr().out)
    wrong = next(worked for worked in found["arithmetic"] if worked["did"])
    assert (wrong["stage"], wrong["line"], wrong["format"]) == ("normalized", 17, "bf16")
    assert wrong["actual"]["bits"].startswith("0x") and found["trace"]["leaves"]


def test_the_smallest_tensors_and_their_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "SHRINKING", 60.0)
    small = "rms_norm x=bf16[1,2] weight=bf16[2] eps=1e-06 seed=1"

    class Shrinks(InThisProcess):
        def do(self, work: Any, *args: Any, **kwargs: Any) -> Any:
            if work is explaining.smallest_of:
                assert kwargs["seconds"] > 0
                return parse_case(small)
            return super().do(work, *args, **kwargs)

    monkeypatch.setattr(explaining, "Worker", Shrinks)
    kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT)
    with Explainer(Config("", kernel_folders=(str(tmp_path),), kernels=("mine",), lines=(BF16,))) as explainer:
        found = explainer.explain("mine", BF16)
    assert (found.smallest, found.reason) == (small, "")
    assert "def test_mine" in found.test and ("smallest", small) in explanation_lines(found)
    assert "\n\ninterpret_triton()  # on a CPU, before anything imports triton\nfrom mine import mine" in found.test


@pytest.mark.parametrize(("body", "has_test"), [("x.zero_(); return y", False), ("return 2 * y", True)])
def test_there_is_no_test_of_what_no_assertion_sees(
    body: str, has_test: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explaining, "SHRINKING", 60.0)
    monkeypatch.setattr(explaining, "smallest_of", lambda *_, **__: parse_case(BF16))
    y = "y = (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + eps) * weight.float()).to(x.dtype)"
    kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=f"{y}; {body}")
    assert run(BF16, "mine", str(tmp_path)) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"smallest {BF16} test" in text
    assert ("def test_mine" in text, NO_TEST in text) == (has_test, not has_test)
    assert "interpret_triton" not in text, "nothing of it is Triton's"


def test_whether_an_assertion_on_the_result_sees_what_is_wrong() -> None:
    found = explained_result(failed(), "norm.py", findings=("It wrote to x.", "2 of 4 are not possible."), test="t")
    wrong, right = found.worst, replace(found.worst, actual=0.1484375) if found.worst else None
    beside = replace(found.trace, notes=found.findings[:1])
    assert found.testable and found.without_vain_test is found
    assert not replace(found, trace=beside).testable
    assert replace(found, trace=beside).without_vain_test.test == ""
    assert replace(found, trace=beside, verdict=Verdict.ERRORED, worst=None).testable
    assert replace(found, worst=right).testable, "a row, say, of which no single element is wrong"
    elsewhere = replace(found, device="cuda:0")
    assert not replace(elsewhere, worst=right).testable
    assert replace(elsewhere, worst=wrong).testable


def test_the_command_without_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BF16, "eager[completion_mask]") == 3
    assert "no kernel of rms_norm is here" in capsys.readouterr().out


def test_a_kernel_that_ends_its_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Ended(InThisProcess):
        def do(self, work: Any, *args: Any, **kwargs: Any) -> Any:
            if explain_case in args or work is explaining.smallest_of:
                raise WorkerEnded("the process died without an exception", BF16)
            return super().do(work, *args, **kwargs)

    monkeypatch.setattr(explaining, "Worker", Ended)
    assert run(BF16, "eager[native_multiply+rounded_sum]") == 2
    assert "the process died without an exception" in capsys.readouterr().out


# An accelerator


def found_on(device: str, verdict: Verdict) -> Explanation:
    """Return an explanation, as a worker on a device has it."""
    trace = KernelTrace("mine", "rms_norm", "native_multiply", BF16, device, verdict)
    worst = Worst((0, 3), 1.0, 2.0, 2.0, 2.0, 2.0, 1.0)
    said = (f"as on {device}",)
    return Explanation("mine", device, BF16, verdict, trace, diagnoses=said, stage="output", worst=worst)


@pytest.fixture
def explainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Explainer]:
    """One of a kernel that fails on an accelerator and has another verdict on the CPU."""

    class Canned(InThisProcess):
        def __enter__(self) -> Canned:
            return self

        def do(self, work: Any, *args: Any, **kwargs: Any) -> Any:
            [device] = self._config.devices
            if work is explaining.planned:
                return (argparse.Namespace(kernel="mine", device=device, op="rms_norm", contract="", source=""),)
            return found_on(device, Verdict.FAILED if device != "cpu" else request.param)

    monkeypatch.setattr(explaining, "Worker", Canned)
    with Explainer(Config("", device_plan=DevicePlan(("cuda:0",), ("asked for",)), lines=(BF16,))) as made:
        yield made


@pytest.mark.parametrize("explainer", [Verdict.FAILED], indirect=True)
def test_what_fails_on_an_accelerator_is_followed_on_the_cpu(explainer: Explainer) -> None:
    found = explainer.explain("mine", BF16)
    assert (found.device, found.trace.device) == ("cuda:0", "cpu")
    assert found.diagnoses == ("as on cuda:0",) and "those of the same case on the CPU" in found.reason


@pytest.mark.parametrize("explainer", [Verdict.PASSED], indirect=True)
def test_what_fails_on_an_accelerator_alone(explainer: Explainer) -> None:
    found = explainer.explain("mine", BF16)
    assert (found.device, found.verdict, found.exit_code) == ("cuda:0", Verdict.FAILED, 1)
    assert found.reason.startswith("on the CPU, interpreted, the kernel keeps its contract on this case: what differs")


def test_an_explanation_is_data() -> None:
    worked = WorkedStage("output", (0, 1), 1.0, 1.0, 1.0, 1.0, "bf16", rounds=True, actual=Element("1", "0x3f80"))
    found = replace(found_on("cpu", Verdict.FAILED), arithmetic=(worked,))
    assert encoded(found)["arithmetic"][0]["index"] == [0, 1]
