"""Sums of exponentials that are rescaled while they grow, as flash attention does.

Each tile of terms is relative to the largest argument so far; when that grows, the sum so far is multiplied by a
factor. Unlike in `softmax`, the shift of a term does not cancel: it decides to which number of 16 bits it is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.dots import dot
from lastbit.numerics.enclosure import Enclosure, unrounded_product, widened
from lastbit.numerics.formats import FP16, FP32, Format, round_to
from lastbit.numerics.parts import full, rounded, unknown, unknown_where
from lastbit.numerics.premises import current
from lastbit.numerics.primitives import exp
from lastbit.numerics.remembered import remembered
from lastbit.numerics.residues import constant
from lastbit.numerics.sums import flushed


@algebraic(lambda x: x * constant(math.log(2)))
@remembered
def of_base_two(x: Enclosure) -> Enclosure:
    """Return x · ln 2, not rounded: its exp stands for a kernel's 2 to the power of x.

    Bounds of exponentials, such as those below and of `folded` arguments, hold for a multiplication by log2 e.
    """
    return Enclosure(x.parts * math.log(2))


@algebraic(lambda x, shift, below=True: (x - shift).exp())
@remembered
def shifted_exponential(x: Enclosure, shift: Enclosure, *, below: bool = True) -> Enclosure:
    """Return exp(x - shift), by base e or base 2; `below`: x is never larger than the shift.

    The difference is rounded, u of it. With base 2, x and the shift are multiplied by log2 e: that constant, rounded
    once or twice, adds 2u of the difference, and each product may be rounded, or the one of x fused with the
    subtraction. So x and the shift err by up to 2u each, beside what their own ends were rounded by; |x| is at most
    |shift| and the difference. Together 5u of the difference and 4u of the shift. The bound of `exp` adds its own.
    """
    four, subtracted = full(x.parts), full(shift.parts)
    lo, hi = four[2] - subtracted[3], four[3] - subtracted[2]
    if below:
        hi = torch.where(hi > 0, 0.0, hi)
    largest = torch.maximum(subtracted[2].abs(), subtracted[3].abs())
    largest = torch.where(torch.isfinite(largest), largest, 0.0)
    errors = [torch.where(torch.isfinite(end), current().unit * (5 * end.abs() + 4 * largest), 0.0) for end in (lo, hi)]
    value = round_to(four[1] - subtracted[1], current().arithmetic)
    difference = torch.stack(torch.broadcast_tensors(four[0] - subtracted[0], value, lo - errors[0], hi + errors[1]))
    return exp(Enclosure(unknown_where(difference, unknown(four), unknown(subtracted))))


@algebraic(rules.rescaled)
def rescaled(tiles: Sequence[Enclosure], factors: Sequence[Enclosure]) -> list[Enclosure]:
    """Return the terms of each tile as they count in the last sum: times all factors that come after the tile.

    tiles: [..., n] each; factors: [..., 1] each, between a tile and the next, one fewer than tiles. Each product with a
    factor is rounded, which is an error of at most u of every term of the sum so far, and rounded terms of it are what
    is enclosed: `total` and `rescaled_dot` add the errors of additions.
    """
    counted = [tiles[-1]]
    later: Tensor | None = None
    for number, (tile, factor) in enumerate(zip(reversed(tiles[:-1]), reversed(factors), strict=True), 1):
        later = factor.parts if later is None else unrounded_product(Enclosure(later), factor)
        terms = unrounded_product(tile, Enclosure(later))
        lost = number * current().unit
        counted.append(Enclosure(widened(terms, lost / (1 - lost), number * (FP32.quantum + flushed()))))
    return counted[::-1]


@algebraic(lambda terms, values, *_: terms @ values)
def rescaled_dot(terms: Enclosure, values: Enclosure, tiles: int, operand: Format) -> Enclosure:
    """Multiply terms [..., M, K] @ values [..., K, N], where `rescaled` gave the terms for so many tiles.

    A product with a factor may underflow, which is an error of its own beside those of the terms. Tensor cores saw the
    terms in the format `operand`, before they were rescaled by at most 1: of fp16 they cut more off, see `cut_off`.
    """
    product = dot(terms, values)
    cores, count = current().tensor_cores, terms.shape[-1]
    lost = tiles * (FP32.quantum + flushed())
    if tiles == 1:
        return product
    if cores is not None and operand is FP16:
        largest = torch.nan_to_num(values.full.abs(), nan=0.0, posinf=0.0).amax().clamp(min=1.0)
        lost = lost + 2 * count * cores.cut * 2.0**FP16.min_exponent * float(largest)
    return Enclosure(rounded(widened(product.parts, current().unit, lost), current().arithmetic))
