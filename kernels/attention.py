"""Flash attention, forward, in Triton: scores of one tile of keys at a time, relative to the largest score so far.

Dao et al. 2022, arXiv 2205.14135. The weights of a tile are rounded to the dtype of v relative to the largest score
after that tile, and divided by their sum at the end. So the width of a tile is part of the contract: `tiles_64`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attention_arguments import check_arguments
from described import current
from torch import Tensor
from triton.language.extra import libdevice

from lastbit import kernel

BLOCK_M = 64  # one for all sizes, so that a query has the same bits in every batch
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
_SIZES = ["queries", "keys", "groups", "shared", "width", "value_width"]


@triton.jit(do_not_specialize=[*_SIZES, "sinks_stride"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, output_ptr, lse_ptr, scale, cap,
    queries, keys, groups, shared, width, value_width,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, q_number: tl.int64,
    k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64, k_number: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, v_number: tl.int64, sinks_stride: tl.int64,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BASE_2: tl.constexpr, SCALED_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute a tile of rows of one head of keys; a row is a query of one of the `shared` heads that use these keys."""
    tiles = tl.cdiv(queries * shared, BLOCK_M)
    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < queries * shared
    batch, group = (tl.program_id(0) // tiles // groups).to(tl.int64), (tl.program_id(0) // tiles % groups).to(tl.int64)
    token, head = row // shared, group.to(tl.int32) * shared + row % shared
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)

    q_row = q_ptr + batch * q_batch + token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
    q = tl.load(q_row[:, None] + d[None, :] * q_number, mask=live[:, None] & (d < width)[None, :], other=0.0)
    if SCALED_QUERY:
        q = (q.to(tl.float32) * scale).to(q_ptr.dtype.element_ty)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * sinks_stride, mask=live, other=0.0).to(tl.float32)
        largest = sink * LOG2E if BASE_2 else sink
        total += 1.0
    sums = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    last = token + (keys - queries)  # the last key that a query sees
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, tl.max(tl.where(live, last, -1), 0) + 1)
    for start in range(0, end, BLOCK_N):
        key = start + n
        there = key < keys
        k_at = k_ptr + batch * k_batch + group * k_head + key.to(tl.int64) * k_token
        k = tl.load(k_at[None, :] + d[:, None] * k_number, mask=there[None, :] & (d < width)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        if not SCALED_QUERY:
            scores = scores * scale
        if CAPPED:
            scores = libdevice.tanh(scores) * cap
        seen = there[None, :] & (key[None, :] <= last[:, None]) if CAUSAL else there[None, :]
        scores = tl.where(seen, scores, float("-inf"))

        larger = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - shift[:, None]) if BASE_2 else tl.exp(scores - shift[:, None])
        factor = tl.exp2(largest - shift) if BASE_2 else tl.exp(largest - shift)
        total = total * factor + tl.sum(weights, 1)
        v_at = v_ptr + batch * v_batch + group * v_head + key.to(tl.int64) * v_token
        v = tl.load(v_at[:, None] + e[None, :] * v_number, mask=there[:, None] & (e < value_width)[None, :], other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * factor[:, None], input_precision="ieee")
        largest = larger

    output = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (batch * queries + token) * (groups * shared) + head
    output_at = output_ptr + place[:, None] * value_width + e[None, :]
    tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=live[:, None] & (e < value_width)[None, :])
    lse = (largest + tl.log2(total)) * LN2 if BASE_2 else largest + tl.log(total)
    tl.store(lse_ptr + (batch * (groups * shared) + head) * queries + token, lse, mask=live)


def _declare(name: str, contract: str, block_n: int, *, base_2: bool, scaled_query: bool) -> None:
    """Register the kernel for one contract."""

    @kernel(
        "attention", contract=contract, name=f"triton[attention+{name}]",
        invariant=("sequences", "permutation", "queries", "shared heads", "layout", "run to run"),
    )  # fmt: skip
    def attention(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, scale: float, causal: bool = False,
        cap: float | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Compute softmax(scale · q · kᵀ) · v; tensors have any strides, and none is copied.

        Args:
            q: [B, T, H, D]; bf16, fp16 or fp32.
            k, v: [B, S, G, D] and [B, S, G, E], of the dtype of q. G divides H: H // G heads of q share keys.
            sinks: [H], one more score of every row of a head.
            scale: of the scores.
            causal: whether query i sees keys up to i + S - T only.
            cap: scores are cap · tanh(score / cap).

        Returns:
            `output` [B, T, H, E] in the dtype of q, 0 where a query sees no key, and `lse` [B, H, T] in fp32.

        Raises:
            ValueError, TypeError: arguments that have no attention.
            UnsupportedCase: heads of more than 256 numbers.
        """
        check_arguments(q, k, v, sinks, scale=scale, cap=cap)
        output = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        _launch(q, k, v, sinks, output, lse, scale, causal, cap, block_n, base_2=base_2, scaled_query=scaled_query)
        return {"output": output, "lse": lse}


def _launch(q, k, v, sinks, output, lse, scale, causal, cap, block_n, *, base_2, scaled_query):
    (batch, queries, heads, width), (_, keys, groups, value_width) = q.shape, v.shape
    shared = heads // groups
    if not q.shape[:3].numel():
        return
    last = LOG2E.value if base_2 else 1.0
    factor = scale * last if cap is None else scale / cap
    blocks = triton.next_power_of_2
    with current(q.device):
        # One axis, as only the first takes more than 65,535 programs.
        _attention_kernel[(triton.cdiv(queries * shared, BLOCK_M) * batch * groups,)](
            q, k, v, sinks, output, lse, factor, 1.0 if cap is None else cap * last,
            queries, keys, groups, shared, width, value_width,
            *q.stride(), *k.stride(), *v.stride(), 0 if sinks is None else sinks.stride(0),
            CAUSAL=causal, CAPPED=cap is not None, BASE_2=base_2, SCALED_QUERY=scaled_query and cap is None,
            BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_D=max(16, blocks(width)), BLOCK_E=max(16, blocks(value_width)),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


_declare("flash", "flash+tiles_16", 16, base_2=False, scaled_query=False)
_declare("base_2", "flash+tiles_64", 64, base_2=True, scaled_query=False)
_declare("scaled_query", "flash+scaled_query_log2+tiles_32", 32, base_2=True, scaled_query=True)
