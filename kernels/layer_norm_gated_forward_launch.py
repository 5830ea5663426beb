"""Gated LayerNorm: how a launch is cut into programs, worked out once for each set of descriptions."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from described import VECTOR_BYTES, Described
from layer_norm_gated_arguments import PER_GROUP, STAGES, STATISTICS, check_forward, check_stepwise
from layer_norm_gated_launch import row_offset
from row_layout import VECTOR_LANES, contiguous_like, merged_dims
from torch import Tensor

# A program takes a group of columns, which a block covers, for several rows where it is short. A thread holds 16
# elements, but 32 of the largest block, as there are at most 1024 threads.
LEAST_BLOCK = 64
ELEMENTS_PER_PROGRAM = 2048
ELEMENTS_PER_THREAD = 16
MOST_WARPS = 32
LEADING_DIMS = 3
NO_ROWS = (1, 1, 0, 0, 0)


def tile(group_size: int) -> tuple[int, int, int]:
    """(rows, lanes, warps) of a program."""
    block = max(LEAST_BLOCK, triton.next_power_of_2(group_size))
    rows = max(1, ELEMENTS_PER_PROGRAM // block)
    return rows, block, min(MOST_WARPS, rows * block // (32 * ELEMENTS_PER_THREAD))


def depth(n: int) -> int:
    """Greatest number of additions between a term and the sum of n of them over a group, compiled or interpreted.

    A block covers the group, so there is one reduction over its lanes. Compiled, a thread holds t elements of a program
    and at most as many of a row, which take t - 1 additions, and threads are combined in a binary tree of height
    log2(block / t); fewer elements of a row make no more of them. Interpreted, the lanes are combined in a
    binary tree of height log2(block), or by numpy in runs of 128 with 8 accumulators (15 additions, 3 to combine them)
    and a tree over the runs of height log2(block / 128): no more than compiled.
    """
    rows, block, warps = tile(n)
    per_thread = min(block, rows * block // (32 * warps))
    return min(n, per_thread - 1 + (block // per_thread).bit_length() - 1)


class Options(NamedTuple):
    """The parameters of a call, but eps, and whether it rounds after every step."""

    group_size: int | None
    norm_before_gate: bool
    is_rms_norm: bool
    activation: str
    stepwise: bool


class Plan(NamedTuple):
    """What a call is made of that depends on shapes, strides, dtypes and options alone.

    Attributes:
        programs: how many there are.
        groups: of columns, in a row.
        stored: the stages to store.
        aligned: whether every row of every tensor may be read in whole vectors.
        numbers: the numbers that the kernel takes, in its order, but for eps.
        constants: what a variant is compiled for, but for `aligned`.
    """

    programs: int
    groups: int
    stored: tuple[str, ...]
    aligned: bool
    numbers: tuple[int, ...]
    constants: dict[str, Any]


@lru_cache(maxsize=1024)
def plan_of(
    x: Described,
    weight: Described,
    bias: Described | None,
    z: Described | None,
    options: Options,
    stages: tuple[str, ...],
) -> Plan | None:
    """How to call the kernel with contiguous weight and bias; None where x or z have rows that it cannot read.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
        UnsupportedCase: rows or groups of a size that no block covers, or a case that the contract does not have.
    """
    group_size = check_forward(x, weight, bias, z, options.group_size, options.activation, stages)
    if options.stepwise:
        check_stepwise(x, weight, is_rms_norm=options.is_rms_norm)
    x_rows, z_rows = rows_of(x), NO_ROWS if z is None else rows_of(z)
    if x_rows is None or z_rows is None:
        return None
    rows, block, warps = tile(group_size)
    count, groups = x.shape[:-1].numel(), x.shape[-1] // group_size
    norm_first = options.norm_before_gate or z is None
    given = [t for t in (x, weight, bias, z) if t is not None]
    aligned = group_size % VECTOR_LANES == 0 and all(map(_in_vectors, given))
    flat = aligned and x_rows[:2] == (1, count) and z_rows[:2] in ((1, count), NO_ROWS[:2])
    return Plan(
        programs=triton.cdiv(count, rows) * groups,
        groups=groups,
        stored=_stored(stages, gated=z is not None, norm_first=norm_first, is_rms_norm=options.is_rms_norm),
        aligned=aligned,
        numbers=(count, groups, group_size, *x_rows, *z_rows),
        constants={
            "RMS": options.is_rms_norm, "NORM_FIRST": norm_first, "SILU": options.activation == "silu",
            "STEPWISE": options.stepwise, "ROWS": rows, "BLOCK": block, "FLAT": flat,
            "num_warps": warps, "enable_fp_fusion": False,
        },
    )  # fmt: skip


def rows_of(tensor: Described) -> tuple[int, ...] | None:
    """Where rows lie: the sizes of the two inner of three leading dimensions, outermost first, and all three strides.

    None if there are more, after merging, or if the columns have a stride.
    """
    dims = merged_dims(tensor.shape[:-1], tensor.strides[:-1])
    if len(dims) > LEADING_DIMS or (tensor.strides[-1] != 1 and tensor.shape[-1] > 1):
        return None
    padded = [(1, 0)] * (LEADING_DIMS - len(dims)) + dims
    return (padded[1][0], padded[2][0], *(stride for _, stride in padded))


def _in_vectors(tensor: Described) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    steps = (stride * tensor.dtype.itemsize % VECTOR_BYTES for stride in tensor.strides[:-1])
    return tensor.aligned and not any(steps)


def _stored(stages: tuple[str, ...], *, gated: bool, norm_first: bool, is_rms_norm: bool) -> tuple[str, ...]:
    """The stages that a call stores: those that the case has, or of them the statistics where no others are asked for.

    A stage that nobody asked for costs memory, and one more set of them a variant.
    """
    absent = {"mean"} if is_rms_norm else set()
    absent |= set() if gated and not norm_first else {"gated_input"}
    absent |= set() if gated else {"gate"}
    wanted = set(STAGES) if set(stages) - set(STATISTICS) else set(STATISTICS) if stages else set()
    return tuple(name for name in STAGES if name in wanted - absent)


def memory_of(stages: Collection[str], x: Tensor, groups: int) -> dict[str, Tensor]:
    """An fp32 tensor for each stage; those with one value per group lie as [groups, rows]."""
    rows = x.shape[:-1].numel()
    return {
        name: torch.empty(groups, rows, dtype=torch.float32, device=x.device)
        if name in PER_GROUP
        else contiguous_like(x, dtype=torch.float32)
        for name in stages
    }


@triton.jit
def row_start(row, size_1, size_2, stride_0, stride_1, stride_2, FLAT: tl.constexpr):
    """`row_offset`; FLAT promises that there is one leading dimension, so that nothing is divided."""
    if FLAT:
        start = row * stride_2
    else:
        start = row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    return start
