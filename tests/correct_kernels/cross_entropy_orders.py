"""Cross entropy in PyTorch with sums in many orders, shifts and forms: all keep the contract, with other bits each."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from summation import halves, library, reversed_, running
from torch import Tensor

from lastbit.kernel import kernel

LogSum = Callable[[Tensor], Tensor]  # x [T, V] in fp32 → [T, 1]
LN_2 = math.log(2.0)
LOG2_E = math.log2(math.e)


def shifted_by(x: Tensor) -> Tensor:
    """Return the largest element, 0 where it is -inf."""
    largest = x.amax(-1, keepdim=True)
    return torch.where(largest.isneginf(), 0.0, largest)


def by_sum(total: Callable[[Tensor], Tensor]) -> LogSum:
    return lambda x: shifted_by(x) + torch.log(total(torch.exp(x - shifted_by(x))))


def binary(x: Tensor) -> Tensor:
    """Powers of two, and the binary logarithm."""
    return shifted_by(x) + torch.log2(torch.exp2((x - shifted_by(x)) * LOG2_E).sum(-1, keepdim=True)) * LN_2


def online(size: int) -> LogSum:
    """Parts of so many classes, the sum of those before rescaled where a part has a larger element."""

    def log_sum(x: Tensor) -> Tensor:
        largest = torch.full_like(x[:, :1], -torch.inf)
        total = torch.zeros_like(largest)
        for part in x.split(size, -1):
            higher = torch.maximum(largest, part.amax(-1, keepdim=True))
            shift = torch.where(higher.isneginf(), 0.0, higher)
            total = total * torch.exp(largest - shift) + torch.exp(part - shift).sum(-1, keepdim=True)
            largest = higher
        return largest + torch.log(total)

    return log_sum


def joined(size: int) -> LogSum:
    """Logarithms of the sums of parts, of which the logarithm of the sum is taken in turn."""

    def log_sum(x: Tensor) -> Tensor:
        parts = torch.cat([by_sum(library)(part) for part in x.split(size, -1)], -1)
        return by_sum(library)(parts)

    return log_sum


def fp64(x: Tensor) -> Tensor:
    return by_sum(library)(x.double()).float()


LOG_SUMS: dict[str, LogSum] = {
    "running": by_sum(running),
    "reversed": by_sum(reversed_),
    "halves": by_sum(halves),
    "binary": binary,
    "online 1": online(1),
    "online 64": online(64),
    "joined 32": joined(32),
    "joined 100": joined(100),
    "fp64": fp64,
}


def losses_of(form: str, x: Tensor, lse: Tensor, own: Tensor, s: float) -> Tensor:
    """Losses with the label smoothed in one of the forms that are in use."""
    count = x.shape[-1]
    if not s:
        return lse - own if form != "last" else -own + lse
    if form == "split":
        return (lse - own) * (1 - s) + ((-s / count * x).sum(-1, keepdim=True) + s * lse)
    if form == "last":
        return ((1 - s) * -own - s * x.sum(-1, keepdim=True) / count) + lse
    return lse - s * x.sum(-1, keepdim=True) / count - (1 - s) * own


def declare(name: str, log_sum: LogSum, form: str) -> None:
    @kernel("cross_entropy", contract="from_lse", name=f"order[{name}, {form}]")
    def cross_entropy(
        logits, labels, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="none", count=None
    ):
        x, counted = logits.float(), labels != ignore_index
        lse, own = log_sum(x), x.gather(1, labels.where(counted, 0).long()[:, None])
        losses = losses_of(form, x, lse, own, label_smoothing)
        losses = losses + z_loss * lse * lse if z_loss else losses
        losses = torch.where(counted[:, None], losses, 0.0)
        if reduction == "none":
            return {"losses": losses[:, 0]}
        loss = running(losses.mT)[0] if len(losses) else losses.sum(0)
        return {"loss": loss if reduction == "sum" else loss / (counted.sum() if count is None else count)}

    @kernel("cross_entropy_backward", contract="from_lse", name=f"order_backward[{name}, {form}]")
    def backward(
        logits, labels, grad_output, lse=None, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, count=None
    ):
        x, counted = logits.float(), (labels != ignore_index)[:, None]
        lse = log_sum(x) if lse is None else lse[:, None]
        probs = torch.exp(x - lse) if form != "last" else torch.exp2((x - lse) * LOG2_E)
        probs = probs + 2 * z_loss * lse * probs if z_loss else probs
        onehot = (torch.arange(x.shape[1]) == labels[:, None]) & counted
        kept, each = 1 - label_smoothing, label_smoothing / x.shape[1]
        if form == "split":
            difference = torch.where(onehot, probs - each - kept, probs - each)
        else:
            difference = torch.where(onehot, probs - kept, probs) - each
        grad = grad_output.float()[:, None]
        if count is not None and form == "split":
            difference = difference / count
        elif count is not None:
            grad = grad / count if form == "last" else grad * (1.0 / count)
        return torch.where(counted, difference * grad, 0.0).to(logits.dtype)


for _number, (_name, _log_sum) in enumerate(LOG_SUMS.items()):
    declare(_name, _log_sum, ("first", "split", "last")[_number % 3])
