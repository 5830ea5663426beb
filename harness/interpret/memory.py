"""Loads, stores and 16-bit atomic updates at arrays of addresses; all of them move bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter as memory
from triton._C.libtriton import ir

from harness.interpret.formats import Array, bits_of, numpy_dtype


@cache
def loader(dtype: Any) -> Callable[..., Array]:
    """Loads from an array of addresses; what a mask excludes is undefined unless it is filled."""
    stored = numpy_dtype(dtype)
    raw = np.dtype(f"u{stored.itemsize}")

    def load(where: Array, mask: Array | None = None, fill: Array | None = None) -> Array:
        inside = np.ones(where.shape, dtype=bool) if mask is None else mask
        # undefined by Triton's documentation: NaN, or -1 in an integer, so that a use of it shows
        other = np.full(where.shape, np.iinfo(raw).max, raw) if fill is None else bits_of(np.ascontiguousarray(fill))
        loaded: Array = memory.load(where, inside, other, raw)
        return loaded.view(stored)

    return load


def store(where: Array, value: Array, mask: Array | None = None) -> None:
    """Stores the bits of `value` at an array of addresses, but for those that a mask excludes."""
    inside = np.ones(where.shape, dtype=bool) if mask is None else mask
    memory.store(where, bits_of(np.ascontiguousarray(value)), inside)


def update_16_bit(operation: Any, pointer: Any, value: Any) -> Any:
    """One atomic update of a bf16 or fp16 in memory; returns the old value."""
    where, always = np.array([pointer], dtype=np.uint64), np.ones(1, dtype=bool)
    old = memory.load(where, always, np.zeros(1, dtype=np.uint16), np.dtype(np.uint16)).view(value.dtype)
    if operation == ir.ATOMIC_OP.FADD:
        new = old + value
    elif operation == ir.ATOMIC_OP.XCHG:
        new = np.array([value])
    else:
        raise NotImplementedError(f"no NVIDIA GPU has an atomic {operation} on {value.dtype}")
    memory.store(where, bits_of(new.astype(value.dtype)), always)
    return old[0]
