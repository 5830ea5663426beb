"""Cross entropy of flash-attn in Triton; read for commit 058ad35 (flash_attn/ops/triton/cross_entropy.py).

An ignored row gets a gradient of 0 · (softmax - 1), which is NaN where a logit is.
"""

from __future__ import annotations

import torch
from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel

TAKES = {"tensors": "non-empty", "labels layout": "contiguous"}


def losses_of(logits, labels, ignore_index, label_smoothing, logit_scale, z_loss):
    refuse_elsewhere(logits, labels=labels)
    found, _ = upstream("flash_attn.ops.triton.cross_entropy", "flash-attn").cross_entropy_loss(
        logits, labels, None, label_smoothing, logit_scale, z_loss, ignore_index
    )
    return found


@kernel("cross_entropy", contract="from_lse", name="flash_attn[cross_entropy]", devices=("cuda",), takes=TAKES)
def cross_entropy(logits, labels, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, z_loss=0.0):
    with torch.no_grad():
        return {"losses": losses_of(logits, labels, ignore_index, label_smoothing, logit_scale, z_loss)}


@kernel(
    "cross_entropy_backward", contract="from_lse+times_zero", name="flash_attn[cross_entropy_backward]",
    devices=("cuda",), takes=TAKES,
)  # fmt: skip
def cross_entropy_backward(
    logits, labels, grad_output, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, z_loss=0.0
):
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = losses_of(leaf, labels, ignore_index, label_smoothing, logit_scale, z_loss)
    (found,) = torch.autograd.grad(losses, leaf, grad_output.float())
    return found
