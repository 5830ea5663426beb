"""Faults of SwiGLU and of its gradient, one deed at a time."""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

GROUPS = {
    "plain": {"bf16": (("swiglu_limit", None), ("alpha", None), ("up_offset", None))},
    "limited": {"bf16": (), "fp16": (("up", "as x"),)},
}
"""Options of a fault → dtype of x → options of the combinations that it is hunted with."""

_edit = partial(Edit, file="swiglu.py")
_tile = partial(Edit, file="swiglu_tile.py")
_limit = partial(Edit, file="swiglu_limit.py")
_backward = partial(Edit, file="swiglu_backward.py")
_fault = partial(Fault, op="swiglu", variant="swiglu+fp32_silu", dtypes=("bf16",))
_limited = partial(_fault, options="limited")
_two = partial(_limited, dtypes=("fp16",))
_gradient = partial(Fault, op="swiglu_backward", variant="swiglu_backward+fp32_silu", dtypes=("bf16",))
_limited_gradient = partial(_gradient, options="limited")
_two_gradient = partial(_limited_gradient, dtypes=("fp16",))

_SIGMOID = "s = rounded(sigmoid_of(scaled), X, STEPS)"
_SILU = 'rounded(gate * s, X, SILU != "fp32_silu")'
_ABOVE = "gate = tl.where(gate > limit, limit, gate)"
_UP = "up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))"
_SHIFT = 'shifted(up, up_offset, X, SILU == "rounded_sigmoid")'
_MASK = "mask = live & (columns < n)"
_STORE = "output.to(X), mask=mask)"
_UP_ROW = "row_start(row, size_1, size_2, up_stride_0, up_stride_1, up_stride_2, FLAT)"
_DY_ROW = "row_start(row, size_1, size_2, dy_stride_0, dy_stride_1, dy_stride_2, FLAT)"
_GATE_ROW = "row_start(row, size_1, size_2, gate_stride_0, gate_stride_1, gate_stride_2, FLAT)"
_CUT_GATE = "grad_gate = tl.where(gate > limit, 0.0, grad_gate)"
_SLOPE = "grad_silu * (s * (1.0 + scaled * (1.0 - s)))"
_GRAD_SILU = f'rounded(dy * {_SHIFT}, X, SILU != "fp32_silu")'
_OF_GATE = "grad_gate or grad_x"
_OF_UP = "grad_up or grad_x"

ROUNDING = (
    _fault("silu rounded", "rounds silu to the dtype", (_tile(_SILU, "rounded(gate * s, X, True)"),), "silu", "output"),
    _fault(
        "silu not rounded", "multiplies silu in fp32", (_tile(_SILU, "gate * s"),),
        "silu", "output", variant="swiglu+rounded_silu",
    ),
    _fault(
        "sigmoid not rounded", "rounds silu and not the sigmoid", (_tile(_SIGMOID, "s = sigmoid_of(scaled)"),),
        "silu", "output", variant="swiglu+rounded_sigmoid",
    ),
    _limited(
        "up + 1 not rounded", "adds the offset in fp32", (_edit(_SHIFT, "shifted(up, up_offset, X, False)"),),
        "output", "output", variant="swiglu+rounded_sigmoid",
    ),
    _fault(
        "output truncated", "rounds the output toward zero",
        (_edit(_STORE, 'output.to(X, fp_downcast_rounding="rtz"), mask=mask)'),), "output", "output",
    ),
    _fault(
        "log2 e cut off", "has five digits of log2 e",
        (Edit("1.4426950408889634", "1.4427", "arithmetic.py"),), "silu or output", "output",
    ),
    _fault(
        "sigmoid of e^x", "computes e^x / (1 + e^x), which is NaN where e^x is infinite",
        (_tile(_SIGMOID, "power = tl.exp(scaled)\n    s = rounded(power / (1.0 + power), X, STEPS)"),),
        "silu or output", "output",
    ),
    _fault(
        "product turned", "multiplies up by silu and not silu by up",
        (_edit(f"output = silu * {_SHIFT}", f"output = {_SHIFT} * silu"),),
        "", "", equivalent="a product does not depend on the order of two factors",
    ),
)  # fmt: skip

