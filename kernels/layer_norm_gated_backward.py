"""Gradients of the gated LayerNorm and RMSNorm in Triton, from saved statistics.

Arithmetic is fp32, each result is rounded once, nothing is fused. Each program walks several tiles of rows of one group
of columns and sums its part of dw and db. The parts are added in a tree of fixed shape, or atomically, in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from layer_norm_gated_arguments import BACKWARD_STAGES, check_backward
from layer_norm_gated_launch import (
    group_depth,
    load,
    parts_of,
    returned_stages,
    row_depth,
    row_offset,
    stage_buffers,
    strided_arguments,
    sum_of_parts,
    tile,
)
from row_layout import address, contiguous_like
from torch import Tensor

from harness.kernel import kernel
from harness.placement import moved

ELEMENTS_PER_THREAD = 4  # few, for a program holds up to a dozen blocks at a time


def depth(n: int) -> int:
    """Greatest number of additions between a term and the sum of n of them, over a group or over rows."""
    return min(n, max(group_depth(n), row_depth(n, atomic=False)))


def depth_atomic(n: int) -> int:
    """`depth` where the parts of a sum over rows are added atomically."""
    return min(n, max(group_depth(n), row_depth(n, atomic=True)))


# What is part of a variant's key is said in layer_norm_gated.py.
@triton.jit(
    do_not_specialize=[
        "store_stages", "rows", "groups", "group_size", "tiles",
        "x_size_1", "x_size_2", "x_stride_0", "x_stride_1", "x_stride_2",
        "dy_size_1", "dy_size_2", "dy_stride_0", "dy_stride_1", "dy_stride_2",
        "z_size_1", "z_size_2", "z_stride_0", "z_stride_1", "z_stride_2",
    ],
    do_not_specialize_on_alignment=[
        "x_ptr", "dy_ptr", "weight_ptr", "bias_ptr", "z_ptr", "mean_ptr", "rstd_ptr", "dx_ptr", "dz_ptr", "output_ptr",
        "dw_ptr", "db_ptr", "gate_ptr", "gated_input_ptr", "normalized_ptr", "affine_ptr", "daffine_ptr",
        "dnormalized_ptr", "c1_ptr", "c2_ptr", "dgated_input_ptr",
    ],
)  # fmt: skip
def _layer_norm_gated_backward_kernel(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, z_ptr, mean_ptr, rstd_ptr, dx_ptr, dz_ptr, output_ptr, dw_ptr, db_ptr,
    gate_ptr, gated_input_ptr, normalized_ptr, affine_ptr, daffine_ptr, dnormalized_ptr, c1_ptr, c2_ptr,
    dgated_input_ptr, store_stages,
    rows: tl.int64, groups, group_size, tiles,
    x_size_1: tl.int64, x_size_2: tl.int64, x_stride_0: tl.int64, x_stride_1: tl.int64, x_stride_2: tl.int64,
    dy_size_1: tl.int64, dy_size_2: tl.int64, dy_stride_0: tl.int64, dy_stride_1: tl.int64, dy_stride_2: tl.int64,
    z_size_1: tl.int64, z_size_2: tl.int64, z_stride_0: tl.int64, z_stride_1: tl.int64, z_stride_2: tl.int64,
    NORM_FIRST: tl.constexpr, SILU: tl.constexpr, ATOMIC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """`tiles` tiles of ROWS rows of one group per program; a block covers the group.

    dw and db are [parts, N], one row per program of a group; with ATOMIC they are [N], filled with zeros.
    """
    X: tl.constexpr = x_ptr.dtype.element_ty
    group = tl.program_id(0) % groups
    part = (tl.program_id(0) // groups).to(tl.int64)
    if ALIGNED:
        group_size = group_size // 16 * 16  # changes nothing, but shows the compiler that masks are uniform
    lanes = tl.arange(0, BLOCK)[None, :]
    inside = lanes < group_size
    start = group.to(tl.int64) * group_size  # where the group starts in a row
    size = group_size.to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)

    for step in range(0, tiles):
        row = (part * tiles + step) * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < rows
        mask = live & inside
        out_row = start + row * groups * group_size
        statistic = group * rows + row
        x_row = start + row_offset(row, x_size_1, x_size_2, x_stride_0, x_stride_1, x_stride_2)
        dy_row = start + row_offset(row, dy_size_1, dy_size_2, dy_stride_0, dy_stride_1, dy_stride_2)
        x = load(x_ptr, x_row, lanes, mask, ALIGNED)
        dy = load(dy_ptr, dy_row, lanes, mask, ALIGNED)
        rstd = tl.load(rstd_ptr + statistic, mask=live, other=0.0)

        value = x
        if z_ptr is not None:
            z_row = start + row_offset(row, z_size_1, z_size_2, z_stride_0, z_stride_1, z_stride_2)
            z = load(z_ptr, z_row, lanes, mask, ALIGNED)
            sigmoid = tl.sigmoid(z)
            if SILU:
                gate = z * sigmoid
                slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
            else:
                gate = sigmoid
                slope = sigmoid * (1.0 - sigmoid)
            if not NORM_FIRST:
                value = x * gate
        centered = value
        if mean_ptr is not None:
            centered = value - tl.load(mean_ptr + statistic, mask=live, other=0.0)
        normalized = tl.where(mask, centered * rstd, 0.0)
        weight = load(weight_ptr, start, lanes, inside, ALIGNED)
        affine = normalized * weight
        if bias_ptr is not None:
            affine += load(bias_ptr, start, lanes, inside, ALIGNED)

        daffine = dy
        output = affine
        if z_ptr is not None:
            if NORM_FIRST:
                daffine = dy * gate
                output = affine * gate
                dz = dy * affine * slope
                tl.store(address(dz_ptr, out_row, lanes, ALIGNED), dz.to(X), mask=mask)
        if output_ptr is not None:
            tl.store(address(output_ptr, out_row, lanes, ALIGNED), output.to(X), mask=mask)
        dw += daffine * normalized
        db += daffine
        dnormalized = daffine * weight
        if store_stages:
            tl.store(normalized_ptr + out_row + lanes, normalized, mask=mask)
            tl.store(dnormalized_ptr + out_row + lanes, dnormalized, mask=mask)
            if affine_ptr is not None:
                tl.store(affine_ptr + out_row + lanes, affine, mask=mask)
            if z_ptr is not None:
                tl.store(gate_ptr + out_row + lanes, gate, mask=mask)
                if NORM_FIRST:
                    tl.store(daffine_ptr + out_row + lanes, daffine, mask=mask)
                else:
                    tl.store(gated_input_ptr + out_row + lanes, value, mask=mask)

        c1 = tl.div_rn(tl.sum(normalized * dnormalized, axis=1, keep_dims=True), size)
        shift = normalized * c1
        if mean_ptr is not None:
            c2 = tl.div_rn(tl.sum(dnormalized, axis=1, keep_dims=True), size)
            shift += c2
        dvalue = (dnormalized - shift) * rstd
        dx = dvalue
        if z_ptr is not None:
            if not NORM_FIRST:
                dz = dvalue * x * slope
                dx = dvalue * gate
                tl.store(address(dz_ptr, out_row, lanes, ALIGNED), dz.to(X), mask=mask)
        tl.store(address(dx_ptr, out_row, lanes, ALIGNED), dx.to(X), mask=mask)
        if store_stages:
            tl.store(c1_ptr + statistic, c1, mask=live)
            if mean_ptr is not None:
                tl.store(c2_ptr + statistic, c2, mask=live)
            if z_ptr is not None:
                if not NORM_FIRST:
                    tl.store(dgated_input_ptr + out_row + lanes, dvalue, mask=mask)

    dw_total = tl.sum(dw, axis=0, keep_dims=True)
    db_total = tl.sum(db, axis=0, keep_dims=True)
    if ATOMIC:
        tl.atomic_add(dw_ptr + start + lanes, dw_total, mask=inside, sem="relaxed")
        if db_ptr is not None:
            tl.atomic_add(db_ptr + start + lanes, db_total, mask=inside, sem="relaxed")
    else:
        part_row = start + part * groups * group_size
        tl.store(dw_ptr + part_row + lanes, dw_total, mask=inside)
        if db_ptr is not None:
            tl.store(db_ptr + part_row + lanes, db_total, mask=inside)


def by_group(statistic: Tensor, rows: int) -> Tensor:
    """A statistic [..., groups] as [groups, rows], where the forward pass saved it; copied if it lies otherwise."""
    return statistic.reshape(rows, statistic.shape[-1]).t().contiguous()


def _present(z: Tensor | None, mean: Tensor | None, *, norm_first: bool, recompute_output: bool) -> list[str]:
    """The stages of a case, in the order of `BACKWARD_STAGES`."""
    gate_first = {"gated_input", "dgated_input"}
    absent = {"gate", "daffine", *gate_first} if z is None else gate_first if norm_first else {"daffine"}
    if not recompute_output and (z is None or not norm_first):
        absent = absent | {"affine"}
    return [name for name in BACKWARD_STAGES if name not in absent and (name != "c2" or mean is not None)]


def _run(
    x: Tensor,
    *,
    dy: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    group_size: int,
    norm_before_gate: bool,
    activation: str,
    recompute_output: bool,
    atomic: bool,
    stages: tuple[str, ...],
) -> dict[str, Tensor]:
    count, groups = x.shape[:-1].numel(), rstd.shape[-1]
    rows, block, warps = tile(group_size, elements_per_thread=ELEMENTS_PER_THREAD)
    parts, tiles = parts_of(count, rows)
    norm_first = norm_before_gate or z is None
    present = _present(z, mean, norm_first=norm_first, recompute_output=recompute_output)
    buffers = stage_buffers(x, present, present if stages else (), groups)
    results = {"dx": contiguous_like(x)}
    if z is not None:
        results["dz"] = contiguous_like(z)
    if recompute_output:
        results["output"] = contiguous_like(x)
    vectors = {"weight_ptr": weight.contiguous(), "bias_ptr": None if bias is None else bias.contiguous()}
    shape = (1 if bias is None else 2, 1 if atomic else parts, x.shape[-1])
    sums = (torch.zeros if atomic else torch.empty)(shape, dtype=torch.float32, device=x.device)
    with torch.accelerator.device_index(x.device.index):
        _layer_norm_gated_backward_kernel[(parts * groups,)](
            **strided_arguments(group_size, {"x": x, "dy": dy, "z": z}, (*vectors.values(), *results.values())),
            **vectors, rstd_ptr=by_group(rstd, count), mean_ptr=None if mean is None else by_group(mean, count),
            **{f"{name}_ptr": results.get(name) for name in ("dx", "dz", "output")},
            dw_ptr=sums[0], db_ptr=None if bias is None else sums[1],
            **{f"{name}_ptr": buffers.get(name) for name in BACKWARD_STAGES}, store_stages=int(bool(stages)),
            rows=count, groups=groups, group_size=group_size, tiles=tiles,
            NORM_FIRST=norm_first, SILU=activation == "silu", ATOMIC=atomic,
            ROWS=rows, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    totals = sum_of_parts(sums)
    results["dw"] = totals[0].to(weight.dtype)
    if bias is not None:
        results["db"] = totals[1].to(bias.dtype)
    return results | returned_stages(x, buffers, stages)


def _declare(name: str, depth: Callable[[int], int], *, atomic: bool) -> Callable[..., dict[str, Tensor]]:
    """Register the kernel that adds the parts of dw and db in a tree, or atomically."""

    @kernel(
        "layer_norm_gated_backward",
        name=name,
        stages=BACKWARD_STAGES,
        depth=depth,
        placement="moves",
        unordered=("dw", "db") if atomic else (),
    )
    def gradients(
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        rstd: Tensor,
        mean: Tensor | None = None,
        bias: Tensor | None = None,
        z: Tensor | None = None,
        *,
        norm_before_gate: bool = True,
        activation: str = "silu",
        recompute_output: bool = False,
        stages: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """Gradients of `layer_norm_gated` for the gradient dy of its output.

        Args:
            x, weight, bias, z, norm_before_gate, activation: as `layer_norm_gated` took them.
            dy: rows and dtype of x, with its own strides, those of an expanded tensor too.
            rstd, mean: [..., G], fp32, with any strides: one value for each of G groups of each row. No mean stands for
                RMS normalization.
            recompute_output: also return `output`, gated where the gate comes after the normalization.
            stages: which of `BACKWARD_STAGES` to return too, in fp32; those that the case lacks are left out.

        Returns:
            `dx` and `dw`, `db` with a bias, `dz` with z: of the dtype and shape of what they are the gradients of.

        Tensors on another device than x are moved with a warning.

        Raises:
            ValueError, TypeError: arguments that do not fit together.
            UnsupportedCase: a group of more than 64 KiB, or rows of more than 2³⁰ elements.
        """
        size = check_backward(x, dy, weight, rstd, mean, bias, z, activation, stages)
        tensors = moved({"dy": dy, "weight": weight, "rstd": rstd, "mean": mean, "bias": bias, "z": z}, x.device)
        options = {"norm_before_gate": norm_before_gate, "activation": activation, "recompute_output": recompute_output}
        return _run(x, **tensors, group_size=size, **options, atomic=atomic, stages=stages)

    return gradients


layer_norm_gated_backward = _declare("triton[gated_backward]", depth, atomic=False)
layer_norm_gated_backward_atomic = _declare("triton[gated_backward+atomic]", depth_atomic, atomic=True)
