"""Rotary position embedding in Triton, of q and k in one launch; the contract says where it rounds:

* `fp32_products`: all in fp32, one rounding of the result.
* `rounded_products`: both products are rounded to the dtype of q before they are added.
* `rounded_table`: cosines and sines are rounded to the dtype of q first.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from described import Described, PlannedLaunch, current, described
from rotary_arguments import aligned, check_heads, check_k, rows_of, sizes_of, table_of
from row_layout import address, contiguous_like, row_start
from torch import Tensor

from lastbit import kernel

PAIRS_PER_PROGRAM = 1024


@triton.jit
def load_pairs(
    ptr, start, live, half, HALF: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Load the first and second numbers of each pair of rows, [ROWS, HALF] each, in their own dtype."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.load(address(ptr, start, columns, ALIGNED), mask=live & (columns < 2 * half), other=0.0)
        first, second = tl.split(tl.reshape(pairs, (ROWS, HALF, 2)))
    else:
        columns = tl.arange(0, HALF)[None, :]
        mask = live & (columns < half)
        first = tl.load(address(ptr, start, columns, ALIGNED), mask=mask, other=0.0)
        second = tl.load(address(ptr, start + half, columns, ALIGNED), mask=mask, other=0.0)
    return first, second


@triton.jit
def store_pairs(
    ptr, start, live, first, second, half,
    HALF: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store pairs where `load_pairs` reads them, rounded to the dtype of the tensor."""
    X: tl.constexpr = ptr.dtype.element_ty
    if INTERLEAVED:
        columns = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.reshape(tl.join(first.to(X), second.to(X)), (ROWS, 2 * HALF))
        tl.store(address(ptr, start, columns, ALIGNED), pairs, mask=live & (columns < 2 * half))
    else:
        columns = tl.arange(0, HALF)[None, :]
        mask = live & (columns < half)
        tl.store(address(ptr, start, columns, ALIGNED), first.to(X), mask=mask)
        tl.store(address(ptr, start + half, columns, ALIGNED), second.to(X), mask=mask)


@triton.jit
def load_row(
    table_ptr, stride, position, half, HALF: tl.constexpr, X: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr
):
    """Load the cosines or sines of each row in fp32, with ROUND rounded to X."""
    columns = tl.arange(0, HALF)[None, :]
    row = tl.load(address(table_ptr, position * stride, columns, ALIGNED), mask=columns < half, other=0.0)
    return row.to(X).to(tl.float32) if ROUND else row.to(tl.float32)


@triton.jit
def turned(first, second, cosine, sine, X: tl.constexpr, ROUND: tl.constexpr):
    """Rotate pairs, all in fp32; with ROUND each product is rounded to X.

    The compiler fuses nothing: which product it would take is open, so that variants of a kernel could differ.
    """
    if ROUND:
        a, b = (first * cosine).to(X).to(tl.float32), (second * sine).to(X).to(tl.float32)
        c, d = (second * cosine).to(X).to(tl.float32), (first * sine).to(X).to(tl.float32)
        pair = a - b, c + d
    else:
        pair = tl.fma(first, cosine, -(second * sine)), tl.fma(second, cosine, first * sine)
    return pair


