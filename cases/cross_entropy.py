"""Cases of cross entropy: groups in which every two dtypes and options meet, vocabularies of real models, and edges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hypothesis import strategies as st

from lastbit import DRAWN, Case, Choices, Chosen, Group, Option
from lastbit.cases._cross_entropy import (
    LARGE_ELEMENTS,
    SMALL_ELEMENTS,
    LogitsVariant,
    choices,
    drawn,
    real_logits,
    variants,
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
    for variant in variants(accepts, {"reduction": _REDUCTIONS}, lambda row: True):
        reduction = variant.row["reduction"]
        own = {**choices(variant, accepts, most), **_reduction(reduction, accepts)}
        name = f"{variant}-{reduction}" if reduction else str(variant)
        yield Group(name, partial(_cases, variant, most), choices=own, combination=variant.row)


def _reduction(reduction: Option, accepts: frozenset[str]) -> Choices:
    """Map what a kernel does with the losses to its options: a count goes with a mean alone."""
    found: dict[str, tuple[Option, ...]] = {"reduction": (reduction,)} if "reduction" in accepts else {}
    return found | ({"count": (None, DRAWN)} if reduction == "mean" and "count" in accepts else {})


@st.composite
def _cases(draw: st.DrawFn, variant: LogitsVariant, most: int, chosen: Chosen) -> Case:
    tensors, params = draw(drawn(variant, most, chosen))
    if reduction := chosen.get("reduction"):
        params["reduction"] = reduction
    return Case("cross_entropy", tuple(tensors), params, draw(st.integers(0, 2**32 - 1)))


def _real_shapes(accepts: frozenset[str], *, small: bool) -> Iterator[Case]:
    """Yield every vocabulary of the table, half of them with a mean."""
    for seed, (tensors, params) in enumerate(real_logits(small=small)):
        params |= {"reduction": "mean"} if seed % 2 and "reduction" in accepts else {}
        if (case := Case("cross_entropy", tuple(tensors), params, seed)).names <= accepts:
            yield case
