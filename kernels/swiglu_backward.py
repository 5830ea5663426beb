"""Gradients of SwiGLU in Triton, of one tensor or two, for the contracts of `swiglu.py`.

`fp32_silu+fp32_product` rounds the gradients alone. The others recompute what their forward pass rounded, and round as
autograd does: `dy · (up + up_offset)`, and under `rounded_sigmoid` both ways to the gate and their parts.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

import torch
import triton
import triton.language as tl
from arithmetic import rounded
from described import CallPlan, Described, PlannedLaunch, current, described
from row_layout import address, contiguous_like, row_start
from swiglu_arguments import BACKWARD_STAGES, SwigluParameters, check_arguments, gate_and_up
from swiglu_limit import limited, through_limit
from swiglu_tile import OF_ELEMENTS, WARPS, activated, as_given, launch_of, load, load_pairs, shifted, tile
from torch import Tensor

from lastbit import kernel, moved


@triton.jit
def _gradient_of_gate(grad_silu, gate, scaled, s, alpha, X: tl.constexpr, SILU: tl.constexpr):
    """Differentiate gate · sigmoid(alpha · gate): by its slope, or by the two ways of autograd, each step rounded."""
    if SILU == "rounded_sigmoid":
        direct = rounded(grad_silu * s, X, True)
        grad_sigmoid = rounded(grad_silu * gate, X, True)
        through = rounded(grad_sigmoid * (1.0 - s) * s, X, True)
        gradient = direct + rounded(through * alpha, X, True)
    else:
        gradient = grad_silu * (s * (1.0 + scaled * (1.0 - s)))
    return gradient


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed.
@triton.jit(
    do_not_specialize=[
        "alpha", "up_offset", "limit", "rows", "n", "size_1", "size_2", "gate_step", "up_step", "dy_step", "out_stride",
        "gate_stride_0", "gate_stride_1", "gate_stride_2", "up_stride_0", "up_stride_1", "up_stride_2",
        "dy_stride_0", "dy_stride_1", "dy_stride_2",
    ],
    do_not_specialize_on_alignment=[
        "gate_ptr", "up_ptr", "dy_ptr", "grad_gate_ptr", "grad_up_ptr", "silu_ptr", "grad_silu_ptr",
    ],
)  # fmt: skip
def _swiglu_backward_kernel(
    gate_ptr, up_ptr, dy_ptr, grad_gate_ptr, grad_up_ptr, silu_ptr, grad_silu_ptr, alpha, up_offset, limit,
    rows: tl.int64, n, out_stride: tl.int64, size_1: tl.int64, size_2: tl.int64,
    gate_stride_0: tl.int64, gate_stride_1: tl.int64, gate_stride_2: tl.int64, gate_step: tl.int64,
    up_stride_0: tl.int64, up_stride_1: tl.int64, up_stride_2: tl.int64, up_step: tl.int64,
    dy_stride_0: tl.int64, dy_stride_1: tl.int64, dy_stride_2: tl.int64, dy_step: tl.int64,
    SILU: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ROWS rows and BLOCK columns per program; every element is read and written once."""
    X: tl.constexpr = grad_gate_ptr.dtype.element_ty
    if ALIGNED:
        n = n // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
        out_stride = out_stride // 16 * 16
    row, first = tile(n, ROWS, BLOCK)
    live = row < rows
    columns = first + tl.arange(0, BLOCK)[None, :]
    mask = live & (columns < n)
    gate_row = row_start(row, size_1, size_2, gate_stride_0, gate_stride_1, gate_stride_2, FLAT)
    dy_row = row_start(row, size_1, size_2, dy_stride_0, dy_stride_1, dy_stride_2, FLAT)
    if PAIRS:
        gate_value, up_value = load_pairs(gate_ptr, gate_row, first, live, n, ROWS, BLOCK, ALIGNED)
    else:
        up_row = row_start(row, size_1, size_2, up_stride_0, up_stride_1, up_stride_2, FLAT)
        gate_value = load(gate_ptr, gate_row, columns, gate_step, mask, ALIGNED)
        up_value = load(up_ptr, up_row, columns, up_step, mask, ALIGNED)
    dy = load(dy_ptr, dy_row, columns, dy_step, mask, ALIGNED)

    gate, up = limited(gate_value, up_value, limit)
    scaled, s, silu = activated(gate, alpha, X, SILU)
    grad_silu = rounded(dy * shifted(up, up_offset, X, SILU == "rounded_sigmoid"), X, SILU != "fp32_silu")
    grad_gate = _gradient_of_gate(grad_silu, gate, scaled, s, alpha, X, SILU)
    grad_gate, grad_up = through_limit(grad_gate, dy * silu, gate_value, up_value, limit)

    grad_gate, grad_up = grad_gate.to(X), grad_up.to(X)
    out_row = row * out_stride
    if INTERLEAVED:
        lanes = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(grad_gate, grad_up), [ROWS, 2 * BLOCK])
        tl.store(address(grad_gate_ptr, out_row, lanes, ALIGNED), both, mask=live & (lanes < 2 * n))
    else:
        tl.store(address(grad_gate_ptr, out_row, columns, ALIGNED), grad_gate, mask=mask)
        tl.store(address(grad_up_ptr, out_row, columns, ALIGNED), grad_up, mask=mask)
    if silu_ptr is not None:
        tl.store(silu_ptr + row * n + columns, silu, mask=mask)
        tl.store(grad_silu_ptr + row * n + columns, grad_silu, mask=mask)


