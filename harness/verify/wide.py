"""Rows in which fp32 overflows, and a kernel whose intermediate values have more range does not: both are legal.

A row is either as fp32 gives it or, in every element and stage, as more range gives it. Nothing in between is legal:
the rows that fail in fp32 are judged once more, under the premise `wide`, and count by that only where it explains them
completely.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from harness.numerics import current, using
from harness.op import Contract, Op
from harness.verify.block import Block
from harness.verify.compare import outside_mask
from harness.verify.evaluate import Params, evaluate
from harness.verify.latent import check_rows, has_latent

_MOST_CHECKS = 256  # row checks; rows that are not tried count as not explained, beside others that are not


@contextmanager
def more_range() -> Iterator[None]:
    """Evaluate references as for a kernel whose intermediate values do not overflow."""
    with using(replace(current(), wide=True)):
        yield


def explained_by_more_range(op: Op, contract: Contract, params: Params, block: Block) -> Tensor:
    """Which rows of a block [rows] are as a kernel of more range than fp32 gives them, and not as fp32 does.

    Only rows with an element outside are tried: where all elements are possible in fp32, more range explains no more.
    """
    explained = torch.zeros(block.count, dtype=torch.bool, device=block.tensors[op.inputs[0]].device)
    if not op.rows or not block.has_rows:
        return explained
    numbers = _outside(op, contract, params, block).nonzero()[:, 0]
    if len(numbers):
        rows = block.only(op, numbers)
        with more_range():
            possible = (~_outside(op, contract, params, rows)).nonzero()[:, 0]
            explained[numbers[_with_one_latent(op, contract, params, rows, possible)]] = True
    return explained


def _outside(op: Op, contract: Contract, params: Params, block: Block) -> Tensor:
    """Rows with an element that is not possible, from the inputs or from the kernel's own earlier stages."""
    traces = [evaluate(op, contract, block.tensors, params)]
    if len(block.actual) > 1:
        traces.append(evaluate(op, contract, block.tensors, params, block.actual))
    masks = [
        outside_mask(block.actual[name], expected).reshape(block.count, -1).any(-1)
        for trace in traces
        for name, expected in trace.expected.items()
        if name in block.actual
    ]
    return torch.stack(masks).any(0)


def _with_one_latent(op: Op, contract: Contract, params: Params, block: Block, rows: Tensor) -> Tensor:
    """Those of the rows that one latent value explains, by halves of what is not explained together."""
    if not has_latent(op, block.actual):
        return rows
    found, rest, checks = [rows[:0]], [rows], 0
    while rest and checks < _MOST_CHECKS:
        some = rest.pop()
        if not len(some):
            continue
        checks += 1
        if _all_explained(op, contract, params, block, some):
            found.append(some)
        elif len(some) > 1:
            rest += some.tensor_split(2)
    return torch.cat(found)


def _all_explained(op: Op, contract: Contract, params: Params, block: Block, rows: Tensor) -> bool:
    part = block.only(op, rows)
    trace = evaluate(op, contract, part.tensors, params)
    return not check_rows(op, contract, part.tensors, params, part.actual, trace).unexplained
