"""The share of each result that was decided: of elements that could not have been otherwise under the contract."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from lastbit.judging.expected import Numbers
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.numerics.formats import ordinals
from lastbit.result import Judgement

# Arbitrary: of a million elements a share is known well enough; more is time.
_MOST = 1 << 20  # elements of the main input of which the rows are asked how well their latent value is known


def constants(whole: Observation, most: int, sums: Collection[str]) -> dict[str, int]:
    """Count the constant elements of each stage, if the kernel gave what it had to give.

    Such an element has one legal value, which nothing has rounded, and it is the same whatever the floating-point
    numbers of the inputs are: the 0 of an ignored row, a masked element. It says nothing about a kernel's arithmetic.
    Integers are not constant in this sense, nor is anything where the inputs have no floating-point numbers.

    Args:
        whole: everything that the kernel gave; none of it is outside.
        most: elements of the main input that are evaluated at once.
        sums: stages that are sums over rows.
    """
    problem = whole.problem
    if not any(tensor.is_floating_point() and tensor.numel() for tensor in problem.tensors.values()):
        return {}
    if problem.in_one(most):
        exact = [_exact(e).any() for e in whole.expected(problem.trace).values() if isinstance(e, Numbers)]
        if not exact or not bool(torch.stack(exact).any()):
            return {}
    elif problem.op.integers.isdisjoint(problem.tensors):
        return {}  # rows are alike then, and there are many
    counts: dict[str, Tensor] = {}
    for index, part in problem.with_any_numbers.blocks(most):
        seen = whole.block(index, part, sums)
        for name, expected in seen.expected(part.trace).items():
            if isinstance(expected, Numbers):
                equal = (seen.actual[name].to(torch.float64) == expected.value) | torch.isnan(expected.value)
                counts[name] = counts.get(name, 0) + (_exact(expected) & equal).count_nonzero()
    return dict(zip(counts, torch.stack(list(counts.values())).tolist(), strict=True)) if counts else {}


def _exact(expected: Numbers) -> Tensor:
    """Return a mask of the elements that may have one value only, which nothing has rounded."""
    e = expected.enclosure
    return ((e.lo == e.hi) & (e.exact == e.lo)) | (torch.isnan(e.lo) & torch.isnan(e.exact))


def decidable(problem: Problem) -> dict[str, tuple[int, int]]:
    """Count the decided elements of each result, and all of them, both without constant ones."""
    constant = problem.with_any_numbers.trace
    found = {}
    for name in problem.trace.results:
        expected, any_numbers = problem.trace.stages[name], constant.stages[name]
        if isinstance(expected, Numbers) and isinstance(any_numbers, Numbers):
            counted = ~_exact(any_numbers)
            sharp = expected.decided & ~torch.isnan(expected.enclosure.lo)
            found[name] = int((sharp & counted).sum()), int(counted.sum())
    return found


def shares(problem: Problem, judgement: Judgement) -> dict[str, float]:
    """Return the share of each result that is decided, from 0 to 1.

    A constant element counts for nothing; see `constants`. One with one legal value counts 1. One in a row that one
    latent value explains counts by how well that value is known: 1 if the order of the sums behind it makes no
    difference, less by the share of its bits that the order leaves open. Where the op's first input has no elements, as
    for a sum over no rows, there is nothing else to decide than constants, and that is.
    """
    rows = judgement.rows
    explained = rows is not None and rows.rows > 0 and not rows.unexplained
    known = _known(problem) if explained else 0.0
    found = {}
    for stage in judgement.stages:
        numel = stage.cumulative.numel - stage.constant
        if stage.result and not numel:
            found[stage.name] = float(not problem.main.numel() or not stage.constant)
        elif stage.result:
            decided = max(stage.cumulative.decided, stage.isolated.decided, stage.equal)
            exact = max(decided - stage.constant, 0) / numel
            found[stage.name] = exact + (1 - exact) * (known if stage.in_rows else 0.0)
    return found


def _known(problem: Problem) -> float:
    """Return the share of the latent value's bits that no order of sums can change, as a mean over the first rows.

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
    """Return the height of a sum that is rounded once, so that its order makes no difference: 0."""
    return 0


def _possible(problem: Problem) -> dict[str, tuple[Tensor, int]]:
    """Count the possible values of each latent stage in each row, NaN where unknown; with its precision in bits."""
    latent, trace = problem.op.latent, problem.trace
    assert latent is not None
    stages = [name for name in (latent.under(problem.contract), *latent.also) if name in trace.formats]
    return {name: _count(trace.numbers(name)) for name in stages}


def _count(expected: Numbers) -> tuple[Tensor, int]:
    ends = expected.enclosure.lo, expected.enclosure.hi
    finite = torch.isfinite(ends[0]) & torch.isfinite(ends[1])
    lo, hi = (ordinals(torch.where(finite, end, 0.0), expected.format) for end in ends)
    return torch.where(finite, (hi - lo + 1).to(torch.float64), torch.nan), expected.format.precision
