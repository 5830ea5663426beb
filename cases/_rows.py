"""Rows of combinations whose options are not all names of tensors and parameters, such as ranks or where a gate is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lastbit import Accepted, Option, combinations

Row = Mapping[str, Any]

OTHER = {"bf16": "fp32", "fp16": "fp32", "fp32": "bf16"}
"""Dtype of a tensor → another one that those beside it have, such as weights."""


def rows_meaning(
    axes: Mapping[str, Sequence[Option]], accepts: frozenset[str], means: Callable[[Row], Row]
) -> Iterator[dict[str, Any]]:
    """Yield rows in which every two options meet of those that a kernel takes; nothing if it takes none.

    `means` maps a row to the tensors and parameters that it gives, as `combinations` calls them.
    """
    taken = accepts if isinstance(accepts, Accepted) else Accepted(accepts)

    def is_taken(row: Row) -> bool:
        return taken.has(means(row))

    if any(is_taken(dict(zip(axes, options, strict=True))) for options in itertools.product(*axes.values())):
        yield from combinations(axes, is_taken)
