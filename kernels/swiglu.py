"""SwiGLU in Triton, gate · sigmoid(alpha · gate) · (up + up_offset), of one tensor or two.

Arithmetic is fp32; the contract says which numbers besides the output are rounded to x's dtype:

* `fp32_silu`: nothing.
* `rounded_silu`: gate · sigmoid(alpha · gate).
* `rounded_sigmoid+rounded_shift`: alpha · gate, its sigmoid, their product, and up + up_offset.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

import torch
import triton
import triton.language as tl
from described import CallPlan, Described, PlannedLaunch, current, described
from row_layout import address, contiguous_like, row_start
from swiglu_arguments import STAGES, SwigluParameters, check_arguments, gate_and_up
from swiglu_limit import limited
from swiglu_tile import OF_ELEMENTS, WARPS, activated, as_given, launch_of, load, load_pairs, shifted, tile
from torch import Tensor

from lastbit import kernel, moved


# Sizes, strides and addresses are no part of a variant's key; ALIGNED alone says whether vectors are allowed.
@triton.jit(
    do_not_specialize=[
        "alpha", "up_offset", "limit", "rows", "n", "size_1", "size_2", "gate_step", "up_step",
        "gate_stride_0", "gate_stride_1", "gate_stride_2", "up_stride_0", "up_stride_1", "up_stride_2",
    ],
    do_not_specialize_on_alignment=["gate_ptr", "up_ptr", "output_ptr", "silu_ptr"],
)  # fmt: skip
def _swiglu_kernel(
    gate_ptr, up_ptr, output_ptr, silu_ptr, alpha, up_offset, limit,
    rows: tl.int64, n, size_1: tl.int64, size_2: tl.int64,
    gate_stride_0: tl.int64, gate_stride_1: tl.int64, gate_stride_2: tl.int64, gate_step: tl.int64,
    up_stride_0: tl.int64, up_stride_1: tl.int64, up_stride_2: tl.int64, up_step: tl.int64,
    SILU: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ROWS rows and BLOCK columns per program; every element is read and written once."""
    X: tl.constexpr = output_ptr.dtype.element_ty
    if ALIGNED:
        n = n // 16 * 16  # changes nothing, but shows the compiler that masks are uniform over a vector
    row, first = tile(n, ROWS, BLOCK)
    live = row < rows
    columns = first + tl.arange(0, BLOCK)[None, :]
    mask = live & (columns < n)
    gate_row = row_start(row, size_1, size_2, gate_stride_0, gate_stride_1, gate_stride_2, FLAT)
    if PAIRS:
        gate, up = load_pairs(gate_ptr, gate_row, first, live, n, ROWS, BLOCK, ALIGNED)
    else:
        up_row = row_start(row, size_1, size_2, up_stride_0, up_stride_1, up_stride_2, FLAT)
        gate = load(gate_ptr, gate_row, columns, gate_step, mask, ALIGNED)
        up = load(up_ptr, up_row, columns, up_step, mask, ALIGNED)
    gate, up = limited(gate, up, limit)
    _, _, silu = activated(gate, alpha, X, SILU)
    output = silu * shifted(up, up_offset, X, SILU == "rounded_sigmoid")
    tl.store(address(output_ptr, row * n, columns, ALIGNED), output.to(X), mask=mask)
    if silu_ptr is not None:
        tl.store(silu_ptr + row * n + columns, silu, mask=mask)


@lru_cache(maxsize=1024)
def _plan(gate: Described, up: Described, options: SwigluParameters, silu: str, stages: tuple[str, ...]) -> CallPlan:
    check_arguments({"gate": gate, "up": up}, options, stages)
    given, copied = as_given({"gate": gate, "up": up})
    programs, parameters = launch_of(given, options)
    parameters |= {"SILU": silu}
    ordered = {name: parameters[name] for name in _swiglu_kernel.arg_names if name in parameters}
    launch = PlannedLaunch(_swiglu_kernel, programs, ordered, num_warps=WARPS, enable_fp_fusion=False)
    return CallPlan(launch if programs else None, copied)


def swiglu(
    x: Tensor, up: Tensor | None, options: SwigluParameters, silu: str, stages: tuple[str, ...]
) -> Tensor | dict[str, Tensor]:
    """Run the kernels of this file; `silu` is `fp32_silu`, `rounded_silu` or `rounded_sigmoid`."""
    up = moved({"up": up}, x.device)["up"]
    gate, up = gate_and_up(x, up, interleaved=options.interleaved)
    plan = _plan(described(gate), described(up), options, silu, tuple(stages))
    output = contiguous_like(gate)
    stored = contiguous_like(gate, dtype=torch.float32) if stages else None
    if plan.launch is not None:
        if plan.copied:
            gate, up = gate.contiguous(), up.contiguous()
        with current(x.device):
            plan.launch(gate, up, output, stored)
    return output if stored is None else {"output": output, "silu": stored}


def _declare(contract: str, silu: str) -> None:
    """Register the kernel of one contract."""

    @kernel(
        "swiglu",
        contract=contract,
        name=f"triton[swiglu+{silu}]",
        stages=STAGES,
        placement="moves",
        invariant=OF_ELEMENTS,
    )
    def of_contract(
        x: Tensor, up: Tensor | None = None, *,
        interleaved: bool = False, swiglu_limit: float = inf, alpha: float = 1.0, up_offset: float = 0.0,
        stages: tuple[str, ...] = (),
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """Compute y = gate · sigmoid(alpha · gate) · (up + up_offset).

        Args:
            x: the gate [..., I], bf16, fp16 or fp32; without up [..., 2I], with the gate in the first half, or with
                `interleaved` in the even columns. Neither tensor is copied unless more than three leading dimensions
                remain after merging.
            up: [..., I], of x's dtype, with its own strides.
            swiglu_limit: L of min(gate, L) and min(max(up, -L), L).
            stages: `silu`, to return it too, in fp32.

        Returns:
            The output [..., I], contiguous; with stages a mapping from names to tensors.

        A tensor on another device than x is moved with a warning.

        Raises:
            ValueError, TypeError: arguments that do not fit together.
            UnsupportedCase: rows of more than 2³⁰ columns.
        """
        return swiglu(x, up, SwigluParameters(interleaved, swiglu_limit, alpha, up_offset), silu, tuple(stages))


_declare("fp32_silu", "fp32_silu")
_declare("rounded_silu", "rounded_silu")
_declare("rounded_sigmoid+rounded_shift", "rounded_sigmoid")
