"""The gradient of cross entropy in Triton: elementwise from the logits and the forward pass's statistics of each row.

Arithmetic is fp32. Under `from_lse` a probability is exp(x - lse), under `normalized` exp(x - largest) / sum; under
`rounded_gradient` the gradient is rounded to the dtype of the logits before it is multiplied by grad_output.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from cross_entropy import forward
from cross_entropy_arguments import BACKWARD_STAGES, check_options, check_tensors
from cross_entropy_rows import columns_of, logits_at, summation_depth, tile
from described import Described, PlannedLaunch, current, described
from torch import Tensor

from lastbit import kernel


@triton.jit(
    do_not_specialize=[
        "n", "rows", "row_stride", "column_stride", "label_stride", "grad_stride", "lse_stride", "ignore_index", "kept",
        "each", "logit_scale", "softcap", "twice_z", "count", "parts",
    ],
    do_not_specialize_on_alignment=[
        "logits_ptr", "labels_ptr", "grad_ptr", "lse_ptr", "largest_ptr", "sum_ptr", "difference_ptr", "gradient_ptr",
        "result_ptr",
    ],
)  # fmt: skip
def _gradient_kernel(
    logits_ptr, labels_ptr, grad_ptr, lse_ptr, largest_ptr, sum_ptr, difference_ptr, gradient_ptr, result_ptr,
    n, parts, rows: tl.int64, row_stride: tl.int64, column_stride: tl.int64, label_stride: tl.int64,
    grad_stride: tl.int64, lse_stride: tl.int64, ignore_index: tl.int64,
    kept, each, logit_scale, softcap, twice_z, count,
    ROUNDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows and BLOCK columns per program; `parts` programs cover a row."""
    X: tl.constexpr = logits_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    row = program // parts * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (program % parts).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = row < rows
    if ALIGNED:
        n = n // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    mask = live & (columns < n)
    label = tl.load(labels_ptr + row * label_stride, mask=live, other=ignore_index).to(tl.int64)
    counted = label != ignore_index
    grad = tl.load(grad_ptr + row * grad_stride, mask=live & counted, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row * lse_stride, mask=live, other=0.0)

    x, squashed = logits_at(columns_of(logits_ptr + row * row_stride, columns, column_stride, ALIGNED), mask,
                            logit_scale, softcap)  # fmt: skip
    if sum_ptr is None:
        probs = tl.exp(x - lse)
    else:
        largest = tl.load(largest_ptr + row, mask=live, other=0.0)
        probs = tl.exp(x - largest) / tl.load(sum_ptr + row, mask=live, other=1.0)
    if twice_z is not None:
        probs += twice_z * lse * probs
    difference = probs - each
    difference = tl.where(counted & (columns == label), difference - kept, difference)
    if difference_ptr is not None:
        tl.store(difference_ptr + row * n + columns, difference, mask=mask)
    if softcap is not None:
        difference = difference * (1.0 - squashed * squashed)
    if count is not None:
        difference = difference / count
    if ROUNDED:
        gradient = (difference * logit_scale).to(X).to(tl.float32)
        result = gradient * grad
    else:
        gradient = difference
        result = difference * (grad * logit_scale)
    if gradient_ptr is not None:
        tl.store(gradient_ptr + row * n + columns, gradient, mask=mask)
    result = tl.where(counted, result, 0.0)
    tl.store(columns_of(result_ptr + row * n, columns, 1, ALIGNED), result.to(X), mask=mask)


