"""RMSNorm of heads and rotary embedding in one Triton kernel; the contract says where it rounds:

* `fp32_multiply+unrounded_output`: all in fp32, one rounding of the result.
* `fp32_multiply`: what is normalized is rounded before it is rotated, as two kernels store it.
* `native_multiply+rounded_products`: every product is rounded, as models in PyTorch compute it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from described import Described, PlannedLaunch, current, described
from rotary import load_pairs, load_row, store_pairs, turned
from rotary_arguments import aligned, check_heads, rows_of, sizes_of, table_of
from row_layout import address, contiguous_like, row_start
from torch import Tensor

from lastbit import UnsupportedCase, kernel

ELEMENTS_PER_PROGRAM = 2048
WIDEST = 1 << 14


@triton.jit
def _normalized(value, inv_rms, weight, offset, X: tl.constexpr, NATIVE: tl.constexpr, ROUND: tl.constexpr):
    """Return value · inv_rms · (weight + offset) in fp32, rounded as the contract says."""
    found = value * inv_rms
    if NATIVE:
        if weight is None:
            found = found.to(X).to(tl.float32)
        else:
            found = (found.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)
    elif weight is not None:
        found = found * (weight.to(tl.float32) + offset)
    return found.to(X).to(tl.float32) if ROUND else found


@triton.jit(
    do_not_specialize=[
        "rows", "heads", "half", "width", "cos_stride", "sin_stride", "eps", "offset",
        "x_size_1", "x_size_2", "x_stride_0", "x_stride_1", "x_stride_2",
    ],
    do_not_specialize_on_alignment=["x_ptr", "weight_ptr", "out_ptr", "cos_ptr", "sin_ptr", "position_ptr"],
)  # fmt: skip
def _qk_norm_rope_kernel(
    x_ptr, weight_ptr, out_ptr, cos_ptr, sin_ptr, position_ptr, eps,
    rows: tl.int64, heads, half, width: tl.int64, cos_stride: tl.int64, sin_stride: tl.int64, offset,
    x_size_1: tl.int64, x_size_2: tl.int64, x_stride_0: tl.int64, x_stride_1: tl.int64, x_stride_2: tl.int64,
    NATIVE: tl.constexpr, ROUND: tl.constexpr, ROUND_PRODUCTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS heads per program, each as its pairs, [ROWS, HALF] twice, and REST columns that are not rotated."""
    X: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    if ALIGNED:
        half = half // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
        width = width // 16 * 16
    start = row_start(row, x_size_1, x_size_2, x_stride_0, x_stride_1, x_stride_2, False)
    first, second = load_pairs(x_ptr, start, live, half, HALF, ROWS, INTERLEAVED, ALIGNED)
    first, second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
    if REST:
        columns = 2 * half + tl.arange(0, REST)[None, :]
        rest = tl.load(address(x_ptr, start, columns, ALIGNED), mask=live & (columns < width), other=0.0)
        rest = rest.to(tl.float32)
        squares += tl.sum(rest * rest, axis=1, keep_dims=True)
    inv_rms = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, width.to(tl.float32)) + eps))

    one = tl.zeros([1, 1], tl.int64)
    if weight_ptr is None:
        first_gain, second_gain, gain = None, None, None
    else:
        first_gain, second_gain = load_pairs(weight_ptr, one, one == 0, half, HALF, 1, INTERLEAVED, ALIGNED)
    first = _normalized(first, inv_rms, first_gain, offset, X, NATIVE, ROUND)
    second = _normalized(second, inv_rms, second_gain, offset, X, NATIVE, ROUND)
    position = tl.load(position_ptr + row // heads, mask=live, other=0).to(tl.int64)
    cosine = load_row(cos_ptr, cos_stride, position, half, HALF, X, False, ALIGNED)
    sine = load_row(sin_ptr, sin_stride, position, half, HALF, X, False, ALIGNED)
    first, second = turned(first, second, cosine, sine, X, ROUND_PRODUCTS)
    store_pairs(out_ptr, row * width, live, first, second, half, HALF, ROWS, INTERLEAVED, ALIGNED)
    if REST:
        if weight_ptr is not None:
            gain = tl.load(address(weight_ptr, one, columns, ALIGNED), mask=columns < width, other=0.0)
        rest = _normalized(rest, inv_rms, gain, offset, X, NATIVE, ROUND)
        tl.store(address(out_ptr, row * width, columns, ALIGNED), rest.to(X), mask=live & (columns < width))


def qk_norm_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    native_multiply: bool = False,
    rounded_output: bool = False,
    rounded_products: bool = False,
) -> Tensor:
    """Divide each head of x by its root mean square, multiply by weight + weight_offset, and rotate its first columns.

    Args:
        x: [..., H, D], bf16, fp16 or fp32, as q of `rotary`; so are cos, sin, positions and interleaved.
        weight: [D], bf16, fp16 or fp32, copied if it has a stride.
        eps: added to the mean square.
        weight_offset: 1 for Gemma's weights; without `native_multiply`.
        native_multiply, rounded_output, rounded_products: the contract, see the module.

    Returns:
        The heads, contiguous.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        UnsupportedCase: heads wider than 2¹⁴ columns.
    """
    plan = _plan(
        described(x), described(cos), described(sin), described(positions), described(weight),
        float(weight_offset), interleaved, native_multiply, rounded_output, rounded_products,
    )  # fmt: skip
    out = contiguous_like(x)
    if plan.launch is not None:
        x = x.contiguous() if plan.copied[0] else x
        cos, sin = (t.contiguous() if copy else t for t, copy in zip((cos, sin), plan.copied[1:], strict=True))
        weight = weight if weight is None else weight.contiguous()
        with current(x.device):
            plan.launch(x, weight, out, cos, sin, positions.contiguous(), float(eps))
    return out


