"""Cases of cross entropy: one group per dtype and range of classes, vocabularies of real models, and edges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hypothesis import strategies as st

from lastbit import Case, Choices, Chosen, Group
from lastbit.cases._cross_entropy import (
    LARGE_ELEMENTS,
    SMALL_ELEMENTS,
    VARIANTS,
    LogitsVariant,
    choices,
    drawn,
    real_logits,
)
from lastbit.cases._edges import edges
from lastbit.cases._properties import properties

_REDUCTIONS = (None, "sum", "mean")


def groups(accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
    """Yield the groups for a kernel that takes the tensors and parameters `accepts`; `small` cuts rows and classes."""
    yield Group("real-shapes", examples=tuple(_real_shapes(accepts, small=small)))
    yield Group("edges", examples=tuple(edges("cross_entropy", accepts, small=small)))
    yield from properties("cross_entropy", accepts, small=small)
    most = SMALL_ELEMENTS if small else LARGE_ELEMENTS
    for variant in VARIANTS:
        own = choices(variant, accepts, most)
        yield Group(str(variant), partial(_cases, variant, most), choices={**own, **_reductions(accepts)})


def _reductions(accepts: frozenset[str]) -> Choices:
    return {"reduction": _REDUCTIONS} if "reduction" in accepts else {}


@st.composite
def _cases(draw: st.DrawFn, variant: LogitsVariant, most: int, chosen: Chosen) -> Case:
    tensors, params = draw(drawn(variant, most, chosen))
    if reduction := chosen.get("reduction"):
        params["reduction"] = reduction
    if reduction != "mean":
        params.pop("count", None)
    return Case("cross_entropy", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every vocabulary of the table, half of them with a mean."""
    for seed, (tensors, params) in enumerate(real_logits(small=small)):
        params |= {"reduction": "mean"} if seed % 2 and "reduction" in accepts else {}
        if (case := Case("cross_entropy", tuple(tensors), params, seed)).names <= accepts:
            yield case