@triton.jit
def _rotate(
    x_ptr, out_ptr, cos_ptr, sin_ptr, position_ptr, program, rows, heads, half, width, cos_stride, sin_stride,
    size_1, size_2, stride_0, stride_1, stride_2,
    ROUND: tl.constexpr, ROUND_TABLE: tl.constexpr, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS heads from `program` · ROWS on."""
    X: tl.constexpr = x_ptr.dtype.element_ty
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    position = tl.load(position_ptr + row // heads, mask=live, other=0).to(tl.int64)
    cosine = load_row(cos_ptr, cos_stride, position, half, HALF, X, ROUND_TABLE, ALIGNED)
    sine = load_row(sin_ptr, sin_stride, position, half, HALF, X, ROUND_TABLE, ALIGNED)
    start = row_start(row, size_1, size_2, stride_0, stride_1, stride_2, False)
    first, second = load_pairs(x_ptr, start, live, half, HALF, ROWS, INTERLEAVED, ALIGNED)
    first, second = turned(first.to(tl.float32), second.to(tl.float32), cosine, sine, X, ROUND)
    store_pairs(out_ptr, row * width, live, first, second, half, HALF, ROWS, INTERLEAVED, ALIGNED)
    if PARTIAL:
        for begin in range(2 * half, width, HALF):
            columns = begin + tl.arange(0, HALF)[None, :]
            mask = live & (columns < width)
            kept = tl.load(address(x_ptr, start, columns, ALIGNED), mask=mask)
            tl.store(address(out_ptr, row * width, columns, ALIGNED), kept, mask=mask)


@triton.jit(
    do_not_specialize=[
        "q_rows", "k_rows", "q_heads", "k_heads", "half", "width", "cos_stride", "sin_stride", "q_programs",
        "q_size_1", "q_size_2", "q_stride_0", "q_stride_1", "q_stride_2",
        "k_size_1", "k_size_2", "k_stride_0", "k_stride_1", "k_stride_2",
    ],
    do_not_specialize_on_alignment=["q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", "cos_ptr", "sin_ptr", "position_ptr"],
)  # fmt: skip
def _rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr,
    q_rows: tl.int64, k_rows: tl.int64, q_heads, k_heads, half, width: tl.int64,
    cos_stride: tl.int64, sin_stride: tl.int64, q_programs,
    q_size_1: tl.int64, q_size_2: tl.int64, q_stride_0: tl.int64, q_stride_1: tl.int64, q_stride_2: tl.int64,
    k_size_1: tl.int64, k_size_2: tl.int64, k_stride_0: tl.int64, k_stride_1: tl.int64, k_stride_2: tl.int64,
    ROUND: tl.constexpr, ROUND_TABLE: tl.constexpr, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rotate heads of q in the first `q_programs` programs, of k in the others."""
    program = tl.program_id(0)
    if ALIGNED:
        half = half // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
        width = width // 16 * 16
    if program < q_programs:
        _rotate(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, position_ptr, program, q_rows, q_heads, half, width,
            cos_stride, sin_stride, q_size_1, q_size_2, q_stride_0, q_stride_1, q_stride_2,
            ROUND, ROUND_TABLE, INTERLEAVED, PARTIAL, ROWS, HALF, ALIGNED,
        )  # fmt: skip
    elif k_ptr is not None:
        _rotate(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr, program - q_programs, k_rows, k_heads, half, width,
            cos_stride, sin_stride, k_size_1, k_size_2, k_stride_0, k_stride_1, k_stride_2,
            ROUND, ROUND_TABLE, INTERLEAVED, PARTIAL, ROWS, HALF, ALIGNED,
        )  # fmt: skip


def rotary(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k: Tensor | None = None,
    *,
    interleaved: bool = False,
    rounded_products: bool = False,
    rounded_table: bool = False,
) -> dict[str, Tensor]:
    """Rotate the first R = 2 · cos.shape[1] columns of each head of q and k; the others are copied.

    Args:
        q: [..., H, D], bf16, fp16 or fp32; k: [..., G, D], of its dtype. Neither is copied where its last dimension is
            contiguous and at most three leading dimensions remain after merging.
        cos, sin: [P, R / 2], bf16, fp16 or fp32, each copied where its columns have a stride.
        positions: [...], int64 or int32, from 0 to P - 1, which is not checked.
        interleaved: pairs are (x[2i], x[2i + 1]), not (x[i], x[i + R / 2]).
        rounded_products, rounded_table: the contract, see the module.

    Returns:
        `q_rotated` and, with a k, `k_rotated`, contiguous.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        UnsupportedCase: more than 2¹⁴ pairs.
    """
    plan = _plan(
        described(q), described(k), described(cos), described(sin), described(positions),
        interleaved, rounded_products, rounded_table,
    )  # fmt: skip
    results = {name: contiguous_like(x) for name, x in (("q_rotated", q), ("k_rotated", k)) if x is not None}
    if plan.launch is not None:
        q = q.contiguous() if plan.copied[0] else q
        k = k.contiguous() if k is not None and plan.copied[1] else k
        cos, sin = (t.contiguous() if copy else t for t, copy in zip((cos, sin), plan.copied[2:], strict=True))
        with current(q.device):
            plan.launch(q, k, results["q_rotated"], results.get("k_rotated"), cos, sin, positions.contiguous())
    return results


class RotaryPlan(NamedTuple):
    """The plan of a call.

    Attributes:
        launch: takes the tensors; None where there is nothing to do.
        copied: whether q, k, cos and sin are to be copied to contiguous memory.
    """

    launch: PlannedLaunch | None
    copied: tuple[bool, bool, bool, bool]


@functools.lru_cache(maxsize=1024)
def _plan(
    q: Described, k: Described | None, cos: Described, sin: Described, positions: Described,
    interleaved: bool, rounded_products: bool, rounded_table: bool,
) -> RotaryPlan:  # fmt: skip
    check_heads(q, positions, cos=cos, sin=sin, k=k)
    check_k(q, k)
    width = q.shape[-1]
    table = table_of(width, cos, sin)
    heads = [(x, rows_of(x)) for x in (q, k) if x is not None]
    (_, q_rows), (k_described, k_rows) = heads[0], heads[-1]
    half_block = max(16, triton.next_power_of_2(table.half))
    rows = max(1, PAIRS_PER_PROGRAM // half_block)
    q_programs = triton.cdiv(q_rows.rows, rows)
    programs = q_programs + (triton.cdiv(k_rows.rows, rows) if k is not None else 0)
    parameters = {
        "q_rows": q_rows.rows, "k_rows": k_rows.rows, "q_heads": q.shape[-2], "k_heads": k_described.shape[-2],
        "half": table.half, "width": width, "cos_stride": table.strides[0], "sin_stride": table.strides[1],
        "q_programs": q_programs, **sizes_of("q", q_rows), **sizes_of("k", k_rows),
        "ROUND": rounded_products, "ROUND_TABLE": rounded_table, "INTERLEAVED": interleaved,
        "PARTIAL": width > 2 * table.half, "ROWS": rows, "HALF": half_block,
        "ALIGNED": aligned(heads, (cos, sin), table),
    }  # fmt: skip
    launch = PlannedLaunch(_rotary_kernel, programs, parameters, num_warps=4, enable_fp_fusion=False)
    return RotaryPlan(
        launch if programs and width else None, (q_rows.copied, k is not None and k_rows.copied, *table.copied)
    )


def _declare(contract: str) -> None:
    rules = {word: word in contract.split("+") for word in ("rounded_products", "rounded_table")}

    @kernel(
        "rotary", contract=contract, name=f"triton[{contract}]",
        invariant=("run to run", "tokens", "permutation", "heads", "padding", "layout", "scaling"),
    )  # fmt: skip
    def on_tensors(q, cos, sin, positions, k=None, *, interleaved=False):
        return rotary(q, cos, sin, positions, k, interleaved=interleaved, **rules)


for _contract in ("fp32_products", "rounded_products", "rounded_products+rounded_table"):
    _declare(_contract)