def cross_entropy_backward(
    logits: Tensor,
    labels: Tensor,
    grad_output: Tensor,
    lse: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    count: int | None = None,
    normalized: bool = False,
    rounded_gradient: bool = False,
    stages: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Compute (softmax(x) - (1 - s) · onehot - s / V) · dx/dlogits · grad_output / count, 0 in ignored rows.

    Args:
        logits, labels, ignore_index, label_smoothing, logit_scale, softcap, z_loss: as of the forward pass.
        grad_output: [T], of the loss of each row, bf16, fp16 or fp32; a stride of 0 repeats that of a sum.
        lse: [T], fp32, as the forward pass saved it; computed anew without it.
        count: what the forward pass divided the sum of the losses by; 1 if None.
        normalized, rounded_gradient: the contract, see the module.
        stages: which of `BACKWARD_STAGES` to return too: `lse` where none is given, and [T, V] `difference`
            and `gradient`, which is rounded under `rounded_gradient`.

    Returns:
        `grad_logits` [T, V], contiguous, of the dtype of the logits.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        UnsupportedCase: no classes, or more than 2³⁰.
    """
    check_options(label_smoothing, softcap, count, stages=stages, known=BACKWARD_STAGES)
    found: dict[str, Tensor] = {}
    check_tensors(logits, labels, grad_output=grad_output, lse=lse)
    largest = total = None
    if lse is None:
        lse = found["lse"] = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        if normalized:
            largest, total = torch.empty_like(lse), torch.empty_like(lse)
        forward(
            logits, labels, None, lse, largest, total, ignore_index=ignore_index, logit_scale=logit_scale,
            softcap=softcap,
        )  # fmt: skip
    elif normalized:
        raise ValueError("lse is given, but normalized takes the largest logit and the sum: leave it out")
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for name in ("difference", "gradient"):
        if name in stages:
            found[name] = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    kept = found.get("difference"), found.get("gradient")
    launch = _launch(
        described(logits), described(labels), described(grad_output), described(lse), ignore_index, label_smoothing,
        float(logit_scale), softcap, z_loss, count, rounded_gradient, (total is None, *(t is None for t in kept)),
    )  # fmt: skip
    if launch is not None:
        with current(logits.device):
            launch(logits, labels, grad_output, lse, largest, total, *kept, grad_logits)
    return {name: tensor for name, tensor in found.items() if name in stages} | {"grad_logits": grad_logits}


@functools.lru_cache(maxsize=1024)
def _launch(
    logits: Described, labels: Described, grad: Described, lse: Described, ignore_index: int, label_smoothing: float,
    logit_scale: float, softcap: float | None, z_loss: float, count: int | None, rounded_gradient: bool,
    left_out: tuple[bool, ...],
) -> PlannedLaunch | None:  # fmt: skip
    """Prepare the launch for tensors like these, None for those left out; return None where there are no rows."""
    rows, n = logits.shape
    cut = tile(logits)
    parts = triton.cdiv(n, cut.block)
    parameters = {
        "n": n, "parts": parts, "rows": rows, "row_stride": logits.strides[0], "column_stride": logits.strides[1],
        "label_stride": labels.strides[0], "grad_stride": grad.strides[0], "lse_stride": lse.strides[0],
        "ignore_index": ignore_index, "kept": 1.0 - label_smoothing, "each": label_smoothing / n,
        "logit_scale": logit_scale, "softcap": None if softcap is None else float(softcap),
        "twice_z": 2.0 * z_loss or None, "count": None if count is None else float(count),
        "ROUNDED": rounded_gradient, "ROWS": cut.rows, "BLOCK": cut.block, "ALIGNED": cut.aligned,
    }  # fmt: skip
    programs = triton.cdiv(rows, cut.rows) * parts
    # With x · scale - largest in one FMA, exp overflows where the largest logit was rounded down.
    launch = PlannedLaunch(_gradient_kernel, programs, parameters, num_warps=cut.num_warps, enable_fp_fusion=False)
    return launch if rows else None


@kernel(
    "cross_entropy_backward", contract="from_lse", name="triton[cross_entropy_backward]", stages=("lse", "difference"),
    depth=summation_depth, invariant=("rows", "permutation", "run to run"),
)  # fmt: skip
def from_lse(
    logits, labels, grad_output, lse=None, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None,
    z_loss=0.0, count=None, stages=(),
):  # fmt: skip
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "logit_scale": logit_scale}
    options |= {"softcap": softcap, "z_loss": z_loss, "count": count, "stages": stages}
    return cross_entropy_backward(logits, labels, grad_output, lse, **options)


@kernel(
    "cross_entropy_backward", contract="normalized+rounded_gradient",
    name="triton[cross_entropy_backward+rounded_gradient]", stages=("difference", "gradient"), depth=summation_depth,
    invariant=("rows", "permutation", "run to run"),
)  # fmt: skip
def normalized(
    logits, labels, grad_output, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0,
    count=None, stages=(),
):  # fmt: skip
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "logit_scale": logit_scale}
    options |= {"softcap": softcap, "z_loss": z_loss, "count": count, "stages": stages}
    return cross_entropy_backward(logits, labels, grad_output, normalized=True, rounded_gradient=True, **options)
