"""Relations between a mixture of experts and its shards: all results but sums over shards.

A sum over shards is added in fp32 and rounded once, while a kernel returns what it has rounded: of those results two
calls promise nothing. What a shard has of everything else is a part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from lastbit.references._layer_weights import ADAPTERS, WEIGHTS
from lastbit.relations import NotApplicable, Related, Tensors, at, relation, together

_ROWS = ("gate_proj", "up_proj", "gate_lora_b", "up_lora_b")
_COLUMNS = ("down_proj", "down_lora_a")
_SAVED = ("saved_gate", "saved_up", "intermediate")
_ROW_PARTS = (*_ROWS, *(f"old_{name}" for name in _ROWS), *(f"grad_{name}" for name in _ROWS))
_COLUMN_PARTS = (*_COLUMNS, *(f"old_{name}" for name in _COLUMNS), *(f"grad_{name}" for name in _COLUMNS), *_SAVED)
_GRADIENTS = tuple(f"grad_{name}" for name in ADAPTERS)
_OF_EXPERTS = (*WEIGHTS, *(f"old_{name}" for name in ADAPTERS))


@relation("shards", "what a shard of the layer has of a result has the bits of the whole, sums over shards left out")
def shards(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    """Split the intermediate dimension in half; then into two shards in one call; then the experts in half."""
    experts, width = tensors["gate_proj"].shape[:2]
    numbers = all(tensors[name].is_floating_point() for name in ("gate_proj", "up_proj", "down_proj"))
    if params.get("shards", 1) == 1 and numbers and width % 2 == 0:
        yield from _intermediate(tensors, width)
    if experts > 1:
        yield from _experts(tensors, int(params.get("first_expert", 0)), experts)
    elif not numbers or width % 2:
        raise NotApplicable(f"the case has {experts} experts and an intermediate dimension of {width}: nothing to cut")


def _intermediate(tensors: Tensors, width: int) -> Iterator[Related]:
    """Compare results that have a part in each shard: the saved rows, and gradients of matrices that are cut."""
    for half, part in {"first": slice(width // 2), "second": slice(width // 2, width)}.items():
        rows, columns = (slice(None), part), (..., part)
        cut = {n: t[rows] if n in _ROW_PARTS else t[columns] if n in _COLUMN_PARTS else t for n, t in tensors.items()}
        own = together(at(_ROW_PARTS, rows), at(_COLUMN_PARTS, columns))
        yield Related(f"the {half} half of the intermediate dimension alone", cut, own)
    yield Related("two shards", tensors, at((*_ROW_PARTS, *_COLUMN_PARTS), ...), {"shards": 2})


def _experts(tensors: Tensors, first: int, experts: int) -> Iterator[Related]:
    """Compare the results of pairs and tokens whose experts are all there."""
    ids = tensors["expert_ids"]
    for half, part in {"first": slice(experts // 2), "second": slice(experts // 2, experts)}.items():
        start, end = first + part.indices(experts)[0], first + part.indices(experts)[1]
        pairs = (ids >= start) & (ids < end)
        tokens = pairs.all(-1)
        own = together(
            at((*_SAVED, "grad_routing_weights"), pairs, pairs),
            at(("output", "grad_input"), tokens, tokens),
            at(_GRADIENTS, part),
        )
        cut = {name: t[part] if name in _OF_EXPERTS else t for name, t in tensors.items()}
        yield Related(f"the {half} half of the experts alone", cut, own, {"first_expert": start})
