"""Quantization to codes of 8 bits in Triton: one scale for a tensor, for each row, or for each group of columns.

Arithmetic is fp32. How a code follows from a number x, the scale s and amax, the largest magnitude that s is of:

* `quotient`: x / s.
* `reciprocal`: x · (1 / s).
* `inverted`: x · (largest / amax), as far as s is not rounded to a power of two.
* `scaled_amax`, `reciprocal_scale`: s is amax · (1 / largest), or 1 / (largest / amax), in place of amax / largest.
* `half_away`, `truncated`: int8 codes are rounded to nearest with ties away from zero, or cut off.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from described import Described, PlannedLaunch, current, described
from quantize_arguments import CODES, LARGEST, STAGES, check_arguments
from rms_norm_launch import tile
from row_layout import address, contiguous_like, layout_of, row_start, whole_vectors
from torch import Tensor, float32
from triton.language.extra import libdevice

from lastbit import kernel

LEADING_DIMS = 3


@triton.jit
def _power_of_two(x, UPWARD: tl.constexpr):
    """Return the power of two next to x > 0, by its bits."""
    bits = x.to(tl.int32, bitcast=True)
    if UPWARD:
        bits += 0x007FFFFF
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(amax, least, LARGEST: tl.constexpr, RULE: tl.constexpr, UE8M0: tl.constexpr):
    """Return the scale, and largest / amax, which is 1 where amax is zero."""
    factor = tl.where(amax > 0.0, tl.div_rn(LARGEST, amax), 1.0)
    if RULE == "reciprocal_scale":
        if UE8M0:
            factor = _power_of_two(factor, False)
        scale = tl.maximum(tl.div_rn(1.0, factor), least)
    else:
        scale = amax * (1.0 / LARGEST) if RULE == "scaled_amax" else tl.div_rn(amax, LARGEST)
        scale = tl.maximum(scale, least)
        if UE8M0:
            scale = _power_of_two(scale, True)
    return scale, factor


@triton.jit
def _code(scaled, DTYPE: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr, INTEGERS: tl.constexpr):
    limited = tl.clamp(scaled, LOWEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if INTEGERS == "half_even":
        limited = libdevice.rint(limited)
    elif INTEGERS == "half_away":
        limited = libdevice.round(limited)
    return limited.to(DTYPE)


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed.
@triton.jit(
    do_not_specialize=[
        "least_amax", "least_scale", "units", "per_row", "n", "size_1", "size_2", "stride_0", "stride_1", "stride_2",
    ],
    do_not_specialize_on_alignment=["x_ptr", "codes_ptr", "scale_ptr", "amax_ptr", "scaled_ptr"],
)  # fmt: skip
def _quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, amax_ptr, scaled_ptr, least_amax, least_scale,
    units: tl.int64, per_row: tl.int64, n, size_1: tl.int64, size_2: tl.int64,
    stride_0: tl.int64, stride_1: tl.int64, stride_2: tl.int64,
    GIVEN: tl.constexpr, GROUPED: tl.constexpr, CODES: tl.constexpr, RULE: tl.constexpr, UE8M0: tl.constexpr,
    INTEGERS: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS units per program: rows, or groups of n columns. Without LOOP a block covers a unit, read once."""
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = unit < units
    lanes = tl.arange(0, BLOCK)[None, :]
    if ALIGNED:
        n = n // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    end = n if LOOP else BLOCK
    if GROUPED:
        row = unit // per_row
        x_unit = row_start(row, size_1, size_2, stride_0, stride_1, stride_2, FLAT) + (unit - row * per_row) * n
    else:
        x_unit = row_start(unit, size_1, size_2, stride_0, stride_1, stride_2, FLAT)
    out_unit = unit * n

    value = tl.zeros([ROWS, BLOCK], tl.float32)
    if GIVEN:
        scale = tl.load(scale_ptr)
        factor = tl.div_rn(1.0, scale)
    else:
        amax = tl.zeros([ROWS, 1], tl.float32)
        for start in range(0, end, BLOCK):
            columns = start + lanes
            mask = live & (columns < n)
            value = tl.load(address(x_ptr, x_unit, columns, ALIGNED), mask=mask, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.max(tl.abs(value), axis=1, keep_dims=True))  # ignores NaN
        amax = tl.maximum(amax, least_amax)
        scale, factor = _scale_of(amax, least_scale, LARGEST, RULE, UE8M0)
        tl.store(scale_ptr + unit, scale, mask=live)
        if amax_ptr is not None:
            tl.store(amax_ptr + unit, amax, mask=live)
        if CODES == "reciprocal":
            factor = tl.div_rn(1.0, scale)

    for start in range(0, end, BLOCK):
        columns = start + lanes
        mask = live & (columns < n)
        if LOOP or GIVEN:
            value = tl.load(address(x_ptr, x_unit, columns, ALIGNED), mask=mask, other=0.0).to(tl.float32)
        scaled = tl.div_rn(value, scale) if CODES == "quotient" else value * factor
        code = _code(scaled, DTYPE, LOWEST, LARGEST, INTEGERS)
        tl.store(address(codes_ptr, out_unit, columns, ALIGNED), code, mask=mask)
        if scaled_ptr is not None:
            tl.store(scaled_ptr + out_unit + columns, scaled, mask=mask)


