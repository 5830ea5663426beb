"""Cross entropy of liger-kernel; read and identified for 0.8.5.

It stores losses in the dtype of the logits, and the gradient in their place. The mean is left out: each loss is divided
by the number of rows that count, rounded to the dtype of the logits, and only then added, for which the op has no
contract.
"""

from __future__ import annotations

import torch
from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel


def function():
    return upstream("liger_kernel.ops.cross_entropy", "liger-kernel").LigerCrossEntropyFunction


def losses_of(logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction):
    refuse_elsewhere(logits, labels=labels)
    found, *_ = function().apply(
        logits, labels, None, ignore_index, z_loss, label_smoothing, reduction, softcap, False, False, False
    )
    return found


@kernel(
    "cross_entropy", contract="from_lse+rounded_losses", name="liger[cross_entropy]", mutates=("logits",),
    takes={"tensors": "non-empty", "reduction": ("none", "sum", None)},
)  # fmt: skip
def cross_entropy(
    logits, labels, *, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, reduction="none"
):
    """Call Liger's function, which sets the logits of ignored rows to 0 without a gradient, too."""
    with torch.no_grad():
        found = losses_of(logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction)
    return {"losses": found} if reduction == "none" else {"loss": found[None]}


@kernel(
    "cross_entropy_backward", contract="normalized+rounded_gradient", name="liger[cross_entropy_backward]",
    mutates=("logits",), takes={"tensors": ("one dtype", "contiguous", "non-empty")},
)  # fmt: skip
def cross_entropy_backward(
    logits, labels, grad_output, *, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0
):
    """Call autograd, for losses of the logits' dtype; of logits with gaps between columns it gives no gradient."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = losses_of(leaf, labels, ignore_index, label_smoothing, softcap, z_loss, "none")
    (found,) = torch.autograd.grad(losses, leaf, grad_output)
    return found
