"""Cases of all-reduce: a group per dtype and number of ranks up to four, and edges with more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from hypothesis import strategies as st

from lastbit import Case, Chosen, Group, Option, combinations, leading_dims, least_rows, row_layouts
from lastbit.cases._edges import edges
from lastbit.cases._ranks import peers, rank_choices, rank_tensors

_AXES: dict[str, tuple[Option, ...]] = {"dtype": ("bf16", "fp16", "fp32"), "ranks": (2, 3, 4)}
_SMALL_ELEMENTS = 1 << 11  # of x where a CPU takes part
_LARGE_ELEMENTS = 1 << 21


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors `accepts`; `small` cuts them."""
    yield Group("edges", examples=tuple(edges("all_reduce", accepts, small=small)))
    most = _SMALL_ELEMENTS if small else _LARGE_ELEMENTS

    def means(row: Mapping[str, Any]) -> dict[str, Any]:
        return {"x dtype": row["dtype"], peers(row["ranks"])[-1]: True}

    for row in combinations(_AXES, accepts=accepts, means=means):
        choices = rank_choices(row["dtype"], row_layouts(most // 64))
        name = f"{row['dtype']}-ranks{row['ranks']}"
        yield Group(name, partial(_cases, row["ranks"], most), choices=choices, combination=row)


@st.composite
def _cases(draw: st.DrawFn, ranks: int, most: int, chosen: Chosen) -> Case:
    width = draw(st.integers(1, most // 8))
    shape = (*draw(leading_dims(most // width, least_rows(chosen))), width)
    return Case("all_reduce", tuple(rank_tensors(ranks, chosen, shape)), {}, draw(st.integers(0, 2**32 - 1)))
