"""Gradients of the gated LayerNorm and RMSNorm in Triton, from saved statistics.

Arithmetic is fp32, each result is rounded once, nothing is fused. Each program walks several tiles of rows of one group
of columns and sums its part of dw and db. The parts are added in a tree of fixed shape, or atomically, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from arithmetic import sigmoid_of
from described import Described, PlannedLaunch, contiguous, current, described
from layer_norm_gated_arguments import BACKWARD_STAGES, check_backward
from layer_norm_gated_backward_launch import (
    depth,
    depth_atomic,
    in_flight,
    keep,
    launch_of_totals,
    layout_of_rows,
    leading_dims,
    parts_of,
    stages_of,
    store,
    tile,
)
from layer_norm_gated_launch import load, returned_stages, stages_in_memory
from row_layout import contiguous_like, row_start
from torch import Tensor

from lastbit import kernel, moved

TENSORS = ("x", "dy", "weight", "rstd", "mean", "bias", "z")
SOURCES = {"dx": "x", "dz": "z", "output": "x", "dw": "weight", "db": "bias"}
POINTERS = ("x", "dy", "z", "weight", "bias", "rstd", "mean", *SOURCES, *BACKWARD_STAGES)
# A program has whole rows of one group, whose sums follow from the size of the group. The sums over rows are added in
# an order that follows from their number, or in any.
OF_ROWS = ("rows", "permutation", "padding", "fp fusion")
OF_SUMS = ("shards", "scaling", "run to run")


class GradientParameters(NamedTuple):
    """The parameters of a call, and the way it adds the parts of dw and db."""

    norm_before_gate: bool
    activation: str
    recompute_output: bool
    atomic: bool


# What is part of a variant's key is said in layer_norm_gated.py.
@triton.jit(
    do_not_specialize=[
        "rows", "groups", "group_size", "tiles",
        "x_size_1", "x_size_2", "x_stride_0", "x_stride_1", "x_stride_2",
        "dy_size_1", "dy_size_2", "dy_stride_0", "dy_stride_1", "dy_stride_2",
        "z_size_1", "z_size_2", "z_stride_0", "z_stride_1", "z_stride_2",
        "rstd_row_stride", "rstd_group_stride", "mean_row_stride", "mean_group_stride",
    ],
    do_not_specialize_on_alignment=[
        "x_ptr", "dy_ptr", "weight_ptr", "bias_ptr", "z_ptr", "mean_ptr", "rstd_ptr", "dx_ptr", "dz_ptr", "output_ptr",
        "dw_ptr", "db_ptr", "gate_ptr", "gated_input_ptr", "normalized_ptr", "affine_ptr", "daffine_ptr",
        "dnormalized_ptr", "c1_ptr", "c2_ptr", "dgated_input_ptr",
    ],
)  # fmt: skip
def _layer_norm_gated_backward_kernel(
    x_ptr, dy_ptr, z_ptr, weight_ptr, bias_ptr, rstd_ptr, mean_ptr, dx_ptr, dz_ptr, output_ptr, dw_ptr, db_ptr,
    gate_ptr, gated_input_ptr, normalized_ptr, affine_ptr, daffine_ptr, dnormalized_ptr, c1_ptr, c2_ptr,
    dgated_input_ptr,
    rows: tl.int64, groups, group_size, tiles,
    x_size_1: tl.int64, x_size_2: tl.int64, x_stride_0: tl.int64, x_stride_1: tl.int64, x_stride_2: tl.int64,
    dy_size_1: tl.int64, dy_size_2: tl.int64, dy_stride_0: tl.int64, dy_stride_1: tl.int64, dy_stride_2: tl.int64,
    z_size_1: tl.int64, z_size_2: tl.int64, z_stride_0: tl.int64, z_stride_1: tl.int64, z_stride_2: tl.int64,
    rstd_row_stride: tl.int64, rstd_group_stride: tl.int64, mean_row_stride: tl.int64, mean_group_stride: tl.int64,
    ALIGNED: tl.constexpr, FLAT: tl.constexpr, NORM_FIRST: tl.constexpr, SILU: tl.constexpr, ATOMIC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """Walk `tiles` tiles of ROWS rows of one group per program; a block covers the group. Absent stages are not stored.

    dw and db are [parts, N], one row per program of a group; with ATOMIC they are [1, N], filled with zeros.
    """
    group = tl.program_id(0) % groups
    part = (tl.program_id(0) // groups).to(tl.int64)
    columns = groups * group_size
    if ALIGNED:
        group_size = group_size // 16 * 16  # changes nothing, but shows the compiler that masks are uniform
    lanes = tl.arange(0, BLOCK)[None, :]
    inside = lanes < group_size
    start = group.to(tl.int64) * group_size  # where the group starts in a row
    size = group_size.to(tl.float32)
    # As whole tiles, so that the compiler lays them out, and with them the sums, as the rows of x.
    every_row = start + tl.zeros([ROWS, 1], tl.int64)
    weight = load(weight_ptr, every_row, lanes, inside, ALIGNED)
    if bias_ptr is not None:
        bias = load(bias_ptr, every_row, lanes, inside, ALIGNED)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)

    for step in tl.range(0, tiles, num_stages=IN_FLIGHT):
        row = (part * tiles + step) * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < rows
        mask = live & inside
        out_row = start + row * columns
        statistic = group * rows + row
        x_row = start + row_start(row, x_size_1, x_size_2, x_stride_0, x_stride_1, x_stride_2, FLAT)
        dy_row = start + row_start(row, dy_size_1, dy_size_2, dy_stride_0, dy_stride_1, dy_stride_2, FLAT)
        x = load(x_ptr, x_row, lanes, mask, ALIGNED)
        dy = load(dy_ptr, dy_row, lanes, mask, ALIGNED)
        rstd = tl.load(rstd_ptr + row * rstd_row_stride + group * rstd_group_stride, mask=live, other=0.0)

        value = x
        if z_ptr is not None:
            z_row = start + row_start(row, z_size_1, z_size_2, z_stride_0, z_stride_1, z_stride_2, FLAT)
            z = load(z_ptr, z_row, lanes, mask, ALIGNED)
            sigmoid = sigmoid_of(z)
            if SILU:
                gate = z * sigmoid
                slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
            else:
                gate = sigmoid
                slope = sigmoid * (1.0 - sigmoid)
            keep(gate_ptr, out_row + lanes, gate, mask)
            if not NORM_FIRST:
                value = x * gate
                keep(gated_input_ptr, out_row + lanes, value, mask)
        centered = value
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row * mean_row_stride + group * mean_group_stride, mask=live, other=0.0)
            centered = value - mean
        normalized = tl.where(mask, centered * rstd, 0.0)
        keep(normalized_ptr, out_row + lanes, normalized, mask)
        affine = normalized * weight
        if bias_ptr is not None:
            affine += bias
        keep(affine_ptr, out_row + lanes, affine, mask)

        daffine = dy
        output = affine
        if z_ptr is not None:
            if NORM_FIRST:
                daffine = dy * gate
                output = affine * gate
                dz = dy * affine * slope
                store(dz_ptr, out_row, lanes, dz, mask, ALIGNED)
                keep(daffine_ptr, out_row + lanes, daffine, mask)
        if output_ptr is not None:
            store(output_ptr, out_row, lanes, output, mask, ALIGNED)
        dw += daffine * normalized
        db += daffine
        dnormalized = daffine * weight
        keep(dnormalized_ptr, out_row + lanes, dnormalized, mask)

        c1 = tl.div_rn(tl.sum(normalized * dnormalized, axis=1, keep_dims=True), size)
        keep(c1_ptr, statistic, c1, live)
        shift = normalized * c1
        if mean_ptr is not None:
            c2 = tl.div_rn(tl.sum(dnormalized, axis=1, keep_dims=True), size)
            keep(c2_ptr, statistic, c2, live)
            shift += c2
        dvalue = (dnormalized - shift) * rstd
        dx = dvalue
        if z_ptr is not None:
            if not NORM_FIRST:
                keep(dgated_input_ptr, out_row + lanes, dvalue, mask)
                dz = dvalue * x * slope
                dx = dvalue * gate
                store(dz_ptr, out_row, lanes, dz, mask, ALIGNED)
        store(dx_ptr, out_row, lanes, dx, mask, ALIGNED)

    dw_total = tl.sum(dw, axis=0, keep_dims=True)
    db_total = tl.sum(db, axis=0, keep_dims=True)
    if ATOMIC:
        tl.atomic_add(dw_ptr + start + lanes, dw_total, mask=inside, sem="relaxed")
        if db_ptr is not None:
            tl.atomic_add(db_ptr + start + lanes, db_total, mask=inside, sem="relaxed")
    else:
        part_row = start + part * columns
        store(dw_ptr, part_row, lanes, dw_total, inside, ALIGNED)
        if db_ptr is not None:
            store(db_ptr, part_row, lanes, db_total, inside, ALIGNED)


class GradientPlan(NamedTuple):
    """The plan of a call.

    Attributes:
        copied: the tensors that are to be copied to contiguous memory.
        results: name → the tensor whose shape and dtype it has.
        stages: those of the case.
        groups: of columns, in a row.
        parts: shape of the parts of dw, and of those of db.
        gradients: takes the tensors, in the order of `POINTERS`.
        totals: takes the parts of dw and db, then dw and db.
    """

    copied: tuple[str, ...]
    results: dict[str, str]
    stages: tuple[str, ...]
    groups: int
    parts: tuple[int, int]
    gradients: PlannedLaunch
    totals: PlannedLaunch


@lru_cache(maxsize=1024)
def _plan(tensors: tuple[Described | None, ...], options: GradientParameters, stages: tuple[str, ...]) -> GradientPlan:
    x, dy, weight, rstd, mean, bias, z = tensors
    size = check_backward(x, dy, weight, rstd, mean, bias, z, options.activation, stages)
    given = {name: tensor for name, tensor in zip(TENSORS, tensors, strict=True) if tensor is not None}
    copied = tuple(name for name, tensor in given.items() if leading_dims(name, tensor) is None)
    given |= {name: contiguous(given[name]) for name in copied}
    norm_first, recompute = options.norm_before_gate or z is None, options.recompute_output
    rows, block, warps = tile(size)
    count, groups, columns = x.shape[:-1].numel(), rstd.shape[-1], x.shape[-1]
    parts, tiles = parts_of(count, rows)
    kept = 1 if options.atomic else parts
    parameters = {
        "rows": count, "groups": groups, "group_size": size, "tiles": tiles, **layout_of_rows(size, given),
        "NORM_FIRST": norm_first, "SILU": options.activation == "silu", "ATOMIC": options.atomic,
        "ROWS": rows, "BLOCK": block, "IN_FLIGHT": in_flight(rows * block * x.dtype.itemsize, x.device),
    }  # fmt: skip
    return GradientPlan(
        copied,
        {name: source for name, source in SOURCES.items() if source in given and (recompute or name != "output")},
        stages_of(given, norm_first=norm_first, recompute_output=recompute),
        groups,
        (kept, columns),
        PlannedLaunch(
            _layer_norm_gated_backward_kernel, parts * groups, parameters, num_warps=warps, enable_fp_fusion=False
        ),
        launch_of_totals(kept, columns),
    )


def _run(
    x: Tensor, others: dict[str, Tensor | None], options: GradientParameters, stages: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the results and stages of a call; `others` are the tensors but x, in the order of `TENSORS`."""
    plan = _plan((described(x), *map(described, others.values())), options, stages)
    given = {"x": x, **others}
    given |= {name: given[name].contiguous() for name in plan.copied}
    results = {name: contiguous_like(given[source]) for name, source in plan.results.items()}
    stored = stages_in_memory(plan.stages, x, plan.groups) if stages else {}
    make = x.new_zeros if options.atomic else x.new_empty
    parts = {name: make(plan.parts, dtype=torch.float32) for name in ("dw", "db") if name in results}
    memory = {**given, **results, **stored, **parts}
    with current(x.device):
        plan.gradients(*map(memory.get, POINTERS))
        plan.totals(parts["dw"], parts.get("db"), results["dw"], results.get("db"))
    return results | returned_stages(x, stored, stages)


