"""The reference of the gradients against automatic differentiation of the exact forward pass, both in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lastbit.judging.expected import RowSum, Trace
from lastbit.judging.problem import Problem
from lastbit.references.layer_norm_gated import layer_norm_gated
from lastbit.references.layer_norm_gated_backward import layer_norm_gated_backward

ROWS, SIZE = 7, 24
EPS = 2.0**-17  # a number of fp32: the reference takes parameters as kernels do

OPTIONS = tuple(
    itertools.product((False, True), (False, True), ("none", "after", "before"), ("silu", "sigmoid"), (1, 3))
)


def names(option: tuple[bool, bool, str, str, int]) -> str:
    rms, bias, gate, activation, groups = option
    return f"{'rms' if rms else 'layer'}-{'bias-' * bias}{gate}-{activation}-{groups}"


@pytest.fixture(params=OPTIONS, ids=names)
def problem(request: pytest.FixtureRequest) -> Differentiated:
    return Differentiated(*request.param)


class Differentiated:
    """One combination of options on random fp64 data, differentiated by torch."""

    def __init__(self, rms: bool, bias: bool, gate: str, activation: str, groups: int) -> None:
        generator = torch.Generator().manual_seed(0)
        width = SIZE * groups
        shapes = {"x": (ROWS, width), "weight": (width,), "bias": (width,), "z": (ROWS, width), "dy": (ROWS, width)}
        made = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
        self.dy = made.pop("dy")
        left_out = {"bias" if not bias else "", "z" if gate == "none" else ""}
        self.inputs = {n: t.requires_grad_() for n, t in made.items() if n not in left_out}
        self.gating = {"norm_before_gate": gate != "before", "activation": activation}
        self.options = {"eps": EPS, "group_size": SIZE, "is_rms_norm": rms, **self.gating}
        self.statistics: dict[str, Tensor] = {}
        self.output = self._forward(rms, gate, activation)
        self.output.backward(self.dy)

    def _forward(self, rms: bool, gate: str, activation: str) -> Tensor:
        x, z = self.inputs["x"], self.inputs.get("z")
        factor = None if z is None else torch.sigmoid(z) * (z if activation == "silu" else 1.0)
        grouped = (x * factor if gate == "before" else x).unflatten(-1, (-1, SIZE))
        if not rms:
            self.statistics["mean"] = grouped.mean(-1).detach()
            grouped = grouped - grouped.mean(-1, keepdim=True)
        rstd = 1.0 / (grouped.square().mean(-1, keepdim=True) + EPS).sqrt()
        self.statistics["rstd"] = rstd[..., 0].detach()
        y = (grouped * rstd).flatten(-2) * self.inputs["weight"]
        y = y + self.inputs["bias"] if "bias" in self.inputs else y
        return y * factor if gate == "after" else y

    def backward(self) -> Trace:
        tensors = {n: t.detach() for n, t in self.inputs.items()} | {"dy": self.dy} | self.statistics
        params = {**self.gating, "recompute_output": True}
        return Problem(layer_norm_gated_backward, layer_norm_gated_backward.contract(), tensors, params).evaluate()


def exact(trace: Trace, stage: str) -> Tensor:
    total = trace.stages[stage]
    return total.sum.facts[0] if isinstance(total, RowSum) else trace.enclosure(stage).exact


def test_forward_is_the_exact_function(problem: Differentiated) -> None:
    tensors = {n: t.detach() for n, t in problem.inputs.items()}
    trace = Problem(layer_norm_gated, layer_norm_gated.contract(), tensors, problem.options).evaluate()
    assert exact(trace, "output") == pytest.approx(problem.output.detach(), abs=1e-12)
    assert exact(trace, "rstd") == pytest.approx(problem.statistics["rstd"], rel=1e-13)


def test_gradients_are_those_of_automatic_differentiation(problem: Differentiated) -> None:
    """‖difference‖ ≤ 1e-12 · ‖Σ|terms|‖, where the terms of dx are w·dy, x̂·c1 and c2, each times rstd."""
    trace = problem.backward()
    for stage, name in (("dx", "x"), ("dz", "z"), ("dw", "weight"), ("db", "bias")):
        if name in problem.inputs:
            gradient = problem.inputs[name].grad
            assert gradient is not None
            difference = (exact(trace, stage) - gradient).norm()
            assert difference <= 1e-12 * magnitude(problem, trace, stage).norm(), stage
    assert exact(trace, "output") == pytest.approx(problem.output.detach(), abs=1e-12)


def magnitude(problem: Differentiated, trace: Trace, stage: str) -> Tensor:
    """Σ|terms| of a gradient."""
    if isinstance(total := trace.stages[stage], RowSum):
        return total.sum.facts[4]  # the magnitudes
    if stage == "dz":
        return exact(trace, "dz").abs()
    parts = exact(trace, "dnormalized").unflatten(-1, (-1, SIZE)).abs()
    parts = parts + (exact(trace, "normalized").unflatten(-1, (-1, SIZE)) * exact(trace, "c1")[..., None]).abs()
    if "c2" in trace.stages:
        parts = parts + exact(trace, "c2")[..., None].abs()
    terms = (parts * problem.statistics["rstd"][..., None]).flatten(-2)
    before = "dgated_input" in trace.stages
    return terms * exact(trace, "gate").abs() if before else terms
