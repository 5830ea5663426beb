"""The epilogue of a tile of a linear layer per expert: add LoRA to the sums, then store or activate them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from arithmetic import rounded
from swiglu_limit import limited


class Adapter(NamedTuple):
    """The operands of LoRA: rows [P, rank] of all pairs, and a weight [E, N, rank], or [E, rank, N] if it is turned.

    The rows, and the weight of an expert, have no gaps.
    """

    middle_ptr: Any
    b_ptr: Any
    b_expert_stride: Any
    rank: Any
    scaling: Any


class Outputs(NamedTuple):
    """Tensors [P, N], or None: both sums, with and without LoRA, and the activation of these, gate and up."""

    result: Any
    second_result: Any
    base: Any
    second_base: Any
    saved_gate: Any
    saved_up: Any
    intermediate: Any


@triton.jit
def adapted(base, adapter, pairs, n, n_size, VARIANT: tl.constexpr):
    """Return base + scaling · (middle · bᵀ) of columns n, or base without adapter; zero for experts elsewhere."""
    value = base
    if adapter.middle_ptr is not None:
        A: tl.constexpr = adapter.middle_ptr.dtype.element_ty
        BLOCK_R: tl.constexpr = VARIANT.block_r
        STEPS: tl.constexpr = VARIANT.rank_steps
        ROUND: tl.constexpr = VARIANT.round_lora
        rank = adapter.rank
        if VARIANT.lora_vectors:
            n_size, rank = n_size // 8 * 8, rank // 8 * 8
        product = tl.zeros(base.shape, tl.float32)
        for step in tl.static_range(STEPS):
            r = step * BLOCK_R + tl.arange(0, BLOCK_R)
            inside = (r < rank) & pairs.taken
            middle_ptr = adapter.middle_ptr + (pairs.pair.to(tl.int64)[:, None] * rank + r[None, :])
            b_ptr = adapter.b_ptr + pairs.expert.to(tl.int64) * adapter.b_expert_stride
            if VARIANT.lora_turned:
                b_ptr = b_ptr + (r[:, None] * n_size + n[None, :])
            else:
                b_ptr = b_ptr + (n[None, :] * rank + r[:, None])
            if VARIANT.lora_vectors:
                middle_ptr = tl.multiple_of(middle_ptr, (1, 16))
                b_ptr = tl.multiple_of(b_ptr, (1, 16) if VARIANT.lora_turned else (16, 1))
            middle = tl.load(middle_ptr, mask=pairs.live[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_ptr, mask=inside[:, None] & (n < n_size)[None, :], other=0.0)
            product = tl.dot(middle, b, product, input_precision="ieee")
        value = value + rounded(rounded(product, A, ROUND) * adapter.scaling, A, ROUND)
    return tl.where(pairs.taken, value, 0.0)  # a scaling that is infinite in fp32 would give NaN


@triton.jit
def store(ptr, value, pairs, n, n_size, VECTORS: tl.constexpr):
    """Write columns n of the pairs' rows of a tensor [P, N], if there is one."""
    if ptr is not None:
        if VECTORS:
            n_size = n_size // 8 * 8
        at = pairs.pair.to(tl.int64)[:, None] * n_size + n[None, :]
        mask = pairs.live[:, None] & (n < n_size)[None, :]
        tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_swiglu(outputs, gate, up, limit, pairs, n, n_size, VARIANT: tl.constexpr):
    """Write gate and up, and silu(gate) · up of both after the limit."""
    A: tl.constexpr = outputs.intermediate.dtype.element_ty
    ROUND: tl.constexpr = VARIANT.round_swiglu
    VECTORS: tl.constexpr = VARIANT.vectors
    gate, up = rounded(gate, A, ROUND), rounded(up, A, ROUND)
    store(outputs.saved_gate, gate, pairs, n, n_size, VECTORS)
    store(outputs.saved_up, up, pairs, n, n_size, VECTORS)
    gate, up = limited(gate, up, limit)
    silu = rounded(gate * tl.sigmoid(gate), A, ROUND)
    store(outputs.intermediate, silu * up, pairs, n, n_size, VECTORS)