@lru_cache(maxsize=1024)
def _plan(
    gate: Described,
    up: Described,
    dy: Described,
    options: SwigluParameters,
    silu: str,
    stages: tuple[str, ...],
    held: int,
) -> CallPlan:
    check_arguments({"gate": gate, "up": up, "dy": dy}, options, stages, BACKWARD_STAGES)
    given, copied = as_given({"gate": gate, "up": up, "dy": dy})
    programs, parameters = launch_of(given, options)
    parameters |= {"SILU": silu, "out_stride": held * gate.shape[-1]}
    ordered = {name: parameters[name] for name in _swiglu_backward_kernel.arg_names if name in parameters}
    launch = PlannedLaunch(_swiglu_backward_kernel, programs, ordered, num_warps=WARPS, enable_fp_fusion=False)
    return CallPlan(launch if programs else None, copied)


def swiglu_backward(
    x: Tensor, dy: Tensor, up: Tensor | None, options: SwigluParameters, silu: str, stages: tuple[str, ...]
) -> dict[str, Tensor]:
    """Run the kernels of this file; `silu` is `fp32_silu`, `rounded_silu` or `rounded_sigmoid`."""
    there = moved({"dy": dy, "up": up}, x.device)
    dy, two = there["dy"], up is not None
    gate, up = gate_and_up(x, there["up"], interleaved=options.interleaved)
    plan = _plan(
        described(gate), described(up), described(dy), options, silu, tuple(stages), 1 if two else 2
    )  # fmt: skip
    results = {n: contiguous_like(t) for n, t in ({"grad_gate": gate, "grad_up": up} if two else {"grad_x": x}).items()}
    written = (results["grad_gate"], results["grad_up"]) if two else gate_and_up(
        results["grad_x"], None, interleaved=options.interleaved
    )  # fmt: skip
    stored = {name: contiguous_like(gate, dtype=torch.float32) for name in BACKWARD_STAGES} if stages else {}
    if plan.launch is not None:
        if plan.copied:
            gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
        with current(x.device):
            plan.launch(gate, up, dy, *written, stored.get("silu"), stored.get("grad_silu"))
    return results | {name: stored[name] for name in stages}


def _declare(contract: str, silu: str) -> None:
    """Register the kernel of one contract."""

    @kernel(
        "swiglu_backward",
        contract=contract,
        name=f"triton[swiglu_backward+{silu}]",
        stages=BACKWARD_STAGES,
        placement="moves",
        invariant=(*OF_ELEMENTS, "scaling") if silu != "rounded_sigmoid" else OF_ELEMENTS,
    )
    def of_contract(
        x: Tensor, dy: Tensor, up: Tensor | None = None, *,
        interleaved: bool = False, swiglu_limit: float = inf, alpha: float = 1.0, up_offset: float = 0.0,
        stages: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:  # fmt: skip
        """Compute the gradients of `swiglu` for the gradient dy of its output.

        Args:
            x, up, interleaved, swiglu_limit, alpha, up_offset: as `swiglu` took them.
            dy: [..., I], of x's dtype, with its own strides.
            stages: which of `BACKWARD_STAGES` to return too, in fp32.

        Returns:
            `grad_gate` and `grad_up`, [..., I], for two tensors, else `grad_x`, [..., 2I]; contiguous.

        A tensor on another device than x is moved with a warning.

        Raises:
            ValueError, TypeError: arguments that do not fit together.
            UnsupportedCase: rows of more than 2³⁰ columns.
        """
        return swiglu_backward(
            x, dy, up, SwigluParameters(interleaved, swiglu_limit, alpha, up_offset), silu, tuple(stages)
        )


_declare("fp32_silu+fp32_product", "fp32_silu")
_declare("rounded_silu+rounded_product", "rounded_silu")
_declare("rounded_sigmoid+rounded_product+rounded_shift", "rounded_sigmoid")
