"""Rows in which fp32 overflows, and a kernel whose intermediate values have more range does not: both are legal.

A row is either as fp32 gives it or, in every element and stage, as more range gives it. Nothing in between is legal:
the rows that fail in fp32 are judged once more, under the premise `wide`, and count by that only where it explains them
completely.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from harness.judging.latent import check_rows
from harness.judging.observation import Observation

_MOST_CHECKS = 256  # row checks; rows that are not tried count as not explained, beside others that are not


def with_more_range(seen: Observation) -> Observation:
    """The same as of a kernel whose intermediate values have more range than fp32."""
    return replace(seen, problem=seen.problem.with_more_range)


def explained_by_more_range(seen: Observation) -> Tensor:
    """Which rows [rows] are as a kernel of more range than fp32 gives them, and not as fp32 does.

    Only rows with an element outside are tried: where all elements are possible in fp32, more range explains no more.
    """
    explained = torch.zeros(seen.count, dtype=torch.bool, device=seen.problem.main.device)
    if not seen.count or not seen.problem.op.rows or not seen.has_rows:
        return explained
    numbers = _outside(seen).nonzero()[:, 0]
    if len(numbers):
        rows = with_more_range(seen.only(numbers))
        possible = (~_outside(rows)).nonzero()[:, 0]
        explained[numbers[_with_one_latent(rows, possible)]] = True
    return explained


def _outside(seen: Observation) -> Tensor:
    """Rows with an element that cannot be, from the inputs or from the kernel's own earlier stages."""
    masks = [
        expected.outside(seen.actual[name]).reshape(seen.count, -1).any(-1)
        for trace in (seen.problem.trace, seen.onward)
        for name, expected in seen.expected(trace).items()
        if not trace.stages[name].of_all_rows
    ]
    return (
        torch.stack(masks).any(0)
        if masks
        else torch.zeros(seen.count, dtype=torch.bool, device=seen.problem.main.device)
    )


def _with_one_latent(seen: Observation, rows: Tensor) -> Tensor:
    """Those of the rows that one latent value explains, by halves of what is not explained together."""
    if not seen.has_latent:
        return rows
    found, rest, checks = [rows[:0]], [rows], 0
    while rest and checks < _MOST_CHECKS:
        some = rest.pop()
        if not len(some):
            continue
        checks += 1
        if not check_rows(seen.only(some)).unexplained:
            found.append(some)
        elif len(some) > 1:
            rest += some.tensor_split(2)
    return torch.cat(found)
