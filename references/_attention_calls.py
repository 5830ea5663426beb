"""Relations between calls of attention, the keys that a query sees, and the parameters that calls take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from lastbit.numerics import Enclosure, Tensor
from lastbit.references._shapes import check_shapes
from lastbit.relations import NotApplicable, Related, Tensors, at, poison_of, relation, shuffled, together

Params = Mapping[str, Any]


@relation("sequences", "a sequence has the same bits alone, in any batch and at any place in it")
def _sequences(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    count = tensors["q"].shape[0]
    if count < 2:
        raise NotApplicable("the case has one sequence")
    order = shuffled(count, random)
    for what, kept in (("alone", order[:1]), ("in another order", order), ("twice", [*order, *order])):
        moved = {name: tensors[name][kept] for name in ("q", "k", "v")}
        yield Related(f"sequences {what}", {**tensors, **moved}, at(("output", "lse"), kept, ...))


@relation("permutation", "heads in another order have the same bits each")
def _permutation(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    """Permute the heads of keys, with their values and queries: all queries of a key head stay together."""
    groups, heads = tensors["k"].shape[2], tensors["q"].shape[2]
    if groups < 2:
        raise NotApplicable("the case has one head of keys")
    moved = shuffled(groups, random)
    shared = heads // groups
    order = [group * shared + head for group in moved for head in range(shared)]
    others = {name: tensors[name][:, :, moved] for name in ("k", "v")} | {"q": tensors["q"][:, :, order]}
    if "sinks" in tensors:
        others["sinks"] = tensors["sinks"][order]
    kept = together(at(("output",), (..., order, slice(None)), ...), at(("lse",), (slice(None), order), ...))
    yield Related("heads in another order", {**tensors, **others}, kept)


@relation("queries", "a query has the same bits without those before it, as it has when tokens are decoded one by one")
def _queries(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    count = tensors["q"].shape[1]
    if count < 2:
        raise NotApplicable("the case has one query")
    for last in sorted({1, count // 2, count - 1}):
        kept = slice(count - last, count)
        same = together(at(("output",), (slice(None), kept), ...), at(("lse",), (..., kept), ...))
        yield Related(f"the last {last} of {count} queries", {**tensors, "q": tensors["q"][:, kept]}, same)
    other = tensors["q"].clone()
    other[:, : count // 2] = poison_of(other[:, : count // 2])
    kept = slice(count // 2, count)
    same = together(at(("output",), (slice(None), kept), (slice(None), kept)), at(("lse",), (..., kept), (..., kept)))
    yield Related("NaN in the first half of the queries", {**tensors, "q": other}, same)


@relation("shared heads", "heads that share keys give the bits that copies of the keys give")
def _shared_heads(tensors: Tensors, params: Params, random: Random) -> Iterator[Related]:
    shared = tensors["q"].shape[2] // tensors["k"].shape[2]
    if shared < 2:
        raise NotApplicable("every head has keys of its own")
    copies = {name: tensors[name].repeat_interleave(shared, 2) for name in ("k", "v")}
    yield Related("keys and values copied for every head", {**tensors, **copies})


RELATIONS = (_sequences, _permutation, _queries, _shared_heads)


def check_attention(
    q: Enclosure, k: Enclosure, v: Enclosure, sinks: Enclosure | None, scale: float, cap: float | None
) -> None:
    """Raise ValueError unless tensors fit together and numbers have a meaning."""
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {tuple(shape)}; it must be [batch, tokens, heads, numbers]")
    (batch, _, heads, width), (_, keys, groups, _) = q.shape, k.shape
    if not keys or not width or not groups or heads % groups:
        raise ValueError(
            f"q has {heads} heads of {width} numbers and k {keys} keys of {groups} heads; the heads of k must divide "
            "those of q, and none of the numbers but the heads of q may be 0"
        )
    fitting = {"k": (k, (batch, keys, groups, width)), "v": (v, (batch, keys, groups, v.shape[-1]))}
    check_shapes({**fitting, "sinks": (sinks, (heads,))})
    for name, number in (("scale", scale), ("cap", 1.0 if cap is None else cap)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name}={number} must be positive and finite")


def is_visible(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Mark the keys that each query sees, [T, S]: with `causal` those up to its own, the last key for the last query.

    q, k: [..., T, H, D] and [..., S, G, D].
    """
    queries, keys = q.shape[-3], k.shape[-3]
    every = q.new_ones(queries, keys).bool()
    return every.tril(keys - queries) if causal else every


def with_one(visible: Tensor) -> Tensor:
    """Prepend a sink, which every query sees, to the visible keys: [T, 1 + S]."""
    both = visible.new_ones(visible.shape[0], 1 + visible.shape[1])
    both[:, 1:] = visible
    return both


def attention_flops(tensors: Mapping[str, Tensor], params: Params) -> int:
    """Count two FLOP for each product in the dots of queries with visible keys, and of weights with values."""
    (batch, queries, heads, width), keys = tensors["q"].shape, tensors["k"].shape[1]
    seen = sum(max(0, keys - last) for last in range(queries)) if params.get("causal") else queries * keys
    return 2 * batch * heads * seen * (width + tensors["v"].shape[-1])
