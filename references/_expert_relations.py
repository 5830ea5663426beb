"""Relations between two calls of a mixture of experts, forward and backward: tokens and experts are independent.

Both ops have the same names for the same things, so that each relation serves both: what a call has not is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from lastbit.numerics import FORMATS, Tensor, format_of
from lastbit.references._expert_shards import shards
from lastbit.references._layer_weights import ADAPTERS, WEIGHTS
from lastbit.relations import (
    Independent,
    NotApplicable,
    Related,
    Relation,
    Tensors,
    at,
    extended,
    poison_of,
    relation,
    same,
    scaled,
    shuffled,
    together,
)

_SAVED = ("saved_gate", "saved_up", "intermediate")
_PAIRS = ("expert_ids", "routing_weights", *_SAVED)
_OF_TOKENS = ("x", "grad_output", *_PAIRS)
_OF_EXPERTS = (*WEIGHTS, *(f"old_{name}" for name in ADAPTERS))
_GRADIENTS = tuple(f"grad_{name}" for name in ADAPTERS)
_PAIR_RESULTS = (*_SAVED, "grad_routing_weights")
_TOKEN_RESULTS = ("output", "grad_input", *_PAIR_RESULTS)

_PROMISE = "a token has the same bits alone, in any batch and at any place in it"
TOKENS = Independent("tokens", _PROMISE, ("x", "expert_ids", "routing_weights"), ("output", *_SAVED))
TOKENS_BACKWARD = Independent("tokens", _PROMISE, _OF_TOKENS, ("grad_input", "grad_routing_weights"))

Params = Mapping[str, Any]


@relation("permutation", "tokens in another order have the same bits each")
def permutation(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    order = shuffled(_several(tensors, "x", "tokens"), random)
    yield Related("tokens in another order", _indexed(tensors, _OF_TOKENS, order), at(_TOKEN_RESULTS, order))


@relation("token order", "neither the order of an expert's tokens nor that of a token's slots changes a bit")
def token_order(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    """Permute the slots of each token, and the tokens; compare results per token and sums over tokens, respectively."""
    slots = tensors["expert_ids"].shape[1]
    if slots > 1:
        order = slice(None), shuffled(slots, random)
        moved = together(at(("output", "grad_input"), ...), at(_PAIR_RESULTS, order), at(_GRADIENTS, ...))
        yield Related("slots of every token in another order", _indexed(tensors, _PAIRS, order), moved)
    tokens = shuffled(_several(tensors, "x", "tokens"), random)
    yield Related("tokens in another order", _indexed(tensors, _OF_TOKENS, tokens), at(_GRADIENTS, ...))


@relation("padding", "tokens of no expert, appended to a batch, change no bit")
def padding(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    count = len(tensors["x"])
    first, end = _ids(tensors, params)
    kept = together(at(_TOKEN_RESULTS, slice(count), slice(count)), at(_GRADIENTS, ...))
    for more, elsewhere, value in ((1, first - 1, None), ((1 << count.bit_length()) + 1 - count, end, 0.0)):
        longer = {name: extended(t, more, value) if name in _OF_TOKENS else t for name, t in tensors.items()}
        longer["expert_ids"] = extended(tensors["expert_ids"], more, elsewhere)
        yield Related(f"{more} tokens of no expert appended", longer, kept)


@relation("other tokens", "neither the values of other tokens nor their experts change a bit of a token")
def other_tokens(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    count = _several(tensors, "x", "tokens")
    order = shuffled(count, random)
    kept, others = sorted(order[: count // 2]), sorted(order[count // 2 :])
    here = at(_TOKEN_RESULTS, kept, kept)
    values = [n for n in _OF_TOKENS if n in tensors and n != "expert_ids"]
    ids, (first, end) = tensors["expert_ids"], _ids(tensors, params)

    def with_others(**parts: Any) -> Tensors:
        """Replace these parts of the other tokens' tensors."""
        return {n: _with(t, others, parts[n]) if n in parts else t for n, t in tensors.items()}

    turned = {n: tensors[n][others].flip(0) for n in values}
    yield Related("the values of half of the tokens exchanged", with_others(**turned), here)
    yield Related("NaN in half of the tokens", with_others(**{n: poison_of(tensors[n][others]) for n in values}), here)
    yield Related("half of the tokens of no expert", with_others(expert_ids=end), here)
    local = ids[kept][(ids[kept] >= first) & (ids[kept] < end)]
    if local.numel():
        yield Related("half of the tokens all of one expert", with_others(expert_ids=local[0]), here)


