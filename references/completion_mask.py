"""Which tokens of a sampled completion count: those up to the first token that ends it, that token included.

The rule is that of the GRPO trainer of TRL 1.16.0 (`mask_truncated_completions` there is `mask_truncated` here), which
its RLOO trainer and others share. Rows of no tokens, on which TRL's argmax fails, give a mask of no elements.
"""

from __future__ import annotations

from typing import Any

from harness.op import Contract, StageRecorder, op


@op(rows=("ids",), integers=("ids", "eos_ids"))
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
