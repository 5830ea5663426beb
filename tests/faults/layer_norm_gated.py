"""Faults of the gated LayerNorm: what its kernels have got wrong in the past, one deed at a time.

A weight on another device than x needs two devices; tests/harness/test_placement.py and the placement
cases of a run have it.
"""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

GROUPS = {
    "after": {
        "bf16": "bf16-weight_fp32-layer-bias-gate_after-groups_of-N129to256",
        "fp16": "fp16-rms-gate_after-N513to1024",
    },
    "before": {"bf16": "bf16-weight_fp32-layer-gate_before-N257to512", "fp32": "fp32-rms-gate_before-N33to64"},
    "before in groups": {"fp16": "fp16-rms-bias-gate_before-groups_of-N33to64"},
    "after in steps": {"bf16": "bf16-rms-gate_after-N1to16", "fp16": "fp16-rms-gate_after-N17to32"},
    "layer": {
        "bf16": "bf16-weight_fp32-layer-bias-gate_after-groups_of-N129to256",
        "fp16": "fp16-weight_fp32-layer-bias-groups_of-N129to256",
        "fp32": "fp32-layer-sigmoid_before-groups_of-N17to32",
    },
    "layer after": {
        "bf16": "bf16-weight_fp32-layer-bias-gate_after-groups_of-N129to256",
        "fp16": "fp16-weight_fp32-layer-sigmoid_after-N1025to2048",
    },
    "far": {"bf16": "bf16-far-from-zero", "fp32": "fp32-far-from-zero"},
    "real shapes": {"bf16": "real-shapes"},
}
"""Options of a fault → dtype of x → the group of cases that it is hunted with."""

_edit = partial(Edit, file="layer_norm_gated.py")
_launch = partial(Edit, file="layer_norm_gated_launch.py")
_fault = partial(Fault, op="layer_norm_gated", variant="single_rounding", options="after", dtypes=("bf16", "fp16"))
_layer = partial(_fault, options="layer", dtypes=("bf16", "fp32"))

_GATE = "gate = z * sigmoid if SILU else sigmoid"
_CENTERED = "centered = tl.where(inside, value - mean, 0.0)"
_MEAN = "mean = quotient(tl.sum(value, axis=1, keep_dims=True), size)"
_VARIANCE = "variance = quotient(tl.sum(centered * centered, axis=1, keep_dims=True), size)"
_RSTD = "rstd = inverse_root(variance + eps)"
_NARROW = ".to(X).to(tl.float32)"

GATE = (
    _fault(
        "gate before norm",
        "gates before the normalization, where the contract gates after it",
        (
            _edit(
                "        if not NORM_FIRST:\n            value = value * gate",
                "        if NORM_FIRST:\n            value = value * gate",
            ),
            _edit(
                "        if NORM_FIRST:\n            output = affine * gate",
                "        if not NORM_FIRST:\n            output = affine * gate",
            ),
        ),
        exposed="mean or variance",
        hidden="output",
    ),
    _fault(
        "sigmoid for silu",
        "gates by sigmoid(z), where the contract gates by z · sigmoid(z)",
        (_edit(_GATE, "gate = sigmoid"),),
        exposed="gate",
        hidden="output",
    ),
    _fault(
        "gelu for silu",
        "gates by z · sigmoid(1.702 z)",
        (_edit("sigmoid = sigmoid_of(z)", "sigmoid = sigmoid_of(1.702 * z)"),),
        exposed="gate",
        hidden="output",
    ),
    _fault(
        "gate rounded",
        "rounds the gate to x's dtype",
        (_edit(_GATE, f"{_GATE}\n        gate = gate{_NARROW}"),),
        exposed="gate",
        hidden="output",
    ),
    _fault(
        "sigmoid rounded",
        "rounds sigmoid(z) to x's dtype before it multiplies by z",
        (_edit("sigmoid = sigmoid_of(z)", f"sigmoid = sigmoid_of(z){_NARROW}"),),
        exposed="gate",
        hidden="output",
    ),
    _fault(
        "rounded before the gate",
        "rounds to x's dtype before it multiplies by the gate",
        (_edit("output = affine * gate", f"output = affine{_NARROW} * gate"),),
        exposed="output",
        hidden="output",
    ),
    _fault(
        "gated input rounded",
        "rounds x · act(z) to x's dtype before it is normalized",
        (_edit("value = value * gate", f"value = (value * gate){_NARROW}"),),
        exposed="gated_input",
        hidden="output",
        options="before",
        dtypes=("bf16",),
    ),
    _fault(
        "rows of z where x has them",
        "reads z with the strides of x",
        (
            _edit(
                "z_row = start + row_start(row, z_size_1, z_size_2, z_stride_0, z_stride_1, z_stride_2, FLAT)",
                "z_row = x_row",
            ),
        ),
        exposed="gate or out_of_bounds",
        hidden="output or out_of_bounds",
    ),
)