VALUES = (
    _limited("alpha left out", "leaves out alpha", (_tile("gate * alpha, X", "gate, X"),), "silu or output", "output"),
    _limited(
        "alpha outside", "multiplies silu by alpha and not the gate in its sigmoid",
        (_tile("gate * alpha, X", "gate, X"), _tile("gate * s, X", "gate * s * alpha, X")), "silu or output", "output",
    ),
    _limited("offset left out", "multiplies by up without the offset", (_edit(_SHIFT, "up"),), "output", "output"),
    _limited("gate without limit", "does not limit the gate", (_limit(_ABOVE, "pass"),), "silu or output", "output"),
    _limited(
        "gate limited below, too", "limits the gate on both sides",
        (_limit(_ABOVE, "gate = tl.where(gate > limit, limit, tl.where(gate < -limit, -limit, gate))"),),
        "silu or output", "output",
    ),
    _limited(
        "up limited above only", "does not limit up below",
        (_limit(_UP, "up = tl.where(up > limit, limit, up)"),), "output", "output",
    ),
    _limited(
        "limit after the offset", "limits up + offset",
        (
            _edit("= limited(gate, up, limit)", "= limited(gate, shifted(up, up_offset, X, False), limit)"),
            _edit(_SHIFT, "up"),
        ),
        "output", "output",
    ),
    _limited(
        "NaN limited", "takes the limit for a gate that is NaN, as fminf",
        (_limit(_ABOVE, "gate = tl.minimum(gate, limit)"),), "silu or output", "output", options="edges",
    ),
    _fault(
        "halves exchanged", "takes the second half for the gate",
        (Edit("(x[..., :width], x[..., width:])", "(x[..., width:], x[..., :width])", "swiglu_arguments.py"),),
        "silu or output", "output",
    ),
    _limited(
        "pairs as halves", "takes the first half of a tile for the gate where gate and up alternate",
        (_tile("tl.reshape(both, [ROWS, BLOCK, 2])", "tl.trans(tl.reshape(both, [ROWS, 2, BLOCK]), 0, 2, 1)"),),
        "silu or output", "output",
    ),
)  # fmt: skip

MEMORY = (
    _two(
        "rows of up as those of the gate", "takes the rows of up to lie as those of the gate",
        (_edit(f"up_row = {_UP_ROW}", f"up_row = {_GATE_ROW}"),), "output or out_of_bounds", "output or out_of_bounds",
    ),
    _two(
        "columns of up without a gap", "takes the columns of up to follow each other without a gap",
        (_edit("load(up_ptr, up_row, columns, up_step,", "load(up_ptr, up_row, columns, 1,"),),
        "output or out_of_bounds", "output or out_of_bounds",
    ),
    _fault(
        "tail not written", "leaves what follows the last whole vector of a row unwritten",
        (_edit(_STORE, "output.to(X), mask=mask & (columns < n // 16 * 16))"),), "unwritten", "unwritten",
    ),
    _fault(
        "rows of the last program", "does not ask whether there are as many rows",
        (_edit(_MASK, "mask = columns < n"),),
        "wrote_outside or out_of_bounds", "wrote_outside or out_of_bounds",
    ),
    _fault(
        "last tile of a row left out", "launches as many tiles of a row as are full",
        (_tile("* triton.cdiv(n, block), parameters", "* max(1, n // block), parameters"),),
        "unwritten", "unwritten", options="edges", dtypes=("fp16",),
    ),
)  # fmt: skip

