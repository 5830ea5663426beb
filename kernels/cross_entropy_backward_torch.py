"""The gradient of cross entropy in PyTorch: written out, and by automatic differentiation of the library function.

cross_entropy_backward.py says what the arguments are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cross_entropy_arguments import check_options, check_tensors
from cross_entropy_torch import log_sum_exp
from torch import Tensor

from lastbit import kernel


@kernel("cross_entropy_backward", contract="from_lse", name="eager[cross_entropy_backward]", invariant=("run to run",))
def from_lse(
    logits, labels, grad_output, lse=None, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None,
    z_loss=0.0, count=None,
):  # fmt: skip
    check_options(label_smoothing, softcap, count)
    check_tensors(logits, labels, grad_output=grad_output, lse=lse)
    x = logits.float() * logit_scale
    squashed = None if softcap is None else torch.tanh(x / softcap)
    x = x if squashed is None else softcap * squashed
    lse = (log_sum_exp(x) if lse is None else lse)[:, None]
    probs = torch.exp(x - lse)
    if z_loss:
        probs = probs + 2 * z_loss * lse * probs
    counted = (labels != ignore_index)[:, None]
    onehot = (torch.arange(logits.shape[1], device=logits.device) == labels[:, None]) & counted
    error = torch.where(onehot, probs - (1 - label_smoothing), probs) - label_smoothing / logits.shape[1]
    if squashed is not None:
        error = error * (1 - squashed * squashed)
    grad = grad_output.float()[:, None] * logit_scale
    grad = grad if count is None else grad / count
    return torch.where(counted, error * grad, 0.0).to(logits.dtype)


@kernel(
    "cross_entropy_backward", contract="from_log_probs+times_zero", name="F.cross_entropy_backward[float]",
    invariant=("run to run",),
)  # fmt: skip
def library_of_float(logits, labels, grad_output, *, ignore_index=-100, label_smoothing=0.0, count=None):
    """Convert logits to fp32 first, as the losses of Transformers do."""
    return differentiated(logits, labels, grad_output, ignore_index, label_smoothing, count, torch.float32)


@kernel(
    "cross_entropy_backward", contract="rounded_log_probs+times_zero", name="F.cross_entropy_backward[cuda]",
    devices=("cuda",),
)  # fmt: skip
def library_of_cuda(logits, labels, grad_output, *, ignore_index=-100, label_smoothing=0.0, count=None):
    return differentiated(logits, labels, grad_output, ignore_index, label_smoothing, count, logits.dtype)


@kernel(
    "cross_entropy_backward", contract="rounded_log_sum+times_zero", name="F.cross_entropy_backward[cpu]",
    devices=("cpu",),
)  # fmt: skip
def library_of_cpu(logits, labels, grad_output, *, ignore_index=-100, label_smoothing=0.0, count=None):
    """Differentiate the library on a CPU, where log_softmax also rounds the sum of exponentials and its logarithm."""
    return differentiated(logits, labels, grad_output, ignore_index, label_smoothing, count, logits.dtype)


def differentiated(
    logits: Tensor, labels: Tensor, grad_output: Tensor, ignore_index: int, label_smoothing: float, count: int | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Differentiate the losses of logits of that dtype; their gradient is grad_output / count in it."""
    check_options(label_smoothing, None, count)
    check_tensors(logits, labels, grad_output=grad_output)
    leaf = logits.detach().requires_grad_()
    grad = grad_output if count is None else grad_output.float() / count
    with torch.enable_grad():
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
        losses = F.cross_entropy(leaf.to(dtype), labels.long(), **options)
    (found,) = torch.autograd.grad(losses, leaf, grad.to(dtype))
    return found
