"""Cross entropy in Triton: one pass over the logits, with the maximum and the sum of exponentials so far.

Arithmetic is fp32, and the loss of a row is stored in fp32, or under `rounded_losses` in the dtype of the logits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from cross_entropy_arguments import FORWARD_STAGES, check_options, check_tensors
from cross_entropy_rows import columns_of, logits_at, summation_depth, tile
from described import Described, PlannedLaunch, current, described
from torch import Tensor

from lastbit import kernel

SUM_BLOCK = 1024


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed.
@triton.jit(
    do_not_specialize=[
        "n", "rows", "row_stride", "column_stride", "label_stride", "ignore_index", "kept", "each", "logit_scale",
        "softcap", "z_loss",
    ],
    do_not_specialize_on_alignment=["logits_ptr", "labels_ptr", "losses_ptr", "lse_ptr", "largest_ptr", "sum_ptr"],
)  # fmt: skip
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, lse_ptr, largest_ptr, sum_ptr,
    n, rows: tl.int64, row_stride: tl.int64, column_stride: tl.int64, label_stride: tl.int64, ignore_index: tl.int64,
    kept, each, logit_scale, softcap, z_loss,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows per program. Without LOOP a block covers a row. Losses are stored if there is a place for them.

    `largest` and `sum` give lse = largest + log(sum).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    lanes = tl.arange(0, BLOCK)[None, :]
    if ALIGNED:
        n = n // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    end = n if LOOP else BLOCK
    row_ptr = logits_ptr + row * row_stride

    largest = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    every = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + lanes
        mask = live & (columns < n)
        pointers = columns_of(row_ptr, columns, column_stride, ALIGNED)
        x, _ = logits_at(pointers, mask, logit_scale, softcap)
        higher = tl.maximum(largest, tl.max(tl.where(mask, x, float("-inf")), axis=1, keep_dims=True))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far
        terms = tl.where(mask, tl.exp(x - shift), 0.0)
        total = total * tl.exp(largest - shift) + tl.sum(terms, axis=1, keep_dims=True)
        largest = higher
        if SMOOTH:
            every += tl.where(mask, x, 0.0)
    lse = largest + tl.log(total)
    tl.store(lse_ptr + row, lse, mask=live)
    if sum_ptr is not None:
        tl.store(largest_ptr + row, largest, mask=live)
        tl.store(sum_ptr + row, total, mask=live)

    if losses_ptr is not None:
        label = tl.load(labels_ptr + row * label_stride, mask=live, other=0).to(tl.int64)
        counted = live & (label != ignore_index)
        own, _ = logits_at(row_ptr + label * column_stride, counted, logit_scale, softcap)
        loss = lse - own
        if SMOOTH:
            loss = lse - tl.sum(every, axis=1, keep_dims=True) * each - own * kept
        if z_loss is not None:
            loss += z_loss * lse * lse
        loss = tl.where(counted, loss, 0.0)
        tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "label_stride", "ignore_index", "count"])
def _reduce_kernel(
    losses_ptr, labels_ptr, loss_ptr, rows: tl.int64, label_stride: tl.int64, ignore_index: tl.int64, count,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add all losses in one program, lane by lane; for MEAN divide by `count`, or by the number of rows that count."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + lanes
        total += tl.load(losses_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
        if MEAN:
            label = tl.load(labels_ptr + row * label_stride, mask=row < rows, other=ignore_index)
            counted += (label != ignore_index).to(tl.int32)
    loss = tl.sum(total, axis=0)
    if MEAN:
        loss = tl.div_rn(loss, tl.sum(counted, axis=0).to(tl.float32) if count is None else count)
    tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "none",
    count: int | None = None,
    rounded_losses: bool = False,
    stages: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Compute losses = lse - x[label] with lse = log(sum(exp(x))) and x = cap · tanh(scale · logits / cap).

    Args:
        logits: [T, V], bf16, fp16 or fp32, with any strides; not copied.
        labels: [T], int64 or int32, classes below V or `ignore_index`, whose rows have a loss of 0.
        label_smoothing: s, the part of a label that is spread over all classes.
        logit_scale, softcap: see above; None for no cap.
        z_loss: z · lse² is added to a loss.
        reduction: `none`; `sum`; or `mean`, the sum divided by the number of rows that count, or by `count`.
        rounded_losses: whether losses and their sum are stored in the dtype of the logits, and not in fp32.
        stages: which of `FORWARD_STAGES` to return too.

    Returns:
        `losses` [T] or, reduced, `loss` [1]; and the stages, `lse` [T] in fp32 and `losses`.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        UnsupportedCase: no classes, or more than 2³⁰.
    """
    check_options(label_smoothing, softcap, count, reduction, stages)
    dtype = logits.dtype if rounded_losses else torch.float32
    losses = torch.empty(logits.shape[:1], dtype=dtype, device=logits.device)
    lse = torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device)
    forward(
        logits, labels, losses, lse, ignore_index=ignore_index, label_smoothing=label_smoothing,
        logit_scale=logit_scale, softcap=softcap, z_loss=z_loss,
    )  # fmt: skip
    found = {name: tensor for name, tensor in (("lse", lse), ("losses", losses)) if name in stages}
    if reduction == "none":
        return found | {"losses": losses}
    loss = torch.empty(1, dtype=dtype, device=logits.device)
    with current(logits.device):
        _reduce_kernel[(1,)](
            losses, labels, loss, len(losses), labels.stride(0), ignore_index, None if count is None else float(count),
            MEAN=reduction == "mean", BLOCK=SUM_BLOCK,
        )  # fmt: skip
    return found | {"loss": loss}


