"""Softmax in Triton, of scores that are scaled and masked on the way: rows in one block, or in several in turn.

Arithmetic is fp32; the contract is the rest:

* `fp32_scores`: x · scale + mask is not rounded to x's dtype; `rounded_scores`: it is, after each operation.
* `base2`: exp is exp2 of scores times log2(e).
* `zero_rows`: a row that keeps nothing is zero in place of NaN.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from described import CallPlan, Described, PlannedLaunch, current, described
from row_layout import address, contiguous_like, layout_of, row_start, whole_vectors
from softmax_arguments import STAGES, check_arguments
from torch import Tensor

from lastbit import kernel

# Few sizes, so that there are few compiled variants. A block covers a row where it can; a loop covers longer rows.
BLOCKS = (64, 256, 1024, 4096, 16384)
ONLINE = (512,)
ELEMENTS_PER_PROGRAM = 2048
ELEMENTS_PER_THREAD = 32
LEADING_DIMS = 3
LOG2_E = tl.constexpr(math.log2(math.e))


def summation_depth(n: int) -> int:
    """Return the greatest number of additions between an exponential and the sum of n of them, compiled or interpreted.

    Blocks of at least 512 columns are summed one after another, ⌈n / 512⌉ at most. Compiled, a thread holds 32 elements
    of a block at most (31 additions), and 512 threads at most are combined in a binary tree (9): 40. Interpreted, numpy
    adds in runs of 128 with 8 accumulators (18 additions) and a tree over the runs (7), or in a binary tree (14).
    """
    return min(n, math.ceil(n / ONLINE[0]) + 40)


@triton.jit
def _scores(
    x_ptr, mask_ptr, keep_ptr, x_row, mask_row, keep_row, columns, inside, scale,
    SCALED: tl.constexpr, ROUNDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return in fp32 x · scale, that plus the mask, and that with -inf for elements not kept or not inside."""
    x = tl.load(address(x_ptr, x_row, columns, ALIGNED), mask=inside, other=0.0)
    scaled = x.to(tl.float32)
    if SCALED:
        scaled = scaled * scale
        if ROUNDED:
            scaled = scaled.to(x.dtype).to(tl.float32)
    masked = scaled
    if mask_ptr is not None:
        masked = scaled + tl.load(address(mask_ptr, mask_row, columns, ALIGNED), mask=inside, other=0.0).to(tl.float32)
        if ROUNDED:
            masked = masked.to(x.dtype).to(tl.float32)
    kept = inside
    if keep_ptr is not None:
        kept = kept & (tl.load(address(keep_ptr, keep_row, columns, ALIGNED), mask=inside, other=0) != 0)
    return scaled, masked, tl.where(kept, masked, -float("inf"))


@triton.jit
def _exp(scores, shift, BASE2: tl.constexpr):
    """Return exp(scores - shift), or with the base 2 of scores that were multiplied by log2(e)."""
    return tl.exp2(scores - shift) if BASE2 else tl.exp(scores - shift)