GRADIENT = (
    _gradient("slope without its second term", "takes sigmoid for the slope of silu",
              (_backward(_SLOPE, "grad_silu * s"),), _OF_GATE, _OF_GATE),
    _gradient("sign in the slope", "subtracts where the slope adds",
              (_backward(_SLOPE, _SLOPE.replace("1.0 + scaled", "1.0 - scaled")),), _OF_GATE, _OF_GATE),
    _limited_gradient("gate in the slope", "has the gate in place of alpha · gate in the slope",
                      (_backward(_SLOPE, _SLOPE.replace("scaled", "gate")),), _OF_GATE, _OF_GATE),
    _gradient("gradient of up without sigmoid", "multiplies dy by the gate for the gradient of up",
              (_backward("dy * silu", "dy * gate"),), _OF_UP, _OF_UP),
    _gradient("gradient of the gate without up", "does not multiply by up",
              (_backward(f"dy * {_SHIFT}", "dy"),), "grad_silu", _OF_GATE),
    _gradient("product rounded", "rounds dy · up to the dtype",
              (_backward(_GRAD_SILU, _GRAD_SILU.replace('SILU != "fp32_silu"', "True")),), "grad_silu", _OF_GATE),
    _gradient("product not rounded", "does not round dy · up as autograd does",
              (_backward(_GRAD_SILU, _GRAD_SILU.replace('SILU != "fp32_silu"', "False")),), "grad_silu", _OF_GATE,
              variant="swiglu_backward+rounded_silu"),
    _gradient("silu recomputed in fp32", "has the silu of fp32 in place of that of the forward pass",
              (_tile(_SILU, "gate * s"),), "silu", _OF_UP, variant="swiglu_backward+rounded_silu"),
    _gradient("direct way not rounded", "adds the direct way to the gate before it is rounded",
              (_backward("rounded(grad_silu * s, X, True)", "grad_silu * s"),), _OF_GATE, _OF_GATE,
              variant="swiglu_backward+rounded_sigmoid"),
    _limited_gradient("alpha left out of a way", "does not multiply the way through the sigmoid by alpha",
                      (_backward("through * alpha", "through"),), _OF_GATE, _OF_GATE,
                      variant="swiglu_backward+rounded_sigmoid"),
    _limited_gradient("offset left out of the gradient", "multiplies dy by up without the offset",
                      (_backward(f"dy * {_SHIFT}", "dy * up"),), "grad_silu", _OF_GATE),
    _limited_gradient("gradient beyond the limit", "passes a gradient to gates beyond the limit",
                      (_limit(_CUT_GATE, "pass"),), _OF_GATE, _OF_GATE),
    _limited_gradient("limited values compared", "compares what was limited with the limit",
                      (_backward("dy * silu, gate_value, up_value", "dy * silu, gate, up"),), _OF_GATE, _OF_GATE),
    _gradient("no gradient at the limit", "cuts off the gradient of gates at the limit",
              (_limit(_CUT_GATE, _CUT_GATE.replace(">", ">=")),), _OF_GATE, _OF_GATE, options="edges"),
    _limited_gradient("gradients exchanged", "stores the gradient of up where that of the gate belongs",
                      (_backward("tl.join(grad_gate, grad_up)", "tl.join(grad_up, grad_gate)"),), "grad_x", "grad_x"),
    _two_gradient("rows of dy as those of the gate", "takes the rows of dy to lie as those of the gate",
                  (_backward(f"dy_row = {_DY_ROW}", f"dy_row = {_GATE_ROW}"),),
                  "grad_silu or grad_up or out_of_bounds", "grad_gate or grad_up or out_of_bounds"),
    _gradient("rows of one half", "writes the rows of both gradients as if each had a tensor of its own",
              (_backward('"out_stride": held * gate.shape[-1]', '"out_stride": gate.shape[-1]'),),
              "unwritten", "unwritten"),
)  # fmt: skip

FAULTS = (*ROUNDING, *VALUES, *MEMORY, *GRADIENT)
