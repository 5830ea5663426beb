"""The gradient of cross entropy with respect to the logits, from them and perhaps the saved logarithm of the sum.

Rules as found in torch, Transformers, Liger, flash-attn and flash-linear-attention; docs/contracts/cross_entropy.md
lists who keeps which. The tests check the formulas against automatic differentiation in fp64.
"""

from __future__ import annotations

from itertools import compress, product

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import (
    Enclosure,
    Tensor,
    divide,
    exp,
    expm1,
    hull,
    in_reals,
    log_softmax,
    log_sum_exp,
    multiply_add,
    product_in_any_order,
    softmax,
    total,
    where,
)
from lastbit.references._cross_entropy import (
    ROUNDED_LOG_PROBS,
    ROUNDED_LOG_SUM,
    Labels,
    Scaled,
    Smoothing,
    labels_of,
    log_probs_of,
    number,
    scaled,
    smoothing_of,
)
from lastbit.references._shapes import check_shapes
from lastbit.relations import scaled as scaling

_ROUNDED = ("grad_losses", "grad_nll", "grad_smooth", "grad_log_probs")


@op(
    rows=("logits", "labels", "grad_output", "lse"),
    returns=("grad_logits",),
    integers=("labels",),
    axes={
        "formula": {
            "from_lse": {},
            "normalized": {},
            "from_log_probs": {},
            "rounded_log_probs": {**ROUNDED_LOG_PROBS, **dict.fromkeys(_ROUNDED, "logits")},
            "rounded_log_sum": {**ROUNDED_LOG_SUM, **dict.fromkeys(_ROUNDED, "logits")},
        },
        "scaling": {"": {}, "rounded_gradient": {"gradient": "logits"}},
        "ignored": {"": {}, "times_zero": {}},
    },
    rounds={"grad_logits": "logits"},
    torch_ops=("aten::_log_softmax_backward_data",),
    relations=(scaling(("grad_output",), {"grad_logits": 1}),),
)
def cross_entropy_backward(
    logits: Enclosure,
    labels: Tensor,
    grad_output: Enclosure,
    lse: Enclosure | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    count: int | None = None,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """grad_logits = (softmax(x) - (1 - s) · onehot - s / V) · dx/dlogits · grad_output / count, 0 in ignored rows.

    x = cap · tanh(scale · logits / cap). logits: [T, V]; labels: [T], integers; grad_output: [T], of the loss of each
    row; lse: [T], fp32, as the forward pass saved it, for `from_lse` alone. `count` is what the forward pass divided a
    sum by, 1 without it. `z_loss` adds 2z · lse · softmax(x). Under `times_zero` an ignored row has a grad_output of 0
    and nothing else, so that NaN stays.

    Raises:
        ValueError: parameters that have no meaning together, or tensors that do not fit.
    """
    rows = labels_of(logits, labels, ignore_index)
    column = tuple(labels.shape)
    check_shapes({"grad_output": (grad_output, column), "lse": (lse, column)})
    if count is not None and count < 1:
        raise ValueError(f"count={count} must be 1 or more")
    of_probs = contract.has("from_lse") or contract.has("normalized")
    _check(contract, of_probs, lse, logit_scale != 1.0 or softcap is not None or z_loss != 0.0)
    smoothing = smoothing_of(label_smoothing, logits.shape[1], labels) if label_smoothing else None
    x = scaled(logits, logit_scale, softcap, stage)
    grad = grad_output[..., None].zero_where(rows.ignored)
    if of_probs:
        saved = None if lse is None else lse[..., None]
        difference = stage("difference", _difference(x.logits, saved, rows, smoothing, z_loss, contract, stage))
        factors = [difference, *_slopes(x, rows, logit_scale, softcap)]
        if contract.has("rounded_gradient"):
            grad_logits = stage("gradient", _product(factors, count)) * grad
        else:
            grad_logits = _product([*factors, grad], count)
    else:
        grad = stage("grad_losses", grad if count is None else divide(grad, float(count)))
        log_probs = log_probs_of(x.logits, contract, stage)
        own = stage("grad_log_probs", _of_log_probs(grad, rows, smoothing, stage))
        grad_logits = multiply_add(-stage("probs", exp(log_probs)), total(own), own)
    stage(
        "grad_logits", grad_logits if contract.has("times_zero") else grad_logits.zero_where(rows.ignored), result=True
    )


def _check(contract: Contract, of_probs: bool, lse: Enclosure | None, of_others: bool) -> None:
    if lse is not None and not contract.has("from_lse"):
        raise ValueError("a saved lse has a meaning under from_lse only")
    if of_others and not of_probs:
        raise ValueError("logit_scale, softcap and z_loss have a meaning under from_lse and normalized only")
    if contract.has("rounded_gradient") and not of_probs:
        raise ValueError("rounded_gradient has a meaning under from_lse and normalized only")


def _difference(
    x: Enclosure,
    lse: Enclosure | None,
    rows: Labels,
    smoothing: Smoothing | None,
    z_loss: float,
    contract: Contract,
    stage: StageRecorder,
) -> Enclosure:
    """Compute softmax(x) · (1 + 2z · lse) - (1 - s) · onehot - s / V; the class's own terms come first or last."""
    log_probs = None if lse is None else x - lse
    if lse is None and (z_loss or contract.has("from_lse")):
        given = stage("lse", computed := log_sum_exp(x)[..., 0])
        lse = given[..., None]
        log_probs = None if given is computed else x - lse
    probs = stage("probs", own := softmax(x) if contract.has("normalized") or lse is None else exp(x - lse))
    if z_loss and lse is not None:
        probs = multiply_add(lse * (2.0 * z_loss), probs, probs)
    if smoothing is None:
        difference = where(rows.onehot, probs - 1.0, probs)
        if z_loss or probs is not own:
            return difference
        return in_reals(difference, lambda: _of_logarithms(log_probs or log_softmax(x), rows))
    rest = probs - smoothing.each
    return where(rows.onehot, hull(rest - smoothing.kept, probs - smoothing.kept - smoothing.each), rest)


def _of_logarithms(log_probs: Enclosure, rows: Labels) -> Enclosure:
    """Compute softmax(x) - onehot from its logarithm, in which 1 - softmax(x) of the class does not cancel."""
    return where(rows.onehot, expm1(log_probs), exp(log_probs))


def _slopes(x: Scaled, rows: Labels, logit_scale: float, softcap: float | None) -> list[Enclosure]:
    """Return dx/dlogits as factors: 1 - tanh², where the tanh of the class may be that of x / cap, and the scale."""
    factors = []
    if softcap is not None and x.squashed is not None:
        slope, again = (multiply_add(-t, t, 1.0) for t in (x.squashed, divide(x.logits, softcap)))
        factors.append(where(rows.onehot, hull(slope, again), slope))
    if logit_scale != 1.0:
        factors.append(number(logit_scale, rows.index))
    return factors


def _product(factors: list[Enclosure], count: int | None) -> Enclosure:
    """Multiply in any order, and divide the product of any of the factors by `count`: subnormals tell where."""
    if count is None:
        return product_in_any_order(*factors)
    options = []
    for chosen in product((True, False), repeat=len(factors)):
        if any(chosen):
            dividend = product_in_any_order(*compress(factors, chosen))
            rest = compress(factors, (not each for each in chosen))
            options.append(product_in_any_order(divide(dividend, float(count)), *rest))
    return hull(*options)


def _of_log_probs(grad: Enclosure, rows: Labels, smoothing: Smoothing | None, stage: StageRecorder) -> Enclosure:
    """Compute the gradient with respect to the log-softmax: -grad · ((1 - s) · onehot + s / V)."""
    if smoothing is None:
        return where(rows.onehot, -grad, 0.0)
    one = stage("grad_nll", grad * smoothing.kept)
    each = stage("grad_smooth", grad * smoothing.each)
    return where(rows.onehot, -(one + each), -each)
