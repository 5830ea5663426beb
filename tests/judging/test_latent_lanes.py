"""Rows of at most 32 columns whose lanes disagree: a notice, and a failure only for what is wrong besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.references.layer_norm_gated import layer_norm_gated
from lastbit.references.rms_norm import rms_norm
from lastbit.result import Judgement, Verdict

EPS = 1e-5
ROWS = 48
Stages = dict[str, Tensor]


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lane_sums(a: Tensor, b: Tensor, bit: int) -> Tensor:
    """Σ a·b over the last dimension as a fusing warp adds it: one sum per lane, first with the lane across `bit`."""
    size = a.shape[-1]
    width = 1 << (size - 1).bit_length()
    a, b = (torch.nn.functional.pad(t.double(), (0, width - size)) for t in (a, b))
    lanes = torch.arange(width)
    product = (a * b).float().double()
    total = (a * b + product[..., lanes ^ (1 << bit)]).float()
    for other in reversed(range(width.bit_length() - 1)):
        if other != bit:
            total = total + total[..., lanes ^ (1 << other)]
    return total[..., :size]


def root_of(variance: Tensor, eps: float = EPS) -> Tensor:
    return (1 / (variance + eps).double().sqrt()).float()


def rms(x: Tensor, weight: Tensor, bit: int) -> Stages:
    """RMSNorm in fp32, rounded once; the statistic that is saved is the first lane's."""
    value = x.float()
    inverse = root_of(lane_sums(value, value, bit) / x.shape[-1])
    return {"output": (value * inverse * weight.float()).to(x.dtype), "inv_rms": inverse[..., :1].clone()}


def gated(x: Tensor, weight: Tensor, z: Tensor, bit: int) -> Stages:
    """LayerNorm of x · silu(z), whose mean is a sum of products, too."""
    value, gate = x.float(), z.float() * torch.sigmoid(z.float())
    mean = lane_sums(value, gate, bit) / x.shape[-1]
    centered = value * gate - mean
    inverse = root_of(lane_sums(centered, centered, bit) / x.shape[-1])
    output = (centered * inverse * weight.float()).to(x.dtype)
    return {"output": output, "mean": mean[..., :1].clone(), "rstd": inverse[..., :1].clone()}


def judged_rms(x: Tensor, weight: Tensor, actual: Stages) -> Judgement:
    return judge(
        Problem(rms_norm, rms_norm.contract("fp32_multiply"), {"x": x, "weight": weight}, {"eps": EPS}), actual
    )


def judged_gated(x: Tensor, weight: Tensor, z: Tensor, actual: Stages) -> Judgement:
    params = {"eps": EPS, "norm_before_gate": False}
    return judge(
        Problem(layer_norm_gated, layer_norm_gated.contract(), {"x": x, "weight": weight, "z": z}, params), actual
    )


# Right kernels


ALONE, SHOWN = ("output",), ("output", "inv_rms", "mean", "rstd")


def only(stages: Stages, shown: tuple[str, ...]) -> Stages:
    return {name: tensor for name, tensor in stages.items() if name in shown}