STATISTICS = (
    _layer(
        "one pass",
        "computes the variance as E[x²] - E[x]²",
        (_edit(_VARIANCE, _VARIANCE.replace("centered * centered", "value * value") + " - mean * mean"),),
        exposed="variance",
        hidden="output",
        options="far",
    ),
    _layer(
        "padded lanes in the variance",
        "does not zero the lanes beyond the row after the mean is subtracted",
        (_edit(_CENTERED, "centered = value - mean"),),
        exposed="variance",
        hidden="output",
    ),
    _layer(
        "unbiased variance",
        "divides by n - 1",
        (_edit(_VARIANCE, _VARIANCE.replace("size)", "size - 1)")),),
        "variance",
        "output",
    ),
    _layer(
        "mean rounded",
        "rounds the mean to bf16",
        (_edit(_MEAN, f"{_MEAN}.to(tl.bfloat16).to(tl.float32)"),),
        exposed="mean",
        hidden="output",
    ),
    _layer(
        "rstd rounded",
        "rounds the inverse deviation to bf16",
        (_edit(_RSTD, f"{_RSTD}.to(tl.bfloat16).to(tl.float32)"),),
        exposed="rstd",
        hidden="output",
    ),
    _layer(
        "eps outside the root",
        "adds eps after the root",
        (_edit(_RSTD, "rstd = tl.div_rn(1.0, tl.sqrt_rn(variance) + eps)"),),
        "rstd",
        "output",
    ),
    _layer("eps left out", "adds no eps", (_edit(_RSTD, "rstd = inverse_root(variance)"),), "rstd", "output"),
    _fault(
        "groups ignored",
        "normalizes over whole rows, where they have groups",
        (
            _edit(
                "GatedNormParameters(group_size, norm_before_gate, is_rms_norm, activation,",
                "GatedNormParameters(None, norm_before_gate, is_rms_norm, activation,",
            ),
        ),
        exposed="errored",
        hidden="output",
        options="before in groups",
        dtypes=("fp16",),
    ),
    _fault(
        "statistics of the next group",
        "stores the statistics as number row · groups + group",
        (_edit("statistic = group * rows + row", "statistic = row * groups + group"),),
        exposed="variance",
        hidden="",
        options="before",
        dtypes=("bf16",),
        equivalent="the output does not depend on where the statistics are stored; with stages the copy is seen",
    ),
)

ROUNDING = (
    _layer(
        "store truncates",
        "rounds the output toward zero",
        (
            _edit(
                "output.to(X), mask=mask)",
                "(output.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(X), mask=mask)",
            ),
        ),
        exposed="output",
        hidden="output",
        dtypes=("bf16",),
    ),
    _fault(
        "rounded in steps",
        "rounds the normalized value and its product with the weight, as modules written in PyTorch do",
        (_edit("activation, stepwise=False", "activation, stepwise=True"),),
        exposed="normalized",
        hidden="output",
        dtypes=("fp16",),
    ),
    _fault(
        "rounded once",
        "rounds once, where the contract rounds after every step",
        (_edit('"silu", stepwise=True', '"silu", stepwise=False'),),
        exposed="normalized",
        hidden="output",
        variant="stepwise",
        options="after in steps",
    ),
)

MEMORY = (
    _fault(
        "limit of a group",
        "covers at most 16384 columns of a group",
        (_launch("rows, warps = TILES[block]", "block = min(16384, block)\n    rows, warps = TILES[block]"),),
        exposed="unwritten",
        hidden="unwritten",
        options="real shapes",
        dtypes=("bf16",),
    ),
    _fault(
        "rows of x assumed contiguous",
        "reads row m of x at m · N",
        (
            _edit(
                "x_row = start + row_start(row, x_size_1, x_size_2, x_stride_0, x_stride_1, x_stride_2, FLAT)",
                "x_row = out_row",
            ),
        ),
        exposed="variance or out_of_bounds",
        hidden="output or out_of_bounds",
    ),
)

FAULTS = (*GATE, *STATISTICS, *ROUNDING, *MEMORY)
