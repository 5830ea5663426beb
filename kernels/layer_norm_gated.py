"""Gated LayerNorm and RMSNorm in Triton, over whole rows or groups of columns, gated before or after normalization.

Arithmetic is fp32. `single_rounding` rounds the output only; `stepwise` also rounds the normalized value to x's dtype
and its product with the weight to the weight's. Nothing is fused, so that a stage is what was computed with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from layer_norm_gated_arguments import STAGES, STATISTICS, check_forward, check_stepwise
from layer_norm_gated_launch import (
    group_depth,
    load,
    returned_stages,
    row_offset,
    stage_buffers,
    strided_arguments,
    tile,
)
from row_layout import address, contiguous_like
from torch import Tensor

from harness.kernel import kernel
from harness.placement import moved


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed. The
# addresses of stages carry no such promise: they would make a call that stores stages another variant.
@triton.jit(
    do_not_specialize=[
        "store_stages", "rows", "groups", "group_size", "eps",
        "x_size_1", "x_size_2", "x_stride_0", "x_stride_1", "x_stride_2",
        "z_size_1", "z_size_2", "z_stride_0", "z_stride_1", "z_stride_2",
    ],
    do_not_specialize_on_alignment=[
        "x_ptr", "weight_ptr", "bias_ptr", "z_ptr", "output_ptr", "gate_ptr", "gated_input_ptr", "mean_ptr",
        "variance_ptr", "rstd_ptr", "normalized_ptr", "affine_ptr",
    ],
)  # fmt: skip
def _layer_norm_gated_kernel(
    x_ptr, weight_ptr, bias_ptr, z_ptr, output_ptr,
    gate_ptr, gated_input_ptr, mean_ptr, variance_ptr, rstd_ptr, normalized_ptr, affine_ptr, store_stages,
    rows: tl.int64, groups, group_size, eps,
    x_size_1: tl.int64, x_size_2: tl.int64, x_stride_0: tl.int64, x_stride_1: tl.int64, x_stride_2: tl.int64,
    z_size_1: tl.int64, z_size_2: tl.int64, z_stride_0: tl.int64, z_stride_1: tl.int64, z_stride_2: tl.int64,
    NORM_FIRST: tl.constexpr, SILU: tl.constexpr, STEPWISE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One group of ROWS rows per program; a block covers the group. Statistics go to number group · rows + row."""
    X: tl.constexpr = x_ptr.dtype.element_ty
    W: tl.constexpr = weight_ptr.dtype.element_ty
    group = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    if ALIGNED:
        group_size = group_size // 16 * 16  # changes nothing, but shows the compiler that masks are uniform
    lanes = tl.arange(0, BLOCK)[None, :]
    inside = lanes < group_size
    mask = live & inside
    start = group.to(tl.int64) * group_size  # where the group starts in a row
    size = group_size.to(tl.float32)
    out_row = start + row * groups * group_size
    statistic = group * rows + row

    x_row = start + row_offset(row, x_size_1, x_size_2, x_stride_0, x_stride_1, x_stride_2)
    value = load(x_ptr, x_row, lanes, mask, ALIGNED)
    if z_ptr is not None:
        z_row = start + row_offset(row, z_size_1, z_size_2, z_stride_0, z_stride_1, z_stride_2)
        z = load(z_ptr, z_row, lanes, mask, ALIGNED)
        sigmoid = tl.sigmoid(z)
        gate = z * sigmoid if SILU else sigmoid
        if not NORM_FIRST:
            value = value * gate

    # Divisions and root are correctly rounded: they are one value per group. tl.rsqrt gives infinity for a subnormal.
    centered = value
    if mean_ptr is not None:
        mean = tl.div_rn(tl.sum(value, axis=1, keep_dims=True), size)
        centered = tl.where(inside, value - mean, 0.0)
        tl.store(mean_ptr + statistic, mean, mask=live)
    variance = tl.div_rn(tl.sum(centered * centered, axis=1, keep_dims=True), size)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    tl.store(variance_ptr + statistic, variance, mask=live)
    tl.store(rstd_ptr + statistic, rstd, mask=live)

    normalized = centered * rstd
    weight = load(weight_ptr, start, lanes, inside, ALIGNED)
    if STEPWISE:
        normalized = normalized.to(X).to(tl.float32)
        affine = (normalized * weight).to(W).to(tl.float32)
    else:
        affine = normalized * weight
        if bias_ptr is not None:
            affine += load(bias_ptr, start, lanes, inside, ALIGNED)
    output = affine
    if z_ptr is not None:
        if NORM_FIRST:
            output = affine * gate
    tl.store(address(output_ptr, out_row, lanes, ALIGNED), output.to(X), mask=mask)
    # Last: Triton 3.6 may move a conversion that the output needs too into this branch, and then fails (triton #8257).
    if store_stages:
        tl.store(normalized_ptr + out_row + lanes, normalized, mask=mask)
        tl.store(affine_ptr + out_row + lanes, affine, mask=mask)
        if z_ptr is not None:
            tl.store(gate_ptr + out_row + lanes, gate, mask=mask)
            if not NORM_FIRST:
                tl.store(gated_input_ptr + out_row + lanes, value, mask=mask)


