"""Dots that a kernel walks in a declared order: they lose by the partial sums that they go through, not by Σ|terms|.

After every `order` terms one fp32 number, the accumulator, holds the sum of all before; the terms between are added to
it in any order. The exact sum is known, in fp64, at every such place, and in between no partial sum leaves it by more
than the terms of one block allow. docs/numerics.md derives the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastbit.numerics.factors import Factor
from lastbit.numerics.formats import FP64_U
from lastbit.numerics.premises import U, current

SHORTEST = 256
"""Products of the shortest dots that are walked: shorter ones gain little (docs/measurements/ordered_dots.md)."""

_LEAST_BLOCK = 16  # smaller ones cost more than they gain; what holds after each block holds after every second one
_TOGETHER, _TOGETHER_ON_CPU = 1 << 22, 1 << 18  # elements of the sums of several blocks that are looked at together
_EVALUATION = 1 + 2.0**-30  # more than the sums over blocks err in fp64
_EXPONENT = 0x7FF << 52


def block_of(terms: int) -> int:
    """Return the number of terms in a block of a dot; 0 where the dot is short, or no order is declared."""
    premises = current()
    if premises.order is None or premises.exact_sums or terms < SHORTEST:
        return 0
    return premises.order * -(-_LEAST_BLOCK // premises.order)


def losing(left: Factor, right: Factor, block: int, pieces: int, magnitude: Tensor, known: Tensor) -> Tensor:
    """Bound the rounding error of a dot whose pieces are walked in blocks, underflow excepted.

    `magnitude` is the sum of the magnitudes of all terms, and `known` a bound on how far the computed sum of any of
    them may be from that of the middles.
    """
    terms, premises = left.terms, current()
    block = min(block, terms // pieces)
    sizes = _sizes(left, right, block, pieces, known + 4 * terms * FP64_U * magnitude)
    joined = torch.minimum(block * sizes.beyond, premises.height(terms) * sizes.most)
    lost = magnitude + block * sizes.alone + joined
    if (cores := premises.tensor_cores) is not None:
        steps, of_step = -(-block // cores.products), cores.lost(cores.products)
        added = max(0.0, 1 - cores.cut / U)  # a block that is summed alone: its first step cuts off no sum so far
        cut = (steps - 1) * of_step * (sizes.alone + sizes.beyond) + (of_step + added) * sizes.ends
        lost = torch.maximum(lost, cut)
    return U * _EVALUATION * lost + terms * FP64_U * magnitude


@dataclass(frozen=True, eq=False)
class _Sizes:
    """Bounds of the numbers in the blocks of a dot, as powers of two, each summed over all blocks but `most`.

    Attributes:
        alone: sums of some terms of a block.
        beyond: how much larger those may be to which the accumulator was added.
        most: the largest such difference.
        ends: the accumulator before and after a block, and each term of it.
    """

    alone: Tensor
    beyond: Tensor
    most: Tensor
    ends: Tensor


def _sizes(left: Factor, right: Factor, block: int, pieces: int, slack: Tensor) -> _Sizes:
    """Return the sizes, all of which may be larger by `slack`. Sums are halved: the middle of a block counts."""
    operands = left.middle / 2, right.middle.mT, left.size / 2, right.size.mT
    x, y, x_size, y_size = (_in_blocks(operand, block, pieces) for operand in operands)
    accumulator, *sums = (torch.zeros_like(slack) for _ in range(5))
    sizes = _Sizes(*sums)
    together = max(1, (_TOGETHER_ON_CPU if slack.device.type == "cpu" else _TOGETHER) // max(1, slack.numel()))
    for part in (slice(start, start + together) for start in range(0, len(x), together)):
        change = x[part] @ y[part].mT
        spread = (x_size[part] @ y_size[part].mT).add_(slack)
        after = accumulator + 2 * change.cumsum(0)
        accumulator, center = after[-1].clone(), after.sub_(change).abs_()
        change.abs_()
        sizes.ends.add_(_binade(torch.maximum(center + slack, spread).add_(change)).sum(0))
        alone, joined = _binade(change.add_(spread)), _binade(center.add_(spread))
        beyond = joined.sub_(alone).clamp_(min=0.0)
        sizes.alone.add_(alone.sum(0))
        sizes.beyond.add_(beyond.sum(0))
        torch.maximum(sizes.most, beyond.amax(0), out=sizes.most)
    return sizes


def _in_blocks(x: Tensor, block: int, pieces: int) -> Tensor:
    """Cut […, K] into [blocks, …, block], with zeros behind the last terms of each piece."""
    of_pieces: Tensor = x.unflatten(-1, (pieces, -1))
    blocks: Tensor = pad(of_pieces, (0, -of_pieces.shape[-1] % block)).unflatten(-1, (-1, block))
    return blocks.flatten(-3, -2).movedim(-2, 0)


def _binade(x: Tensor) -> Tensor:
    """Replace each positive number, in place, by the power of two at or below it; NaN may become inf."""
    bits = x.view(torch.int64)
    bits &= _EXPONENT
    return x
