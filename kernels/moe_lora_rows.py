"""Rows of tensors of pairs [T, k, ·] and of tokens [T, ·], as the kernels of experts address them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from described import VECTOR_BYTES
from row_layout import VECTOR_LANES
from torch import Tensor


@triton.jit
def row_of(pair, slots, PER_TOKEN: tl.constexpr):
    """Return the row of a pair: its token's, or one of its own."""
    if PER_TOKEN:
        pair = pair // slots
    return pair.to(tl.int64)


def flat_rows(tensor: Tensor) -> Tensor:
    """View [T, k, C] or [T, C] as rows [·, C] whose elements follow each other; copy where strides allow no view."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def in_vectors(rows: Tensor) -> bool:
    """Check whether rows [·, C] or [·, ·, C] can be read in whole 16-byte vectors, 16 elements or more."""
    steps = (stride * rows.element_size() for stride in rows.stride()[:-1])
    return not (rows.shape[-1] % VECTOR_LANES or rows.data_ptr() % VECTOR_BYTES or any(s % VECTOR_BYTES for s in steps))


def row_arguments(**tensors: Tensor) -> dict[str, Any]:
    """Return pointer and stride of flat rows, as `name_ptr` and `name_stride`."""
    pointers = {f"{name}_ptr": rows for name, rows in tensors.items()}
    return pointers | {f"{name}_stride": rows.stride(0) for name, rows in tensors.items()}
