"""Sums that are rescaled while they grow, as flash attention does: after each tile of terms the sum so far is multiplied
by a factor, because what all terms are relative to has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.numerics.dots import dot
from harness.numerics.enclosure import Enclosure, unrounded_product, widened
from harness.numerics.formats import FP16, FP32, Format
from harness.numerics.parts import rounded
from harness.numerics.premises import U, current
from harness.numerics.sums import flushed


def rescaled(tiles: Sequence[Enclosure], factors: Sequence[Enclosure]) -> list[Enclosure]:
    """The terms of each tile as they count in the last sum: times all factors that come after the tile.

    tiles: [..., n] each; factors: [..., 1] each, between a tile and the next, one fewer than tiles. Each product with a
    factor is rounded, which is an error of at most u of every term of the sum so far, and rounded terms of it are what
    is enclosed: `total` and `rescaled_dot` add the errors of additions.
    """
    counted = [tiles[-1]]
    later: Tensor | None = None
    for number, (tile, factor) in enumerate(zip(reversed(tiles[:-1]), reversed(factors), strict=True), 1):
        later = factor.parts if later is None else unrounded_product(Enclosure(later), factor)
        terms = unrounded_product(tile, Enclosure(later))
        counted.append(Enclosure(widened(terms, number * U / (1 - number * U), number * (FP32.quantum + flushed()))))
    return counted[::-1]


def rescaled_dot(terms: Enclosure, values: Enclosure, tiles: int, operand: Format) -> Enclosure:
    """terms [..., M, K] @ values [..., K, N], where terms are what `rescaled` gave for so many tiles.

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
    return Enclosure(rounded(widened(product.parts, U, lost), current().arithmetic))
