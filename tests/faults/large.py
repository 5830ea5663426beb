"""Faults that no case for a CPU exposes: more rows than 16 bits count, and elements 2³¹ and more from the first.

Offsets are cut to 31 bits where they would be cut to 32 and a sign, so that what is read is memory of the tensor.
"""

from __future__ import annotations

from functools import partial

from tests.faults.plant import Edit, Fault

_norm = partial(Fault, options="edges")
_gated = partial(Fault, op="layer_norm_gated", variant="single_rounding", options="edges")
_backward = partial(Fault, op="layer_norm_gated_backward", variant="gated_backward", options="edges")
_mask = partial(Fault, op="completion_mask", variant="completion_mask", options="edges", dtypes=("int64", "int32"))
_experts = partial(Fault, op="moe_lora", variant="moe_lora+fused", options="edges", dtypes=("bf16",))
_gated_text = partial(Edit, file="layer_norm_gated.py")
_row_text = partial(Edit, file="row_layout.py")
_mask_text = partial(Edit, file="completion_mask.py")
_tile = partial(Edit, file="grouped_tile.py")
_epilogue = partial(Edit, file="grouped_epilogue.py")

_OFFSET = "row // size_2 // size_1 * stride_0 + row // size_2 % size_1 * stride_1 + row % size_2 * stride_2"
_RESIDUAL = (
    "residual_row = row_start(row, size_1, size_2, residual_stride_0, residual_stride_1, residual_stride_2, FLAT)"
)
_X = "x_row = row_start(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2, FLAT)"


def _cut(old: str, *, after: str = "") -> tuple[str, str]:
    """Source text, and the same with what comes after `after` cut to 31 bits."""
    return old, f"{after}({old.removeprefix(after)}) % 2147483648"


OFFSETS_OF_ROWS = (_row_text(*_cut("row * stride_2")), _row_text(*_cut(_OFFSET)))
PROGRAMS = (
    _norm(
        "programs of 16 bits", "counts programs in 16 bits",
        (Edit("tl.program_id(0).to(tl.int64)", "(tl.program_id(0) % 65536).to(tl.int64)"),), "unwritten", "unwritten",
    ),
    _gated(
        "programs of 16 bits", "counts programs in 16 bits",
        (_gated_text("row = (tl.program_id(0) // groups)", "row = (tl.program_id(0) // groups % 65536)"),),
        "unwritten", "unwritten",
    ),
    _mask(
        "programs of 16 bits", "counts programs in 16 bits",
        (_mask_text("tl.program_id(0).to(tl.int64)", "(tl.program_id(0) % 65536).to(tl.int64)"),),
        "unwritten", "unwritten",
    ),
    _experts(
        "pairs of 16 bits", "counts pairs of tokens and slots in 16 bits",
        (_tile("mask=live, other=0).to(tl.int32)", "mask=live, other=0).to(tl.int32) % 65536"),),
        "unwritten or nondeterministic or uninitialised or gate_base",
        "unwritten or nondeterministic or uninitialised or saved_gate",
    ),
)  # fmt: skip

OFFSETS = (
    _norm("offsets of x in 31 bits", "cuts offsets of rows of x to 31 bits",
          (Edit(*_cut(_X, after="x_row = ")),), "variance", "output"),
    _norm("offsets of the residual in 31 bits", "cuts offsets of rows of the residual to 31 bits",
          (Edit(*_cut(_RESIDUAL, after="residual_row = ")),), "variance or residual_sum", "output or residual_sum"),
    _gated("offsets of rows in 31 bits", "cuts offsets of rows to 31 bits",
           OFFSETS_OF_ROWS, "mean or variance or normalized", "output"),
    _backward("offsets of rows in 31 bits", "cuts offsets of rows to 31 bits",
              OFFSETS_OF_ROWS, "normalized", "dx or dw"),
    _mask("offsets of rows in 31 bits", "cuts offsets of rows to 31 bits",
          (_mask_text(*_cut("row * row_stride")),), "is_eos", "mask"),
    _mask("offsets of columns in 31 bits", "cuts offsets of columns to 31 bits",
          (_mask_text(*_cut("columns * column_stride")),), "is_eos", "mask"),
    _experts("offsets of experts in 31 bits", "cuts offsets of base weights to 31 bits",
             (_tile("load([expert, first_n, first_k])", "load([expert % 2, first_n + expert // 2 * 2, first_k])"),),
             "gate_base", "saved_gate"),
    _experts("offsets of tokens in 31 bits", "cuts offsets of rows of x to 31 bits",
             (_tile(*_cut("(pairs.pair // rows.slots).to(tl.int64) * rows.stride")),),
             "gate_base", "saved_gate"),
    _experts("offsets of adapters in 31 bits", "cuts offsets of B to 31 bits",
             (_epilogue(*_cut("pairs.expert.to(tl.int64) * adapter.b_expert_stride")),),
             "gate or expert_output", "saved_gate or output"),
)  # fmt: skip

FAULTS = (*PROGRAMS, *OFFSETS)
