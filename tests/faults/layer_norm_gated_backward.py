"""Faults of the gradients of the gated LayerNorm, one deed at a time."""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

GROUPS = {
    "after": {
        "bf16": "bf16-weight_fp32-layer-bias-gate_after-groups_of-N17to32",
        "fp16": "fp16-weight_fp32-layer-sigmoid_after-N33to64",
    },
    "before": {
        "bf16": "bf16-weight_fp32-layer-gate_before-N129to256",
        "fp16": "fp16-rms-bias-gate_before-groups_of-N65to128",
    },
    "layer": {
        "bf16": "bf16-weight_fp32-layer-bias-gate_after-groups_of-N17to32",
        "fp16": "fp16-weight_fp32-layer-bias-groups_of-N33to64",
    },
    "plain": {"bf16": "bf16-rms-N257to512", "fp16": "fp16-rms-gate_after-N513to1024"},
    "exact": {"fp32": "exact-fp32-layer-bias-N1to16", "bf16": "exact-bf16-weight_fp32-rms-gate_after-N65to128"},
    "latents": {"fp32": "latents"},
    "exact gated": {"fp32": "exact-fp32-layer-bias-gate_after-N129to256"},
}
"""Options of a fault → dtype of x → the group of cases that it is hunted with."""

_edit = partial(Edit, file="layer_norm_gated_backward.py")
_launch = partial(Edit, file="layer_norm_gated_backward_launch.py")
_fault = partial(
    Fault, op="layer_norm_gated_backward", variant="gated_backward", options="after", dtypes=("bf16", "fp16")
)
_sum = partial(_fault, options="exact", dtypes=("fp32",))
_row = partial(_fault, options="latents", dtypes=("fp32",))

_C1 = "c1 = tl.div_rn(tl.sum(normalized * dnormalized, axis=1, keep_dims=True), size)"
_C2 = "c2 = tl.div_rn(tl.sum(dnormalized, axis=1, keep_dims=True), size)"
_DW = "dw += daffine * normalized"
_DB = "db += daffine\n"

INPUT = (
    _fault(
        "projection left out",
        "leaves out x̂ · c1 in dx",
        (_edit("shift = normalized * c1", "shift = normalized * 0.0"),),
        "dx",
        "dx",
        options="plain",
    ),
    _fault(
        "mean gradient left out",
        "leaves out c2 in dx",
        (_edit("shift += c2", "shift += 0.0"),),
        "dx",
        "dx",
        options="layer",
    ),
    _fault(
        "c1 rounded",
        "rounds c1 to bf16",
        (_edit(_C1, f"{_C1}.to(tl.bfloat16).to(tl.float32)"),),
        "c1",
        "dx",
        options="layer",
    ),
    _fault(
        "c2 rounded",
        "rounds c2 to bf16",
        (_edit(_C2, f"{_C2}.to(tl.bfloat16).to(tl.float32)"),),
        "c2",
        "dx",
        options="layer",
    ),
    _fault(
        "dx not gated",
        "does not multiply dx by the gate that came first",
        (_edit("dx = dvalue * gate", "dx = dvalue"),),
        "dx",
        "dx",
        options="before",
    ),
    _fault(
        "dx truncated",
        "rounds dx toward zero",
        (
            _edit(
                "lanes, dx, mask",
                "lanes, (dx.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True), mask",
            ),
        ),
        "dx",
        "dx",
        dtypes=("bf16",),
    ),
    _fault(
        "bias for mean",
        "does not subtract the mean",
        (_edit("centered = value - mean", "centered = value"),),
        "normalized",
        "output",
        options="layer",
    ),
    _fault(
        "statistics of the next group",
        "reads rstd as number row · groups + group",
        (_edit("row * rstd_row_stride + group * rstd_group_stride", "row * groups + group"),),
        "dgated_input or normalized",
        "output or dz or dw",
        options="before",
        dtypes=("fp16",),
    ),
    _fault(
        "rows of dy assumed contiguous",
        "reads row m of dy at m · N",
        (
            _edit(
                "dy_row = start + row_start(row, dy_size_1, dy_size_2, dy_stride_0, dy_stride_1, dy_stride_2, FLAT)",
                "dy_row = out_row",
            ),
        ),
        "daffine or out_of_bounds",
        "dz or out_of_bounds",
    ),
)

