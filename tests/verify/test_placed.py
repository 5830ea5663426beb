"""Kernels that are given tensors on another device, and what is found of those that treat them wrongly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from elsewhere import CPU, OTHER, Elsewhere
from torch import Tensor

from lastbit.case import parse_case
from lastbit.devices import machine
from lastbit.errors import KernelError, UnsupportedCase
from lastbit.inputs import Inputs, build
from lastbit.kernel import Kernel
from lastbit.placement import PlacementWarning, moved
from lastbit.result import Finding
from lastbit.verify.placed import in_this_process, placement_findings

LINE = "scale x=fp32[4,8] weight=fp32[8] bias=fp32[8] seed=3"

Function = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Displaced(Inputs):
    """Inputs of which a kernel gets some on another device."""

    elsewhere: tuple[str, ...] = ()

    def hand_out(self) -> dict[str, Tensor]:
        handed = super().hand_out()
        return {name: t.as_subclass(Elsewhere) if name in self.elsewhere else t for name, t in handed.items()}


def inputs(*elsewhere: str) -> Inputs:
    """Put some of the tensors of LINE elsewhere."""
    built = build(parse_case(LINE), CPU)
    return Displaced(built.case, built.guards, built.pristine, elsewhere)


def findings(function: Function, *elsewhere: str, device: torch.device = CPU, **declared: Any) -> tuple[Finding, ...]:
    """List what is wrong with a kernel of one result, given tensors elsewhere."""

    def call(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": function(**tensors)}

    kernel = Kernel("mine", "scale", "", function, **declared)
    return placement_findings(kernel, inputs(*elsewhere), device, in_this_process(call))


def sentences(function: Function, *elsewhere: str, **declared: Any) -> str:
    return "\n".join(f.sentence for f in findings(function, *elsewhere, **declared))


def reads(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight + bias


def moves(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    here = moved({"weight": weight, "bias": bias}, x.device)
    return x * here["weight"] + here["bias"]


def refuses(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
    return reads(x, weight, bias)


# Kernels that do what they declare


@pytest.mark.parametrize("elsewhere", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_a_kernel_that_moves(elsewhere: tuple[str, ...]) -> None:
    assert findings(moves, *elsewhere, placement="moves") == ()


@pytest.mark.parametrize("elsewhere", [(), ("weight",), ("weight", "bias")])
def test_a_kernel_that_refuses(elsewhere: tuple[str, ...]) -> None:
    assert findings(refuses, *elsewhere) == ()


def test_a_warning_of_its_own_is_enough() -> None:
    def own(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if weight.device != x.device:
            warnings.warn(f"weight: {weight.device} → {x.device}, an upstream bug?", stacklevel=2)
        return reads(x, weight.to(x.device), bias)

    assert findings(own, "weight", placement="moves") == ()


def test_warnings_of_other_things_do_not_count() -> None:
    def talks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        warnings.warn("weight on cpu is deprecated", stacklevel=2)
        return moves(x, weight, bias)

    assert findings(talks, "weight", placement="moves") == ()


@pytest.mark.parametrize(
    "message",
    [
        "weight is on cuda:1, but x is on cpu",
        "Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:1!",
    ],
)
@pytest.mark.parametrize("error", [RuntimeError, UnsupportedCase])
def test_errors_that_are_clear(message: str, error: type[Exception]) -> None:
    def kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        raise error(message)

    assert findings(kernel, "weight") == ()


# Kernels that do not


def test_a_kernel_that_refuses_but_reads_silently() -> None:
    [finding] = findings(reads, "weight")
    assert (finding.kind, finding.stage) == ("placement", "weight")
    assert "silently read weight on cuda:1 while it runs on cpu, although it declares to refuse" in finding.sentence


def test_a_kernel_that_refuses_one_tensor_and_reads_the_other() -> None:
    def half(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return refuses(x, weight, bias.as_subclass(Tensor))

    assert findings(half, "weight") == ()
    assert "silently read bias on cuda:1" in sentences(half, "bias")


@pytest.mark.parametrize(
    "message", ["no", "weight is not on cpu", "weight is on cuda:1", "weight is on cuda:10, not on cpu"]
)
def test_errors_that_are_not_clear(message: str) -> None:
    def kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        raise ValueError(message)

    text = sentences(kernel, "weight")
    assert "With weight on cuda:1, the kernel raised ValueError without naming cpu and the other device" in text
    assert message in text


@pytest.mark.parametrize("placement", ["refuses", "moves"])
def test_a_kernel_that_takes_no_such_case_anywhere(placement: str) -> None:
    def narrow(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        raise UnsupportedCase("rows of 8 are too wide")

    with pytest.raises(UnsupportedCase, match="too wide"):
        findings(narrow, "weight", placement=placement)


def test_a_kernel_that_moves_without_a_warning() -> None:
    text = sentences(reads, "weight", placement="moves")
    assert "read weight on cuda:1 while it runs on cpu, and no warning names weight" in text


def test_a_kernel_that_warns_of_one_of_two() -> None:
    def half(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return moves(x, weight, bias.as_subclass(Tensor))

    [finding] = findings(half, "weight", "bias", placement="moves")
    assert finding.stage == "bias"


def test_a_kernel_that_warns_twice() -> None:
    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        moved({"weight": weight}, x.device)
        return moves(x, weight, bias)

    assert "2 warnings say in one call that weight is on cuda:1" in sentences(twice, "weight", placement="moves")


@pytest.mark.parametrize(
    "message",
    [
        "a parameter on cuda:1 was copied to cpu; this may be an upstream bug",
        "weights on cuda:1 were copied to cpu; this may be an upstream bug",
        "weight was copied to cpu; this may be an upstream bug",
        "weight was copied from cuda:1; this may be an upstream bug",
        "weight was copied from cuda:1 to cpu",
    ],
)
def test_warnings_that_leave_something_out(message: str) -> None:
    def kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if weight.device != x.device:
            warnings.warn(message, stacklevel=2)
        return reads(x, weight.to(x.device), bias)

    assert "no warning names weight" in sentences(kernel, "weight", placement="moves")


def test_a_kernel_that_always_warns() -> None:
    def always(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        warnings.warn(PlacementWarning("weight", OTHER, CPU), stacklevel=2)
        return reads(x, weight.to(x.device), bias)

    [finding] = findings(always, "weight", placement="moves")
    assert "warns of the device of a tensor although all are on cpu" in finding.sentence


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda y: y + 1, "32 of 32"),
        (lambda y: torch.where(torch.arange(8) == 3, -y, y), "4 of 32"),
    ],
)
def test_a_kernel_whose_result_differs(change: Callable[[Tensor], Tensor], count: str) -> None:
    def differs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = moves(x, weight, bias)
        return change(y) if weight.device != x.device else y

    assert f"{count} elements of y have other bits" in sentences(differs, "weight", placement="moves")
    assert findings(differs, "weight", placement="moves", unordered=("y",)) == ()


def test_bits_of_nans_count() -> None:
    def nans(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        moves(x, weight, bias)
        return torch.full((2,), 0x7FC00000 + (weight.device != x.device), dtype=torch.int32).view(torch.float32)

    assert "2 of 2 elements of y have other bits" in sentences(nans, "weight", placement="moves")


def test_a_nan_is_equal_to_itself() -> None:
    def nans(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return moves(x, weight, bias) * float("nan")

    assert findings(nans, "weight", placement="moves") == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.to("meta"), "y is returned on meta, but the kernel runs on cpu"),
        (lambda y: y.double(), "y has another shape or dtype"),
        (lambda y: y[:1], "y has another shape or dtype"),
    ],
)
def test_a_result_of_another_kind(change: Callable[[Tensor], Tensor], message: str) -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = moves(x, weight, bias)
        return change(y) if weight.device != x.device else y

    assert message in sentences(other, "weight", placement="moves", unordered=("y",))


@pytest.mark.parametrize("placement", ["refuses", "moves"])
def test_a_kernel_that_changes_an_input(placement: str) -> None:
    def changes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        bias.zero_()
        return (moves if placement == "moves" else refuses)(x, weight, bias)

    [finding] = findings(changes, "weight", placement=placement)
    assert (finding.kind, finding.stage) == ("mutated_input", "bias")
    assert "With weight on cuda:1, the kernel changed 8 elements of the input bias" in finding.sentence
    assert findings(changes, "weight", placement=placement, mutates=("bias",)) == ()


def test_a_result_that_is_an_input_is_kept_before_it_is_restored() -> None:
    def in_place(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x.copy_(moves(x, weight, bias) + (weight.device != x.device))

    assert "other bits" in sentences(in_place, "weight", placement="moves", mutates=("x",))


def test_every_call_starts_from_the_same_bits() -> None:
    def in_place(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x.copy_(moves(x, weight, bias))

    assert findings(in_place, "weight", placement="moves", mutates=("x",)) == ()


def test_a_kernel_that_moves_but_raises() -> None:
    with pytest.raises(KernelError, match='declares placement="moves", but with weight on cuda:1 it raised ValueError'):
        findings(refuses, "weight", placement="moves")


def test_an_accelerator_that_is_left_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError(f"illegal memory access on {device}")

    monkeypatch.setattr(torch.accelerator, "synchronize", lost)
    with pytest.raises(KernelError, match="left cuda:0 unusable: illegal memory access on cuda:0"):
        findings(refuses, "weight", device=torch.device("cuda", 0))


# Two devices


def on_accelerator(function: Function, line: str, **declared: Any) -> tuple[Finding, ...]:
    """List what is wrong with a kernel of one result on the first accelerator."""
    here = machine()
    device = torch.device(here.accelerator, 0)
    try:
        built = build(parse_case(line), device)
    except UnsupportedCase as error:
        pytest.skip(str(error))
    attempt = in_this_process(lambda tensors: {"y": function(**tensors)})
    return placement_findings(Kernel("mine", "scale", "", function, **declared), built, device, attempt)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "peer"])
@pytest.mark.parametrize(("function", "placement"), [(moves, "moves"), (refuses, "refuses"), (reads, "refuses")])
def test_kernels_on_two_devices(place: str, function: Function, placement: str) -> None:
    """`reads` is refused by torch itself, whose message names both devices."""
    line = f"scale x=bf16[64,256] weight=bf16[256]~{place} bias=bf16[256]~{place}:special seed=3"
    assert on_accelerator(function, line, placement=placement) == ()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "peer"])
def test_a_silent_copy_is_seen_on_two_devices(place: str) -> None:
    def silent(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.to(x.device)

    line = f"scale x=bf16[64,256] weight=bf16[256]~{place} seed=3"
    [finding] = on_accelerator(silent, line)
    assert "silently read weight" in finding.sentence
    [finding] = on_accelerator(silent, line, placement="moves")
    assert "no warning names weight" in finding.sentence
