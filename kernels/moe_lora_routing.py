"""Which expert takes which pair of a token and a slot: the pairs sorted by expert, and cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = (16, 64, 128)


@dataclass(frozen=True, eq=False)
class Routing:
    """Pairs p = t · slots + j of token t and slot j, sorted by expert; all indices are int64, on one device.

    Attributes:
        tokens, slots, experts: how many there are; an expert is one that is held here.
        local_experts: [P] the expert of each pair; `experts` for a pair that is skipped.
        order: [P] the pairs in ascending order of their expert, then of their number; skipped pairs are last.
        offsets: [experts + 2] where in `order` the pairs of each expert start, then the skipped ones, then the end.
        block_rows: height M of the blocks into which `order` is cut, so that a block has pairs of one expert only.
        block_experts: [P // M + min(P, experts + 1)] expert of each block; `experts` for skipped pairs, -1 if unused.
        block_starts: where in `order` each block starts; it ends where its expert's pairs do, or after M of them.
    """

    tokens: int
    slots: int
    experts: int
    local_experts: Tensor
    order: Tensor
    offsets: Tensor
    block_rows: int
    block_experts: Tensor
    block_starts: Tensor


def route(expert_ids: Tensor, experts: int, first_expert: int) -> Routing:
    """Sort the pairs of expert_ids [T, k], where expert e has the id first_expert + e; other ids are skipped.

    Nothing waits for the device.
    """
    ids = expert_ids.reshape(-1).to(torch.int64)
    held = (ids >= first_expert) & (ids < first_expert + experts)
    local_experts = torch.where(held, ids - first_expert, experts)
    ascending, order = torch.sort(local_experts, stable=True)
    offsets = torch.searchsorted(ascending, torch.arange(experts + 2, device=ids.device))
    rows = rows_per_block(len(ids), experts)
    blocks = _blocks(offsets, len(ids) // rows + min(len(ids), experts + 1), rows)
    return Routing(*expert_ids.shape, experts, local_experts, order, offsets, rows, *blocks)


def rows_per_block(pairs: int, experts: int) -> int:
    """Height of a block: the smallest that holds the pairs of an expert if all have equally many, or the largest."""
    return next((rows for rows in BLOCK_ROWS if rows * experts >= pairs), BLOCK_ROWS[-1])


def _blocks(offsets: Tensor, blocks: int, rows: int) -> tuple[Tensor, Tensor]:
    """(block_experts, block_starts) for a number of blocks that is never too small: one per `rows` and per expert."""
    per_expert = (offsets.diff() + rows - 1) // rows
    ends = per_expert.cumsum(0)
    block = torch.arange(blocks, device=offsets.device)
    expert = torch.searchsorted(ends, block, right=True)
    used = expert < len(ends)
    expert = torch.where(used, expert, 0)
    starts = offsets[expert] + (block - ends[expert] + per_expert[expert]) * rows
    return torch.where(used, expert, -1), starts