def quantize(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    dtype: str,
    group_size: int | None = None,
    ue8m0: bool = False,
    least_amax: float = 0.0,
    least_scale: float = 0.0,
    codes: str = "quotient",
    scale_rule: str = "",
    integers: str = "half_even",
    stages: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Quantize x / scale, limited to the largest number of the codes' format and rounded to it.

    Args:
        x: [..., N], bf16, fp16 or fp32, with any strides. Not copied where its last dimension is contiguous and at most
            three leading dimensions remain after merging.
        scale: [1], fp32, for the whole tensor; None where it is found for each row or group.
        dtype: of the codes, `e4m3`, `e5m2` or `int8`.
        group_size: columns that share a scale; None for all of a row.
        ue8m0: whether scales are rounded up to powers of two. They are fp32 all the same.
        least_amax, least_scale: lower limits of the largest magnitude and the scale. With neither, a row of zeros has
            the scale 0, and its codes are 0 / 0 where the contract divides by the scale.
        codes, scale_rule, integers: the contract, see the module.
        stages: which of `STAGES` to return too; `amax` exists only where no scale is given.

    Returns:
        The codes as `e4m3_codes`, `e5m2_codes` or `int8_codes`, contiguous, and where none is given the `scale`, fp32,
        [..., 1] or [..., N / group_size].

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        UnsupportedCase: rows of more than 2³⁰ elements.
    """
    plan = _plan(
        described(x), described(scale), dtype, group_size, ue8m0, float(least_amax), float(least_scale),
        codes, scale_rule, integers, bool(stages),
    )  # fmt: skip
    found = {f"{dtype}_codes": contiguous_like(x, dtype=CODES[dtype])}
    if scale is None:
        found["scale"] = contiguous_like(x, columns=plan.scales, dtype=float32)
    amax = contiguous_like(x, columns=plan.scales, dtype=float32) if stages and scale is None else None
    scaled = contiguous_like(x, dtype=float32) if stages else None
    if plan.launch is not None:
        with current(x.device):
            plan.launch(
                x.contiguous() if plan.copied else x, found[f"{dtype}_codes"], found.get("scale", scale), amax, scaled,
                float(least_amax), float(least_scale),
            )  # fmt: skip
    shown = {"amax": amax, "scaled": scaled}
    return found | {name: tensor for name, tensor in shown.items() if name in stages and tensor is not None}


class QuantizePlan(NamedTuple):
    """The plan of a call.

    Attributes:
        launch: takes the tensors and least values; None where there is nothing to do.
        copied: whether x is to be copied to contiguous memory.
        scales: of a row.
    """

    launch: PlannedLaunch | None
    copied: bool
    scales: int


@functools.lru_cache(maxsize=1024)
def _plan(
    x: Described, scale: Described | None, dtype: str, group_size: int | None, ue8m0: bool,
    least_amax: float, least_scale: float, codes: str, scale_rule: str, integers: str,
    staged: bool,
) -> QuantizePlan:  # fmt: skip
    """Plan a call; `staged` chooses the compiled variant, and changes nothing else here."""
    check_arguments(x, scale, dtype, group_size, ue8m0, least_amax, least_scale)
    n = group_size or x.shape[-1]
    scales = x.shape[-1] // n if group_size else 1
    layout = layout_of([x], dims=LEADING_DIMS)
    units = layout.rows * scales
    rows, block, num_warps = tile(n, quantized=True)
    if ue8m0 and scale_rule != "reciprocal_scale":
        codes = "reciprocal"  # that of a power of two is exact, so that a product is the quotient
    aligned = n % 16 == 0 and whole_vectors(x.shape[-1], [x], layout)
    parameters: dict[str, Any] = {
        "units": units, "per_row": scales, "n": n, "size_1": layout.sizes[1], "size_2": layout.sizes[2],
        "stride_0": layout.strides[0][0], "stride_1": layout.strides[0][1], "stride_2": layout.strides[0][2],
        "GIVEN": scale is not None, "GROUPED": scales > 1, "CODES": codes, "RULE": scale_rule, "UE8M0": bool(ue8m0),
        "INTEGERS": integers if dtype == "int8" else "",
        "LOWEST": -128.0 if dtype == "int8" else -LARGEST[dtype], "LARGEST": LARGEST[dtype],
        "ROWS": rows, "BLOCK": block, "LOOP": n > block,
        "FLAT": aligned and layout.sizes[:-1] == (1, 1), "ALIGNED": aligned,  # few variants: no plain rows unaligned
    }  # fmt: skip
    launch = PlannedLaunch(_quantize_kernel, triton.cdiv(units, rows), parameters, num_warps=num_warps)
    return QuantizePlan(launch if units else None, layout.copied, scales)


def _declare(contract: str, **rules: str) -> None:
    @kernel(
        "quantize",
        contract=contract,
        name=f"triton[{contract}]",
        stages=STAGES,
        invariant=("rows", "permutation", "padding", "layout", "shards", "run to run"),  # no sum that has an order
    )
    def triton_quantize(
        x, scale=None, *, dtype, group_size=None, ue8m0=False, least_amax=0.0, least_scale=0.0, stages=()
    ):
        options = {"group_size": group_size, "ue8m0": ue8m0, "least_amax": least_amax, "least_scale": least_scale}
        return quantize(x, scale, dtype=dtype, stages=stages, **options, **rules)


_declare("quotient", codes="quotient")
_declare("reciprocal", codes="reciprocal")
_declare("inverted+half_away", codes="inverted", integers="half_away")
_declare("inverted+scaled_amax", codes="inverted", scale_rule="scaled_amax")
_declare("inverted+reciprocal_scale", codes="inverted", scale_rule="reciprocal_scale")
