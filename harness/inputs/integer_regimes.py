"""Regimes of integer and bool tensors, in int64: the same on every device, as those of floating-point tensors are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import UsageError
from lastbit.inputs.draws import DrawnBlock

Values = Callable[[DrawnBlock, torch.dtype], Tensor]

_NUMBERED = re.compile(r"(?P<word>[a-z]+)_(?P<number>[1-9]\d*)$")
# As many tokens as Mistral's Tekken has, 131,072; a larger vocabulary needs no other code.
_VOCABULARY = 1 << 17
# Half of the vocabulary above, so that other tokens are left; models have a handful.
_MOST_ENDS = 1 << 16
_LOADS = (0, 1, 16, 17, 32, 64, 128)  # nothing, one pair, and what fills one or several blocks of 16, 32, 64 or 128


def normal(block: DrawnBlock, dtype: torch.dtype) -> Tensor:
    """Integers: uniform from -64 to 63; bool: either value."""
    low, high = (0, 1) if dtype is torch.bool else (-64, 63)
    return block.integers(block.elements, low, high)


def zeros(block: DrawnBlock, dtype: torch.dtype) -> Tensor:
    """Integers: all 0; bool: all False."""
    return torch.zeros_like(block.elements)


def ones(block: DrawnBlock, dtype: torch.dtype) -> Tensor:
    """Integers: all 1; bool: all True."""
    return torch.ones_like(block.elements)


def spans(block: DrawnBlock, dtype: torch.dtype) -> Tensor:
    """Bool: what a row keeps: all, up to a column, from one on, one alone, none, or a random half."""
    _require_room(block, dtype, "spans", 1)
    return kept(block).to(torch.int64)


def kept(block: DrawnBlock) -> Tensor:
    """Return which elements `spans` keeps, as bool."""
    column = block.column(block.rows)
    places = (
        block.columns <= column,
        block.columns >= column,
        block.columns == column,
        block.columns < 0,
        block.integers(block.elements, 0, 1, "half") == 0,
    )
    kind = block.integers(block.rows, 0, 2 * len(places), "kind")
    values = kind >= 0
    for number, place in enumerate(places):
        values = torch.where(kind == number, place, values)
    return values


def counting(block: DrawnBlock, dtype: torch.dtype) -> Tensor:
    """Integers: 0, 1, 2, … along the last dimension."""
    _require_room(block, dtype, "counting", block.width - 1)
    return block.columns + torch.zeros_like(block.rows)


def below(block: DrawnBlock, dtype: torch.dtype, bound: int) -> Tensor:
    """Integers: uniform from 0 to N-1, such as below_128."""
    _require_room(block, dtype, f"below_{bound}", bound - 1)
    return block.integers(block.elements, 0, bound - 1)


def sequences(block: DrawnBlock, dtype: torch.dtype, ends: int) -> Tensor:
    """Integers: rows of token ids from N to 131071 that ids below N end: nowhere, once, often, or from a column on."""
    if ends > _MOST_ENDS:
        raise UsageError(f"regime 'sequences_{ends}' of tensor {block.name!r}: at most {_MOST_ENDS} ids end a sequence")
    _require_room(block, dtype, f"sequences_{ends}", _VOCABULARY - 1)
    column = block.column(block.rows)
    here = block.columns == column
    several = here | (block.integers(block.elements, 0, 3, "several") == 0)
    places = (
        torch.zeros_like(here),
        block.columns == 0,
        block.columns == block.width - 1,
        here,
        several,
        torch.ones_like(here),
        block.columns >= column,  # padded with one end id, below
    )
    kind = block.integers(block.rows, 0, len(places) - 1, "kind")
    end = block.integers(block.elements, 0, ends - 1, "end")
    values = _lookalikes(block, dtype, end, block.integers(block.elements, ends, _VOCABULARY - 1, "token"))
    end = torch.where(kind == len(places) - 1, block.integers(block.rows, 0, ends - 1, "padding"), end)
    for number, place in enumerate(places):
        values = torch.where((kind == number) & place, end, values)
    return values


def bits(block: DrawnBlock, dtype: torch.dtype) -> Tensor:
    """Integers: any bits at all, as packed codes have; bool: either value."""
    if dtype is torch.bool:
        return normal(block, dtype)
    return block.words(block.elements, "bits")  # what does not fit is cut off


def around(block: DrawnBlock, dtype: torch.dtype, middle: int) -> Tensor:
    """Integers: uniform from N-3 to N+3, such as around_127."""
    _require_room(block, dtype, f"around_{middle}", middle + 3)
    return block.integers(block.elements, middle - 3, middle + 3)


def experts(block: DrawnBlock, dtype: torch.dtype, count: int) -> Tensor:
    """Integers: ids of N experts per token: uniform, all one, few in use, the same in a row, or of no expert."""
    _require_room(block, dtype, f"experts_{count}", 2 * count + 7)
    kind = block.integers(block.whole, 0, 5, "kind")
    uniform = block.integers(block.elements, 0, count - 1)
    one = block.integers(block.whole, 0, count - 1, "one") + torch.zeros_like(uniform)
    same = block.integers(block.rows, 0, count - 1, "same") + torch.zeros_like(uniform)
    often = block.integers(block.elements, 0, 3, "often")
    beyond = uniform + (1 << 32) if dtype.itemsize == 8 else uniform + count
    elsewhere = torch.where(uniform % 3 == 0, beyond, count + 7 * (uniform % 2))
    strange = torch.where(often == 0, -1, torch.where(often == 1, elsewhere, uniform))
    values = uniform
    for number, other in enumerate((one, torch.where(often == 0, uniform, one), same, strange)):
        values = torch.where(kind == number, other, values)
    return values


def lookalikes(block: DrawnBlock, dtype: torch.dtype, ends: int) -> Tensor:
    """Integers: along the last dimension, of each id below N the one with its lower half of bits above, below; -100."""
    _require_room(block, dtype, f"lookalikes_{ends}", max(ends, _VOCABULARY) - 1)
    end, span = block.columns // 3 % ends, 1 << (4 * dtype.itemsize)
    kind = block.columns % 3 + torch.zeros_like(block.rows)
    return torch.where(kind == 0, end + span, torch.where(kind == 1, end - span, -100))


def labels(block: DrawnBlock, dtype: torch.dtype, classes: int) -> Tensor:
    """Integers: labels below N: uniform, one in eight each the first and the last, one in four -100, to be ignored."""
    _require_room(block, dtype, f"labels_{classes}", classes - 1)
    kind = block.integers(block.elements, 0, 7, "kind")
    values = block.integers(block.elements, 0, classes - 1)
    for number, label in enumerate((-100, -100, 0, classes - 1)):
        values = torch.where(kind == number, label, values)
    return values


def ends(block: DrawnBlock, dtype: torch.dtype, classes: int) -> Tensor:
    """Integers: as labels_N, of which one in eight each is the first and the last of a block of 16 to 4,096."""
    values = labels(block, dtype, classes)
    kind = block.integers(block.elements, 0, 7, "kind")
    # A kernel reads a row in blocks, and of labels that are uniform one in 128 ends a block of 128.
    below: Tensor = 2 ** block.integers(block.elements, 4, 12, "block") - 1
    first, last = values & ~below, torch.clamp(values | below, max=classes - 1)
    return torch.where(kind == 4, first, torch.where(kind == 5, last, values))


def loads(block: DrawnBlock, dtype: torch.dtype, count: int) -> Tensor:
    """Integers: ids of N experts, the first of which get 0, 1, 16, 17, 32, 64 and 128 pairs; the last gets the rest."""
    _require_room(block, dtype, f"loads_{count}", count - 1)
    number = block.height * block.width - 1 - block.elements
    values, taken = torch.zeros_like(number), 0
    for load in _LOADS[: count - 1]:
        taken += load
        values = values + (number >= taken).to(torch.int64)
    return torch.where(values == len(_LOADS), count - 1, values)


def _lookalikes(block: DrawnBlock, dtype: torch.dtype, end: Tensor, values: Tensor) -> Tensor:
    """Replace one in eight of `values`: by an id above or below `end` with the lower half of its bits, or by -100.

    -100 is the label that losses ignore.
    """
    span = 1 << (4 * dtype.itemsize)
    chosen = block.integers(block.elements, 0, 23, "lookalike")
    for number, replacement in enumerate((end + span, end - span, torch.full_like(end, -100))):
        values = torch.where(chosen == number, replacement, values)
    return values


def _require_room(block: DrawnBlock, dtype: torch.dtype, regime: str, needed: int) -> None:
    """Raise a `UsageError` if `needed` is no value of the dtype, or beyond what `Block.integers` can draw."""
    largest = 1 if dtype is torch.bool else min(torch.iinfo(dtype).max, 2**31 - 1)
    if needed > largest:
        name = DTYPE_NAMES[dtype]
        raise UsageError(f"regime {regime!r} of tensor {block.name!r} exceeds {largest}, the most for {name}")


PLAIN: Mapping[str, Values] = {regime.__name__: regime for regime in (normal, zeros, ones, spans, counting, bits)}
"""Name → function of the regimes for integer and bool tensors that have no number in their name."""

NUMBERED: Mapping[str, Callable[[DrawnBlock, torch.dtype, int], Tensor]] = {
    regime.__name__: regime for regime in (below, around, experts, labels, ends, loads, sequences, lookalikes)
}
"""Word → function of those that have one: `below` makes below_1, below_2, and so on."""

INTEGER_REGIMES: Mapping[str, str] = {
    name: (regime.__doc__ or "").strip()
    for name, regime in (*PLAIN.items(), *((f"{word}_N", regime) for word, regime in NUMBERED.items()))
}
"""Name → one-line description of every regime for integer and bool tensors."""


def integer_regime(name: str) -> Values | None:
    """Return the regime called `name`, with its number, or None if there is none for integers."""
    if numbered := _NUMBERED.match(name):
        regime, number = NUMBERED.get(numbered["word"]), int(numbered["number"])
        return None if regime is None else lambda block, dtype: regime(block, dtype, number)
    return PLAIN.get(name)
