"""SwiGLU, silu(gate) · up (Shazeer 2020, arXiv 2002.05202), and the form with a limit, alpha and up + 1 of gpt-oss.

docs/contracts/swiglu.md says which kernels keep which contract.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import inf

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import (
    FORMATS,
    Enclosure,
    Format,
    divide,
    exp,
    exp2,
    hull,
    multiply_add,
    product_in_any_order,
    sigmoid,
    stack,
)
from lastbit.references._experts import check_limit, limited, rounded
from lastbit.references._shapes import check_shapes, width_of

LOG2_E = math.log2(math.e)


@op(
    rows=("x", "up"),
    returns=("output",),
    axes={
        "silu": {
            "fp32_silu": {},
            "rounded_silu": rounded("silu"),
            "rounded_sigmoid": rounded("scaled", "sigmoid", "silu"),
        },
        "shift": {"": {}, "rounded_shift": rounded("shifted_up")},
    },
    rounds=rounded("output"),
)
def swiglu(
    x: Enclosure,
    up: Enclosure | None = None,
    *,
    interleaved: bool = False,
    swiglu_limit: float = inf,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """y = gate · sigmoid(alpha · gate) · (up + up_offset), after gate and up were limited.

    x: the gate [..., I], and up of the same shape; or without up [..., 2I], which holds both: the gate in the first
    half, or with `interleaved` in the even columns. With `swiglu_limit` = L the gate enters as min(gate, L) and up as
    min(max(up, -L), L); NaN stays NaN. gpt-oss has L = 7, alpha = 1.702 and up_offset = 1.

    Raises:
        ValueError: shapes that do not fit, `interleaved` with two tensors, a limit that x's dtype has not, or an alpha
            or offset that is not finite in fp32.
    """
    check_parameters(x, swiglu_limit, alpha, up_offset, stage.format_of("x"))
    gate, up = limited(*gate_and_up(x, up, interleaved=interleaved), swiglu_limit)
    shifted = stage("shifted_up", up + up_offset) if up_offset else up
    activated = Activated.of(gate, alpha, contract, stage)
    if not contract.has("fp32_silu"):
        output = activated.silu * shifted
    else:
        output = activated.times(shifted)
        if up_offset:  # as silu · up + silu, in an FMA
            output = hull(output, multiply_add(activated.silu, up, activated.silu * up_offset))
    stage("output", output, result=True)


def gate_and_up(x: Enclosure, up: Enclosure | None, *, interleaved: bool) -> tuple[Enclosure, Enclosure]:
    """Return gate and up: the two tensors, or the two halves of one; ValueError for shapes that do not fit."""
    width = width_of("x", x)
    if up is not None:
        check_shapes({"up": (up, tuple(x.shape))})
        if interleaved:
            raise ValueError("interleaved=True says how x holds gate and up, but up is a tensor of its own")
        return x, up
    if width % 2:
        raise ValueError(f"x has {width} columns; without up it holds gate and up, and their number must be even")
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    return x[..., : width // 2], x[..., width // 2 :]


def joined(gate: Enclosure, up: Enclosure) -> Enclosure:
    """Interleave gate and up in a tensor [..., 2I]."""
    return stack(gate, up).joined()


def check_parameters(x: Enclosure, swiglu_limit: float, alpha: float, up_offset: float, fmt: Format) -> None:
    """Raise ValueError for a limit that the format has not, or a number that is not finite in fp32."""
    check_limit(swiglu_limit, fmt, x.value)
    for name, number in {"alpha": alpha, "up_offset": up_offset}.items():
        if not abs(number) <= FORMATS["fp32"].max:
            raise ValueError(f"{name}={number} is no number in fp32; it must be finite")


@dataclass(frozen=True, eq=False)
class Activated:
    """The gate activated: gate · sigmoid(alpha · gate), from a product with the sigmoid or from a quotient.

    Attributes:
        gate: what is activated, after the limit.
        scaled: alpha · gate.
        sigmoid: of `scaled`.
        divisor: 1 + exp(-scaled).
        silu: the stage of that name.
    """

    gate: Enclosure
    scaled: Enclosure
    sigmoid: Enclosure
    divisor: Enclosure
    silu: Enclosure

    @classmethod
    def of(cls, gate: Enclosure, alpha: float, contract: Contract, stage: StageRecorder) -> Activated:
        """Activate the gate: step by step under `rounded_sigmoid`; else alpha may be multiplied into log2 e."""
        scaled = gate if alpha == 1.0 else stage("scaled", gate * alpha)
        power, gating = exp(-scaled), sigmoid(scaled)
        if contract.has("rounded_sigmoid"):
            gating = stage("sigmoid", gating)
            silu = gate * gating
        else:
            if alpha != 1.0:
                power = hull(power, *map(exp2, _with_folded_constants(gate, alpha)))
                gating = hull(gating, divide(1.0, power + 1.0))
            silu = hull(gate * gating, divide(gate, power + 1.0))
        return cls(gate, scaled, gating, power + 1.0, stage("silu", silu))

    def times(self, other: Enclosure) -> Enclosure:
        """Multiply by a factor, in any order, with the division where it may stand."""
        in_any_order = product_in_any_order(self.gate, self.sigmoid, other)
        return hull(self.silu * other, in_any_order, divide(self.gate * other, self.divisor))


def _with_folded_constants(gate: Enclosure, alpha: float) -> tuple[Enclosure, ...]:
    """Compute -alpha · log2(e) · gate, the two constants multiplied first: in fp32, or before rounding to it."""
    in_fp32 = Enclosure.point(gate.value.new_tensor(alpha).float()) * -LOG2_E
    return gate * -LOG2_E * alpha, gate * in_fp32, gate * (-alpha * LOG2_E)
