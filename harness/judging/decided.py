"""What share of each result was decided: how much of it could not have been otherwise under the contract."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from harness.judging.expected import Numbers
from harness.judging.problem import Problem
from harness.numerics.formats import ordinals
from harness.result import Judgement, StageResult

_MOST = 1 << 20  # elements of the main input of which the rows are asked how well their latent value is known


def shares(problem: Problem, judgement: Judgement) -> dict[str, float]:
    """Result → share of it that is decided, from 0 to 1.

    An element with one legal value counts 1. An element in a row that one latent value explains counts by how well that
    value is known: 1 if the order of the sums behind it makes no difference, less by the share of its bits that the
    order leaves open.
    """
    rows = judgement.rows
    explained = rows is not None and rows.rows > 0 and not rows.unexplained
    known = _known(problem) if explained else 0.0
    return {s.name: _share(s, known if s.in_rows else 0.0) for s in judgement.stages if s.result}


def _share(stage: StageResult, known: float) -> float:
    numel = stage.cumulative.numel
    exact = max(stage.cumulative.decided, stage.isolated.decided) / numel if numel else 1.0
    return exact + (1 - exact) * known


def _known(problem: Problem) -> float:
    """Share of the bits of the latent value that the order of sums leaves no choice about, mean over the first rows.

    Of several latent values it is the one that is known worst.
    """
    _, some = next(problem.blocks(_MOST))
    sharp = replace(some, premises=replace(problem.premises, depth=_no_height), siblings=None)
    least = _possible(sharp)
    known = [_share_of_bits(own, *least[name]) for name, (own, _) in _possible(some).items()]
    return float(torch.stack(known).amin(0).mean())


def _share_of_bits(own: Tensor, least: Tensor, precision: int) -> Tensor:
    open_bits = torch.log2(own / least).clamp(min=0)
    return torch.where(torch.isfinite(open_bits), 1 - open_bits / precision, 0.0).clamp(min=0)


def _no_height(terms: int) -> int:
    """The height of a sum that is rounded once, whose order makes no difference."""
    return 0


def _possible(problem: Problem) -> dict[str, tuple[Tensor, int]]:
    """How many values each latent stage may have in each row, NaN where that is unknown, and its precision in bits."""
    latent, trace = problem.op.latent, problem.trace
    assert latent is not None
    stages = [name for name in (latent.under(problem.contract), *latent.also) if name in trace.formats]
    return {name: _count(trace.numbers(name)) for name in stages}


def _count(expected: Numbers) -> tuple[Tensor, int]:
    ends = expected.enclosure.lo, expected.enclosure.hi
    finite = torch.isfinite(ends[0]) & torch.isfinite(ends[1])
    lo, hi = (ordinals(torch.where(finite, end, 0.0), expected.format) for end in ends)
    return torch.where(finite, (hi - lo + 1).to(torch.float64), torch.nan), expected.format.precision
