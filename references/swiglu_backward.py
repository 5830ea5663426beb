"""Gradients of SwiGLU; the tests check them against automatic differentiation in fp64.

docs/contracts/swiglu.md says which kernels keep which contract.
"""

from __future__ import annotations

from math import inf

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Enclosure, concatenate, hull, multiply_add, product_in_any_order
from lastbit.references._experts import limited, rounded, through_limits
from lastbit.references._shapes import check_shapes
from lastbit.references._silu import times_silu_slope
from lastbit.references.swiglu import Activated, check_parameters, gate_and_up, joined
from lastbit.relations import scaled

_STEPS = rounded("scaled", "sigmoid", "silu", "direct", "grad_sigmoid", "grad_scaled", "through_sigmoid")


@op(
    rows=("x", "dy", "up"),
    returns=("grad_x", "grad_gate", "grad_up"),
    axes={
        "silu": {"fp32_silu": {}, "rounded_silu": rounded("silu"), "rounded_sigmoid": _STEPS},
        "product": {"fp32_product": {}, "rounded_product": rounded("grad_silu")},
        "shift": {"": {}, "rounded_shift": rounded("shifted_up")},
        "slope": {"": {}, "rounded_slope": rounded("rest", "grad_rest")},
    },
    rounds=rounded("grad_gate", "grad_up", "grad_x"),
    relations=(scaled(("dy",), dict.fromkeys(("grad_gate", "grad_up", "grad_x"), 1)),),
)
def swiglu_backward(
    x: Enclosure,
    dy: Enclosure,
    up: Enclosure | None = None,
    *,
    interleaved: bool = False,
    swiglu_limit: float = inf,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """Compute the gradients of `swiglu` from the gradient dy of its output, and x and up of the forward pass.

    dy: [..., I]. With two tensors the results are `grad_gate` and `grad_up`, [..., I]; else `grad_x`, [..., 2I], with
    both where x holds gate and up. A value beyond the limit has a gradient of exactly zero, one at the limit the whole.
    silu is computed anew: in fp32, or rounded as the forward pass had it. `rounded_product` rounds dy · (up + offset).
    `rounded_slope` has a meaning with `rounded_sigmoid` alone: it rounds every operation of the slope of the sigmoid.

    Raises:
        ValueError: as `swiglu`, or a dy that does not have the shape of its output.
    """
    check_parameters(x, swiglu_limit, alpha, up_offset, stage.format_of("x"))
    values = gate_and_up(x, up, interleaved=interleaved)
    check_shapes({"dy": (dy, tuple(values[0].shape))})
    gate, limited_up = limited(*values, swiglu_limit)
    shifted = stage("shifted_up", limited_up + up_offset) if up_offset else limited_up
    activated = Activated.of(gate, alpha, contract, stage)
    grad_up = activated.times(dy) if contract.has("fp32_silu") else dy * activated.silu
    grad_silu = stage("grad_silu", dy * shifted)
    if contract.has("rounded_sigmoid"):
        grad_gate = _step_by_step(activated, grad_silu, alpha, contract, stage)
    else:
        grad_gate = _in_fp32(activated, alpha, grad_silu)
        if contract.has("fp32_product"):
            grad_gate = hull(grad_gate, times_silu_slope((dy, shifted), activated.scaled, activated.sigmoid))

    two = up is not None
    grad_gate = through_limits(grad_gate, values[0], -inf, swiglu_limit, was_rounded=False)
    grad_gate = stage("grad_gate", grad_gate, result=two)
    grad_up = through_limits(grad_up, values[1], -swiglu_limit, swiglu_limit, was_rounded=False)
    grad_up = stage("grad_up", grad_up, result=two)
    if not two:
        together = joined(grad_gate, grad_up) if interleaved else concatenate(grad_gate, grad_up)
        stage("grad_x", together, result=True)


def _in_fp32(activated: Activated, alpha: float, grad_silu: Enclosure) -> Enclosure:
    """Propagate the gradient through silu in fp32: times its slope, or as the sum of the two ways of autograd."""
    gate, s = activated.gate, activated.sigmoid
    through = product_in_any_order(grad_silu * gate, 1.0 + -s, s)
    summed = multiply_add(through, alpha, grad_silu * s), multiply_add(grad_silu, s, through * alpha)
    return hull(times_silu_slope((grad_silu,), activated.scaled, s), *summed)


def _step_by_step(
    activated: Activated, grad_silu: Enclosure, alpha: float, contract: Contract, stage: StageRecorder
) -> Enclosure:
    """Propagate the gradient through gate · sigmoid(alpha · gate) as autograd does: the direct part plus the rest."""
    gate, s = activated.gate, activated.sigmoid
    direct = stage("direct", grad_silu * s)
    grad_sigmoid = stage("grad_sigmoid", grad_silu * gate)
    if contract.has("rounded_slope"):
        through = stage("grad_rest", grad_sigmoid * stage("rest", 1.0 + -s)) * s
    else:
        through = product_in_any_order(grad_sigmoid, 1.0 + -s, s)
    through = stage("grad_scaled", through)
    if alpha != 1.0:
        through = stage("through_sigmoid", through * alpha)
    return direct + through
