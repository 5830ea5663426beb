"""The operations of `lastbit.numerics.sums` on CUDA.

The order of a sum is not torch's, so that its last bits may differ; see `Sum.enclosed`. All other bits are equal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lastbit.numerics.formats import Format
from lastbit.numerics.fused.compiled import launcher
from lastbit.numerics.fused.elements import bounds_kernel, facts_kernel
from lastbit.numerics.fused.fp64 import FORMATS

FACTS = 10
# Four elements for each of 128 threads; of each element there are up to ten facts in registers.
TILE = 512
_COLUMNS = {True: (32, 128, 512), False: (4, 64)}  # of a tile of rows, or of columns: few, as each is compiled
# Two elements for each of 128 threads, with ten facts each.
BLOCK = 256
# About four for each of 132 multiprocessors of an H200.
PROGRAMS = 512  # as many as keep a GPU busy
OPERATIONS = frozenset(("facts_of_rows", "facts_of_columns", "facts_of_squares", "bounded"))


def run(name: str, operand: Tensor, numbers: tuple[float, ...], fmt: Format | None) -> Tensor:
    """Run an operation of `lastbit.numerics.sums`."""
    if fmt is not None:
        out = operand.new_empty((4, *operand.shape[1:]))
        if size := operand[0].numel():
            launcher(bounds_kernel, (FORMATS.index(fmt), BLOCK), operand.device)(
                (-(-size // BLOCK), 1), (out, operand.contiguous(), size, *numbers)
            )
        return out
    if name == "facts_of_columns":
        return _facts(operand, outer=operand.shape[-1], inner=operand.shape[-2], rows=False)
    facts = _facts(
        operand, outer=math.prod(operand.shape[1:-1]), inner=operand.shape[-1], squares=name == "facts_of_squares"
    )
    return facts.reshape(len(facts), *operand.shape[1:-1], 1)


def _facts(terms: Tensor, *, outer: int, inner: int, rows: bool = True, squares: bool = False) -> Tensor:
    """Return the facts of `outer` sums of `inner` terms, in as many shares as keep the device busy."""
    terms = terms.contiguous()
    most = _COLUMNS[rows]
    columns = next((columns for columns in most if columns >= terms.shape[-1]), most[-1])
    tile = TILE // columns, columns
    sums_of_tile, terms_of_tile = tile if rows else tile[::-1]
    programs = -(-outer // sums_of_tile)
    shares = max(1, min(PROGRAMS // max(programs, 1), inner // (16 * terms_of_tile)))
    out = terms.new_empty((shares, FACTS + squares, outer))
    part = outer * inner
    where = (part if len(terms) > 1 else 0, part if len(terms) > 2 else 0, *((inner, 1) if rows else (1, outer)))
    if outer:
        launch = launcher(facts_kernel, (squares, *tile, 1 if rows else 0), terms.device)
        launch((programs, shares), (out, terms, *where, outer, inner, -(-inner // shares)))
    return out[0] if shares == 1 else torch.cat([out[:, :6].sum(0), out[:, 6:8].amin(0), out[:, 8:].amax(0)])
