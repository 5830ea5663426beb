"""The first stage that goes wrong: planted faults are named, and nothing else."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_this_process import InThisProcess
from rich.console import Console
from torch import Tensor

from lastbit.case import Case, parse_case
from lastbit.commands import explain as command
from lastbit.commands import parsers
from lastbit.diagnosing.handover import search_stages
from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel
from lastbit.numerics import Enclosure, hull
from lastbit.ops import Contract, StageRecorder, op
from lastbit.reports.stages import StageKind, StageSearch, print_stages, sentences
from lastbit.verify.check import Subject
from lastbit.verify.worker import WorkerEnded
from tests.faults import hunt
from tests.faults.catalogue import FAULTS
from tests.faults.plant import Fault, planted
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")

CPU = torch.device("cpu")
BF16 = "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 seed=1"
SMALL = "rms_norm x=bf16[2,8] weight=bf16[8] eps=1e-06 seed=2"
FP32 = "rms_norm x=fp32[24,96] weight=fp32[96] eps=1e-06 seed=3"
Stages = dict[str, Tensor]


def searched(kernel: Kernel, line: str) -> StageSearch:
    return search_stages(Subject(kernel, hunt.project().op(kernel.op), CPU), parse_case(line))


def of(call: Callable[..., Any], line: str = BF16, contract: str = "", **declared: Any) -> StageSearch:
    return searched(Kernel("mine", "rms_norm", contract, call, **declared), line)


@functools.cache
def fault(text: str) -> Fault:
    return next(f for f in FAULTS if str(f) == text)


def rows_of(case: Case) -> int:
    return math.prod(case.tensors[0].shape[:-1])


def of_fault(text: str, *, stages: bool) -> StageSearch:
    """Search on the first case that shows the fault; of two rows, one of them zeros, little can be said."""
    every, again = (hunt.cases_for(fault(text), fault(text).dtypes[0], 60) for _ in range(2))
    first, _ = hunt.KEPT.get(text, (1, 1))
    cases = (
        case
        for case in itertools.chain(itertools.islice(every, first - 1, None), again)
        if rows_of(case) > 3 or case.tensors[0].regime != "zero_rows"
    )
    with planted(fault(text)) as kernel:
        kernel = kernel if stages else hunt.without_stages(kernel)
        sighting = next(filter(None, (hunt.hunt(kernel, [case], CPU) for case in cases)))
        return searched(kernel, sighting.result.case)


# Planted faults


@pytest.mark.parametrize(
    ("planted_fault", "stage"),
    [
        ("rms_norm: weight multiplied in fp32", "normalized"),
        ("rms_norm: weight multiplied natively", "normalized"),
        ("rms_norm: inverse rms rounded", "inv_rms"),
        ("rms_norm: squares rounded", "variance"),
        ("rms_norm: last element dropped", "variance"),
        ("rms_norm: weight + 1 rounded", "product"),
        ("rms_norm: store truncates", "output"),
        ("rms_norm: residual not written back", "residual_sum"),
        ("layer_norm_gated: gate rounded", "gate"),
        ("layer_norm_gated: mean rounded", "mean"),
        ("layer_norm_gated: eps left out", "rstd"),
        ("layer_norm_gated: rounded before the gate", "output"),
        ("layer_norm_gated_backward: c2 rounded", "c2"),
        ("moe_lora: base rounded", "gate_base"),
        ("moe_lora: silu rounded", "intermediate"),
        ("moe_lora: expert output rounded", "expert_output"),
    ],
)
def test_the_stage_of_a_fault(planted_fault: str, stage: str) -> None:
    found = of_fault(planted_fault, stages=True)
    assert (found.stage, found.exit_code) == (stage, 1)
    at = next(h for h in found.handovers if h.stage == stage)
    assert at.isolated.outside == found.wrong[0] > 0
    before = found.handovers[: found.handovers.index(at)]
    assert not any(h.isolated.outside or h.forward.outside for h in before)


# Kernels without a fault


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("triton[native_multiply+unrounded_sum]", BF16.replace("weight", "residual=bf16[24,96] weight")),
        ("triton[fp32_multiply+rounded_sum]", FP32),
        ("F.rms_norm", BF16),
        (
            "triton[single_rounding]",
            "layer_norm_gated x=bf16[9,64] weight=bf16[64] z=bf16[9,64]:gates eps=1e-05 seed=2",
        ),
        ("triton[completion_mask]", "completion_mask ids=int64[3,17]:below_4 eos_ids=int64[1]:below_4 seed=4"),
    ],
)
def test_no_stage_of_a_correct_kernel(name: str, line: str) -> None:
    kernel = next(k for k in hunt.clean_kernels() if k.name == name)
    found = searched(kernel, line)
    assert (found.kind, found.stage, found.exit_code) == (StageKind.CLEAN, "", 0)
    assert found.handovers[0].stage == "" and found.handovers[-1].result
    assert all(not h.isolated.outside and not h.forward.outside and not h.backward for h in found.handovers)
    assert next(sentences(found)).startswith("No stage goes wrong.")


# Kernels that are wrong in other ways


def parts(x: Tensor, weight: Tensor, eps: float) -> Stages:
    variance = x.float().square().mean(-1, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    normalized = (x.float() * inverse).to(x.dtype)
    product = (normalized.float() * weight.float()).to(x.dtype)
    return {"variance": variance, "inv_rms": inverse, "normalized": normalized, "product": product, "output": product}


def with_stages(change: Callable[[Stages], Stages], *seen: str) -> Callable[..., Any]:
    def call(x: Tensor, weight: Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> Tensor | Stages:
        made = change(parts(x, weight, eps))
        return {name: made[name] for name in ("output", *stages)} if stages else made["output"]

    return call


def test_a_fault_that_no_result_shows() -> None:
    def stored_wrong(made: Stages) -> Stages:
        return {**made, "variance": made["variance"] * (1 + 2**-20)}

    found = of(with_stages(stored_wrong), SMALL, stages=("variance", "normalized"))
    assert (found.kind, found.stage) == (StageKind.UNSEEN, "variance")
    assert "No result shows it here" in next(sentences(found))


def test_the_first_of_the_stages_that_are_seen() -> None:
    """Only two stages are seen; the fault is in an earlier one."""

    def with_another_eps(x: Tensor, weight: Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> Tensor | Stages:
        made = parts(x, weight, eps=1.0)
        return {name: made[name] for name in ("output", *stages)} if stages else made["output"]

    found = of(with_another_eps, stages=("normalized", "product"))
    assert (found.kind, found.stage) == (StageKind.LOCAL, "normalized")
    assert found.handovers[1].backward == 0


@op(rows=("x",))
def forgetful(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """Leaves open whether x is doubled, and forgets that it did."""
    a = stage("a", hull(x, x * 2.0))
    stage("output", x if len(a.parts) == 4 else a, result=True)


def test_results_that_do_not_follow_although_every_stage_does() -> None:
    def doubled(x: Tensor, *, stages: tuple[str, ...] = ()) -> Tensor | Stages:
        return {"output": x * 2, "a": x * 2} if stages else x * 2

    subject = Subject(Kernel("mine", "forgetful", "", doubled, stages=("a",)), forgetful, CPU)
    found = search_stages(subject, parse_case("forgetful x=fp32[2,4] seed=1"))
    assert (found.kind, found.stage, found.exit_code) == (StageKind.MISSING, "a", 1)
    assert next(sentences(found)).startswith("Every stage follows from those before it")


def test_rows_that_disagree_with_themselves() -> None:
    def torn(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        exact = (1 / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()).float()
        ends = [torch.nextafter(exact, torch.full((), limit)) for limit in (0.0, torch.inf)]
        return x * torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, *ends) * weight

    found = of(torn, FP32)
    assert (found.kind, found.stage, found.exit_code) == (StageKind.ROWS, "inv_rms", 1)
    assert "cannot come from one inv_rms" in next(sentences(found))


def test_what_no_stage_shows_is_said() -> None:
    def in_place(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return x.copy_(parts(x, weight, eps)["output"])

    found = of(in_place)
    assert found.kind is StageKind.CLEAN and found.exit_code == 1
    assert any("changed" in sentence for sentence in sentences(found))


# What cannot be searched


def test_a_kernel_that_raises() -> None:
    found = of(lambda x, weight, *, eps: 1 / 0)
    assert (found.handovers, found.reason, found.exit_code) == ((), "ZeroDivisionError: division by zero", 2)


def test_a_case_that_the_kernel_does_not_take() -> None:
    found = of(lambda x, *, eps: x)
    assert (found.reason, found.exit_code) == ("the kernel takes no weight", 3)


def test_a_case_that_is_too_large() -> None:
    with pytest.raises(UsageError, match="x has 8,388,608 elements"):
        of(lambda x: x, "rms_norm x=bf16[2048,4096] weight=bf16[4096] eps=1e-06 seed=1")


# Evaluation


def test_a_reference_goes_on_from_an_enclosure() -> None:
    rms_norm = hunt.project().op("rms_norm")
    tensors = {"x": torch.ones(1, 4), "weight": torch.ones(4)}
    contract = rms_norm.contract("fp32_multiply")
    parts_ = torch.tensor([1.0, 1.0, 0.5, 2.0], dtype=torch.float64).reshape(4, 1, 1)
    trace = Problem(rms_norm, contract, tensors, {"eps": 0.0}).evaluate({"inv_rms": Enclosure(parts_)})
    output = trace.enclosure("output")
    assert (output.lo.max(), output.value.max(), output.hi.min()) == (0.5, 1.0, 2.0)
    assert trace.enclosure("inv_rms").hi.max() < 1.001  # what the stage must be is still what follows from the inputs


# What is printed


def run(*words: str) -> int:
    """Run `lastbit explain WORDS --stages`, with kernels in this process, and return its exit code."""
    parser = argparse.ArgumentParser()
    parsers.add_explain(parser)
    options = parser.parse_args([*words, "--stages"])
    with patch.object(command, "Worker", InThisProcess):
        return int(command.run(options, []))


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(BF16, "triton[fp32_multiply+rounded_sum]") == 0
    text = capsys.readouterr().out
    assert "triton[fp32_multiply+rounded_sum] on cpu" in text
    assert "(inv_rms)" in text and "No stage goes wrong." in text


def test_a_case_that_no_kernel_is_for_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(BF16, "eager[completion_mask]") == 3
    assert "no kernel of rms_norm is here" in capsys.readouterr().out


def test_a_kernel_that_ends_its_process_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object, **__: object) -> None:
        raise WorkerEnded("the process died without an exception", BF16)

    monkeypatch.setattr(command, "search_stages", ends)
    assert run(BF16, "triton[fp32_multiply+rounded_sum]") == 2
    assert "errored: the process died without an exception, in rms_norm" in " ".join(capsys.readouterr().out.split())


def test_the_table() -> None:
    found = of_fault("rms_norm: inverse rms rounded", stages=True)
    console = Console(width=120)
    with console.capture() as capture:
        print_stages(found, console)
    lines = capture.get().splitlines()
    assert lines[1].strip() == found.case
    assert [line.split()[0] for line in lines[3:6]] == ["(inputs)", "(variance)", "(inv_rms)"]