def _declare(name: str, depth: Callable[[int], int], *, atomic: bool) -> Callable[..., dict[str, Tensor]]:
    """Register the kernel that adds the parts of dw and db in a tree, or atomically."""

    @kernel(
        "layer_norm_gated_backward",
        name=name,
        stages=BACKWARD_STAGES,
        depth=depth,
        placement="moves",
        unordered=("dw", "db") if atomic else (),
        invariant=OF_ROWS if atomic else (*OF_ROWS, *OF_SUMS),
    )
    def gradients(
        x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor,
        mean: Tensor | None = None, bias: Tensor | None = None, z: Tensor | None = None, *,
        norm_before_gate: bool = True,
        activation: str = "silu",
        recompute_output: bool = False,
        stages: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:  # fmt: skip
        """Compute the gradients of `layer_norm_gated` for the gradient dy of its output.

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
        tensors = moved({"dy": dy, "weight": weight, "rstd": rstd, "mean": mean, "bias": bias, "z": z}, x.device)
        return _run(
            x,
            tensors,
            GradientParameters(norm_before_gate, activation, recompute_output, atomic),
            tuple(stages),
        )

    return gradients


layer_norm_gated_backward = _declare("triton[gated_backward]", depth, atomic=False)
layer_norm_gated_backward_atomic = _declare("triton[gated_backward+atomic]", depth_atomic, atomic=True)
