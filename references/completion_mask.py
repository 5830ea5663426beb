"""Which tokens of a sampled completion count: those up to the first token that ends it, that token included.

The rule is that of the GRPO trainer of TRL 1.16.0 (`mask_truncated_completions` there is `mask_truncated` here), which
its RLOO trainer and others share. Rows of no tokens, on which TRL's argmax fails, give a mask of no elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from lastbit import Contract, StageRecorder, op
from lastbit.relations import NotApplicable, Related, Tensors, at, extended, relation, shuffled

_PADDING = 7  # columns


@relation("padding", "columns appended after the end of rows change no bit before them")
def _padding(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    """Pad by an id that ends nothing; in rows that have ended, by the one that ends them, as trainers pad."""
    ids, ends = tensors["ids"], tensors["eos_ids"]
    if not ids.numel():
        raise NotApplicable("the case has no tokens")
    before = at(("mask",), ..., (..., slice(ids.shape[-1])))
    no_end = next(i for i in range(len(ends) + 1) if i not in ends.tolist())
    longer = extended(ids, _PADDING, no_end, dim=-1)
    yield Related(f"{_PADDING} columns more, of no end", {**tensors, "ids": longer}, before)
    found = (ids[..., None] == ends).any(-1)
    end = ids.gather(-1, found.int().argmax(-1, keepdim=True))
    longer = longer.clone()
    longer[..., -_PADDING:] = end.where(found.any(-1, keepdim=True), longer[..., -1:])
    yield Related(f"{_PADDING} columns more, in rows that have ended of an end", {**tensors, "ids": longer}, before)


@relation("permutation", "the ids that end a sequence have no order")
def _permutation(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    if len(ends := tensors["eos_ids"]) < 2:
        raise NotApplicable("one id alone ends a sequence")
    yield Related("end ids in another order", {**tensors, "eos_ids": ends[shuffled(len(ends), random)]})


@op(rows=("ids",), returns=("mask",), integers=("ids", "eos_ids"), relations=(_padding, _permutation))
def completion_mask(
    ids: Any, eos_ids: Any, *, mask_truncated: bool = False, contract: Contract, stage: StageRecorder
) -> None:
    """mask = 1 up to the first of the `eos_ids` in a row, 0 after it; all 1 in a row that has none.

    ids: [..., L] and eos_ids: [K], K ≥ 1, integer tensors, which are exact. With `mask_truncated`, a row without any of
    the `eos_ids`, cut off by the length limit, is all 0. mask: [..., L], int32.

    Raises:
        ValueError: tensors of other shapes.
    """
    if not ids.ndim:
        raise ValueError("ids has no dimension; it must be [..., L]")
    if eos_ids.ndim != 1 or not eos_ids.numel():
        raise ValueError(f"eos_ids has shape {tuple(eos_ids.shape)}; it must be [K] with at least one id")
    found = ids != ids
    for one in eos_ids.split(1):  # of shape [1]: torch would cast a number to the dtype of ids
        found = found | (ids == one)
    is_eos = stage("is_eos", found)
    before = is_eos.cumsum(-1) == 0
    eos_index = stage("eos_index", before.sum(-1, keepdim=True))
    kept = before.new_ones(ids.shape[-1]).cumsum(-1) <= eos_index + 1
    if mask_truncated:
        kept = kept & (eos_index < ids.shape[-1])
    stage("mask", kept.int(), result=True)
