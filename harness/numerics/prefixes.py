"""Cumulative sums: each element is the sum of a prefix, whose terms are added in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.parts import full
from lastbit.numerics.premises import current
from lastbit.numerics.remembered import remembered
from lastbit.numerics.sums import bounded_each, finite, flushed, units_of

_FP64_U = 2.0**-53


@algebraic(rules.cumulative)
@remembered
def cumsum(x: Enclosure) -> Enclosure:
    """Sum the prefixes of the last dimension, each by fp32 additions of its terms in any order.

    That covers scans from first to last, in trees, and in blocks to which the sum of what is before them is added. Not
    covered is a prefix from which something is taken away again, as in the total minus the rest.
    """
    count = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64, device=x.parts.device)
    relative = torch.tensor([current().accumulation(n) for n in range(1, x.shape[-1] + 1)], dtype=torch.float64)
    relative = relative.to(count.device) + 2 * count * _FP64_U
    return Enclosure(bounded_each(_facts(x.parts), relative, 0.0, count * flushed(), -torch.inf, current().arithmetic))


def _facts(terms: Tensor) -> Tensor:
    """Return the facts of `Sum` for each prefix."""
    lo, hi = (terms[2], terms[3]) if len(terms) == 4 else (terms[-1], terms[-1])
    magnitude = torch.maximum(lo.abs(), hi.abs()).cumsum(-1)
    of_finite = torch.maximum(finite(lo), finite(hi)).cumsum(-1)
    quantum = units_of(lo.contiguous()).cummin(-1).values
    known = (lo == hi).to(lo.dtype).cummin(-1).values
    signs = [sign.to(lo.dtype).cummax(-1).values for sign in (lo < 0, hi > 0)]
    return torch.cat([full(terms.cumsum(-1)), torch.stack([magnitude, of_finite, quantum, known, *signs])])
