"""The completion mask in PyTorch, by argmax as in TRL; `completion_mask.py` defines it."""

from __future__ import annotations

import torch
from completion_mask_arguments import check_arguments
from torch import Tensor

from lastbit import kernel


@kernel(
    "completion_mask",
    name="eager[completion_mask]",
    invariant=("rows", "permutation", "padding", "layout", "run to run"),
)
def completion_mask(ids: Tensor, eos_ids: Tensor, *, mask_truncated: bool = False) -> Tensor:
    """Find ends by torch's argmax, which takes the first of equal ones, and has no answer for rows of no tokens."""
    check_arguments(ids, eos_ids)
    length = ids.shape[-1]
    if length == 0:
        return torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    is_eos = torch.isin(ids, eos_ids)
    ended = is_eos.any(-1, keepdim=True)
    last = torch.where(ended, is_eos.int().argmax(-1, keepdim=True), length - 1)
    kept = torch.arange(length, device=ids.device) <= last
    return (kept & ended if mask_truncated else kept).int()