GATE = (
    _fault(
        "dz without the slope of silu",
        "differentiates z · sigmoid(z) as sigmoid(z)",
        (_edit("slope = sigmoid * (1.0 + z * (1.0 - sigmoid))", "slope = sigmoid"),),
        "dz",
        "dz",
        dtypes=("bf16",),
    ),
    _fault(
        "slope of the gate's value",
        "takes the slope of silu at silu(z)",
        (_edit("(1.0 + z * (1.0 - sigmoid))", "(1.0 + gate * (1.0 - sigmoid))"),),
        "dz",
        "dz",
        dtypes=("bf16",),
    ),
    _fault(
        "dz from dx",
        "stores dx as dz",
        (_edit("dz = dvalue * x * slope", "dz = dvalue"),),
        "dz",
        "dz",
        options="before",
    ),
    _fault(
        "gate rounded",
        "rounds the gate to x's dtype",
        (_edit("gate = z * sigmoid\n", "gate = (z * sigmoid).to(z_ptr.dtype.element_ty).to(tl.float32)\n"),),
        "gate",
        "output or dw",
        dtypes=("bf16",),
    ),
    _fault(
        "affine rounded",
        "recomputes the normalized output in x's dtype",
        (_edit("dy * affine * slope", "dy * affine.to(x_ptr.dtype.element_ty).to(tl.float32) * slope"),),
        "dz",
        "dz",
    ),
    _fault(
        "recomputed output not gated",
        "returns the output without its gate",
        (_edit("                output = affine * gate\n", ""),),
        "output",
        "output",
    ),
)

SUMS = (
    _sum(
        "dw without the gate",
        "adds dy · x̂ to dw, where dy · gate · x̂ is due",
        (_edit(_DW, "dw += dy * normalized"),),
        "dw",
        "dw",
        options="exact gated",
    ),
    _sum(
        "db without the gate",
        "adds dy to db, where dy · gate is due",
        (_edit(_DB, "db += dy\n"),),
        "db",
        "db",
        options="exact gated",
    ),
    _sum(
        "dw accumulated in bf16",
        "adds the terms of dw in bf16",
        (_edit(_DW, f"dw = ({_DW.replace('dw += ', 'dw + ')}).to(tl.bfloat16).to(tl.float32)"),),
        "dw",
        "dw",
    ),
    _sum(
        "terms of dw rounded",
        "rounds each term of dw to bf16",
        (_edit(_DW, "dw += (daffine * normalized).to(tl.bfloat16).to(tl.float32)"),),
        "dw",
        "dw",
        options="exact gated",
    ),
    _sum(
        "parts in bf16",
        "rounds each program's part of dw to bf16",
        (
            _edit(
                "dw_total = tl.sum(dw, axis=0, keep_dims=True)",
                "dw_total = tl.sum(dw, axis=0, keep_dims=True).to(tl.bfloat16).to(tl.float32)",
            ),
        ),
        "dw",
        "dw",
    ),
    _sum(
        "last row left out of dw",
        "leaves the last row out of dw",
        (_edit(_DW, "dw += tl.where(row < rows - 1, daffine * normalized, 0.0)"),),
        "dw",
        "dw",
    ),
    _sum(
        "other parts left out",
        "adds no more than the first part of the programs",
        (_launch("(part < parts) & inside", "(part < 1) & inside"),),
        "dw",
        "dw",
    ),
    _sum(
        "db rounded before the cast",
        "rounds db to bf16",
        (
            _edit(
                "db_total = tl.sum(db, axis=0, keep_dims=True)",
                "db_total = tl.sum(db, axis=0, keep_dims=True).to(tl.bfloat16).to(tl.float32)",
            ),
        ),
        "db",
        "db",
        options="exact gated",
    ),
    _sum(
        "sums not cleared",
        "adds to memory that nothing has cleared",
        (_edit("x.new_zeros if options.atomic else x.new_empty", "x.new_empty"),),
        "uninitialised",
        "uninitialised",
        variant="gated_backward+atomic",
    ),
    _sum(
        "bias gradient left out",
        "returns no db",
        (_edit(', "db": "bias"}', "}"),),
        "errored",
        "errored",
    ),
)

ROWS = (
    _row(
        "elements off by an ulp",
        "stores the next number of fp32 for one in a hundred elements of dx",
        (
            _edit(
                "        dx = dvalue\n",
                "        above = (dvalue.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)\n"
                "        dx = tl.where((lanes + row) % 97 == 0, above, dvalue)\n",
            ),
        ),
        "dx",
        "c1",
    ),
    _row(
        "two orders in a row",
        "takes c1 from a sum in another order for the second half of a row",
        (
            _edit(
                "shift = normalized * c1",
                "first = tl.where(lanes < group_size // 3, normalized * dnormalized, 0.0)\n"
                "        rest = tl.where(lanes < group_size // 3, 0.0, normalized * dnormalized)\n"
                "        other = tl.sum(first, axis=1, keep_dims=True) + tl.sum(rest, axis=1, keep_dims=True)\n"
                "        shift = normalized * tl.where(lanes < group_size // 2, c1, tl.div_rn(other, size))",
            ),
        ),
        "dx",
        "c1",
    ),
    _row(
        "c1 rounded in fp32",
        "rounds c1 to bf16",
        (_edit(_C1, f"{_C1}.to(tl.bfloat16).to(tl.float32)"),),
        "c1",
        "c1 or dx",
    ),
    _row(
        "shift rounded",
        "rounds x̂ · c1 to bf16",
        (_edit("shift = normalized * c1", "shift = (normalized * c1).to(tl.bfloat16).to(tl.float32)"),),
        "dx",
        "c1 or dx",
    ),
)

FAULTS = (*INPUT, *GATE, *SUMS, *ROWS)
