"""The routing of pairs of a token and a slot to experts: the pairs sorted by expert, and cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from described import current
from torch import Tensor

BLOCK_ROWS = (16, 64, 128)
PAIRS_PER_STEP = (128, 2048)
EXPERTS_PER_STEP = 128


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


@triton.jit
def _local_experts(ids_ptr, pair, pairs, slots, token_stride, slot_stride, experts, first_expert):
    """Return the expert of each pair: `experts` where it is not held here, and one more past the last pair."""
    at = (pair // slots).to(tl.int64) * token_stride + (pair % slots).to(tl.int64) * slot_stride
    local = tl.load(ids_ptr + at, mask=pair < pairs, other=0).to(tl.int64) - first_expert
    local = tl.where((local >= 0) & (local < experts), local, experts)
    return tl.where(pair < pairs, local, experts + 1).to(tl.int32)


@triton.jit(
    do_not_specialize=["pairs", "slots", "token_stride", "slot_stride", "experts", "first_expert"],
    do_not_specialize_on_alignment=["ids_ptr", "local_experts_ptr", "order_ptr", "offsets_ptr"],
)
def _sort_kernel(
    ids_ptr, local_experts_ptr, order_ptr, offsets_ptr,
    pairs, slots, token_stride: tl.int64, slot_stride: tl.int64, experts, first_expert: tl.int64, STEP: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of one expert per program, which counts those of experts before; the last has skipped ones."""
    own = tl.program_id(0)
    before = tl.zeros([STEP], tl.int32)
    for start in range(0, pairs, STEP):
        pair = start + tl.arange(0, STEP)
        local = _local_experts(ids_ptr, pair, pairs, slots, token_stride, slot_stride, experts, first_expert)
        before += (local < own).to(tl.int32)
    offset = tl.sum(before)
    tl.store(offsets_ptr + own, offset.to(tl.int64))
    for start in range(0, pairs, STEP):
        pair = start + tl.arange(0, STEP)
        local = _local_experts(ids_ptr, pair, pairs, slots, token_stride, slot_stride, experts, first_expert)
        mine = (local == own).to(tl.int32)
        tl.store(order_ptr + offset + tl.cumsum(mine) - 1, pair.to(tl.int64), mask=mine != 0)
        tl.store(local_experts_ptr + pair, local.to(tl.int64), mask=mine != 0)
        offset += tl.sum(mine)
    if own == experts:
        tl.store(offsets_ptr + experts + 1, offset.to(tl.int64))


@triton.jit(
    do_not_specialize=["experts", "blocks", "rows"],
    do_not_specialize_on_alignment=["offsets_ptr", "block_experts_ptr", "block_starts_ptr"],
)
def _cut_kernel(
    offsets_ptr, block_experts_ptr, block_starts_ptr, experts, blocks, rows, EXPERTS: tl.constexpr, STEP: tl.constexpr
):
    """Cut the blocks of one expert per program, after those of the experts before; the last one fills unused places."""
    own = tl.program_id(0)
    before = tl.zeros([EXPERTS], tl.int64)
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        start = tl.load(offsets_ptr + expert, mask=expert < own, other=0)
        end = tl.load(offsets_ptr + expert + 1, mask=expert < own, other=0)
        before += (end - start + rows - 1) // rows
    start, end = tl.load(offsets_ptr + own), tl.load(offsets_ptr + own + 1)
    place = tl.sum(before)
    used = (end - start + rows - 1) // rows
    until = tl.where(own == experts, blocks - place, used)
    for first in range(0, tl.maximum(until, 1), STEP):
        block = first + tl.arange(0, STEP)
        expert = tl.where(block < used, own, -1).to(tl.int64)
        tl.store(block_experts_ptr + place + block, expert, mask=block < until)
        tl.store(block_starts_ptr + place + block, start + block.to(tl.int64) * rows, mask=block < until)


def route(expert_ids: Tensor, experts: int, first_expert: int) -> Routing:
    """Sort the pairs of expert_ids [T, k], where expert e has the id first_expert + e; other ids are skipped.

    Nothing waits for the device.
    """
    tokens, slots = expert_ids.shape
    pairs = tokens * slots
    rows = rows_per_block(pairs, experts)
    blocks = pairs // rows + min(pairs, experts + 1)
    sizes = (pairs, pairs, experts + 2, blocks, blocks)
    memory = torch.empty(sum(sizes), dtype=torch.int64, device=expert_ids.device)
    local_experts, order, offsets, block_experts, block_starts = memory.split(sizes)
    grid = (experts + 1,)
    with current(expert_ids.device):
        _sort_kernel[grid](
            expert_ids, local_experts, order, offsets, pairs, slots, *expert_ids.stride(), experts, first_expert,
            STEP=PAIRS_PER_STEP[pairs > PAIRS_PER_STEP[0]], num_warps=8,
        )  # fmt: skip
        _cut_kernel[grid](
            offsets, block_experts, block_starts, experts, blocks, rows,
            EXPERTS=EXPERTS_PER_STEP, STEP=EXPERTS_PER_STEP, num_warps=4,
        )  # fmt: skip
    return Routing(tokens, slots, experts, local_experts, order, offsets, rows, block_experts, block_starts)


def rows_per_block(pairs: int, experts: int) -> int:
    """Return the height of a block: the least that holds an expert's pairs if all have equally many, or the largest."""
    return next((rows for rows in BLOCK_ROWS if rows * experts >= pairs), BLOCK_ROWS[-1])