@triton.jit
def _finite_shift(largest):
    """Return the shift, 0 where all scores so far are -inf, so that their exponentials are 0 and not NaN."""
    return tl.where(largest == -float("inf"), 0.0, largest)


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed.
@triton.jit(
    do_not_specialize=[
        "rows", "n", "size_1", "size_2", "scale", "x_stride_0", "x_stride_1", "x_stride_2",
        "mask_stride_0", "mask_stride_1", "mask_stride_2", "keep_stride_0", "keep_stride_1", "keep_stride_2",
    ],
    do_not_specialize_on_alignment=[
        "x_ptr", "mask_ptr", "keep_ptr", "output_ptr", "scaled_ptr", "masked_ptr", "total_ptr",
    ],
)  # fmt: skip
def _softmax_kernel(
    x_ptr, mask_ptr, keep_ptr, output_ptr, scaled_ptr, masked_ptr, total_ptr, scale,
    n, rows: tl.int64, size_1: tl.int64, size_2: tl.int64,
    x_stride_0: tl.int64, x_stride_1: tl.int64, x_stride_2: tl.int64,
    mask_stride_0: tl.int64, mask_stride_1: tl.int64, mask_stride_2: tl.int64,
    keep_stride_0: tl.int64, keep_stride_1: tl.int64, keep_stride_2: tl.int64,
    SCALED: tl.constexpr, ROUNDED: tl.constexpr, BASE2: tl.constexpr, ZERO_ROWS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows per program. Without LOOP a block covers a row, read once; else the sum is rescaled online."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    lanes = tl.arange(0, BLOCK)[None, :]
    if ALIGNED:
        n = n // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    end = n if LOOP else BLOCK
    x_row = row_start(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2, FLAT)
    mask_row = row_start(row, size_1, size_2, mask_stride_0, mask_stride_1, mask_stride_2, FLAT)
    keep_row = row_start(row, size_1, size_2, keep_stride_0, keep_stride_1, keep_stride_2, FLAT)
    out_row = row * n

    largest = tl.full([ROWS, 1], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    terms = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + lanes
        inside = live & (columns < n)
        scaled, masked, scores = _scores(
            x_ptr, mask_ptr, keep_ptr, x_row, mask_row, keep_row, columns, inside, scale, SCALED, ROUNDED, ALIGNED
        )
        if scaled_ptr is not None:
            tl.store(scaled_ptr + out_row + columns, scaled, mask=inside)
        if masked_ptr is not None:
            tl.store(masked_ptr + out_row + columns, masked, mask=inside)
        if BASE2:
            scores = scores * LOG2_E
        larger = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True))
        shift = _finite_shift(larger)
        terms = _exp(scores, shift, BASE2)
        total = total * _exp(largest, shift, BASE2) + tl.sum(terms, axis=1, keep_dims=True)
        largest = larger
    if total_ptr is not None:
        tl.store(total_ptr + row, total, mask=live)

    divisor = total
    if ZERO_ROWS:
        divisor = tl.where(largest == -float("inf"), tl.where(total == 0.0, 1.0, total), total)
    shift = _finite_shift(largest)
    for start in range(0, end, BLOCK):
        columns = start + lanes
        inside = live & (columns < n)
        if LOOP:
            _, _, scores = _scores(
                x_ptr, mask_ptr, keep_ptr, x_row, mask_row, keep_row, columns, inside, scale, SCALED, ROUNDED, ALIGNED
            )
            if BASE2:
                scores = scores * LOG2_E
            terms = _exp(scores, shift, BASE2)
        output = terms / divisor
        tl.store(address(output_ptr, out_row, columns, ALIGNED), output.to(output_ptr.dtype.element_ty), mask=inside)


