"""Checks of the arguments of rotary embeddings, with an error for each that is not allowed, and the places of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from described import VECTOR_BYTES, Described
from row_layout import RowLayout, layout_of, whole_vectors

from lastbit import UnsupportedCase

LEADING_DIMS = 3
MOST_PAIRS = 1 << 14
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RotaryTable(NamedTuple):
    """The number of columns of heads that are rotated, and whether the tables must be copied.

    Attributes:
        half: pairs of a head.
        copied: for cos and sin, whether its columns have a stride.
        strides: of their rows, in elements, of the copies if there are any.
    """

    half: int
    copied: tuple[bool, bool]
    strides: tuple[int, int]


def check_heads(q: Described, positions: Described, **others: Described | None) -> None:
    """Raise ValueError or TypeError unless positions are those of the tokens of q, and all are on one device."""
    if len(q.shape) < 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be [..., H, D] with one or more dimensions of tokens")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q is {q.dtype}; it must be bf16, fp16 or fp32")
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"positions are {positions.dtype}; they must be int64 or int32")
    if positions.shape != q.shape[:-2]:
        raise ValueError(f"positions have shape {tuple(positions.shape)}; q has the tokens {tuple(q.shape[:-2])}")
    for name, tensor in {"positions": positions, **others}.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, but q is on {q.device}: move it there")


def check_k(q: Described, k: Described | None) -> None:
    """Raise ValueError or TypeError unless k has the tokens, the width and the dtype of q."""
    if k is None:
        return
    if len(k.shape) != len(q.shape) or (*k.shape[:-2], k.shape[-1]) != (*q.shape[:-2], q.shape[-1]):
        raise ValueError(f"k has shape {tuple(k.shape)}; with q it must be [{', '.join(map(str, q.shape[:-2]))}, G, D]")
    if k.dtype != q.dtype:
        raise TypeError(f"k is {k.dtype}; it must be {q.dtype}, as q is")


def table_of(width: int, cos: Described, sin: Described) -> RotaryTable:
    """Check the tables against heads of that width, and describe them.

    Raises:
        ValueError, TypeError: tables that are no pair, or too wide.
        UnsupportedCase: more pairs than a program takes.
    """
    if len(cos.shape) != 2 or 2 * cos.shape[1] > width:
        raise ValueError(f"cos has shape {tuple(cos.shape)}; it must be [P, R / 2] with R from 0 to {width}, q's width")
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {tuple(sin.shape)}; it must be {tuple(cos.shape)}, as cos")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in _DTYPES:
            raise TypeError(f"{name} is {table.dtype}; it must be bf16, fp16 or fp32")
    half = cos.shape[1]
    if half > MOST_PAIRS:
        raise UnsupportedCase(f"{half} pairs of columns; a program takes {MOST_PAIRS}")
    copied = tuple(half > 1 and table.strides[1] != 1 for table in (cos, sin))
    strides = tuple(half if copy else t.strides[0] for copy, t in zip(copied, (cos, sin), strict=True))
    return RotaryTable(half, copied, strides)  # type: ignore[arg-type]


def rows_of(heads: Described) -> RowLayout:
    """Return where the heads of a tensor lie, each a row."""
    return layout_of([heads], dims=LEADING_DIMS)


def aligned(heads: Sequence[tuple[Described, RowLayout]], tables: Sequence[Described], table: RotaryTable) -> bool:
    """Check whether both halves of every head, and the rows of the tables, can be read in whole 16-byte vectors."""
    width = heads[0][0].shape[-1]
    if not all(whole_vectors(width, [x], layout) and whole_vectors(table.half, [x], layout) for x, layout in heads):
        return False
    steps = zip(tables, table.strides, strict=True)
    return all(t.aligned and stride * t.dtype.itemsize % VECTOR_BYTES == 0 for t, stride in steps)


def sizes_of(name: str, layout: RowLayout) -> dict[str, Any]:
    """Return the parameters of a kernel that say where the rows of `name` lie."""
    _, size_1, size_2 = layout.sizes
    named = {"size_1": size_1, "size_2": size_2} | {f"stride_{i}": s for i, s in enumerate(layout.strides[0])}
    return {f"{name}_{word}": value for word, value in named.items()}
