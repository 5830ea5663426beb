"""`lastbit agree`: equal or not, which stage parts, and what each kernel keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_this_process import InThisProcess
from torch import Tensor

from lastbit.case import Group
from lastbit.cli import main
from lastbit.commands import agree as command
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.identifying.bitwise_agreement import _compare, agree_kernels
from lastbit.kernel import Kernel
from lastbit.reports.agreement import Agreement, KernelSide, StageAgreement, as_json, sentences
from lastbit.verify.check import Subject
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import WorkerEnded, Workplace

LINES = (
    "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 seed=1",
    "rms_norm x=bf16[3,64]:special weight=bf16[64] eps=1e-06 seed=2",
)


Function = Callable[..., Tensor]


def native(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def in_fp32(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def backwards(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Multiply in another order than `in_fp32`, under the same contract."""
    value = x.float()
    return (value * (torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float())).to(x.dtype)


def other_nan(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    found = native(x, weight, eps=eps)
    return torch.where(found.isnan(), torch.tensor(-math.nan, dtype=found.dtype), found)


def raising(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    raise RuntimeError("out of luck")


def raising_on_many_rows(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return native(x, weight, eps=eps) if len(x) < 4 else raising(x, weight, eps=eps)


def emptying(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    found = native(x, weight, eps=eps)
    x.zero_()
    return found


CONTRACTS = {in_fp32: "fp32_multiply", backwards: "fp32_multiply"}


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


Agree = Callable[..., Agreement]


@pytest.fixture
def agree(project: Project) -> Agree:
    """Compare two functions on `LINES`."""

    def compared(first: Function, second: Function, *lines: str) -> Agreement:
        op = project.op("rms_norm")
        kernels = [Kernel(f.__name__, op.name, CONTRACTS.get(f, "native_multiply"), f) for f in (first, second)]
        items = (Item(Subject(kernel, op, torch.device("cpu")), Group("g")) for kernel in kernels)
        place = Workplace(Config(folder="", lines=lines or LINES), project, Plan(tuple(items), (), 0))
        return agree_kernels(place, first.__name__, second.__name__, most=100)

    return compared


def test_the_same_arithmetic_agrees(agree: Agree) -> None:
    found = agree(native, other_nan)
    assert (found.cases, found.unequal_cases, found.exit_code) == (2, 0, 0)
    assert not found.line and found.parting is None
    assert found.stages[0].elements == 24 * 96 + 3 * 64
    assert next(sentences(found)).startswith("Every bit is equal: 2,496 elements in 2 cases")


def test_another_contract_is_named_with_the_stage_where_it_parts(agree: Agree) -> None:
    found = agree(native, in_fp32)
    assert found.exit_code == 1 and found.line == LINES[1]  # the smaller one
    assert found.parting is not None and found.parting.stage == "normalized"
    one, other = found.parting.does
    assert (one.rounds_to, other.rounds_to) == ("bf16", "")
    assert other.options == ("fp32_multiply",) and one.options[0] in ("native_multiply", "input_multiply")
    said = " ".join(sentences(found))
    assert "part at normalized: native rounds it to bf16 (native_multiply), in_fp32 does not round it" in said
    assert Path(__file__).name in other.place  # the line, seen without the kernel's help


def test_the_element_that_is_farthest_apart_is_shown(agree: Agree) -> None:
    [stage] = agree(native, in_fp32, LINES[0]).stages
    assert stage.stage == "output" and stage.ulp == 1 and 0 < stage.unequal_elements < stage.elements
    assert stage.apart is not None and stage.apart.case == LINES[0]
    one, other = map(float, stage.apart.values)
    assert one != other and abs(one - other) / abs(one) < 2**-6


def test_bits_that_differ_within_a_contract_are_legal(agree: Agree) -> None:
    found = agree(in_fp32, backwards, LINES[0].replace("bf16", "fp32"))
    assert found.exit_code == 1 and found.common and found.parting is None
    assert any("within its freedom" in sentence for sentence in sentences(found))


def test_a_kernel_that_raises_is_an_error(agree: Agree) -> None:
    found = agree(native, raising)
    assert found.exit_code == 2 and found.cases == 0
    assert any("out of luck" in sentence for sentence in sentences(found))


def test_equal_bits_are_told_of_the_cases_without_an_error_only(agree: Agree) -> None:
    found = agree(native, raising_on_many_rows)
    assert (found.exit_code, found.cases) == (2, 1)
    assert next(sentences(found)).startswith("Every bit is equal where neither kernel errored: 192 elements")


def test_what_is_wrong_beside_the_values_is_told(agree: Agree) -> None:
    """Equal bits of a kernel that changes its inputs are not all that matters."""
    found = agree(native, emptying)
    assert found.exit_code == 0
    assert any("Beside its values, emptying: changed" in sentence for sentence in sentences(found))


def test_nothing_to_compare() -> None:
    found = Agreement("op", "cpu", (KernelSide("a", "c", unsupported={"too wide": 2}), KernelSide("b", "c")))
    assert found.exit_code == 3
    assert [*sentences(found)] == ["There was nothing to compare.", "a turned down 2 cases: too wide."]


def test_cases_of_another_op_are_nothing_to_compare(agree: Agree) -> None:
    found = agree(native, in_fp32, "all_reduce x=bf16[1,8] peer_1=bf16[1,8] seed=1")
    assert found.exit_code == 3
    assert [*sentences(found)][1] == "No case with elements is one of rms_norm that both kernels take."


def test_nan_and_zero_and_dtypes() -> None:
    def compared(a: Tensor, b: Tensor) -> StageAgreement:
        return _compare("y", True, a, b, "line")

    zeros = compared(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (zeros.unequal_elements, zeros.ulp) == (1, 0.0)  # equal numbers, and other bits
    special = compared(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]))
    assert (special.unequal_elements, special.ulp) == (1, math.inf)
    assert compared(torch.ones(3), torch.ones(3).bfloat16()).unequal_elements == 3
    assert compared(torch.tensor([3, 4]), torch.tensor([3, 9])).ulp == 5


def test_kernels_of_two_ops(project: Project) -> None:
    def mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
        return ids

    kernels = Kernel("mask", "completion_mask", "", mask), Kernel("native", "rms_norm", "", native)
    items = (Item(Subject(kernel, project.op(kernel.op), torch.device("cpu")), Group("g")) for kernel in kernels)
    place = Workplace(Config(folder=""), project, Plan(tuple(items), (), 0))
    with pytest.raises(UsageError, match="mask computes completion_mask, but native rms_norm"):
        agree_kernels(place, "mask", "native", most=1)
    with pytest.raises(UsageError, match="other does not run on cpu"):
        agree_kernels(place, "other", "native", most=1)


# The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, contract in (("native", "native_multiply"), ("in_fp32", "fp32_multiply")):
        text = f"from lastbit.kernel import kernel\nfrom {__name__} import {name} as f\n\n"
        (tmp_path / f"{name}.py").write_text(
            f"{text}\n@kernel('rms_norm', contract='{contract}')\ndef {name}(x, weight, *, eps):\n"
            "    return f(x, weight, eps=eps)\n"
        )
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    return tmp_path


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Worker", InThisProcess)
    arguments = ["agree", "native", "in_fp32", str(folder), "--cases", str(folder / "lines.txt")]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "Their contracts part at normalized" in text and f"lastbit verify {folder}::native '{LINES[1]}'" in text
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1 and found["parting"]["stage"] == "normalized" and found["unequal_cases"] == 2


def test_wrong_names(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Worker", InThisProcess)
    assert main(["agree", "native", "native", str(folder)]) == 2
    assert "give two kernels" in capsys.readouterr().err
    assert main(["agree", "native", "nativ", str(folder)]) == 2
    assert "did you mean 'native'?" in capsys.readouterr().err
    assert main(["agree", "native", "native@HEAD", str(folder)]) == 2
    assert "@HEAD needs kernels that are in a git repository" in capsys.readouterr().err


def test_a_process_that_ends_is_an_error() -> None:
    class Ending:
        def do(self, *_: object, **__: object) -> Agreement:
            raise WorkerEnded("the process ended", LINES[0])

    found = command._compared(Ending(), "cpu", "a", "b", 1)  # type: ignore[arg-type]
    assert found.exit_code == 2 and "the process ended" in found.sides[0].errors[0]


def test_json_spells_what_it_cannot(agree: Agree) -> None:
    stage = StageAgreement("y", True, 1, 1, 1, 1, math.inf)
    found = Agreement("op", "cpu", (KernelSide("a", "c"), KernelSide("b", "c")), 1, 1, (stage,))
    assert json.loads(as_json(found))["stages"][0]["ulp"] == "Infinity"
