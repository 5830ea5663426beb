"""Rows in which fp32 overflows: as fp32 gives them, or as a kernel with more range does, and nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import lastbit.judging.verdict as judging
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics import Enclosure, Premises, dot, exp, mean_of_squares, multiply_add, total, using, variance_about
from lastbit.numerics.formats import FP32, WIDE_FP32, Format, round_to
from lastbit.references.layer_norm_gated import layer_norm_gated
from lastbit.references.layer_norm_gated_backward import layer_norm_gated_backward
from lastbit.references.rms_norm import rms_norm
from lastbit.result import Judgement, Verdict

EPS = 1e-6
ROWS, WIDTH = 6, 64
BF16, FLOAT = torch.bfloat16, torch.float32

Norm = Callable[[Tensor, Tensor], Tensor]

every_dtype = pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=str)


def normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


def large(scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every row overflows but the third."""
    x = normals(0).clamp(-3, 3) * scale
    x[2] /= scale
    return {"x": x.to(dtype), "weight": normals(1, WIDTH).to(dtype)}


def normed(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    return ((x.float() * inverse).to(weight.dtype) * weight).to(x.dtype)


def in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return normed(x, weight, torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS))


def in_fp64(x: Tensor, weight: Tensor) -> Tensor:
    return normed(x, weight, torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS).float())


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    largest = x.float().abs().amax(-1, keepdim=True)
    square = (x.float() / largest).square().mean(-1, keepdim=True)
    return normed(x, weight, torch.rsqrt(square + EPS / largest / largest) / largest)


def divided_first(x: Tensor, weight: Tensor) -> Tensor:
    """mean(x² / N): overflows later than the sum of squares."""
    return normed(x, weight, torch.rsqrt((x.float() * (x.float() / x.shape[-1])).sum(-1, keepdim=True) + EPS))


