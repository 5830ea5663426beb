"""--sanitize travels from the command line to where kernels are called, and from a finding to its repro line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from lastbit.case import parse_case
from lastbit.cli import make_parser
from lastbit.commands import verify
from lastbit.commands.options import config_of
from lastbit.config import PROFILES, Config
from lastbit.devices import DevicePlan
from lastbit.inputs import bare, build
from lastbit.interpret import races
from lastbit.interpret.watching import watching_races
from lastbit.kernel import Kernel
from lastbit.references.rms_norm import rms_norm
from lastbit.reports.summary import repro_line
from lastbit.result import SANITIZED, Finding, Verdict
from lastbit.sanitize.looking import call_bare
from lastbit.sanitize.tool import TOOLS
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.plan import make_plan
from lastbit.verify.project import open_project
from lastbit.verify.worker import Worker, Workplace, plan_for
from tests.reports.test_reports import failed, passed

CASE = "rms_norm x=bf16[4,8]@24,1+3 eps=1e-06 seed=1"


def test_the_option_reaches_the_configuration_of_a_run(tmp_path: Path) -> None:
    for words in (["verify"], ["verify", CASE]):
        options, _ = make_parser().parse_known_args(
            [*words, "--sanitize", "--run-folder", str(tmp_path / str(len(words)))]
        )
        config = config_of(options)
        assert config.sanitize and Config.load(config.save()) == config
    assert not config_of(make_parser().parse_args(["verify", CASE])).sanitize


@pytest.mark.parametrize(
    ("words", "profile"),
    [((), "ci"), (("--sanitize",), "smoke"), (("--sanitize", "--profile", "nightly"), "nightly")],
)
def test_a_sanitized_run_is_a_smoke_run_by_default(
    words: tuple[str, ...], profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Config] = []
    monkeypatch.setattr(verify, "_run", lambda config, arguments, **_: ran.append(config) or 0)
    options, rest = make_parser().parse_known_args(["verify", *words])
    assert resolve_name(options.command)(options, rest) == 0
    assert [config.profile for config in ran] == [profile]


def test_a_sanitized_run_has_small_cases() -> None:
    on_cuda = DevicePlan(("cuda:0",), ("",))
    assert [Config("", device_plan=on_cuda, sanitize=sanitize).small for sanitize in (False, True)] == [False, True]


def test_who_watches_for_races() -> None:
    watching = {name: Config("", profile=name).races for name in PROFILES}
    assert watching == {"smoke": False, "ci": False, "nightly": True}
    config = Config("", sanitize=True, ops=("rms_norm",), lines=(CASE,))
    assert config.races and all(item.subject.races for item in make_plan(config, "cpu").items)


@pytest.mark.parametrize("sanitize", [False, True])
def test_a_kernel_is_called_within_races(sanitize: bool) -> None:
    seen: list[bool] = []

    def kernel(x: torch.Tensor, *, eps: float) -> torch.Tensor:
        seen.append(watching_races())
        xf = x.float()
        return (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    subject = Subject(Kernel("k", "rms_norm", "fp32_multiply", kernel), rms_norm, torch.device("cpu"), races=sanitize)
    assert verify_case(subject, parse_case(CASE)).verdict is Verdict.PASSED
    assert set(seen) == {sanitize} and not watching_races()


def test_races_end_with_their_context() -> None:
    with races():
        with races():
            pass
        assert watching_races()
    assert not watching_races()


@pytest.mark.parametrize("kind", sorted(SANITIZED))
def test_a_case_that_needs_the_option_is_repeated_with_it(kind: str) -> None:
    assert "--sanitize" in repro_line(passed(findings=(Finding(kind, "x", "x."),))).split()
    assert "--sanitize" not in repro_line(failed())
    assert set(TOOLS) < SANITIZED


def test_a_launcher_starts_the_process_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(command: list[str], **options: Any) -> None:
        assert command[:2] == ["tool", "--option"] and command[-2].startswith("import sys")
        assert options["env"]["CACHING"] == "no" and options["env"]["TRITON_INTERPRET"] == "1"
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(Started), Worker(Config(""), launcher=("tool", "--option"), environ={"CACHING": "no"}) as worker:
        worker.do(lambda place: None)


@pytest.mark.parametrize(
    "spec",
    ["bf16[4,8]@24,1+3", "fp32[3,5]", "e4m3[2,3,4]@40,8,1", "bf16[3,4]@0,1+1", "fp32[0,4]", "fp16[2,3]@1,2"],
)
def test_a_bare_tensor_is_what_its_case_says_and_ends_with_its_last_element(spec: str) -> None:
    inputs = build(parse_case(f"rms_norm x={spec} seed=1"), "cpu")
    tensor, like = bare(inputs, torch.device("cpu"))["x"], inputs.tensors["x"]
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    assert torch.equal(tensor.contiguous().view(torch.uint8), like.contiguous().view(torch.uint8))
    end = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    assert tensor.untyped_storage().nbytes() == (end * tensor.itemsize if tensor.numel() else 0)
    assert tensor.storage_offset() == inputs.case["x"].offset


def test_bare_tensors_leave_gaps_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: empty(size, **options).fill_(7.0))
    tensor = bare(build(parse_case(CASE), "cpu"), torch.device("cpu"))["x"]
    whole = tensor.as_strided((3 * 24 + 8 + 3,), (1,), 0)
    assert (whole[:3] == 7).all() and (whole[3 + 8 : 3 + 24] == 7).all() and not (tensor == 7).any()


def place_with(call: Any, stages: tuple[str, ...] = ()) -> Workplace:
    config = Config("", ops=("rms_norm",), lines=(CASE,))
    plan = plan_for(config)
    [item, *_] = plan.items
    kernel = Kernel("k", "rms_norm", "fp32_multiply", call, stages=stages)
    subject = Subject(kernel, item.subject.op, torch.device("cpu"))
    items = (type(item)(subject, item.group),)
    return Workplace(config, open_project(config), type(plan)(items, (), 0))


def test_a_bare_call_names_the_memory_of_inputs_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    held: list[dict[str, torch.Tensor]] = []

    def kernel(x: torch.Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> object:
        y = x * 2
        held.append({"x": x, "output": y})
        return {"output": y, "inv_rms": y[:, 0]} if stages else y

    called = call_bare(place_with(kernel, ("inv_rms",)), "k", CASE)
    assert called.raised == "" and len(held) == 2
    assert [m.name for m in called.memory] == ["x", "the result", "x", "output", "inv_rms"]
    assert called.memory[0].start == held[0]["x"].untyped_storage().data_ptr()
    assert called.memory[0].size == (3 * 24 + 8 + 3) * 2


def test_a_bare_call_that_raises_says_so_and_names_its_inputs() -> None:
    def kernel(x: torch.Tensor, *, eps: float) -> torch.Tensor:
        raise ValueError("no tile\nfor it")

    called = call_bare(place_with(kernel), "k", CASE)
    assert called.raised == "ValueError: no tile" and [m.name for m in called.memory] == ["x"]
