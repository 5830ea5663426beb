"""Contracts that round in other directions than to nearest: right kernels pass, and those of another direction fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.judging.candidates import Rows
from lastbit.judging.latent import check_rows
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics.formats import DIRECTIONS, Direction, format_of, round_to
from lastbit.ops import Op
from lastbit.references.layer_norm_gated_backward import layer_norm_gated_backward
from lastbit.references.rms_norm import rms_norm
from lastbit.references.swiglu import swiglu
from lastbit.result import Judgement, Verdict, simplest
from tests.directed import rounded

narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KEEPS: dict[str, tuple[str, ...]] = {
    "nearest": ("nearest", "either"),
    "zero": ("zero", "either"),
    "ties_away": ("ties_away", "either"),
    "either": ("either",),
}
"""Direction of a kernel → the directions of a contract that it keeps."""


def normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def judged(op: Op, contract: str, given: dict[str, Tensor], actual: dict[str, Tensor], **params: Any) -> Judgement:
    return judge(Problem(op, op.contract(contract), given, params), actual)


@narrow
@pytest.mark.parametrize("own", DIRECTIONS)
def test_the_last_product_of_a_norm(own: Direction, dtype: torch.dtype) -> None:
    """In fp16 hardly any product is a tie, and 4 of 16 bits are lost of each in bf16."""
    given = {"x": normals(0, 16, 128).to(dtype), "weight": normals(1, 128).bfloat16().to(dtype)}
    x, weight = (given[name].float() for name in ("x", "weight"))
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    output = rounded((x * inverse).to(dtype).float() * weight, dtype, own)
    for direction in DIRECTIONS:
        found = judged(rms_norm, f"native_multiply+product:{direction}", given, {"output": output}, eps=1e-6)
        kept = found.verdict is Verdict.PASSED
        assert kept == (direction in KEEPS[own]), (own, direction)
        if not kept and own == "nearest":
            assert "native_multiply+rounded_sum" in simplest(found.explained_by, found.explained_by[0])


@pytest.mark.parametrize("own", ["nearest", "zero", "either"])
def test_the_output_of_a_gate(own: Direction) -> None:
    """An op without a latent value, of which what is nearer to real arithmetic than fp32 counts as well."""
    given = {"x": normals(0, 8, 64).bfloat16(), "up": normals(1, 8, 64).bfloat16()}
    for precise in (torch.float32, torch.float64):
        gate, up = (given[name].to(precise) for name in ("x", "up"))
        output = (gate * torch.sigmoid(gate) * up).float()
        for direction in ("nearest", "zero", "either"):
            actual = {"output": rounded(output, torch.bfloat16, own)}
            found = judged(swiglu, f"fp32_silu+output:{direction}", given, actual)
            assert (found.verdict is Verdict.PASSED) == (direction in KEEPS[own]), (own, direction, precise)
            if found.verdict is Verdict.PASSED:  # to either neighbour, nothing else is open
                assert found.stages[0].cumulative.decided >= 0.99 * output.numel()


def test_either_neighbour_is_no_third_number() -> None:
    given = {"x": normals(0, 8, 64).bfloat16(), "up": normals(1, 8, 64).bfloat16()}
    output = torch.nn.functional.silu(given["x"].float()) * given["up"].float()
    wrong = rounded(output, torch.bfloat16, "either")
    wrong.view(torch.int16)[3, 5] += 2
    found = judged(swiglu, "fp32_silu+output:either", given, {"output": wrong})
    assert found.stages[0].cumulative.outside == 1


def gradients(direction: Direction) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw inputs of a gradient of LayerNorm in bf16, and round all of its results in a direction."""
    x, dy, weight = (normals(seed, *shape).bfloat16() for seed, shape in enumerate([(8, 96), (8, 96), (96,)]))
    mean = x.float().mean(-1, keepdim=True)
    rstd = torch.rsqrt((x.float() - mean).square().mean(-1, keepdim=True) + 1e-5)
    normalized, d = (x.float() - mean) * rstd, dy.float() * weight.float()
    c1, c2 = (normalized * d).mean(-1, keepdim=True), d.mean(-1, keepdim=True)
    found = {"dx": (d - (normalized * c1 + c2)) * rstd, "dw": (dy.float() * normalized).sum(0)}
    given = {"x": x, "dy": dy, "weight": weight, "mean": mean, "rstd": rstd}
    return given, {name: rounded(t, torch.bfloat16, direction) for name, t in found.items()}


@pytest.mark.parametrize("own", ["nearest", "zero", "either"])
def test_rows_that_two_values_explain_together_and_sums_over_rows(own: Direction) -> None:
    given, actual = gradients(own)
    op = layer_norm_gated_backward
    for direction in ("nearest", "zero", "either"):
        problem = Problem(op, op.contract(f"dx:{direction}+dw:{direction}"), given, {})
        found = judge(problem, actual)
        outside = {stage.name: stage.cumulative.outside for stage in found.stages}
        if direction in KEEPS[own]:
            assert found.verdict is Verdict.PASSED and not any(outside.values())
            rows = check_rows(Observation.of(problem, {"dx": actual["dx"]}))
            assert (rows.explained, rows.unexplained) == (8, 0)
        else:
            assert outside["dx"] > 100 and outside["dw"] > 10


def test_what_is_rounded_to_an_element_lies_between() -> None:
    """What the row check takes for the numbers that become an element, against numbers that do."""
    given, _ = gradients("zero")
    fmt = format_of(torch.bfloat16)
    x = torch.cat([normals(5, 4096), torch.tensor([0.0, -0.0, 1e-40, -1e-40])]).double()
    for direction in DIRECTIONS:
        op = layer_norm_gated_backward
        problem = Problem(op, op.contract(f"dx:{direction}"), given, {})
        seen = round_to(x, fmt.toward(direction))
        none = torch.zeros(1, 1, dtype=torch.int64)
        low, high = Rows(problem, {"dx": seen}, "c1", none, none, none.bool()).rounding("dx")
        assert bool(((low <= x) & (x <= high)).all())
        assert bool((high - low <= 2 * seen.abs().clamp(min=2.0**-126) * 2.0**-7).all())


def test_what_overflows_saturates_toward_zero_alone() -> None:
    given = {"x": torch.full((1, 4), 60000.0).half(), "up": torch.full((1, 4), 4.0).half()}
    largest, infinite = torch.full((1, 4), 65504.0).half(), torch.full((1, 4), torch.inf).half()
    for direction in DIRECTIONS:
        contract = f"fp32_silu+output:{direction}"
        kept = [
            judged(swiglu, contract, given, {"output": y}).verdict is not Verdict.FAILED for y in (largest, infinite)
        ]
        assert kept == [direction in ("zero", "either"), direction != "zero"], direction


def test_fp32_is_rounded_to_nearest_whatever_is_declared() -> None:
    """Arithmetic is in fp32, so that nothing is left to be rounded."""
    given = {"x": normals(0, 4, 64), "up": normals(1, 4, 64)}
    own, cut = (Problem(swiglu, swiglu.contract(f"fp32_silu{more}"), given, {}) for more in ("", "+output:zero"))
    assert cut.takes(own.steps) and cut.trace.stages["output"].same(own.trace.stages["output"])
