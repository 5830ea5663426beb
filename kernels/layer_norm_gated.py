"""Gated LayerNorm and RMSNorm in Triton, over whole rows or groups of columns, gated before or after normalization.

Arithmetic is fp32. `single_rounding` rounds the output only; `stepwise` also rounds the normalized value to x's dtype
and its product with the weight to the weight's. Nothing is fused, so that a stage is what was computed with.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from arithmetic import inverse_root, quotient, sigmoid_of
from described import Described, PlannedLaunch, current, described
from layer_norm_gated_arguments import STAGES, check_forward, check_stepwise
from layer_norm_gated_launch import (
    GatedNormParameters,
    depth,
    load,
    numbers_of,
    returned_stages,
    rows_of,
    stages_in_memory,
    stages_to_store,
    tile,
)
from row_layout import address, contiguous_like, row_start, whole_vectors
from torch import Tensor

from lastbit import kernel, moved

# A program has one group of some rows. Its block, and with it every sum, follows from the size of the group.
INVARIANT = ("rows", "permutation", "padding", "shards", "scaling", "run to run", "fp fusion")


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed, and FLAT
# whether row numbers need be divided. A stage that is not stored has no pointer, so that no variant branches.
@triton.jit(
    do_not_specialize=[
        "rows", "groups", "group_size", "eps",
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
    gate_ptr, gated_input_ptr, mean_ptr, variance_ptr, rstd_ptr, normalized_ptr, affine_ptr, eps,
    rows: tl.int64, groups, group_size,
    x_size_1: tl.int64, x_size_2: tl.int64, x_stride_0: tl.int64, x_stride_1: tl.int64, x_stride_2: tl.int64,
    z_size_1: tl.int64, z_size_2: tl.int64, z_stride_0: tl.int64, z_stride_1: tl.int64, z_stride_2: tl.int64,
    RMS: tl.constexpr, NORM_FIRST: tl.constexpr, SILU: tl.constexpr, STEPWISE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Compute a group of ROWS rows per program; a block covers it. Statistics go to place group · rows + row."""
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

    weight = load(weight_ptr, start, lanes, inside, ALIGNED)
    if bias_ptr is not None:
        bias = load(bias_ptr, start, lanes, inside, ALIGNED)
    x_row = start + row_start(row, x_size_1, x_size_2, x_stride_0, x_stride_1, x_stride_2, FLAT)
    value = load(x_ptr, x_row, lanes, mask, ALIGNED)
    if z_ptr is not None:
        z_row = start + row_start(row, z_size_1, z_size_2, z_stride_0, z_stride_1, z_stride_2, FLAT)
        z = load(z_ptr, z_row, lanes, mask, ALIGNED)
        sigmoid = sigmoid_of(z)
        gate = z * sigmoid if SILU else sigmoid
        if not NORM_FIRST:
            value = value * gate

    centered = value
    if not RMS:
        mean = quotient(tl.sum(value, axis=1, keep_dims=True), size)
        centered = tl.where(inside, value - mean, 0.0)
        if mean_ptr is not None:
            tl.store(mean_ptr + statistic, mean, mask=live)
    variance = quotient(tl.sum(centered * centered, axis=1, keep_dims=True), size)
    rstd = inverse_root(variance + eps)
    if rstd_ptr is not None:
        tl.store(variance_ptr + statistic, variance, mask=live)
        tl.store(rstd_ptr + statistic, rstd, mask=live)

    normalized = centered * rstd
    if STEPWISE:
        normalized = normalized.to(X).to(tl.float32)
        affine = (normalized * weight).to(W).to(tl.float32)
    else:
        affine = normalized * weight
        if bias_ptr is not None:
            affine += bias
    output = affine
    if z_ptr is not None:
        if NORM_FIRST:
            output = affine * gate
    tl.store(address(output_ptr, out_row, lanes, ALIGNED), output.to(X), mask=mask)
    if normalized_ptr is not None:
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
    depth=depth,
    placement="moves",
    invariant=INVARIANT,
    primitives={"inverse_root": "rsqrt"},
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
    """Compute (x - mean) / sqrt(variance + eps) · weight + bias over each group of columns, times act(z).

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
            of their memory for M rows; asked for alone they cost next to nothing, while other stages cost memory.

    Returns:
        The output, of x's dtype and shape, contiguous; with stages, a mapping from names to tensors.

    Tensors on another device than x are moved with a warning.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
        UnsupportedCase: a group of more than 64 KiB, or rows of more than 2³⁰ elements.
    """
    tensors = moved({"weight": weight, "bias": bias, "z": z}, x.device)
    options = GatedNormParameters(group_size, norm_before_gate, is_rms_norm, activation, stepwise=False)
    return _run(x, **tensors, eps=eps, options=options, stages=tuple(stages))