@kernel(
    "layer_norm_gated",
    contract="single_rounding",
    name="triton[single_rounding]",
    stages=STAGES,
    depth=group_depth,
    placement="moves",
)
def layer_norm_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "silu",
    stages: tuple[str, ...] = (),
) -> Tensor | dict[str, Tensor]:
    """y = (x - mean) / sqrt(variance + eps) · weight + bias over each group of columns, times act(z).

    Args:
        x: [..., N], bf16, fp16 or fp32. Not copied where its last dimension is contiguous and at most three leading
            dimensions remain after merging.
        weight, bias: [N], bf16, fp16 or fp32.
        z: rows and dtype of x, with its own strides; it may have other leading dimensions, as [T, H, N] for [T · H, N].
        eps: added to the variance.
        group_size: columns per group; it divides N, None is N. A group takes at most 64 KiB in x's dtype.
        norm_before_gate: otherwise x · act(z) is normalized.
        is_rms_norm: the mean square takes the place of the variance, and no mean is subtracted.
        activation: `silu` (z · sigmoid(z)) or `sigmoid`.
        stages: which of `STAGES` to return too, in fp32: `gate` with z, `gated_input` where the gate comes first,
            `mean` without `is_rms_norm`. Statistics are [..., G] for G groups, and hold group g of row m at g · M + m
            of their memory for M rows; they are computed in any case, while other stages cost memory.

    Returns:
        The output, of x's dtype and shape, contiguous; with stages, a mapping from names to tensors.

    Tensors on another device than x are moved with a warning.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
        UnsupportedCase: a group of more than 64 KiB, or rows of more than 2³⁰ elements.
    """
    size = check_forward(x, weight, bias, z, group_size, activation, stages)
    tensors = moved({"weight": weight, "bias": bias, "z": z}, x.device)
    options = {"norm_before_gate": norm_before_gate, "is_rms_norm": is_rms_norm, "activation": activation}
    return _run(x, **tensors, eps=eps, group_size=size, **options, stepwise=False, stages=stages)


@kernel(
    "layer_norm_gated",
    contract="stepwise",
    name="triton[stepwise]",
    stages=STAGES,
    depth=group_depth,
    placement="moves",
)
def layer_norm_gated_stepwise(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    *,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    stages: tuple[str, ...] = (),
) -> Tensor | dict[str, Tensor]:
    """`layer_norm_gated` rounded after every step, as modules written in PyTorch are.

    The normalized value is rounded to x's dtype, and its product with the weight to the weight's, before the gate. Only
    with `is_rms_norm`, and weights of x's dtype or fp32.

    Raises:
        UnsupportedCase: a case that no such module has; otherwise as `layer_norm_gated`.
    """
    size = check_forward(x, weight, None, z, group_size, "silu", stages)
    check_stepwise(x, weight, is_rms_norm=is_rms_norm)
    tensors = moved({"weight": weight, "z": z}, x.device)
    options = {"norm_before_gate": norm_before_gate, "is_rms_norm": True, "activation": "silu"}
    return _run(x, **tensors, bias=None, eps=eps, group_size=size, **options, stepwise=True, stages=stages)


def _run(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    is_rms_norm: bool,
    activation: str,
    stepwise: bool,
    stages: tuple[str, ...],
) -> Tensor | dict[str, Tensor]:
    groups = x.shape[-1] // group_size
    absent = {"mean"} if is_rms_norm else set()
    absent |= {"gate", "gated_input"} if z is None else {"gated_input"} if norm_before_gate else set()
    present = [name for name in STAGES if name not in absent]
    in_full = bool(set(stages) - set(STATISTICS))
    buffers = stage_buffers(x, present, present if in_full else STATISTICS, groups)
    output = contiguous_like(x)
    vectors = {"weight_ptr": weight.contiguous(), "bias_ptr": None if bias is None else bias.contiguous()}
    rows, block, warps = tile(group_size)
    count = x.shape[:-1].numel()
    with torch.accelerator.device_index(x.device.index):
        if count:
            _layer_norm_gated_kernel[(triton.cdiv(count, rows) * groups,)](
                **strided_arguments(group_size, {"x": x, "z": z}, (*vectors.values(), output)),
                **vectors, output_ptr=output, **{f"{name}_ptr": buffers.get(name) for name in STAGES},
                store_stages=int(in_full), rows=count, groups=groups, group_size=group_size, eps=float(eps),
                NORM_FIRST=norm_before_gate or z is None, SILU=activation == "silu", STEPWISE=stepwise,
                ROWS=rows, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    mapping = returned_stages(x, buffers, stages)
    return mapping | {"output": output} if stages else output
