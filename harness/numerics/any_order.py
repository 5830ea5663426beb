"""A sum of few terms in any order, each addition rounded: all orders are tried, so that the ends are sharp."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.formats import Format
from lastbit.numerics.parts import added, hull, rounded
from lastbit.numerics.premises import EXACT, current
from lastbit.numerics.remembered import remembered


@algebraic(rules.added, of_enclosures=True)
@remembered
def sum_in_any_order(terms: Sequence[Enclosure], fmt: Format | None = None) -> Enclosure:
    """Add terms of one shape two at a time in whichever order, each sum rounded to fp32 and then to `fmt`.

    25 additions for four terms, 3,025 for eight, and so on by the power of three. For two numbers of bf16 or fp16, to
    round their sum to fp32 first changes nothing (24 >= 2 * 11 + 2, Figueroa 1995). The value is that of one order.
    """
    arithmetic, exact = current().arithmetic, current() == EXACT

    def add(x: Tensor, y: Tensor) -> Tensor:
        total = added(x, y, arithmetic)
        return total if fmt is None or exact else rounded(total, fmt)

    everything = (1 << len(terms)) - 1
    sums = {1 << position: term.parts for position, term in enumerate(terms)}
    for part in range(1, everything + 1):
        if part not in sums:  # what is added last: one side of the split without the last term, and the other with it
            last = 1 << (part.bit_length() - 1)
            one = rest = part ^ last
            sums[part] = add(sums[rest], sums[last])
            while one := (one - 1) & rest:
                sums[part] = hull(sums[part], add(sums[one], sums[part ^ one]))
    return Enclosure(sums[everything])
