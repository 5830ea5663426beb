"""Cross entropy of logits and integer labels, with label smoothing, z-loss, a scale and a soft cap of the logits.

Rules as found in torch, Transformers, Liger, flash-attn and flash-linear-attention; docs/contracts/cross_entropy.md
lists who keeps which.
"""

from __future__ import annotations

from collections.abc import Callable

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import (
    Enclosure,
    Tensor,
    divide,
    fusible_product,
    gather,
    hull,
    in_reals,
    log_softmax,
    log_sum_exp,
    multiply_add,
    sum_in_any_order,
    sum_of_rows,
    total,
    total_of_products,
)
from lastbit.references._cross_entropy import (
    ROUNDED_LOG_PROBS,
    ROUNDED_LOG_SUM,
    Smoothing,
    labels_of,
    log_probs_of,
    scaled,
    smoothing_of,
)

REDUCTIONS = ("none", "sum", "mean")
_ROUNDED = ("smooth_loss", "weighted_loss", "weighted_smooth", "losses", "loss")

Rounding = Callable[[str, Enclosure], Enclosure]
"""Name of a value and the value → the value as the contract has it."""


@op(
    rows=("logits", "labels"),
    returns=("loss", "losses"),
    integers=("labels",),
    axes={
        "formula": {
            "from_lse": {},
            "from_log_probs": {},
            "rounded_log_probs": {**ROUNDED_LOG_PROBS, **dict.fromkeys(_ROUNDED, "logits")},
            "rounded_log_sum": {**ROUNDED_LOG_SUM, **dict.fromkeys(_ROUNDED, "logits")},
        },
        "result": {"": {}, "rounded_losses": {"losses": "logits", "loss": "logits"}},
    },
    torch_ops=("aten::cross_entropy_loss", "aten::nll_loss_nd"),
)
def cross_entropy(
    logits: Enclosure,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "none",
    count: int | None = None,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """losses = lse - x[label] with lse = log(sum(exp(x))) and x = cap · tanh(scale · logits / cap); 0 of ignored rows.

    logits: [T, V]; labels: [T], integers. The result is `losses` [T], or with a `reduction` `loss` [1], their sum, for
    `mean` divided by the number of rows that are not ignored, or by `count`. `z_loss` adds z · lse² to a loss.

    Raises:
        ValueError: parameters that have no meaning together, or tensors that do not fit.
    """
    _check(z_loss, reduction, count, contract)
    rows = labels_of(logits, labels, ignore_index)
    smoothing = smoothing_of(label_smoothing, logits.shape[1], labels) if label_smoothing else None
    x = scaled(logits, logit_scale, softcap, stage).logits
    counted = Enclosure.point((~rows.ignored).double())
    if contract.has("from_lse"):
        lse = stage("lse", own := log_sum_exp(x)[..., 0])
        losses, weights = _from_lse(x, lse[..., None], rows.index, smoothing, z_loss), None
        if lse is own and smoothing is None and not z_loss:
            losses = in_reals(losses, lambda: -gather(log_softmax(x), rows.index))
        losses = losses.zero_where(rows.ignored)
    else:
        log_probs, weights = log_probs_of(x, contract, stage), smoothing
        losses = (-gather(log_probs, rows.index)).zero_where(rows.ignored)
    smooth = [] if weights is None else [stage("smooth_loss", -total(log_probs)).zero_where(rows.ignored)]

    if reduction == "none" or weights is None:
        whole = _weighted(losses, smooth, weights, stage)
        losses = stage("losses", whole[..., 0], result=reduction == "none")[..., None]
        smooth, weights = [], None
    if reduction != "none":
        rounded = contract.has("rounded_log_probs") or contract.has("rounded_log_sum")
        fmt = stage.format_of("logits") if rounded else None

        def kept(name: str, value: Enclosure) -> Enclosure:
            return value if fmt is None else value.rounded(fmt)

        def finished(counted: Enclosure, *sums: Enclosure) -> Enclosure:
            loss, *others = [kept("sum", each) for each in sums]
            if reduction == "mean" and count is None:
                loss = kept("mean", divide(sums[0], counted))
                others = [kept("mean", divide(each, kept("count", counted))) for each in others]
            loss = _weighted(loss, others, weights, kept)
            return loss if count is None else divide(kept("sum", loss), float(count))

        sums = [sum_of_rows(each) for each in (losses, *smooth)]
        stage("loss", sum_of_rows(counted).then(finished, *sums), result=True)


def _check(z_loss: float, reduction: str, count: int | None, contract: Contract) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is none of {', '.join(REDUCTIONS)}")
    if count is not None and (reduction != "mean" or count < 1):
        raise ValueError(f"count={count} with reduction={reduction}; it must be 1 or more, and goes with mean")
    if z_loss and not contract.has("from_lse"):
        raise ValueError(f"z_loss={z_loss} has a meaning under from_lse only")


def _from_lse(x: Enclosure, lse: Enclosure, index: Tensor, smoothing: Smoothing | None, z_loss: float) -> Enclosure:
    """Compute lse - x[label], or with smoothing lse - s / V · sum(x) - (1 - s) · x[label], and z · lse², in any order.

    Or (1 - s) · (lse - x[label]) + (sum(-s / V · x) + s · lse), as Liger has it. Products may be fused with additions.
    """
    own = gather(x, index)
    squares = [hull(fusible_product(lse * z_loss, lse), fusible_product(lse * lse, z_loss))] if z_loss else []
    if smoothing is None:
        return sum_in_any_order([lse, -own, *squares])
    every, s = total(x), smoothing
    share = hull(fusible_product(every, s.each), divide(every * s.own, float(x.shape[-1])))
    loss = sum_in_any_order([lse, -share, -fusible_product(s.kept, own), *squares])
    tail = multiply_add(lse, s.own, total_of_products(x, -s.each))
    split = multiply_add(lse - own, s.kept, tail)
    return hull(loss, sum_in_any_order([split, *squares]))


def _weighted(loss: Enclosure, smooth: list[Enclosure], smoothing: Smoothing | None, rounding: Rounding) -> Enclosure:
    """Compute (1 - s) · loss + s / V · smooth_loss, where there is a smooth loss."""
    if smoothing is None:
        return loss
    one = rounding("weighted_loss", fusible_product(smoothing.kept, loss))
    return one + rounding("weighted_smooth", fusible_product(smoothing.each, smooth[0]))
