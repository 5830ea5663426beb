"""The completion mask in Triton: 1 up to the first end-of-sequence token of a row, that token included, 0 after it."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from completion_mask_arguments import STAGES, check_arguments
from described import current
from torch import Tensor

from lastbit import kernel, moved

# Few sizes, so that there are few compiled variants. A block covers a row where it can; a loop covers longer rows.
BLOCKS = (64, 256, 1024)
ELEMENTS_PER_PROGRAM = 1024


# Sizes, strides and addresses are no part of a variant's key: completions are of every length.
@triton.jit(
    do_not_specialize=[
        "mask_truncated", "store_stages", "rows", "n", "row_stride", "column_stride", "eos_count", "eos_stride",
    ],
    do_not_specialize_on_alignment=["ids_ptr", "eos_ids_ptr", "mask_ptr", "is_eos_ptr", "eos_index_ptr"],
)  # fmt: skip
def _completion_mask_kernel(
    ids_ptr, eos_ids_ptr, mask_ptr, is_eos_ptr, eos_index_ptr, mask_truncated, store_stages,
    rows: tl.int64, n, row_stride: tl.int64, column_stride: tl.int64, eos_count, eos_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows per program. Every lane keeps its first end, so that no order of a reduction matters."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    lanes = tl.arange(0, BLOCK)[None, :]

    first = tl.zeros([ROWS, BLOCK], tl.int32) + n
    for start in range(0, n, BLOCK):
        columns = start + lanes
        inside = live & (columns < n)
        ids = tl.load(ids_ptr + row * row_stride + columns * column_stride, mask=inside, other=0)
        is_eos = ids != ids
        for k in range(0, eos_count):
            is_eos = is_eos | (ids == tl.load(eos_ids_ptr + k * eos_stride))
        first = tl.minimum(first, tl.where(is_eos, columns, n))
        if store_stages:
            tl.store(is_eos_ptr + row * n + columns, is_eos.to(tl.int8), mask=inside)
    eos_index = tl.min(first, axis=1, keep_dims=True)
    if store_stages:
        tl.store(eos_index_ptr + row, eos_index.to(tl.int64), mask=live)

    last = tl.where((eos_index == n) & (mask_truncated != 0), -1, eos_index)
    for start in range(0, n, BLOCK):
        columns = start + lanes
        inside = live & (columns < n)
        tl.store(mask_ptr + row * n + columns, (columns <= last).to(tl.int32), mask=inside)


@kernel(
    "completion_mask",
    name="triton[completion_mask]",
    stages=STAGES,
    placement="moves",
    invariant=("rows", "permutation", "padding", "layout", "run to run"),
)
def completion_mask(
    ids: Tensor, eos_ids: Tensor, *, mask_truncated: bool = False, stages: tuple[str, ...] = ()
) -> Tensor | dict[str, Tensor]:
    """Mark the tokens that count towards a loss: all up to the first token of each row that is one of `eos_ids`.

    Args:
        ids: [..., L], int64 or int32, with any strides. Not copied where the leading dimensions have one stride.
        eos_ids: [K], K ≥ 1, int64 or int32; moved to the device of `ids` with a warning if it is on another.
        mask_truncated: whether a row without any of `eos_ids`, which the length limit cut off, is all 0 instead of 1.
        stages: which of `STAGES` to return too: `is_eos` ([..., L], int8) and `eos_index` ([..., 1], int64), the index
            of the first of `eos_ids`, L where there is none.

    Returns:
        The mask, int32 of the shape of `ids`, contiguous; with stages, a mapping from names to tensors.

    Raises:
        ValueError, TypeError: arguments that have no mask.
        UnsupportedCase: rows of more than 2³⁰ tokens.
    """
    eos_ids = moved({"eos_ids": eos_ids}, ids.device)["eos_ids"]
    check_arguments(ids, eos_ids, stages)
    mask = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    stored = _allocate_stages(ids, stages=bool(stages))
    _launch(ids, eos_ids, mask, stored, mask_truncated=int(mask_truncated), store_stages=int(bool(stages)))
    return {"mask": mask} | {name: stored[name] for name in stages} if stages else mask


def _allocate_stages(ids: Tensor, *, stages: bool) -> dict[str, Tensor]:
    """Allocate a buffer for each stage, empty without `stages`: with the dtypes of stages, one variant serves both."""
    shape, per_row = (ids.shape, (*ids.shape[:-1], 1)) if stages else ((0,), (0,))
    return {
        "is_eos": torch.empty(shape, dtype=torch.int8, device=ids.device),
        "eos_index": torch.empty(per_row, dtype=torch.int64, device=ids.device),
    }


def _launch(ids: Tensor, eos_ids: Tensor, mask: Tensor, stored: dict[str, Tensor], **options: int) -> None:
    n, count = ids.shape[-1], math.prod(ids.shape[:-1])
    if not count:
        return
    strided = ids.reshape(count, n)
    block = next((size for size in BLOCKS if size >= n), BLOCKS[-1])
    rows = ELEMENTS_PER_PROGRAM // block
    with current(ids.device):
        _completion_mask_kernel[(triton.cdiv(count, rows),)](
            strided, eos_ids, mask, stored["is_eos"], stored["eos_index"], **options,
            rows=count, n=n, row_stride=strided.stride(0), column_stride=strided.stride(1),
            eos_count=eos_ids.numel(), eos_stride=eos_ids.stride(0), ROWS=rows, BLOCK=block,
        )  # fmt: skip