@kernel(
    "layer_norm_gated",
    contract="stepwise",
    name="triton[stepwise]",
    stages=STAGES,
    depth=depth,
    placement="moves",
    invariant=INVARIANT,
    primitives={"inverse_root": "rsqrt"},
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
    """Compute `layer_norm_gated` rounded after every step, as modules written in PyTorch are.

    The normalized value is rounded to x's dtype, and its product with the weight to the weight's, before the gate. Only
    with `is_rms_norm`, and weights of x's dtype or fp32.

    Raises:
        UnsupportedCase: a case that no such module has; otherwise as `layer_norm_gated`.
    """
    tensors = moved({"weight": weight, "z": z}, x.device)
    options = GatedNormParameters(group_size, norm_before_gate, is_rms_norm, "silu", stepwise=True)
    return _run(x, **tensors, bias=None, eps=eps, options=options, stages=tuple(stages))


def _run(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    options: GatedNormParameters,
    stages: tuple[str, ...],
) -> Tensor | dict[str, Tensor]:
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    plan = _plan(described(x), described(weight), described(bias), described(z), options, stages)
    x, z = x.contiguous() if "x" in plan.copied else x, z.contiguous() if "z" in plan.copied else z
    output = contiguous_like(x)
    stored = stages_in_memory(plan.stored, x, plan.groups)
    if plan.launch is not None:
        with current(x.device):
            plan.launch(x, weight, bias, z, output, *map(stored.get, STAGES), float(eps))
    return returned_stages(x, stored, stages) | {"output": output} if stages else output


class GatedNormPlan(NamedTuple):
    """The plan of a call.

    Attributes:
        launch: takes the tensors and eps; None where there is nothing to do.
        copied: which of x and z are to be copied to contiguous memory.
        stored: the stages to store.
        groups: of columns, in a row.
    """

    launch: PlannedLaunch | None
    copied: tuple[str, ...]
    stored: tuple[str, ...]
    groups: int


@lru_cache(maxsize=1024)
def _plan(
    x: Described,
    weight: Described,
    bias: Described | None,
    z: Described | None,
    options: GatedNormParameters,
    stages: tuple[str, ...],
) -> GatedNormPlan:
    size = check_forward(x, weight, bias, z, options.group_size, options.activation, stages)
    if options.stepwise:
        check_stepwise(x, weight, is_rms_norm=options.is_rms_norm)
    groups, norm_first = x.shape[-1] // size, options.norm_before_gate or z is None
    rows, block, warps = tile(size)
    x_rows, z_rows = rows_of(x), rows_of(z)
    flat = [weight] if bias is None else [weight, bias]
    aligned = whole_vectors(size, [x], x_rows, flat) and (z is None or whole_vectors(size, [z], z_rows))
    parameters = {
        "rows": x_rows.rows, "groups": groups, "group_size": size,
        **numbers_of("x", x_rows), **numbers_of("z", z_rows),
        "RMS": options.is_rms_norm, "NORM_FIRST": norm_first, "SILU": options.activation == "silu",
        "STEPWISE": options.stepwise, "ROWS": rows, "BLOCK": block, "ALIGNED": aligned,
        "FLAT": aligned and x_rows.sizes[:-1] == z_rows.sizes[:-1] == (1, 1),
    }  # fmt: skip
    programs = triton.cdiv(x_rows.rows, rows) * groups
    launch = PlannedLaunch(_layer_norm_gated_kernel, programs, parameters, num_warps=warps, enable_fp_fusion=False)
    copied = tuple(name for name, layout in (("x", x_rows), ("z", z_rows)) if layout.copied)
    stored = stages_to_store(stages, gated=z is not None, norm_first=norm_first, is_rms_norm=options.is_rms_norm)
    return GatedNormPlan(launch if programs else None, copied, stored, groups)
