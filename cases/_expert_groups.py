"""The groups of cases of an op on a mixture of experts: real layers, edges, cases for properties, and variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hypothesis import strategies as st

from lastbit import Case, Choices, Chosen, Group, TensorSpec
from lastbit.cases._expert_edges import LayerEdge, edges, properties
from lastbit.cases._expert_variants import LayerVariant, has_adapters, plain_variants, variants
from lastbit.cases._experts import REAL_KINDS, Regimes, Sizes, any_of, real_routing, real_sizes, real_weights
from lastbit.cases._properties import group_of

SCALINGS = {
    "exact": (0.75, 1.0, 2.0, 1.25),
    "balanced": (2.0, 0.7, 1.0, 0.3, -1.5, 0.0),
    "one_sign": (0.7, 1.0, 0.3, 1.4),
}
"""Scalings of adapters, alpha / r; the exact ones keep gates positive, those of one sign what adapters add its sign."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExpertCases:
    """The facts about an op on a mixture of experts from which its groups are made.

    Attributes:
        regimes: kind of a variant → name of a tensor → its regimes.
        rows: maps the tensors beside routing and weights to their shapes, the first input of the op first.
        choices: what the cases of a variant choose from, for a kernel with these parameters.
        drawn: draws a case of a variant, of which sizes are `small` or not, from what was chosen.
        beside: the further tensors of an edge, for a kernel with these parameters.
    """

    op: str
    regimes: Mapping[str, Regimes]
    rows: Callable[[Sizes], Mapping[str, Shape]]
    choices: Callable[[LayerVariant, frozenset[str]], Choices]
    drawn: Callable[[LayerVariant, bool, Chosen], st.SearchStrategy[Case]]
    beside: Callable[[LayerEdge, frozenset[str]], Iterable[TensorSpec]] = lambda edge, accepts: ()

    def groups(self, accepts: frozenset[str], *, small: bool) -> Iterator[Group]:
        """Yield the groups for a kernel that takes what `accepts` names; `small` cuts every dimension."""
        yield Group("real-layers", examples=tuple(self._real_layers(small=small, adapters=has_adapters(accepts))))
        yield Group("edges", examples=tuple(self._edges(accepts, edges(small=small))))
        yield from group_of(self._edges(accepts, properties(small=small)), accepts)
        for variant in variants(accepts):
            choices = self.choices(variant, accepts)
            strategy = partial(self.drawn, variant, small)
            yield Group(str(variant), strategy, choices=choices, combination=variant.row)
        if plain := plain_variants(accepts):
            yield Group("plain", self._plain(plain, accepts, small))

    def _plain(self, plain: Sequence[LayerVariant], accepts: frozenset[str], small: bool) -> st.SearchStrategy[Case]:
        """Draw a case of any of the variants, none of which has adapters."""

        @st.composite
        def any_variant(draw: st.DrawFn) -> Case:
            variant = draw(st.sampled_from(plain))
            return draw(self.drawn(variant, small, draw(any_of(self.choices(variant, accepts)))))

        return any_variant()

    def _real_layers(self, *, small: bool, adapters: bool) -> Iterator[Case]:
        """Yield the layer of every model of the table once, exact and of one sign in turn."""
        for seed, size in enumerate(real_sizes(small=small)):
            kind = REAL_KINDS[seed % 2]
            first, *others = self._rows(size, "bf16", regimes := self.regimes[kind])
            own = real_weights(size, regimes, adapters=adapters)
            scaling = {"scaling": SCALINGS[kind][0]} if adapters else {}
            yield Case(self.op, (first, *real_routing(size, kind), *others, *own), scaling, seed)

    def _edges(self, accepts: frozenset[str], chosen: Sequence[LayerEdge]) -> Iterator[Case]:
        """Yield the edges that a kernel with these parameters can take."""
        for seed, edge in enumerate(chosen):
            regimes = self.regimes[edge.kind]
            rows = self._rows(edge.size, edge.dtype, regimes)
            tensors = [*rows, *edge.pairs(), *edge.weights(regimes), *self.beside(edge, accepts)]
            case = edge.case(self.op, tensors, seed)
            if case.names <= accepts:
                yield case

    def _rows(self, size: Sizes, dtype: str, regimes: Regimes) -> Iterator[TensorSpec]:
        for name, shape in self.rows(size).items():
            yield TensorSpec(name, dtype, shape, regime=regimes[name][0])
