"""Rotary position embedding of heads (Su et al. 2021, arXiv 2104.09864), from given tables of cosines and sines.

Where products are rounded differs: fused kernels compute in fp32 and round once, PyTorch code in the dtype of the model
rounds each product and the sum, and a compiler that contracts it rounds one product alone. docs/contracts/rotary.md
lists who keeps which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Enclosure, Tensor, concatenate, gather, hull, multiply_add, stack
from lastbit.references._shapes import check_shapes
from lastbit.relations import NotApplicable, Related, Tensors, at, extended, relation, scaled, shuffled

_RESULTS = ("q_rotated", "k_rotated")
_OF_TOKENS = ("q", "k", "positions")
_MORE = 5  # heads, or rows of a table


@relation("tokens", "a token has the same bits alone, in any batch and at any place in it")
def _tokens(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    count = _several_tokens(tensors)
    some = sorted(random.sample(range(count), (count + 1) // 2))
    for what, index in (("the last token alone", [count - 1]), ("half of the tokens", some)):
        yield Related(what, _indexed(tensors, index), at(_RESULTS, index))
    yield Related(
        "all tokens after themselves", _indexed(tensors, [*range(count)] * 2), at(_RESULTS, ..., slice(count, None))
    )


@relation("permutation", "tokens in another order have the same bits each")
def _permutation(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    order = shuffled(_several_tokens(tensors), random)
    yield Related("tokens in another order", _indexed(tensors, order), at(_RESULTS, order))


def _several_tokens(tensors: Tensors) -> int:
    """Return the number of tokens, the size of the first dimension; raise if it is below two."""
    if (count := tensors["q"].shape[0]) < 2:
        raise NotApplicable(f"{count} in the first dimension, that of tokens; two are needed")
    return count


def _indexed(tensors: Tensors, index: list[int]) -> Tensors:
    return {name: tensor[index] if name in _OF_TOKENS else tensor for name, tensor in tensors.items()}


@relation("heads", "a head has the same bits alone and among others, in q and in k")
def _heads(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    if (heads := tensors["q"].shape[-2]) < 1:
        raise NotApplicable("q has no heads")
    last = ..., slice(heads - 1, heads), slice(None)
    yield Related("the last head of q alone", {**tensors, "q": tensors["q"][last]}, at(("q_rotated",), last))
    as_k = lambda first, second: {"q_rotated": (first["q_rotated"], second["k_rotated"])}  # noqa: E731
    yield Related("q as k, too", {**tensors, "k": tensors["q"]}, as_k)


@relation("padding", "rows that are appended to the tables, and heads to q, change no bit of the others")
def _padding(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    longer = {name: extended(tensors[name], len(tensors[name]) + _MORE) for name in ("cos", "sin")}
    yield Related(f"{_MORE} rows of NaN at the end of the tables", {**tensors, **longer})
    heads = tensors["q"].shape[-2]
    wider = {**tensors, "q": extended(tensors["q"], heads + _MORE, dim=-2)}
    yield Related(f"{_MORE} heads more, of NaN", wider, at(("q_rotated",), ..., (..., slice(heads), slice(None))))


@op(
    rows=(),
    returns=("q_rotated", "k_rotated"),
    integers=("positions",),
    axes={
        "products": {
            "fp32_products": {},
            "rounded_products": {
                "q_cos_product": "q",
                "q_sin_product": "q",
                "k_cos_product": "k",
                "k_sin_product": "k",
            },
            "contracted_products": {"q_sin_product": "q", "k_sin_product": "k"},
            "contracted_x1_products": {"q_x2_product": "q", "k_x2_product": "k"},
        },
        "table": {"": {}, "rounded_table": {"cos_row": "q", "sin_row": "q"}},
    },
    rounds={"q_rotated": "q", "k_rotated": "k"},
    relations=(_tokens, _permutation, _heads, _padding, scaled(("q", "k"), dict.fromkeys(_RESULTS, 1))),
)
def rotary(
    q: Enclosure,
    cos: Enclosure,
    sin: Enclosure,
    positions: Tensor,
    k: Enclosure | None = None,
    *,
    interleaved: bool = False,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """y1 = x1 · cos - x2 · sin and y2 = x2 · cos + x1 · sin for pairs (x1, x2) of each head of q and k.

    q: [..., H, D]; k: [..., G, D], of q's dtype; cos, sin: [P, R / 2], R ≤ D even; positions: [...], integers from 0 to
    P - 1, the row of the tables for each token. The first R columns of a head are rotated, the others stay as they are.
    A pair is (x[i], x[i + R/2]), or (x[2i], x[2i + 1]) where `interleaved`. Results: `q_rotated`, `k_rotated`.

    Raises:
        ValueError: tensors whose shapes or dtypes do not fit, or positions beyond the tables.
    """
    if len(q.shape) < 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be [..., H, D] with one or more dimensions of tokens")
    *tokens, _, width = q.shape
    if len(cos.shape) != 2 or 2 * cos.shape[1] > width:
        raise ValueError(f"cos has shape {tuple(cos.shape)}; it must be [P, R / 2] with R from 0 to {width}, q's width")
    check_shapes({"sin": (sin, tuple(cos.shape)), "positions": (positions, tuple(tokens))})
    if k is not None:
        if len(k.shape) != len(q.shape):
            raise ValueError(f"k has shape {tuple(k.shape)}; it must have {len(q.shape)} dimensions, as q has")
        check_shapes({"k": (k, (*tokens, k.shape[-2], width))})
        if (own := stage.format_of("q")) != (other := stage.format_of("k")):
            raise ValueError(f"k is of {other.name}; it must be of {own.name}, as q is")

    cosine, sine = stage("cos_row", _rows(cos, positions)), stage("sin_row", _rows(sin, positions))
    both = partial(_paired, interleaved=interleaved)
    cosines, sines, width = both(cosine, cosine), both(sine, sine), 2 * cosine.shape[-1]
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            x1, x2 = _numbers(x, width, interleaved=interleaved)
            rotating, swapped = x[..., :width], both(-x2, x1)
            if contract.has("rounded_products"):
                product = stage(f"{name}_cos_product", rotating * cosines)
                rotated = product + stage(f"{name}_sin_product", swapped * sines)
            elif contract.has("contracted_products"):
                rotated = multiply_add(rotating, cosines, stage(f"{name}_sin_product", swapped * sines))
            elif contract.has("contracted_x1_products"):
                product = stage(f"{name}_x2_product", both(-x2, x2) * both(sine, cosine))
                rotated = multiply_add(both(x1, x1), both(cosine, sine), product)
            else:
                fused = multiply_add(swapped, sines, rotating * cosines)
                rotated = hull(multiply_add(rotating, cosines, swapped * sines), fused)
            stage(f"{name}_rotated", concatenate(rotated, x[..., width:]), result=True)


def _rows(table: Enclosure, positions: Tensor) -> Enclosure:
    """Gather the rows of a table [P, N] at positions [...], for all heads of a token: [..., 1, N]."""
    index = positions.reshape(-1, 1).expand(-1, table.shape[1])
    return gather(table, index, dim=0).reshape(*positions.shape, 1, table.shape[1])


def _numbers(x: Enclosure, width: int, *, interleaved: bool) -> tuple[Enclosure, Enclosure]:
    """Return the first and the second numbers of the pairs in the first `width` columns."""
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def _paired(first: Enclosure, second: Enclosure, *, interleaved: bool) -> Enclosure:
    """Put numbers where the first and the second of each pair lie in a head."""
    return stack(first, second).joined() if interleaved else concatenate(first, second)
