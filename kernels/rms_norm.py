"""RMSNorm in Triton, with fused residual add and FP8 output, for every combination of rounding rules.

Arithmetic is fp32; the contract says which numbers are rounded to a narrower format:

* `native_multiply`: x · r is rounded to the weight's dtype, and so is its product with the weight; the output to x's.
* `fp32_multiply`: only the output is rounded.
* `rounded_sum`, `unrounded_sum`, `rounded_value`: the sum with the residual is rounded to x's dtype before it is
  squared and normalized, in neither place, or only before it is normalized.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from described import CallPlan, Described, PlannedLaunch, current, described
from rms_norm_arguments import RESIDUAL_RULES, STAGES, WEIGHT_RULES, check_options, check_tensors
from rms_norm_launch import NO_STAGES, allocate_results, allocate_stages, summation_depth, tile
from row_layout import address, layout_of, row_start, whole_vectors
from torch import Tensor

from lastbit import kernel

FP8_MAX = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1 / (448.0 * 512.0))
LEADING_DIMS = 3


@triton.jit
def _load(x_ptr, residual_ptr, x_offset, residual_offset, columns, mask, RULE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return in fp32 the numbers to square, those to normalize, and the rounded sum."""
    x = tl.load(address(x_ptr, x_offset, columns, ALIGNED), mask=mask, other=0.0)
    total = x.to(tl.float32)
    rounded = total
    if residual_ptr is not None:
        residual = tl.load(address(residual_ptr, residual_offset, columns, ALIGNED), mask=mask, other=0.0)
        total = total + residual.to(tl.float32)
        rounded = total.to(x.dtype).to(tl.float32)
    squared = rounded if RULE == "rounded_sum" else total
    value = total if RULE == "unrounded_sum" else rounded
    return squared, value, rounded


@triton.jit
def _load_weight(ptr, columns, n, ALIGNED: tl.constexpr):
    """Load the weights of columns, in their own dtype; None where there are none."""
    if ptr is None:
        weight = None
    else:
        weight = tl.load(address(ptr, 0, columns, ALIGNED), mask=columns < n, other=0.0)
    return weight


@triton.jit
def _normalize(value, inv_rms, weight, offset, X: tl.constexpr, NATIVE: tl.constexpr):
    """Return in fp32 the stages `normalized`, `product` and `output`, rounded as the contract says."""
    normalized = value * inv_rms
    if weight is None:
        if NATIVE:
            normalized = normalized.to(X).to(tl.float32)
        product = normalized
    elif NATIVE:
        normalized = normalized.to(weight.dtype).to(tl.float32)
        product = (normalized * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)
    else:
        product = normalized * (weight.to(tl.float32) + offset)
    return normalized, product, product.to(X).to(tl.float32)


