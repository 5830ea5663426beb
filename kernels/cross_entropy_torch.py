"""Cross entropy in PyTorch: written out, and the library function on either dtype.

cross_entropy.py says what the arguments are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cross_entropy_arguments import check_options, check_tensors
from torch import Tensor

from lastbit import kernel


def as_softmax_sees(logits: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    """Return cap · tanh(scale · logits / cap) in fp32."""
    x = logits.float() * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def log_sum_exp(x: Tensor) -> Tensor:
    """Return log(sum(exp(x))) of rows [T, V]: [T]. Unlike torch.logsumexp it makes a row with an infinity NaN."""
    largest = x.amax(-1)
    shift = torch.where(largest.isneginf(), 0.0, largest)
    return torch.log(torch.exp(x - shift[:, None]).sum(-1)) + shift


def reduced(losses: Tensor, counted: Tensor, reduction: str, count: int | None) -> dict[str, Tensor]:
    """Return the losses, or their sum or mean over the rows that count."""
    if reduction == "none":
        return {"losses": losses}
    total = losses.float().sum()[None]
    if reduction == "mean":
        total = total / (counted.sum() if count is None else count)
    return {"loss": total.to(losses.dtype)}


@kernel("cross_entropy", contract="from_lse", name="eager[cross_entropy]", invariant=("run to run",))
def from_lse(
    logits, labels, *, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0,
    reduction="none", count=None,
):  # fmt: skip
    check_options(label_smoothing, softcap, count, reduction)
    check_tensors(logits, labels)
    x = as_softmax_sees(logits, logit_scale, softcap)
    lse, counted = log_sum_exp(x), labels != ignore_index
    own = x.gather(1, labels.where(counted, 0).long()[:, None])[:, 0]
    losses = lse - own
    if label_smoothing:
        losses = lse - label_smoothing * x.sum(-1) / x.shape[-1] - (1 - label_smoothing) * own
    if z_loss:
        losses = losses + z_loss * lse * lse
    return reduced(torch.where(counted, losses, 0.0), counted, reduction, count)


@kernel("cross_entropy", contract="from_log_probs", name="F.cross_entropy[float]", invariant=("run to run",))
def library_of_float(logits, labels, *, ignore_index=-100, label_smoothing=0.0, reduction="none", count=None):
    """Convert logits to fp32 first, as the losses of Transformers do."""
    return library(logits.float(), labels, ignore_index, label_smoothing, reduction, count)


@kernel("cross_entropy", contract="rounded_log_probs", name="F.cross_entropy[cuda]", devices=("cuda",))
def library_of_cuda(logits, labels, *, ignore_index=-100, label_smoothing=0.0, reduction="none", count=None):
    return library(logits, labels, ignore_index, label_smoothing, reduction, count)


@kernel(
    "cross_entropy", contract="rounded_log_sum", name="F.cross_entropy[cpu]", devices=("cpu",),
    takes={"reduction": ("none", None)},
)  # fmt: skip
@kernel(
    "cross_entropy", contract="rounded_log_sum", name="F.cross_entropy[cpu+fp32]", devices=("cpu",),
    takes={"logits dtype": "fp32"},
)  # fmt: skip
def library_of_cpu(logits, labels, *, ignore_index=-100, label_smoothing=0.0, reduction="none", count=None):
    """Call the library on a CPU, where the sum of exponentials and its logarithm are rounded, too.

    Losses are added in their own dtype, which agrees with a contract in fp32 alone.
    """
    return library(logits, labels, ignore_index, label_smoothing, reduction, count)


def library(logits, labels, ignore_index, label_smoothing, reduction, count):
    check_options(label_smoothing, None, count, reduction)
    check_tensors(logits, labels)
    how = "sum" if count is not None else reduction
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": how}
    found = F.cross_entropy(logits, labels.long(), **options)
    found = found if count is None else found / count
    return {"losses": found} if reduction == "none" else {"loss": found[None]}