@relation("relabelling", "experts under other numbers give the same bits")
def relabelling(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    experts, (first, _) = _several(tensors, "gate_proj", "experts"), _ids(tensors, params)
    ids, order = tensors["expert_ids"], shuffled(experts, random)
    renamed = ids.clone()
    for new, old in enumerate(order):
        renamed[ids == first + old] = first + new
    moved = _indexed(tensors, _OF_EXPERTS, order) | {"expert_ids": renamed}
    by_expert = together(at(_TOKEN_RESULTS, ...), at(_GRADIENTS, order))
    yield Related("experts numbered in another order", moved, by_expert)
    yield Related("ids that are all larger by 5", {**tensors, "expert_ids": ids + 5}, same, {"first_expert": first + 5})


@relation("zero adapter", "an adapter of zero, or one that is scaled by zero, gives the bits of none")
def zero_adapter(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    if ADAPTERS[0] not in tensors:
        raise NotApplicable("the case has no adapters")
    _check_ordinary(tensors)
    old = {f"old_{name}" for name in ADAPTERS}
    fresh = {name: t for name, t in tensors.items() if name not in old}
    without = Related("without adapters", {name: t for name, t in fresh.items() if name not in ADAPTERS})
    zero = {name: t.new_zeros(t.shape) if name.endswith("_lora_b") else t for name, t in fresh.items()}
    yield Related("adapters whose B is zero, beside none", zero, first=without)
    yield Related("a scaling of 0, beside no adapters", fresh, params={"scaling": 0.0}, first=without)


@relation("capacity", "neither the weights nor the number of experts without tokens change a bit")
def capacity(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    experts, (first, _) = len(tensors["gate_proj"]), _ids(tensors, params)
    used = set(tensors["expert_ids"].flatten().tolist())
    idle = [e for e in range(experts) if first + e not in used]
    weights = [name for name in WEIGHTS if name in tensors]
    if idle:
        spoilt = {name: _with(tensors[name], idle, poison_of(tensors[name][idle])) for name in weights}
        yield Related("NaN in the weights of experts without tokens", {**tensors, **spoilt})
    elsewhere = {i - first for i in used if isinstance(i, int) and i >= first + experts}
    more = min(elsewhere, default=2 * experts + 3) - experts  # ids of others stay those of others
    if more < 1:
        return
    longer = {name: extended(t, more) if name in _OF_EXPERTS else t for name, t in tensors.items()}
    own = together(at(_TOKEN_RESULTS, ...), at(_GRADIENTS, ..., slice(experts)))
    yield Related(f"{more} experts more, without tokens", longer, own)


RELATIONS = (
    *(permutation, token_order, padding, other_tokens),
    *(relabelling, zero_adapter, capacity, shards),
)
"""Of the forward pass and of the backward one."""


def scaling(factor: str, among: tuple[str, ...], results: Mapping[str, int]) -> Relation:
    """Scale inputs by a factor; values that are rounded to fp16 on the way may become subnormal there."""
    whole = scaled((factor,), results, among=among)

    def related(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
        if tensors["x"].dtype == FORMATS["fp16"].dtype:
            raise NotApplicable("numbers of fp16 may become subnormal or overflow where they are scaled")
        if any(name.startswith("old_") for name in tensors):
            raise NotApplicable("gradients are added to others, which are not scaled")
        yield from whole.related(tensors, params, random)

    return replace(whole, related=related)


SCALING = scaling("routing_weights", (), {"output": 1, **dict.fromkeys(_SAVED, 0)})
SCALING_BACKWARD = scaling(
    "grad_output",
    ("routing_weights", "down_proj"),
    dict.fromkeys(("grad_input", "grad_routing_weights", *_GRADIENTS), 1),
)


def _ids(tensors: Tensors, params: Params) -> tuple[int, int]:
    """Return the first id of the experts on this rank, and the one after the last."""
    first = int(params.get("first_expert", 0))
    return first, first + len(tensors["gate_proj"])


def _check_ordinary(tensors: Tensors) -> None:
    """Raise `NotApplicable` where a middle may be infinite or NaN: times zero it is not nothing."""
    dtype = tensors["x"].dtype
    most = format_of(dtype).max ** 0.25
    for name, tensor in tensors.items():
        if tensor.dtype == dtype and not bool((tensor.abs() <= most).all()):
            raise NotApplicable(f"{name} holds numbers beyond {most:.3g}, or NaN: dots of such may overflow")


def _several(tensors: Tensors, name: str, what: str) -> int:
    count = len(tensors[name])
    if count < 2:
        raise NotApplicable(f"the case has {count} {what}; two are needed")
    return count


def _indexed(tensors: Tensors, names: tuple[str, ...], index: Any) -> dict[str, Tensor]:
    return {name: tensor[index] if name in names else tensor for name, tensor in tensors.items()}


def _with(tensor: Tensor, index: list[int], part: Any) -> Tensor:
    changed = tensor.clone()
    changed[index] = part
    return changed