@triton.jit
def _quotient(output, scale):
    """Return output / scale, whose code is that of the correctly rounded quotient, see docs/contracts/rms_norm.md.

    The factors -1 keep the sign of a zero; an infinite scale takes nothing away, so that finite outputs give 0.
    """
    reciprocal = tl.div_rn(1.0, scale)
    quotient = output * reciprocal
    excess = tl.fma(quotient, tl.where(scale == float("inf"), 0.0, scale), output * -1.0)
    return tl.fma(excess, reciprocal * -1.0, quotient)


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed. The
# addresses of stages carry no such promise. What small kernels read stands in front, in the first 64 bytes.
@triton.jit(
    do_not_specialize=[
        "rows", "n", "variance_size", "size_1", "size_2", "x_stride_0", "x_stride_1", "x_stride_2",
        "residual_stride_0", "residual_stride_1", "residual_stride_2", "eps", "weight_offset",
    ],
    do_not_specialize_on_alignment=[
        "x_ptr", "residual_ptr", "weight_ptr", "scale_ptr", "result_ptr", "residual_sum_ptr", "row_scale_ptr",
        "variance_ptr", "inv_rms_ptr", "normalized_ptr", "product_ptr", "output_ptr",
    ],
)  # fmt: skip
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, result_ptr, residual_sum_ptr, row_scale_ptr,
    variance_ptr, inv_rms_ptr, normalized_ptr, product_ptr, output_ptr, eps,
    n, rows: tl.int64, x_stride_2: tl.int64, residual_stride_2: tl.int64, weight_offset, variance_size,
    size_1: tl.int64, size_2: tl.int64,
    x_stride_0: tl.int64, x_stride_1: tl.int64, residual_stride_0: tl.int64, residual_stride_1: tl.int64,
    NATIVE: tl.constexpr, RULE: tl.constexpr, QUANT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows per program. Without LOOP a block covers a row, every loop runs once and x is read once."""
    X: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    lanes = tl.arange(0, BLOCK)[None, :]
    if ALIGNED:
        n = n // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    end = n if LOOP else BLOCK
    x_row = row_start(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2, FLAT)
    residual_row = row_start(row, size_1, size_2, residual_stride_0, residual_stride_1, residual_stride_2, FLAT)
    out_row = row * n

    count = n if variance_size is None else variance_size
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    value = squares
    for start in range(0, end, BLOCK):
        columns = start + lanes
        mask = live & (columns < n)
        squared, value, rounded = _load(x_ptr, residual_ptr, x_row, residual_row, columns, mask, RULE, ALIGNED)
        if variance_size is not None:
            squared = tl.where(columns < variance_size, squared, 0.0)
        squares += squared * squared
        if residual_ptr is not None:
            tl.store(address(residual_sum_ptr, out_row, columns, ALIGNED), rounded.to(X), mask=mask)
    weight = _load_weight(weight_ptr, lanes, n, ALIGNED)  # does not wait for the sum
    variance = tl.div_rn(tl.sum(squares, axis=1, keep_dims=True), count.to(tl.float32))
    # Not tl.rsqrt, which gives infinity for a subnormal argument; this is one value per row, of rows of any length.
    inv_rms = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    if variance_ptr is not None:
        tl.store(variance_ptr + row, variance, mask=live)
        tl.store(inv_rms_ptr + row, inv_rms, mask=live)

    if QUANT == "static":
        row_scale = tl.div_rn(1.0, tl.load(scale_ptr))
    elif QUANT == "dynamic":
        amax = tl.zeros([ROWS, 1], tl.float32)
        for start in range(0, end, BLOCK):
            columns = start + lanes
            mask = live & (columns < n)
            if LOOP:
                _, value, _ = _load(x_ptr, residual_ptr, x_row, residual_row, columns, mask, RULE, ALIGNED)
            gain = _load_weight(weight_ptr, columns, n, ALIGNED) if LOOP else weight
            _, _, output = _normalize(value, inv_rms, gain, weight_offset, X, NATIVE)
            amax = tl.maximum(amax, tl.max(tl.abs(output), axis=1, keep_dims=True))
        row_scale = tl.maximum(tl.div_rn(amax, FP8_MAX), SMALLEST_SCALE)
        tl.store(row_scale_ptr + row, row_scale, mask=live)

    for start in range(0, end, BLOCK):
        columns = start + lanes
        mask = live & (columns < n)
        if LOOP:
            _, value, _ = _load(x_ptr, residual_ptr, x_row, residual_row, columns, mask, RULE, ALIGNED)
        gain = _load_weight(weight_ptr, columns, n, ALIGNED) if LOOP else weight
        normalized, product, output = _normalize(value, inv_rms, gain, weight_offset, X, NATIVE)
        result = output
        if QUANT == "static":
            result = tl.clamp(output * row_scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        elif QUANT == "dynamic":
            result = _quotient(output, row_scale)
        result_pointers = address(result_ptr, out_row, columns, ALIGNED)
        tl.store(result_pointers, result.to(result_ptr.dtype.element_ty), mask=mask)
        if normalized_ptr is not None:
            tl.store(normalized_ptr + out_row + columns, normalized, mask=mask)
            tl.store(product_ptr + out_row + columns, product, mask=mask)
            tl.store(output_ptr + out_row + columns, output, mask=mask)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    quant: str | None = None,
    weight_rule: str = "native_multiply",
    residual_rule: str = "rounded_sum",
    stages: tuple[str, ...] = (),
) -> Tensor | dict[str, Tensor]:
    """Compute y = x / sqrt(mean(x²) + eps) · (weight + weight_offset) over the last dimension, after x + residual.

    Args:
        x, residual: [..., N], bf16, fp16 or fp32, of one shape and dtype, each with its own strides. Neither is copied
            where its last dimension is contiguous and at most three leading dimensions remain after merging.
        weight: [N], bf16, fp16 or fp32.
        scale: [1], fp32; needed for `quant="static"` and only there.
        eps: added to the mean square.
        variance_size: number of leading columns that the mean is over; None for all.
        weight_offset: 1 for Gemma's weights; only with `fp32_multiply`.
        quant: None, `static` (e4m3 codes of y · (1 / scale)) or `dynamic` (codes of y / s with s = max|y| / 448 for
            each row). A NaN of y becomes a NaN code and is ignored by s.
        weight_rule, residual_rule: the contract, see the module.
        stages: which of `STAGES` to return too; `product` exists only with a weight.

    Returns:
        The output, contiguous, or where there is more than one result or stage, a mapping from names to tensors:
        `output` or `quantized`, `scale` ([..., 1], dynamic), `residual_sum` and the stages.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        UnsupportedCase: rows of no elements, or of more than 2³⁰.
    """
    plan = _plan(
        described(x), described(weight), described(residual), described(scale),
        variance_size, weight_offset, quant, weight_rule, residual_rule, tuple(stages),
    )  # fmt: skip
    results = allocate_results(x, residual is not None, quant)
    stored = allocate_stages(x) if stages else NO_STAGES
    if plan.launch is not None:
        if plan.copied:
            x, residual = x.contiguous(), residual if residual is None else residual.contiguous()
        weight = weight if weight is None else weight.contiguous()
        result, residual_sum = results.get("output", results.get("quantized")), results.get("residual_sum")
        with current(x.device):
            plan.launch(
                x, residual, weight, scale, result, residual_sum, results.get("scale"), *stored.values(), float(eps)
            )
    present = [name for name in stages if name != "product" or weight is not None]
    mapping = {name: stored[name] for name in present} | results
    return mapping if stages or len(mapping) > 1 else next(iter(mapping.values()))


@functools.lru_cache(maxsize=1024)
def _plan(
    x: Described, weight: Described | None, residual: Described | None, scale: Described | None,
    variance_size: int | None, weight_offset: float, quant: str | None,
    weight_rule: str, residual_rule: str, stages: tuple[str, ...],
) -> CallPlan:  # fmt: skip
    check_options(scale, weight_offset, quant, weight_rule, residual_rule, stages)
    check_tensors(x, weight, residual, scale, variance_size)
    n = x.shape[-1]
    strided = [t for t in (x, residual) if t is not None]
    layout = layout_of(strided, dims=LEADING_DIMS)
    flat = [weight] if weight is not None and weight.strides == (1,) else []
    rows, block, num_warps = tile(n, quantized=quant is not None)
    aligned = whole_vectors(n, strided, layout, flat)
    parameters = {
        "n": n, "rows": layout.rows, "x_stride_2": layout.strides[0][2], "residual_stride_2": layout.strides[-1][2],
        "weight_offset": float(weight_offset) or -0.0,  # -0 is what leaves every weight as it is, -0 too
        "variance_size": None if variance_size == n else variance_size,
        "size_1": layout.sizes[1], "size_2": layout.sizes[2],
        "x_stride_0": layout.strides[0][0], "x_stride_1": layout.strides[0][1],
        "residual_stride_0": layout.strides[-1][0], "residual_stride_1": layout.strides[-1][1],
        "NATIVE": weight_rule == "native_multiply", "RULE": "rounded_sum" if residual is None else residual_rule,
        "QUANT": quant or "none", "ROWS": rows, "BLOCK": block, "LOOP": n > block,
        "FLAT": aligned and layout.sizes[:-1] == (1, 1), "ALIGNED": aligned,  # few variants: no plain rows unaligned
    }  # fmt: skip
    launch = PlannedLaunch(_rms_norm_kernel, triton.cdiv(layout.rows, rows), parameters, num_warps=num_warps)
    return CallPlan(launch if layout.rows else None, layout.copied)


def _declare(weight_rule: str, residual_rule: str):
    """Register the kernel of one contract; a parameter that has no meaning in it is not in its signature."""
    contract = f"{weight_rule}+{residual_rule}"
    rules = {"weight_rule": weight_rule, "residual_rule": residual_rule}
    register = kernel(
        "rms_norm", contract=contract, name=f"triton[{contract}]", stages=STAGES, depth=summation_depth,
        invariant=("rows", "permutation", "padding", "run to run"),  # the tile follows from the width of a row
    )  # fmt: skip

    def native_multiply(x, weight=None, residual=None, scale=None, *, eps, variance_size=None, quant=None, stages=()):
        options = {"eps": eps, "variance_size": variance_size, "quant": quant, "stages": stages}
        return rms_norm(x, weight, residual, scale, **options, **rules)

    def fp32_multiply(
        x, weight=None, residual=None, scale=None, *, eps, variance_size=None, weight_offset=0.0, quant=None, stages=()
    ):  # fmt: skip
        options = {"eps": eps, "variance_size": variance_size, "quant": quant, "stages": stages}
        return rms_norm(x, weight, residual, scale, weight_offset=weight_offset, **options, **rules)

    return register(native_multiply if weight_rule == "native_multiply" else fp32_multiply)


KERNELS = {f"{w}+{r}": _declare(w, r) for w in WEIGHT_RULES for r in RESIDUAL_RULES}