def inputs(width: int, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, and gates so large that their silu is themselves."""
    return (
        normals(rows, width, seed=width).to(dtype),
        normals(width, seed=1).to(dtype),
        (18 + 4 * normals(rows, width, seed=2).abs()).to(dtype),
    )


@pytest.mark.parametrize("shown", [ALONE, SHOWN], ids=["output alone", "statistics shown"])
@pytest.mark.parametrize(("width", "bit"), [(3, 0), (17, 4), (24, 0), (32, 4), (32, 2)])
def test_lanes_that_disagree_pass_with_a_notice(width: int, bit: int, shown: tuple[str, ...]) -> None:
    x, weight, z = inputs(width)
    normed = judged_rms(x, weight, only(rms(x, weight, bit), shown))
    centered = judged_gated(x, weight, z, only(gated(x, weight, z, bit), shown))
    for judgement in (normed, centered):
        assert judgement.verdict is Verdict.PASSED, judgement.findings
        assert judgement.rows is not None and judgement.rows.unexplained == 0
        assert all(finding.notice and finding.kind == "lanes" for finding in judgement.findings)
        assert bool(judgement.findings) == (judgement.rows.split > 0)
    assert width not in (24, 32) or normed.rows.split > 0
    assert shown == ALONE or width not in (24, 32) or centered.rows.split > normed.rows.split, "means differ, too"


def test_lanes_that_disagree_rule_out_no_contract() -> None:
    """What does not follow from a statistic of the other half is no evidence against another contract."""
    x, weight, z = inputs(16)
    judgement = judged_gated(x, weight, z, gated(x, weight, z, 2))
    assert judgement.rows is not None and judgement.rows.split
    assert judgement.ruled_out["single_rounding+welford"] == 0


def test_lanes_that_disagree_in_bf16() -> None:
    x, weight, z = inputs(32, torch.bfloat16)
    assert judged_rms(x, weight, rms(x, weight, 4)).verdict is Verdict.PASSED
    assert judged_gated(x, weight, z, gated(x, weight, z, 4)).verdict is Verdict.PASSED


def test_all_groups_of_a_row_are_whole_or_split_by_one_bit() -> None:
    """Groups have statistics of their own, but a kernel lays all of them out alike."""
    x, weight = normals(60, 96), normals(96, seed=1)
    params = {"eps": EPS, "group_size": 32, "is_rms_norm": True}

    def in_groups(*bits: int) -> Tensor:
        parts = [
            rms(x[:, at : at + 32], weight[at : at + 32], bit)["output"]
            for at, bit in zip((0, 32, 64), bits, strict=True)
        ]
        return torch.cat(parts, -1)

    def judged(output: Tensor) -> Judgement:
        tensors = {"x": x, "weight": weight}
        return judge(Problem(layer_norm_gated, layer_norm_gated.contract(), tensors, params), {"output": output})

    alike, mixed = judged(in_groups(4, 4, 4)), judged(in_groups(4, 3, 0))
    assert alike.verdict is Verdict.PASSED and alike.rows is not None and alike.rows.split > 5
    assert mixed.verdict is Verdict.FAILED and mixed.rows is not None and mixed.rows.split > 0


# Wrong kernels


def step(x: Tensor, where: tuple[Any, ...], ulps: int = 1) -> Tensor:
    moved = x.clone()
    moved.view(torch.int32)[where] += ulps
    return moved


def by_columns(x: Tensor, weight: Tensor, ulps: list[int], eps: float = EPS) -> Stages:
    """RMSNorm whose inverse rms is off by so many ulp in each column."""
    inverse = root_of(x.square().mean(-1, keepdim=True), eps).expand(x.shape).clone()
    moved = (inverse.view(torch.int32) + torch.tensor(ulps, dtype=torch.int32)).view(torch.float32)
    return {"output": x * moved * weight, "inv_rms": moved[..., :1].clone()}


@pytest.mark.parametrize("shown", [ALONE, SHOWN], ids=["output alone", "statistics shown"])
@pytest.mark.parametrize(
    ("ulps", "right"),
    [
        ([0] * 16 + [3] * 16, True),
        ([0, 3] * 16, True),
        ([0] * 8 + [3] * 8 + [6] * 16, False),
        ([0] * 10 + [3] * 22, False),
        ([0] * 17 + [3] * 15, False),
        ([0] * 16 + [500] * 16, False),
        ([0] * 32 + [3] * 32, False),
    ],
    ids=["halves", "every other", "three values", "a third", "not half", "too far", "64 columns"],
)
def test_only_halves_by_a_bit_of_the_column_with_possible_values(
    ulps: list[int], right: bool, shown: tuple[str, ...]
) -> None:
    x, weight, _ = inputs(len(ulps), rows=6)
    judgement = judged_rms(x, weight, only(by_columns(x, weight, ulps), shown))
    assert judgement.verdict is (Verdict.PASSED if right else Verdict.FAILED)
    assert judgement.rows is not None and judgement.rows.split == (6 if right else 0)


@pytest.mark.parametrize("shown", [ALONE, SHOWN], ids=["output alone", "statistics shown"])
@pytest.mark.parametrize("bit", [None, 4], ids=["one sum", "lanes disagree"])
def test_one_element_off_by_an_ulp_fails(bit: int | None, shown: tuple[str, ...]) -> None:
    x, weight, _ = inputs(32)
    right = by_columns(x, weight, [0] * 32) if bit is None else rms(x, weight, bit)
    wrong = {**right, "output": step(right["output"], (slice(None, None, 8), 11))}
    before, after = (judged_rms(x, weight, only(stages, shown)) for stages in (right, wrong))
    assert (before.verdict, after.verdict) == (Verdict.PASSED, Verdict.FAILED)
    assert before.rows is not None and after.rows is not None
    assert after.rows.unexplained >= len(x[::8]) - 1, "one of these is possible with a product in another order"
    assert after.rows.split <= before.rows.split


def test_one_element_off_by_an_ulp_fails_beside_a_mean_of_lanes() -> None:
    x, weight, z = inputs(32)
    right = gated(x, weight, z, 4)
    wrong = {**right, "output": step(right["output"], (slice(None, None, 8), 11))}
    judgement = judged_gated(x, weight, z, wrong)
    assert judgement.verdict is Verdict.FAILED
    output = next(stage for stage in judgement.stages if stage.name == "output")
    assert output.isolated.outside >= len(x[::8])


def test_a_saved_statistic_that_neither_half_used_fails() -> None:
    x, weight, _ = inputs(32, rows=8)
    stages = by_columns(x, weight, [0] * 16 + [3] * 16)
    stages["inv_rms"] = step(stages["inv_rms"], (slice(None),), 9)
    judgement = judged_rms(x, weight, stages)
    assert judgement.verdict is Verdict.FAILED and judgement.rows is not None and judgement.rows.split == 0
