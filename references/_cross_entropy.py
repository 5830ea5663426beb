"""Shared parts of cross entropy and its gradient: labels, scaled logits, and the weights of smoothing."""

from __future__ import annotations

from dataclasses import dataclass

from lastbit import Contract, StageRecorder
from lastbit.numerics import (
    Enclosure,
    Tensor,
    amax,
    divide,
    exp,
    fusible_product,
    hull,
    log,
    log_softmax,
    tanh,
    total,
)
from lastbit.references._shapes import check_shapes

ROUNDED_LOG_PROBS = {"log_probs": "logits"}
ROUNDED_LOG_SUM = {"exp_sum": "logits", "log_sum": "logits", "log_probs": "logits"}
"""What is rounded where log_softmax is stored in the dtype of the logits; on a CPU torch rounds the sum as well."""


@dataclass(frozen=True)
class Labels:
    """The label of each row.

    Attributes:
        index: [T, 1], int64: the class; 0 where the row is ignored.
        ignored: [T, 1], bool.
        onehot: [T, V], bool: the class of each row that counts.
    """

    index: Tensor
    ignored: Tensor
    onehot: Tensor


def labels_of(logits: Enclosure, labels: Tensor, ignore_index: int) -> Labels:
    """Locate the label of each row of logits [T, V].

    Raises:
        ValueError: there is not one label per row, or one is neither a class nor `ignore_index`.
    """
    if len(logits.shape) != 2 or not logits.shape[1]:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; it must be [T, V] with V ≥ 1")
    check_shapes({"labels": (labels, tuple(logits.shape[:1]))})
    classes, column = logits.shape[1], labels[:, None].long()
    ignored = column == ignore_index
    index = column.masked_fill(ignored, 0)
    if bool(((index < 0) | (index >= classes)).any()):
        wrong = int(index[(index < 0) | (index >= classes)][0])
        raise ValueError(f"a label is {wrong}; it must be from 0 to {classes - 1}, or ignore_index={ignore_index}")
    places = index.new_ones(classes).cumsum(0) - 1
    return Labels(index, ignored, (places == index) & ~ignored)


@dataclass(frozen=True)
class Scaled:
    """Logits as the softmax sees them: times a scale, then cap · tanh(x / cap).

    Attributes:
        logits: [T, V].
        squashed: tanh(x / cap), None without a cap.
    """

    logits: Enclosure
    squashed: Enclosure | None


def scaled(logits: Enclosure, logit_scale: float, softcap: float | None, stage: StageRecorder) -> Scaled:
    """Scale and cap the logits; both products may be fused into the difference with the maximum that follows.

    Raises:
        ValueError: a cap that is not positive.
    """
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be positive, or None")
    value, squashed = logits, None
    if logit_scale != 1.0:
        value = fusible_product(value, logit_scale)
    if softcap is not None:
        squashed = stage("squashed", tanh(divide(value, softcap)))
        value = fusible_product(squashed, softcap)
    return Scaled(value if value is logits else stage("scaled_logits", value), squashed)


@dataclass(frozen=True)
class Smoothing:
    """A smoothed label: 1 - s on the class, and s / V on each class, [1] each.

    A kernel may compute these from s in fp32, or get them from a host that has s in fp64.
    """

    own: Enclosure
    kept: Enclosure
    each: Enclosure


def number(value: float, like: Tensor) -> Enclosure:
    """Round a number to fp32, [1], on the device of a tensor."""
    return Enclosure.point(like.new_ones(()).float() * value).reshape(1)


def smoothing_of(label_smoothing: float, classes: int, like: Tensor) -> Smoothing:
    """Compute the parts of a smoothed label on the device of a tensor; ValueError if the smoothing is not in [0, 1]."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    numbers = label_smoothing, 1.0 - label_smoothing, label_smoothing / classes
    own, kept, each = (number(value, like) for value in numbers)
    return Smoothing(own, hull(kept, 1.0 - own), hull(each, divide(own, float(classes))))


def log_probs_of(x: Enclosure, contract: Contract, stage: StageRecorder) -> Enclosure:
    """Compute the log-softmax of rows, (x - max(x)) - log(sum(exp(x - max(x)))), as the contract rounds it."""
    if not contract.has("rounded_log_sum"):
        return stage("log_probs", log_softmax(x))
    shifted = x - amax(x)
    exp_sum = stage("exp_sum", total(exp(shifted)))
    return stage("log_probs", shifted - stage("log_sum", log(exp_sum)))