def rows_of_both(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([in_fp32(x, weight)[:1], in_fp64(x, weight)[1:]])


def half(x: Tensor, weight: Tensor) -> Tensor:
    return in_fp64(x, weight) / 2


def infinite(x: Tensor, weight: Tensor) -> Tensor:
    return in_fp64(x, weight).index_fill(0, torch.tensor([4]), torch.inf)


def mixed(x: Tensor, weight: Tensor) -> Tensor:
    """One row half as fp32 gives it and half as fp64 does."""
    y = in_fp64(x, weight)
    y[1, : WIDTH // 2] = in_fp32(x, weight)[1, : WIDTH // 2]
    return y


def one_ulp(x: Tensor, weight: Tensor) -> Tensor:
    """One element of fp32 that no single inverse root explains, or of bf16 that none does."""
    y = in_fp64(x, weight)
    y[3, 5] = torch.nextafter(y[3, 5], torch.zeros_like(y[3, 5])) if y.dtype is BF16 else y[3, 5] * (1 + 2.0**-21)
    return y


def judged(norm: Norm, tensors: dict[str, Tensor], **stages: Tensor) -> Judgement:
    return judge(Problem(rms_norm, rms_norm.contract(), tensors, {"eps": EPS}), {"output": norm(**tensors), **stages})


@every_dtype
@pytest.mark.parametrize("scale", [1e19, 1e25, 1e38])
@pytest.mark.parametrize("norm", [in_fp32, in_fp64, scaled, divided_first, rows_of_both])
def test_a_row_may_overflow_or_not(norm: Norm, scale: float, dtype: torch.dtype) -> None:
    judgement = judged(norm, large(scale, dtype))
    assert judgement.verdict is Verdict.PASSED, judgement.findings
    assert judgement.rows is not None
    assert (judgement.rows.rows, judgement.rows.explained) == (ROWS, ROWS)
    assert judgement.stages[0].cumulative.numel == ROWS * WIDTH


@every_dtype
@pytest.mark.parametrize("scale", [1e19, 1e38])
@pytest.mark.parametrize(("norm", "row"), [(half, None), (infinite, 4), (mixed, 1), (one_ulp, 3)])
def test_nothing_in_between_is_legal(norm: Norm, row: int | None, scale: float, dtype: torch.dtype) -> None:
    judgement = judged(norm, large(scale, dtype))
    assert judgement.verdict is Verdict.FAILED
    output = judgement.stages[0].cumulative
    assert output.worst is not None
    assert row in (None, output.worst.index[0])
    assert output.outside <= (ROWS if row is None else 1) * WIDTH, "other rows are as more range gives them"


def test_the_worst_element_is_named_in_the_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_BLOCK", {"cpu": 2 * WIDTH})
    tensors = large(1e25, BF16)
    y = mixed(**tensors)
    y[4, 7] = -torch.inf
    shaped = {"x": tensors["x"].reshape(2, 3, WIDTH), "weight": tensors["weight"]}
    judgement = judge(Problem(rms_norm, rms_norm.contract(), shaped, {"eps": EPS}), {"output": y.reshape(2, 3, WIDTH)})
    output = judgement.stages[0].cumulative
    assert output.worst is not None
    assert output.worst.index[:2] in ((0, 1), (1, 1))
    assert output.worst.actual == y.reshape(2, 3, WIDTH)[output.worst.index].item()
    assert output.numel == y.numel()
    assert judgement.rows is not None
    assert judgement.rows.rows - judgement.rows.explained == 2


def test_a_tensor_of_one_row() -> None:
    tensors = {name: t[0] if t.ndim > 1 else t for name, t in large(1e25, BF16).items()}
    assert judged(in_fp64, tensors).verdict is Verdict.PASSED
    assert judged(half, tensors).verdict is Verdict.FAILED


def test_a_kernel_that_passes_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> Tensor:
        raise AssertionError("more range was tried")

    monkeypatch.setattr(judging, "explained_beyond_fp32", never)
    assert judged(in_fp32, large(1e25, BF16)).verdict is Verdict.PASSED


def test_a_stage_may_be_stored_where_it_is_infinite_and_used_where_it_is_not() -> None:
    """The variance of an fp64 kernel is infinite in the tensor of fp32 that it is returned in."""
    tensors = large(1e25, BF16)
    variance = tensors["x"].double().square().mean(-1, keepdim=True)
    stages = {"variance": variance.float(), "inv_rms": torch.rsqrt(variance + EPS).float()}
    judgement = judged(in_fp64, tensors, **stages)
    assert judgement.verdict is Verdict.PASSED, judgement.findings
    assert judged(in_fp32, tensors, **stages).verdict is Verdict.FAILED, "the output follows from another inverse root"
    stages["inv_rms"] = stages["inv_rms"] / 2
    assert judged(in_fp64, tensors, **stages).verdict is Verdict.FAILED


def test_contracts_are_told_apart_by_the_rows_that_fp32_answers_for() -> None:
    """A row that is not as any contract has it in fp32 rules none out."""
    tensors = large(1e25, BF16)
    tensors["x"][2] = normals(7, WIDTH).to(BF16)
    ordinary = {**tensors, "x": tensors["x"][2:3]}
    assert dict(judged(in_fp64, tensors).ruled_out) == dict(judged(in_fp64, ordinary).ruled_out) != {}


# LayerNorm and gradients


def layer_norm(x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    mean = x.to(wide).mean(-1, keepdim=True).float()
    centered = x.float() - mean
    inverse = torch.rsqrt(centered.to(wide).square().mean(-1, keepdim=True) + EPS).float()
    return (centered * inverse * weight.float()).to(x.dtype)


@every_dtype
@pytest.mark.parametrize("scale", [1e19, 1e36])
def test_layer_norm_has_a_mean_and_a_variance_of_more_range(scale: float, dtype: torch.dtype) -> None:
    tensors = large(scale, dtype)
    problem = Problem(layer_norm_gated, layer_norm_gated.contract(), tensors, {"eps": EPS})
    for wide in (torch.float32, torch.float64):
        assert judge(problem, {"output": layer_norm(**tensors, wide=wide)}).verdict is Verdict.PASSED
    y = layer_norm(**tensors, wide=torch.float64)
    y[0, :9] = 0
    assert judge(problem, {"output": y}).verdict is Verdict.FAILED
    assert judge(problem, {"output": y / 2}).verdict is Verdict.FAILED


def gradients(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor, arithmetic: Format) -> dict[str, Tensor]:
    """Every step is rounded as numbers of fp32 are, in the range of `arithmetic`."""
    step = partial(round_to, fmt=arithmetic)
    normalized, d = step(x.double() * rstd.double()), step(dy.double() * weight.double())
    c1 = step(step(normalized * d).mean(-1, keepdim=True))
    dx = step(step(d - step(normalized * c1)) * rstd.double())
    return {"dx": dx.to(x.dtype), "dw": step(step(dy.double() * normalized).sum(0)).to(weight.dtype)}


@every_dtype
def test_gradients_follow_their_rows(dtype: torch.dtype) -> None:
    x, dy = normals(0) * 1e4, normals(1)
    dy[1:3] *= 1e34
    weight = normals(2, WIDTH) * 1e5
    tensors = {"x": x.to(dtype), "dy": dy.to(dtype), "weight": weight, "rstd": torch.full((ROWS, 1), 1.3e-4)}
    problem = Problem(layer_norm_gated_backward, layer_norm_gated_backward.contract(), tensors, {})
    narrow, wide = (gradients(**tensors, arithmetic=fmt) for fmt in (FP32, WIDE_FP32))
    assert not bool(narrow["dx"].isfinite().all())
    assert bool(wide["dx"].isfinite().all())
    for actual in (narrow, wide):
        assert judge(problem, actual).findings == ()
    assert judge(problem, {**wide, "dx": wide["dx"] / 2}).verdict is Verdict.FAILED
    judgement = judge(problem, {**wide, "dw": wide["dw"] * 2})
    assert [f.stage for f in judgement.findings] == ["dw"]


# The premise


def test_with_more_range_nothing_overflows_and_everything_is_as_precise_as_fp32() -> None:
    x = Enclosure.point(torch.tensor([[3e38, -2e38, 1e38]]))
    operations: dict[str, Callable[[], Enclosure]] = {
        "product": lambda: x * x,
        "sum": lambda: x + x,
        "fma": lambda: multiply_add(x, x, x),
        "total": lambda: total(x + x),
        "squares": lambda: mean_of_squares(x),
        "variance": lambda: variance_about(x, Enclosure.point(torch.tensor([[1e37]]))),
        "exp": lambda: exp(Enclosure.point(torch.tensor([[100.0]]))),
        "dot": lambda: dot(x, Enclosure(x.parts.transpose(-1, -2))),
    }
    for name, operation in operations.items():
        narrow = operation()
        assert not bool((narrow.lo.isfinite() & narrow.hi.isfinite()).all()), name
        with using(Premises(arithmetic=WIDE_FP32)):
            wide = operation()
        assert bool((wide.lo.isfinite() & wide.hi.isfinite()).all()), name
        assert bool(((wide.hi - wide.lo).abs() <= 2.0**-15 * wide.exact.abs()).all()), name
        assert bool(((wide.value - wide.exact).abs() <= 2.0**-23 * wide.exact.abs()).all()), name


def test_within_the_range_of_fp32_both_premises_agree() -> None:
    x = Enclosure.point(normals(3) * torch.logspace(-40, 15, WIDTH))
    narrow = [x * x, x + x, mean_of_squares(x)]
    with using(Premises(arithmetic=WIDE_FP32)):
        wide = [x * x, x + x, mean_of_squares(x)]
    for one, other in zip(narrow, wide, strict=True):
        assert torch.equal(one.full, other.full)