def forward(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    largest: Tensor | None = None,
    total: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> None:
    """Store the logarithms of the sums, and losses, largest logits and sums where there is a tensor for them."""
    launch = _launch(
        described(logits), described(labels), ignore_index, label_smoothing, float(logit_scale), softcap, z_loss,
        None if losses is None else losses.dtype, largest is None,
    )  # fmt: skip
    if launch is not None:
        with current(logits.device):
            launch(logits, labels, losses, lse, largest, total)


@functools.lru_cache(maxsize=1024)
def _launch(
    logits: Described, labels: Described, ignore_index: int, label_smoothing: float, logit_scale: float,
    softcap: float | None, z_loss: float, stored: torch.dtype | None, alone: bool,
) -> PlannedLaunch | None:  # fmt: skip
    """Prepare the launch; the dtype of losses, and whether largest logits are stored, choose the compiled variant."""
    check_tensors(logits, labels)
    count, n = logits.shape
    cut = tile(logits)
    parameters = {
        "n": n, "rows": count, "row_stride": logits.strides[0], "column_stride": logits.strides[1],
        "label_stride": labels.strides[0], "ignore_index": ignore_index,
        "kept": 1.0 - label_smoothing, "each": label_smoothing / n, "logit_scale": logit_scale,
        "softcap": None if softcap is None else float(softcap), "z_loss": float(z_loss) or None,
        "SMOOTH": label_smoothing > 0, "ROWS": cut.rows, "BLOCK": cut.block, "LOOP": n > cut.block,
        "ALIGNED": cut.aligned,
    }  # fmt: skip
    programs = triton.cdiv(count, cut.rows)
    launch = PlannedLaunch(_cross_entropy_kernel, programs, parameters, num_warps=cut.num_warps, enable_fp_fusion=False)
    return launch if count else None


def _declare(name: str, contract: str, *, rounded_losses: bool) -> None:
    """Register the kernel of one contract."""

    @kernel(
        "cross_entropy", contract=contract, name=f"triton[{name}]", stages=FORWARD_STAGES, depth=summation_depth,
        invariant=("rows", "permutation", "run to run"),
    )  # fmt: skip
    def cross_entropy_of(
        logits, labels, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0,
        reduction="none", count=None, stages=(),
    ):  # fmt: skip
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "logit_scale": logit_scale}
        options |= {"softcap": softcap, "z_loss": z_loss, "reduction": reduction, "count": count, "stages": stages}
        return cross_entropy(logits, labels, rounded_losses=rounded_losses, **options)


_declare("cross_entropy", "from_lse", rounded_losses=False)
_declare("cross_entropy+rounded_losses", "from_lse+rounded_losses", rounded_losses=True)