@functools.lru_cache(maxsize=1024)
def _plan(
    x: Described, mask: Described | None, keep: Described | None, scaled: bool, rounded: bool, base2: bool,
    zero_rows: bool, fp32_output: bool, blocks: tuple[int, ...], stages: tuple[str, ...],
) -> CallPlan:  # fmt: skip
    """CallPlan a call; `fp32_output` chooses the compiled variant, and changes nothing else here."""
    check_arguments(x, mask, keep, stages)
    n = x.shape[-1]
    layout = layout_of([t for t in (x, mask, keep) if t is not None], dims=LEADING_DIMS)
    strides = iter(layout.strides)
    of_each = [next(strides) if t is not None else (0, 0, 0) for t in (x, mask, keep)]
    block = next((size for size in blocks if size >= n), blocks[-1])
    rows = max(1, ELEMENTS_PER_PROGRAM // block)
    aligned = whole_vectors(n, [t for t in (x, mask, keep) if t is not None], layout)
    parameters = {
        "n": n, "rows": layout.rows, "size_1": layout.sizes[1], "size_2": layout.sizes[2],
        **{f"{name}_stride_{i}": s for name, of in zip(("x", "mask", "keep"), of_each, strict=True)
           for i, s in enumerate(of)},
        "SCALED": scaled, "ROUNDED": rounded, "BASE2": base2, "ZERO_ROWS": zero_rows,
        "ROWS": rows, "BLOCK": block, "LOOP": n > block,
        "FLAT": aligned and layout.sizes[:-1] == (1, 1), "ALIGNED": aligned,
    }  # fmt: skip
    warps = max(1, rows * block // (32 * ELEMENTS_PER_THREAD))
    programs = triton.cdiv(layout.rows, rows)
    # With x · scale - shift in one FMA, exp overflows where the largest score was rounded down, by up to 10³⁰ of 10³⁷.
    launch = PlannedLaunch(_softmax_kernel, programs, parameters, num_warps=warps, enable_fp_fusion=False)
    return CallPlan(launch if layout.rows else None, layout.copied)


def softmax(
    x: Tensor,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    scale: float = 1.0,
    rounded: bool = False,
    base2: bool = False,
    zero_rows: bool = False,
    fp32_output: bool = False,
    blocks: tuple[int, ...] = BLOCKS,
    stages: tuple[str, ...] = (),
) -> Tensor | dict[str, Tensor]:
    """Compute the softmax over the last dimension of x · scale + mask where `keep` is true, and of -inf elsewhere.

    Args:
        x, mask: [..., N], bf16, fp16 or fp32, of one shape, each with its own strides. None is copied where its last
            dimension is contiguous and at most three leading dimensions remain after merging.
        keep: [..., N], bool.
        scale: factor of x.
        rounded, base2, zero_rows: the contract, see the module.
        fp32_output: whether the result is fp32 in place of x's dtype.
        blocks: columns of a block, of which the smallest is taken that covers a row.
        stages: which of `STAGES` to return too; those that the call has.

    Returns:
        The probabilities, contiguous; in fp32 or with stages, a mapping from names to tensors.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        UnsupportedCase: rows of no elements, or of more than 2³⁰.
    """
    scaled = scale != 1.0
    plan = _plan(
        described(x), described(mask), described(keep), scaled, rounded, base2, zero_rows, fp32_output, blocks,
        tuple(stages),
    )  # fmt: skip
    output = contiguous_like(x, dtype=torch.float32 if fp32_output else x.dtype)
    present = {"scaled": scaled and rounded, "masked": mask is not None and rounded, "total": True}
    columns = {"total": 1}
    stored = {
        name: contiguous_like(x, columns=columns.get(name), dtype=torch.float32) if name in stages and here else None
        for name, here in present.items()
    }
    if plan.launch is not None:
        if plan.copied:
            x, mask, keep = (t if t is None else t.contiguous() for t in (x, mask, keep))
        with current(x.device):
            plan.launch(x, mask, keep, output, *stored.values(), float(scale))
    name = "probabilities" if fp32_output else "output"
    return {name: output} | {n: t for n, t in stored.items() if t is not None} if stages or fp32_output else output


def _declare(contract: str, stages: tuple[str, ...], **options: object):
    """Register the kernel of one contract."""
    register = kernel(
        "softmax", contract=contract, name=f"triton[{contract}]", stages=stages, depth=summation_depth,
        invariant=("rows", "permutation", "padding", "run to run"),  # the tile follows from the width of a row
    )  # fmt: skip

    def of_contract(x, mask=None, keep=None, *, scale=1.0, fp32_output=False, stages=()):
        return softmax(x, mask, keep, scale=scale, fp32_output=fp32_output, stages=stages, **options)

    return register(of_contract)


KERNELS = (
    _declare("fp32_scores", ("total",)),
    _declare("rounded_scores", STAGES, rounded=True),
    _declare("fp32_scores+base2+zero_rows", ("total",), base2=True, zero_rows=True, blocks=ONLINE),
)