class QkNormPlan(NamedTuple):
    """The plan of a call.

    Attributes:
        launch: takes the tensors and eps; None where there is nothing to do.
        copied: whether x, cos and sin are to be copied to contiguous memory.
    """

    launch: PlannedLaunch | None
    copied: tuple[bool, bool, bool]


@functools.lru_cache(maxsize=1024)
def _plan(
    x: Described, cos: Described, sin: Described, positions: Described, weight: Described | None,
    weight_offset: float, interleaved: bool, native_multiply: bool, rounded_output: bool, rounded_products: bool,
) -> QkNormPlan:  # fmt: skip
    check_heads(x, positions, cos=cos, sin=sin, weight=weight)
    width = x.shape[-1]
    if weight is not None and weight.shape != (width,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; with heads of {width} columns it must be ({width},)")
    if not 1 <= width <= WIDEST:
        raise UnsupportedCase(f"heads of {width} columns; a program takes from 1 to {WIDEST}")
    table, layout = table_of(width, cos, sin), rows_of(x)
    rest = width - 2 * table.half
    half_block, rest_block = max(1, triton.next_power_of_2(table.half)), triton.next_power_of_2(rest) if rest else 0
    rows = max(1, ELEMENTS_PER_PROGRAM // triton.next_power_of_2(2 * half_block + rest_block))
    vectors = aligned([(x, layout)], (cos, sin), table) and (
        weight is None or (weight.aligned and weight.strides == (1,))
    )
    parameters = {
        "rows": layout.rows, "heads": x.shape[-2], "half": table.half, "width": width,
        "cos_stride": table.strides[0], "sin_stride": table.strides[1],
        "offset": weight_offset or -0.0,  # -0 is what leaves every weight as it is, -0 too
        **sizes_of("x", layout), "NATIVE": native_multiply, "ROUND": rounded_output, "ROUND_PRODUCTS": rounded_products,
        "INTERLEAVED": interleaved, "ROWS": rows, "HALF": half_block, "REST": rest_block, "ALIGNED": vectors,
    }  # fmt: skip
    programs = triton.cdiv(layout.rows, rows)
    launch = PlannedLaunch(_qk_norm_rope_kernel, programs, parameters, num_warps=4, enable_fp_fusion=False)
    return QkNormPlan(launch if programs else None, (layout.copied, *table.copied))


_HELD = ("run to run",)


@kernel("qk_norm_rope", contract="fp32_multiply+unrounded_output", name="triton[qk_norm_rope,fused]", invariant=_HELD)
def fused(x, cos, sin, positions, weight=None, *, eps, weight_offset=0.0, interleaved=False):
    return qk_norm_rope(x, cos, sin, positions, weight, eps=eps, weight_offset=weight_offset, interleaved=interleaved)


@kernel("qk_norm_rope", contract="fp32_multiply", name="triton[qk_norm_rope,two kernels]", invariant=_HELD)
def as_two_kernels(x, cos, sin, positions, weight=None, *, eps, weight_offset=0.0, interleaved=False):
    return qk_norm_rope(
        x, cos, sin, positions, weight,
        eps=eps, weight_offset=weight_offset, interleaved=interleaved, rounded_output=True,
    )  # fmt: skip


@kernel("qk_norm_rope", contract="native_multiply+rounded_products", name="triton[qk_norm_rope]", invariant=_HELD)
def as_in_models(x, cos, sin, positions, weight=None, *, eps, interleaved=False):
    rules = {"native_multiply": True, "rounded_output": True, "rounded_products": True}
    return qk_norm_rope(x, cos, sin, positions, weight, eps=eps, interleaved=interleaved, **rules)
