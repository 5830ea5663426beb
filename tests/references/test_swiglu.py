"""The references of SwiGLU against automatic differentiation in fp64, and what they refuse."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.references.swiglu import swiglu
from lastbit.references.swiglu_backward import swiglu_backward

PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"swiglu_limit": 0.5},
    {"swiglu_limit": 2.0, "alpha": 1.75, "up_offset": 1.0},
    {"alpha": -0.5, "up_offset": -0.25},
)
"""Numbers of fp32: the references take parameters as kernels do."""
FORMS = ("two", "halves", "interleaved")


def problem(form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    shape = (5, 12) if form == "two" else (5, 24)
    tensors = {"x": torch.randn(shape, generator=generator), "dy": torch.randn(5, 12, generator=generator)}
    tensors |= {"up": torch.randn(shape, generator=generator)} if form == "two" else {}
    return tensors, ({"interleaved": True} if form == "interleaved" else {})


def exact(
    x: Tensor, up: Tensor | None, *, interleaved: bool = False, swiglu_limit: float = inf,
    alpha: float = 1.0, up_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute the formula of the paper and of gpt-oss, element by element."""
    if up is None:
        x, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = x.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + up_offset)


@pytest.mark.parametrize("params", PARAMETERS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("silu", ["fp32_silu", "rounded_silu", "rounded_sigmoid"])
def test_exact_values_are_those_of_the_formula_and_of_autograd(silu: str, form: str, params: dict[str, Any]) -> None:
    tensors, how = problem(form)
    leaves = {n: t.double().requires_grad_() for n, t in tensors.items() if n != "dy"}
    output = exact(leaves["x"], leaves.get("up"), **how, **params)
    output.backward(tensors["dy"].double())
    forward = {n: t for n, t in tensors.items() if n != "dy"}
    found = Problem(swiglu, swiglu.contract(silu), forward, {**how, **params}).evaluate()
    assert torch.allclose(found.enclosure("output").exact, output.detach(), rtol=1e-12, atol=1e-14)
    found = Problem(swiglu_backward, swiglu_backward.contract(silu), tensors, {**how, **params}).evaluate()
    wanted = {"grad_gate": leaves["x"], "grad_up": leaves["up"]} if form == "two" else {"grad_x": leaves["x"]}
    for name, leaf in wanted.items():
        assert torch.allclose(found.enclosure(name).exact, leaf.grad, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize(("gate", "whole"), [(1.875, True), (2.0, True), (2.125, False), (-9.0, True), (inf, False)])
def test_a_gradient_passes_up_to_the_limit_and_not_beyond(gate: float, whole: bool) -> None:
    tensors = {"x": torch.tensor([[gate]]), "dy": torch.ones(1, 1), "up": torch.ones(1, 1)}
    trace = Problem(swiglu_backward, swiglu_backward.contract(), tensors, {"swiglu_limit": 2.0}).evaluate()
    gradient = trace.enclosure("grad_gate")
    assert bool((gradient.lo != 0) & (gradient.hi != 0)) is whole


@pytest.mark.parametrize(
    ("dtype", "steps", "contract", "verdict"),
    [
        (torch.bfloat16, True, "rounded_slope", "PASSED"),
        (torch.bfloat16, True, "", "FAILED"),
        (torch.bfloat16, False, "", "PASSED"),
        (torch.bfloat16, False, "rounded_slope", "FAILED"),
        (torch.float16, True, "rounded_slope", "PASSED"),
    ],
)
def test_the_slope_of_a_sigmoid_is_rounded_at_every_step_or_once(
    dtype: torch.dtype, steps: bool, contract: str, verdict: str
) -> None:
    """torch takes steps on a GPU: -0.0078 in place of 0.0078 was seen, where what comes directly nearly cancels."""
    generator = torch.Generator().manual_seed(0)
    x, up, dy = (torch.randn(64, 100, generator=generator).to(dtype) for _ in range(3))
    s = torch.sigmoid(x)
    grad_silu = dy * up
    through = grad_silu * x
    through = through * (1 - s) * s if steps else (through.float() * (1 - s.float()) * s.float()).to(dtype)
    claimed = "+".join(filter(None, ["rounded_sigmoid+rounded_product", contract]))
    found = Problem(swiglu_backward, swiglu_backward.contract(claimed), {"x": x, "dy": dy, "up": up}, {})
    actual = {"grad_gate": grad_silu * s + through, "grad_up": dy * (x * s)}
    assert judge(found, actual).verdict.value == verdict


REFUSED = (
    ({"x": (3, 5)}, {}, "x has 5 columns"),
    ({"x": ()}, {}, "x has no dimension"),
    ({"x": (3, 4), "up": (3, 5)}, {}, r"up has shape \(3, 5\); with the other tensors it must be \(3, 4\)"),
    ({"x": (3, 4), "up": (3, 4)}, {"interleaved": True}, "up is a tensor of its own"),
    ({"x": (3, 4)}, {"swiglu_limit": -1.0}, "swiglu_limit=-1.0 must be positive"),
    ({"x": (3, 4)}, {"swiglu_limit": 0.1}, "swiglu_limit=0.1 must be positive and a number of torch.bfloat16"),
    ({"x": (3, 4)}, {"alpha": 1e39}, r"alpha=1e\+39 is no number in fp32"),
    ({"x": (3, 4)}, {"up_offset": inf}, "up_offset=inf is no number in fp32"),
)


@pytest.mark.parametrize(("shapes", "params", "said"), REFUSED)
def test_what_has_no_meaning_is_refused(shapes: dict[str, Any], params: dict[str, Any], said: str) -> None:
    tensors = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    with pytest.raises(UsageError, match=said):
        Problem(swiglu, swiglu.contract(), tensors, params).evaluate()


def test_the_gradient_of_the_output_has_its_shape() -> None:
    tensors = {"x": torch.zeros(3, 8), "dy": torch.zeros(3, 8)}
    with pytest.raises(UsageError, match=r"dy has shape \(3, 8\); with the other tensors it must be \(3, 4\)"):
        Problem(swiglu_backward, swiglu_backward.contract(), tensors, {}).evaluate()
