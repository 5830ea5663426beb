"""Cases of rotary embeddings: groups in which every two dtypes and options meet, real-model shapes, and edges.

A group fixes what a Triton kernel is specialised on; regimes and layouts are chosen, and Hypothesis draws the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

from hypothesis import strategies as st

from lastbit import (
    Case,
    Choices,
    Chosen,
    Group,
    chosen_tensor,
    combinations,
    least_rows,
    row_layouts,
    tensor_choices,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties
from lastbit.cases._rotary import HEADS, heads, real_heads, real_shapes, real_tables, rotary_choices

_SMALL_ELEMENTS = 1 << 10  # of q where a CPU takes part
_LARGE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class _RotaryOptions:
    """The fixed facts of a group: dtypes of q and the tables, k or not, how pairs lie, and the range of R / 2."""

    q: str
    cos: str
    sin: str
    k: bool
    interleaved: bool
    halves: tuple[int, int]
    row: Chosen = field(compare=False)

    def __str__(self) -> str:
        low, high = self.halves
        words = [self.q, f"cos_{self.cos}-sin_{self.sin}", "k" * self.k, "interleaved" * self.interleaved]
        return "-".join(filter(None, [*words, f"R{2 * low}to{2 * high}"]))


_HALVES = ((33, 64), (17, 32), (1, 16))


def _rows(accepts: frozenset[str]) -> Iterator[_RotaryOptions]:
    """Yield rows of options in which every two meet that a kernel with these parameters takes."""
    found = combinations(
        {
            "q dtype": ("bf16", "fp16", "fp32"),
            "cos dtype": ("fp32", "bf16", "fp16"),
            "sin dtype": ("fp32", "bf16", "fp16"),
            "k": (True, None),
            "interleaved": (None, True),
        },
        accepts=accepts,
    )
    for row, halves in zip(found, cycle(_HALVES), strict=False):
        q, cos, sin = (str(row[f"{name} dtype"]) for name in ("q", "cos", "sin"))
        yield _RotaryOptions(q, cos, sin, bool(row["k"]), bool(row["interleaved"]), halves, row)


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts the tokens."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("rotary", accepts, small=small)))
    yield from properties("rotary", accepts, small=small)
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS
    for options in _rows(accepts):
        choices = _choices(options, most // 64)
        yield Group(str(options), partial(_cases, options, most), choices=choices, combination=options.row)


def _choices(options: _RotaryOptions, rows: int) -> Choices:
    """Map the tensors of a group to their options, where q may have that many rows."""
    found = tensor_choices("q", (options.q,), HEADS, row_layouts(rows))
    found |= tensor_choices("k", (options.q,), HEADS, row_layouts(rows)) if options.k else {}
    return found | rotary_choices(options.cos, options.sin, rows)


@st.composite
def _cases(draw: st.DrawFn, options: _RotaryOptions, most: int, chosen: Chosen) -> Case:
    drawn = draw(heads(chosen, *options.halves, most))
    *tokens, count, width = drawn.shape
    tensors = [chosen_tensor("q", chosen, drawn.shape), *drawn.tables]
    if options.k:
        least = least_rows({choice: option for choice, option in chosen.items() if choice.startswith("k ")})[-1]
        tensors.append(chosen_tensor("k", chosen, (*tokens, draw(st.integers(least, count + 1)), width)))
    params: dict[str, Any] = {"interleaved": True} if options.interleaved else {}
    return Case("rotary", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every shape of the table once in bf16, with tables of either dtype in turns."""
    for seed, (shape, tokens) in enumerate(real_shapes(_SMALL_ELEMENTS if small else None)):
        if shape["interleaved"] and "interleaved" not in accepts:
            continue
        tensors = [real_heads(shape, "q", tokens, "bf16"), *real_tables(shape, tokens, ("bf16", "fp32")[seed % 2])]
        tensors += [real_heads(shape, "k", tokens, "bf16")] if "k" in accepts else []
        yield Case("rotary", tuple(tensors), {"interleaved": True} if shape["interleaved"] else {}, seed)
