"""Regimes of one sign: the terms of a dot share a sign, because the tensors of a case share signs per index.

Where all terms have one sign, Σ|t| = |Σt|, and the bound of a sum in any order is a relative one: in bf16 most results
of long dots then have one legal value. A label names one random sign per index, the same for every tensor of the case
that names it. With x `one_sign(,hidden)` and W `one_sign_fan_in(gate,hidden)` each term of x · Wᵀ has the sign of its
row of W, and half of the results are negative.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.inputs.draws import DrawnBlock

_LABELS = r"(?:[A-Za-z_]\w*(?:\*[A-Za-z_]\w*)*)?"
_CALL = re.compile(rf"(?P<word>\w+)\((?P<rows>{_LABELS}),(?P<columns>{_LABELS})\)$")
_MEAN = 0.75


def one_sign(block: DrawnBlock) -> Tensor:
    """Draw magnitudes uniform in [0.25, 1.25), all positive."""
    return block.uniform(block.elements) + 0.25


def one_sign_fan_in(block: DrawnBlock) -> Tensor:
    """Draw positive magnitudes that vary fivefold, as do their rows, divided by the width: dots keep a size of one."""
    scale = (block.uniform(block.rows, "scale") + 0.25) * 2
    return one_sign(block) * scale / torch.full_like(block.elements, _MEAN * block.width, dtype=torch.float64)


POSITIVE: Mapping[str, Callable[[DrawnBlock], Tensor]] = {r.__name__: r for r in (one_sign, one_sign_fan_in)}
"""Name → regime of positive values, to which labels give signs."""

SIGNED: Mapping[str, str] = {
    f"{name}(ROWS,COLUMNS)": f"As {name}, with a sign per row and column that tensors share by labels such as gate*up."
    for name in POSITIVE
}
"""How a regime with signs is written → one-line description."""


def signed(name: str) -> Callable[[DrawnBlock], Tensor] | None:
    """Return the regime `WORD(ROWS,COLUMNS)`: `WORD` times the signs of the labels of an element's row and column.

    A row counts within its matrix, the last two dimensions. Labels are joined by `*`; without one the sign is plus.

    Raises:
        UsageError: a word that takes labels is followed by something else.
    """
    word, parenthesis, _ = name.partition("(")
    if not parenthesis or word not in POSITIVE:
        return None
    match = _CALL.match(name)
    if match is None:
        raise UsageError(
            f"cannot read regime {name!r}: expected {word}(ROWS,COLUMNS), where either is empty or labels joined by *, "
            f"as in {word}(gate*up,hidden)"
        )
    labels = [match[part].split("*") if match[part] else [] for part in ("rows", "columns")]
    return lambda block: _with_signs(POSITIVE[word](block), block, *labels)


def _with_signs(values: Tensor, block: DrawnBlock, rows: list[str], columns: list[str]) -> Tensor:
    for index, labels in ((block.rows_of_matrix, rows), (block.columns, columns)):
        for label in labels:
            values = values * block.shared.signs(index, label)
    return values
