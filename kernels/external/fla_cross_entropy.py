"""Cross entropy of flash-linear-attention (fla-core); read and identified for 0.6.0.

An ignored row gets a gradient of 0 · (softmax - 1), which is NaN where a logit is.
"""

from __future__ import annotations

import torch
from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel

TAKES = {"tensors": "non-empty", "labels layout": "contiguous"}


def losses_of(logits, labels, ignore_index, label_smoothing, logit_scale, softcap, z_loss):
    refuse_elsewhere(logits, labels=labels)
    found, _ = upstream("fla.modules.fused_cross_entropy", "fla-core einops").cross_entropy_loss(
        logits, labels, label_smoothing, logit_scale, z_loss, softcap, ignore_index
    )
    return found


@kernel("cross_entropy", contract="from_lse", name="fla[cross_entropy]", takes=TAKES)
def cross_entropy(logits, labels, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0):
    with torch.no_grad():
        return {"losses": losses_of(logits, labels, ignore_index, label_smoothing, logit_scale, softcap, z_loss)}


@kernel("cross_entropy_backward", contract="from_lse+times_zero", name="fla[cross_entropy_backward]", takes=TAKES)
def cross_entropy_backward(
    logits, labels, grad_output, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0
):
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = losses_of(leaf, labels, ignore_index, label_smoothing, logit_scale, softcap, z_loss)
    (found,) = torch.autograd.grad(losses, leaf, grad_output.float())
    return found
