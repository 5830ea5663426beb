"""Same inputs, called in another way: each property finds a kernel that breaks it, and leaves one that holds alone."""

import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.inputs import Inputs
from lastbit.invariance import ways
from lastbit.invariance.properties import result_of
from lastbit.invariance.property import Basis, Property
from lastbit.invariance.ways import WAYS
from lastbit.kernel import Kernel, load_kernels
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.verify import asking
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project
from lastbit.verify.property_checks import basis_of
from lastbit.verify.worker import open_workplace, plan_for, prepare, unwatched
from tests.rms_norm_contract import INTERPRETED

CPU = torch.device("cpu")
CASE = parse_case("rms_norm x=fp32[8,64] weight=fp32[64] eps=1e-06 seed=1")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
ULP = 1 + 2**-23
BY_NAME = {way.name: way for way in WAYS}
RUN_TO_RUN, COMPILED, FP_FUSION = (BY_NAME[name] for name in ("run to run", "compiled", "fp fusion"))


def plain(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Give the same bits in every way of calling that traces but does not generate code."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def halves(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add in another order: other bits, which the contract allows as well."""
    squares = x.square()
    total = squares[:, ::2].sum(-1, keepdim=True) + squares[:, 1::2].sum(-1, keepdim=True)
    return x * torch.rsqrt(total / x.shape[-1] + eps) * weight


class Second:
    """Gives other bits from its second call on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        self.calls += 1
        return (plain if self.calls == 1 else halves)(x, weight, eps=eps)


class ByAddress:
    """Keeps something by the address of its input: other bits elsewhere in memory."""

    def __init__(self) -> None:
        self.first = 0

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        self.first = self.first or x.data_ptr()
        return (plain if x.data_ptr() == self.first else halves)(x, weight, eps=eps)


def by_alignment(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Take another path at odd multiples of 256 bytes."""
    return (halves if x.data_ptr() // 256 % 2 else plain)(x, weight, eps=eps)


class Remembers:
    """Its bits depend on the values of the call before."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        last, self.last = self.last or float(x[0, 0]), float(x[0, 0])
        return (plain if last == self.last else halves)(x, weight, eps=eps)


def wide_eps_when_compiled(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """vllm #57123: eps is fp64 under torch.compile, and fp32 without."""
    mean = x.square().mean(-1, keepdim=True)
    if torch.compiler.is_compiling():
        return x * torch.rsqrt(mean.double() + eps).float() * weight
    return x * torch.rsqrt(mean + eps) * weight


def basis(function: object, **declared: object) -> Basis:
    made = Kernel("planted", "rms_norm", "fp32_multiply", function, **declared)  # type: ignore[arg-type]
    return basis_of(Subject(made, RMS_NORM, CPU), CASE)


def found(property: Property, function: object, **declared: object) -> PropertyResult:
    return result_of(property, basis(function, **declared))


# Run to run


@pytest.mark.parametrize(
    ("function", "second"),
    [
        (Second(), "call 2 on the same inputs"),
        (by_alignment, "call 3 on the same inputs, elsewhere in memory"),
        (ByAddress(), "call 3 on the same inputs, elsewhere in memory"),
        (Remembers(), "call 4 on the same inputs, after one on other values"),
    ],
)
def test_what_later_calls_depend_on(function: object, second: str) -> None:
    one = found(RUN_TO_RUN, function, invariant=("run to run",))
    assert (one.outcome, one.second, one.fails, one.pairs) == (PropertyOutcome.BROKEN, second, True, 3)
    assert one.legal


@pytest.mark.parametrize("apart", [1, 2, 15, 16])
def test_an_odd_distance_is_found_however_far_apart_allocations_are(
    apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distances are in multiples of 256 bytes; a heap often gives blocks of one size one behind the other."""
    places = count(2, apart)
    monkeypatch.setattr(ways, "elsewhere", lambda basis, steps=0: next(places) + steps)
    monkeypatch.setattr(ways, "_place", lambda inputs: inputs)
    assert ways.oddly_elsewhere(SimpleNamespace(inputs=0)) % 2 == 1


def test_later_calls_of_a_kernel_without_memory_are_the_same() -> None:
    one = found(RUN_TO_RUN, plain)
    assert (one.outcome, one.pairs) == (PropertyOutcome.HOLDS, 3)


def test_unordered_results_are_told_and_fail_nothing() -> None:
    one = found(RUN_TO_RUN, Second(), invariant=("run to run",), unordered=("output",))
    assert one.outcome is PropertyOutcome.BROKEN and not one.fails


def test_what_is_ordered_counts_although_other_results_change_more_often() -> None:
    """An unordered residual sum changes in call 2, and an ordered output in call 4 alone."""
    remembers, calls = Remembers(), iter(range(9))

    def both(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> dict[str, Tensor]:
        total = x + residual
        return {"output": remembers(total, weight, eps=eps), "residual_sum": total + min(next(calls), 1) * 2**-20}

    case = parse_case("rms_norm x=fp32[8,64] residual=fp32[8,64] weight=fp32[64] eps=1e-06 seed=1")
    made = Kernel("planted", "rms_norm", "fp32_multiply", both, unordered=("residual_sum",), invariant=("run to run",))
    one = result_of(RUN_TO_RUN, basis_of(Subject(made, RMS_NORM, CPU), case))
    assert (one.result, one.fails, one.pairs) == ("output", True, 3)
    assert one.second == "call 4 on the same inputs, after one on other values"


def test_other_properties_leave_unordered_results_out() -> None:
    one = found(COMPILED, Second(), unordered=("output",))
    assert (
        one.outcome is PropertyOutcome.NOT_APPLICABLE
        and "output" in one.reason
        and "declared as unordered" in one.reason
    )


def test_mutated_inputs_are_as_before_in_each_call() -> None:
    def in_place(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return x.copy_(plain(x, weight, eps=eps))

    for way in (RUN_TO_RUN, COMPILED):
        assert found(way, in_place, mutates=("x",)).outcome is PropertyOutcome.HOLDS


# Compiled


def test_another_width_of_eps_when_compiled_is_found() -> None:
    one = found(COMPILED, wide_eps_when_compiled, invariant=("compiled",))
    assert one.fails and one.second == "torch.compile(backend='eager', dynamic=False)"


def test_a_kernel_that_is_traced_holds_and_nothing_stays_compiled() -> None:
    one = found(COMPILED, plain)
    assert (one.outcome, one.pairs) == (PropertyOutcome.HOLDS, 2)
    assert not torch._dynamo.convert_frame.input_codes.seen  # type: ignore[attr-defined]


def test_a_kernel_that_is_not_traced_shows_nothing() -> None:
    with torch.compiler.set_stance("force_eager"):
        one = found(COMPILED, plain)
    assert one.outcome is PropertyOutcome.NOT_APPLICABLE and "nothing of the kernel was traced" in one.reason


def test_a_kernel_that_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise RuntimeError("no such step\nand more")

    monkeypatch.setattr(torch, "compile", refuses)
    one = found(COMPILED, plain)
    expected = "torch.compile(backend='eager', dynamic=False): RuntimeError: no such step; "
    assert one.outcome is PropertyOutcome.NOT_APPLICABLE and one.reason.startswith(expected)


PROGRAM = """
    import torch
    import triton
    import triton.language as tl
    from sibling import blocks
    from lastbit.kernel import kernel

    @triton.jit
    def _program(x_ptr, weight_ptr, out_ptr, eps, n, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + tl.program_id(0) * n + lanes, mask=lanes < n, other=0.0)
        weight = tl.load(weight_ptr + lanes, mask=lanes < n, other=0.0)
        r = 1 / tl.sqrt_rn(tl.sum(x * x) / n + eps)
        tl.store(out_ptr + tl.program_id(0) * n + lanes, x * r * weight, mask=lanes < n)

    @kernel("rms_norm", contract="fp32_multiply", out={"out": "output"})
    def launched(out, x, weight, *, eps):
        _program[blocks(x)](x, weight, out, eps, x.shape[1], BLOCK=64)
"""


@pytest.mark.skipif(not INTERPRETED, reason="programs are interpreted there")
def test_programs_of_triton_are_launched_and_not_traced(tmp_path: Path) -> None:
    prepare(CPU)
    (tmp_path / "k.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "sibling.py").write_text("ROWS = 0\n\ndef blocks(x):\n    return (x.shape[ROWS],)\n")
    for _ in range(2):  # a second load has other modules under the same names
        [kernel] = load_kernels(tmp_path)
        one = result_of(COMPILED, basis_of(Subject(kernel, RMS_NORM, CPU), CASE))
        assert (one.outcome, one.pairs, one.reason) == (PropertyOutcome.HOLDS, 2, "")
    assert "sibling" not in sys.modules


# What needs more than one CPU


@pytest.mark.parametrize("name", ["stream", "graph", "contention", "device", "fp fusion"])
def test_on_the_cpu_the_others_mean_nothing(name: str) -> None:
    one = found(BY_NAME[name], plain)
    assert one.outcome is PropertyOutcome.NOT_APPLICABLE and "cpu" in one.reason.lower()


@pytest.mark.parametrize("name", ["stream", "graph", "compiled", "grad", "contention", "device"])
def test_kernels_in_processes_of_their_own_are_not_called_here(name: str) -> None:
    one = result_of(BY_NAME[name], replace(basis(plain), direct=False))
    assert one.outcome is PropertyOutcome.NOT_APPLICABLE and "processes of their own" in one.reason


def in_place(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x.copy_(plain(x, weight, eps=eps))


def seen_to_require_grad(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    assert not (x.requires_grad or weight.requires_grad), "made for inference"
    return plain(x, weight, eps=eps)


@pytest.mark.parametrize(
    ("function", "declared", "outcome", "fails"),
    [
        (plain, {}, PropertyOutcome.HOLDS, False),
        (in_place, {"mutates": ("x",), "held": {"x": "output"}}, PropertyOutcome.HOLDS, False),
        (seen_to_require_grad, {}, PropertyOutcome.ERRORED, False),
        (seen_to_require_grad, {"invariant": ("grad",)}, PropertyOutcome.ERRORED, True),
        (torch.compile(plain, backend="eager"), {}, PropertyOutcome.NOT_APPLICABLE, False),
    ],
)
def test_inputs_that_require_grad(
    function: Any, declared: dict[str, Any], outcome: PropertyOutcome, fails: bool
) -> None:
    """A kernel for inference may refuse them, unless it declares the property."""
    made = Kernel("mine", "rms_norm", "fp32_multiply", function, **declared)
    one = result_of(BY_NAME["grad"], basis_of(Subject(made, RMS_NORM, CPU), CASE))
    assert (one.outcome, one.fails) == (outcome, fails), one


@pytest.mark.parametrize(("function", "outcome"), [(plain, PropertyOutcome.HOLDS), (Second(), PropertyOutcome.BROKEN)])
def test_another_device_is_compared(
    monkeypatch: pytest.MonkeyPatch, function: object, outcome: PropertyOutcome
) -> None:
    monkeypatch.setattr(ways, "require_accelerator", lambda *asked: None)
    monkeypatch.setattr(ways, "alike", lambda device: (CPU,))
    one = found(BY_NAME["device"], function)
    assert (one.outcome, one.pairs) == (outcome, 1)


class Baked:
    """Stands for a graph: what it computes for the tensors that it was captured on, with a scalar from the capture."""

    def __init__(self, inputs: Inputs, baked: float) -> None:
        self.tensors, self.baked = inputs.hand_out(), baked
        self.output = torch.empty_like(self.tensors["x"])

    def replay(self) -> None:
        x, weight = self.tensors["x"], self.tensors["weight"]
        scale = self.baked or float(x.abs().max())
        self.output.copy_(scaled(x, weight, eps=1e-6, scale=scale))


def scaled(x: Tensor, weight: Tensor, *, eps: float, scale: float | None = None) -> Tensor:
    """Divides by the largest element, a number on the host, before it squares."""
    scale = scale or float(x.abs().max())
    small = x / scale
    return small * torch.rsqrt(small.square().mean(-1, keepdim=True) + eps / scale**2) * weight


@pytest.mark.parametrize(("bakes", "outcome"), [(False, PropertyOutcome.HOLDS), (True, PropertyOutcome.BROKEN)])
def test_a_graph_that_keeps_a_number_of_its_capture(
    monkeypatch: pytest.MonkeyPatch, bakes: bool, outcome: PropertyOutcome
) -> None:
    def replay_of(basis: Basis, inputs: Inputs) -> ways.GraphReplay:
        graph = Baked(inputs, float(inputs.tensors["x"].abs().max()) if bakes else 0.0)
        return ways.GraphReplay(graph, inputs, {"output": graph.output})  # type: ignore[arg-type]

    monkeypatch.setattr(ways, "require_accelerator", lambda *asked: None)
    monkeypatch.setattr(ways, "replay_of", replay_of)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    one = found(BY_NAME["graph"], scaled)
    assert (one.outcome, one.pairs) == (outcome, 4)
    assert not bakes or "replayed on the values of seed 2" in one.second
    assert not bakes or one.first.endswith(", with the values of seed 2"), "the call that the replay is compared with"


# Compiled without fused multiplications and additions


@pytest.mark.parametrize(("broken", "outcome"), [(False, PropertyOutcome.HOLDS), (True, PropertyOutcome.BROKEN)])
def test_fusion_is_compared_between_two_new_processes(broken: bool, outcome: PropertyOutcome) -> None:
    own = basis(plain)

    def in_new_process(environ: object) -> dict[str, Tensor]:
        scale = ULP if broken and environ == {"TRITON_DEFAULT_FP_FUSION": "0"} else 1
        return {name: tensor * scale for name, tensor in own.results.items()}

    one = result_of(FP_FUSION, replace(own, device=torch.device("cuda:0"), anew=in_new_process))
    assert (one.outcome, one.pairs) == (outcome, 1)
    assert not broken or one.second == "TRITON_DEFAULT_FP_FUSION=0"


class Here:
    """Stands for a process: does work in this one, with the environment that it is given."""

    def __init__(self, config: Config, *, environ: Mapping[str, str]) -> None:
        self.config, self.environ = config, environ

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def do(self, work: Callable[..., object], *args: object) -> object:
        with patch.dict(os.environ, self.environ):
            return work(open_workplace(self.config, unwatched, lambda result: None), *args)


@pytest.mark.skipif(not INTERPRETED, reason="programs are interpreted there")
def test_a_new_process_has_the_environment_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = """
        import os
        from lastbit.kernel import kernel

        @kernel("rms_norm", contract="fp32_multiply")
        def by_environment(x, weight, *, eps):
            return x * float(os.environ.get("FACTOR", "1"))
    """
    (tmp_path / "k.py").write_text(textwrap.dedent(source))
    config = Config(folder="", kernel_folders=(str(tmp_path),), lines=(str(CASE),))
    [item] = plan_for(config).items
    own = basis_of(item.subject, CASE)
    monkeypatch.setattr(asking, "Worker", Here)
    there = asking.anew_for(config, item.subject, CASE)({"FACTOR": "2"})
    assert torch.equal(there["output"], 2 * own.results["output"])


# On a GPU


def on_the_default_stream(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Launch on another stream than the current one, and wait for nobody."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return plain(x, weight, eps=eps)


class Bakes:
    """Keeps a number on the host by the address of its input; a capture keeps that of the values it has seen."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0:
            self.known[x.data_ptr()] = float(x.abs().max())
        return scaled(x, weight, eps=eps, scale=self.known[x.data_ptr()])


def waits(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return scaled(x, weight, eps=eps)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "function", "outcome"),
    [
        ("run to run", plain, PropertyOutcome.HOLDS),
        ("stream", plain, PropertyOutcome.HOLDS),
        ("stream", on_the_default_stream, PropertyOutcome.BROKEN),
        ("graph", plain, PropertyOutcome.HOLDS),
        ("graph", Bakes(), PropertyOutcome.BROKEN),
        ("graph", waits, PropertyOutcome.NOT_APPLICABLE),
        ("compiled", wide_eps_when_compiled, PropertyOutcome.BROKEN),
        ("contention", plain, PropertyOutcome.HOLDS),
    ],
)
def test_ways_of_calling_on_a_gpu(name: str, function: object, outcome: PropertyOutcome) -> None:
    made = Kernel("planted", "rms_norm", "fp32_multiply", function)  # type: ignore[arg-type]
    one = result_of(BY_NAME[name], basis_of(Subject(made, RMS_NORM, torch.device("cuda:0")), CASE))
    assert one.outcome is outcome, one
