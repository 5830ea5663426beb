"""Blocks that are compared while the reference goes on say what blocks say that are judged in full."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import lastbit.judging.verdict as judging
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import Screened, judge
from lastbit.references.rms_norm import rms_norm
from lastbit.result import Judgement, Verdict
from tests.judging.test_verdict import EPS, eager

CONTRACT = "native_multiply+rounded_sum"
ROWS, WIDTH = 12, 64


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (ROWS, WIDTH), "residual": (ROWS, WIDTH), "weight": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def problem(tensors: dict[str, Tensor]) -> Problem:
    return Problem(rms_norm, rms_norm.contract(CONTRACT), tensors, {"eps": EPS})


def judged(
    stages: dict[str, Tensor], tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, *, screened: bool
) -> Judgement:
    """Judged by three rows, of which all but the first may be screened."""
    with monkeypatch.context() as patch:
        patch.setattr(judging, "_BLOCK", {"cpu": 3 * WIDTH})
        if not screened:
            patch.setattr(judging.Screened, "begin", lambda seen: None)
        return judge(problem(tensors), stages)


def spoil(stages: dict[str, Tensor], spoilt: dict[str, tuple[int, int]]) -> None:
    for name, place in spoilt.items():
        stages[name][place] = 50.0


@pytest.mark.parametrize(
    "spoilt",
    [{}, {"output": (0, 3)}, {"output": (5, 63)}, {"output": (11, 0)}, {"normalized": (7, 2)}, {"inv_rms": (7, 0)}],
    ids=str,
)
@pytest.mark.parametrize("given", [("output",), ("inv_rms", "normalized", "output")], ids=len)
def test_the_judgement_is_the_same(
    given: tuple[str, ...], spoilt: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs()
    stages = eager(CONTRACT, **tensors)
    stages = {name: stages[name].clone() for name in ("residual_sum", *given)}
    spoil(stages, {name: place for name, place in spoilt.items() if name in stages})
    full, screened = (judged(stages, tensors, monkeypatch, screened=s) for s in (False, True))
    assert repr(screened) == repr(full)
    assert (full.verdict is Verdict.FAILED) == any(name in stages for name in spoilt)


def test_rows_beyond_fp32_are_judged_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that more range than that of fp32 explains fails the screen, and passes."""
    tensors = {"x": torch.ones(6, 32), "weight": torch.ones(32)}
    tensors["x"][5] = 2.0**100
    wide = tensors["x"].double()
    output = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).float()
    monkeypatch.setattr(judging, "_BLOCK", {"cpu": 64})
    assert judge(problem(tensors), {"output": output}).verdict is Verdict.PASSED
    monkeypatch.setattr(judging.Screened, "begin", lambda seen: None)
    assert judge(problem(tensors), {"output": output}).verdict is Verdict.PASSED


def test_every_row_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of blocks that are screened, the last one included."""
    tensors = {name: tensor.float() for name, tensor in inputs().items()}
    stages = {name: eager(CONTRACT, **tensors)[name] for name in ("residual_sum", "output")}
    monkeypatch.setattr(judging, "_BLOCK", {"cpu": 3 * WIDTH})
    right = judge(problem(tensors), stages)
    assert right.verdict is Verdict.PASSED and right.rows is not None
    assert (right.rows.rows, right.rows.explained) == (ROWS, ROWS)
    stages["output"].view(torch.int32)[ROWS - 1, 17] += 1
    wrong = judge(problem(tensors), stages)
    assert wrong.rows is not None and (wrong.rows.rows, wrong.rows.unexplained) == (ROWS, 1)
    assert [f.kind for f in wrong.findings] == ["rows"]


def test_alternatives_are_ruled_out_wherever_rows_tell_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first blocks are of zeros, which every contract leaves as they are."""
    tensors = inputs()
    for name in ("x", "residual"):
        tensors[name][: ROWS - 1] = 0
    stages = {name: eager(CONTRACT, **tensors)[name] for name in ("residual_sum", "output")}
    whole = judge(problem(tensors), stages).ruled_out
    monkeypatch.setattr(judging, "_BLOCK", {"cpu": 3 * WIDTH})
    monkeypatch.setattr(judging, "_OTHERS", 4 * WIDTH)
    assert judge(problem(tensors), stages).ruled_out.keys() == whole.keys() != set()


@pytest.mark.parametrize(("most", "together"), [(4, 3), (5, 1), (100, 5), (1, 7)])
def test_samples_are_spread_over_all_rows(most: int, together: int) -> None:
    tensors = inputs()
    seen = Observation.of(problem(tensors), {"output": tensors["x"]})
    samples = list(seen.samples(most * WIDTH, together * WIDTH, ()))
    numbers = sorted(n for sample in samples for n in sample.numbers.tolist())
    assert numbers[0] == 0 and numbers[-1] == ROWS - 1 and len(set(numbers)) == len(numbers)
    assert len(numbers) == min(ROWS, max(2, most))
    gaps = [b - a for a, b in itertools.pairwise(numbers)]
    assert max(gaps) - min(gaps) <= 1
    for sample in samples:
        assert torch.equal(sample.problem.tensors["x"], tensors["x"][sample.numbers])


def test_a_screen_keeps_the_latent_stage_only() -> None:
    tensors = inputs()
    stages = eager(CONTRACT, **tensors)
    whole = Observation.of(problem(tensors), {name: stages[name] for name in ("residual_sum", "output")})
    index, part = next(whole.problem.blocks(3 * WIDTH))
    block = Screened.begin(whole.block(index, part, ()))
    assert list(block.cumulative.stages) == list(block.isolated.stages) == ["inv_rms"]
    assert "trace" not in vars(part)
    assert block.tally.cumulative["output"].numel == 3 * WIDTH
