"""What the gated norms leave free, such as a product that a compiler fuses into what follows it, and what not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.references.layer_norm_gated import layer_norm_gated
from lastbit.references.layer_norm_gated_backward import layer_norm_gated_backward
from lastbit.result import Verdict

EPS = 1e-5
Difference = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(x: Tensor, z: Tensor, mean: Tensor) -> Tensor:
    return x * z - mean


def fused(x: Tensor, z: Tensor, mean: Tensor) -> Tensor:
    """x · z - mean, rounded once."""
    return (x.double() * z.double() - mean.double()).float()


def wrong(x: Tensor, z: Tensor, mean: Tensor) -> Tensor:
    return (x * z - mean) * (1 + 2.0**-20)


def problem(rows: int, width: int, offset: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randn(rows, width, generator=generator) + offset
    z = 17 + 7 * torch.rand(rows, width, generator=generator)  # act(z) = z
    return {"x": x, "z": z, "weight": torch.ones(width)}


@pytest.mark.parametrize("difference", [plain, fused])
@pytest.mark.parametrize(("width", "offset"), [(8, 0.0), (8, 100.0), (8, 1000.0), (64, 1000.0)])
def test_forward_may_fuse_the_gate_into_the_difference(difference: Difference, width: int, offset: float) -> None:
    tensors = problem(16, width, offset)
    x, z = tensors["x"], tensors["z"]
    mean = (x * z).mean(-1, keepdim=True)
    centered = difference(x, z, mean)
    variance = centered.square().mean(-1, keepdim=True)
    rstd = 1 / (variance + EPS).sqrt()
    actual = {"gate": z, "gated_input": x * z, "mean": mean, "variance": variance, "rstd": rstd}
    actual |= {"normalized": centered * rstd, "affine": centered * rstd, "output": centered * rstd}
    params = {"eps": EPS, "norm_before_gate": False}
    assert (
        judge(Problem(layer_norm_gated, layer_norm_gated.contract(), tensors, params), actual).verdict is Verdict.PASSED
    )


def gradients(tensors: dict[str, Tensor], difference: Difference) -> dict[str, Tensor]:
    x, z, dy = tensors["x"], tensors["z"], tensors["dy"]
    normalized = difference(x, z, tensors["mean"]) * tensors["rstd"]
    c1 = (normalized * dy).mean(-1, keepdim=True)
    c2 = dy.mean(-1, keepdim=True)
    dvalue = (dy - (normalized * c1 + c2)) * tensors["rstd"]
    results = {"dx": dvalue * z, "dz": dvalue * x, "dw": (dy * normalized).sum(0)}
    return {"gate": z, "gated_input": x * z, "normalized": normalized, **results}


@pytest.mark.parametrize(
    ("difference", "verdict"), [(plain, Verdict.PASSED), (fused, Verdict.PASSED), (wrong, Verdict.FAILED)]
)
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_backward_may_fuse_the_gate_into_the_difference(difference: Difference, verdict: Verdict, rows: int) -> None:
    tensors = problem(rows, 64, 3.0)
    tensors["dy"] = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    tensors["mean"], tensors["rstd"] = torch.full((rows, 1), 60.1), torch.full((rows, 1), 0.07)
    params = {"norm_before_gate": False}
    op = layer_norm_gated_backward
    assert judge(Problem(op, op.contract(), tensors, params), gradients(tensors, difference)).verdict is verdict


@pytest.mark.parametrize("order", ["dy * gate", "(dy * z) * s"])
def test_db_takes_the_gate_in_any_order(order: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, z, dy = (torch.randn(1, 64, generator=generator) for _ in range(3))
    s, weight = torch.sigmoid(z), torch.ones(64)
    gate, normalized = z * s, x * 0.5
    terms = dy * gate if order == "dy * gate" else (dy * z) * s
    d = terms
    dx = (d - normalized * (normalized * d).mean(-1, keepdim=True)) * 0.5
    dz = dy * (normalized + 0.0) * s * (1 + z * (1 - s))
    actual = {"gate": gate, "dx": dx, "dz": dz, "dw": (terms * normalized).sum(0), "db": terms.sum(0)}
    tensors = {"x": x, "dy": dy, "weight": weight, "z": z, "bias": torch.zeros(64), "rstd": torch.full((1, 1), 0.5)}
    op = layer_norm_gated_backward
    assert judge(Problem(op, op.contract(), tensors, {}), actual).verdict is not Verdict.FAILED
    actual["db"] = actual["db"] * (1 + 2.0**-19)
    assert judge(Problem(op, op.contract(), tensors, {}), actual).verdict is Verdict.FAILED


def test_a_gate_of_minus_infinity_gives_nan() -> None:
    x, z = torch.ones(1, 4), torch.tensor([[1.0, -1.0, 0.0, -torch.inf]])
    tensors, params = {"x": x, "z": z, "weight": torch.ones(4)}, {"eps": 0.0, "is_rms_norm": True}
    right = torch.nn.functional.silu(z)
    assert right[0, 3].isnan()
    op = layer_norm_gated
    assert judge(Problem(op, op.contract(), tensors, params), {"output": right}).verdict is not Verdict.FAILED
    judgement = judge(Problem(op, op.contract(), tensors, params), {"output": right.nan_to_num(12345.0)})
    assert judgement.verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(7)}, r"weight has shape \(7,\); with x \(2, 8\) it must be \(8,\)"),
        ({"weight": torch.ones(2, 8)}, r"weight has shape \(2, 8\)"),
        ({"z": torch.ones(2, 7)}, r"z has shape \(2, 7\); with x \(2, 8\) it must be \(2, 8\)"),
        ({"z": torch.ones(3, 8)}, r"z has rows \(3,\), but x has \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    tensors = {"x": torch.ones(2, 8), "weight": torch.ones(8), **change}
    with pytest.raises(UsageError, match=message):
        judge(
            Problem(layer_norm_gated, layer_norm_gated.contract(), tensors, {"eps": EPS}), {"output": torch.ones(2, 8)}
        )
