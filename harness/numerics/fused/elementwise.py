"""The kernel around the functions of `elements` and its siblings: one launch, one pass over memory.

Sums without error and exact products must not be contracted: the launch says enable_fp_fusion=False.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(pointer, contract, end, offset, mask):
    """Load an element of 1, 2 or 4 parts: value lies `contract` numbers after exact, lo and hi `end` further each."""
    exact, value = pointer + offset, pointer + offset + contract
    return (
        tl.load(exact, mask=mask), tl.load(value, mask=mask),
        tl.load(value + end, mask=mask), tl.load(value + 2 * end, mask=mask),
    )  # fmt: skip


ARGUMENTS = [
    *["out", "x", "y", "z", "w", "parts", "size", "rows", "columns"],
    *[f"{operand}{what}" for operand in "xyzw" for what in ("_contract", "_end", "0", "1", "2")],
    *["first", "second", "third", "fourth"],
]


@triton.jit(do_not_specialize=ARGUMENTS)  # one compiled kernel serves all of their values
def elementwise(
    out, x, y, z, w, parts: tl.int32, size: tl.int32, rows: tl.int32, columns: tl.int32,
    x_contract: tl.int64, x_end: tl.int64, x0: tl.int64, x1: tl.int64, x2: tl.int64,
    y_contract: tl.int64, y_end: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64,
    z_contract: tl.int64, z_end: tl.int64, z0: tl.int64, z1: tl.int64, z2: tl.int64,
    w_contract: tl.int64, w_end: tl.int64, w0: tl.int64, w1: tl.int64, w2: tl.int64,
    first: tl.float64, second: tl.float64, third: tl.float64, fourth: tl.float64,
    FUNCTION: tl.constexpr, OPERANDS: tl.constexpr, FLAT: tl.constexpr, MOST: tl.constexpr,
    F: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply `FUNCTION` to elements of up to four operands, whose indices have three dimensions [..., rows, columns]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    if FLAT:
        i, j, k = index * 0, index * 0, index
    else:
        row = index // columns
        i, j, k = row // rows, row % rows, index % columns
    a = load(x, x_contract, x_end, i * x0 + j * x1 + k * x2, mask)
    operands = (a,)
    if OPERANDS > 1:
        operands = operands + (load(y, y_contract, y_end, i * y0 + j * y1 + k * y2, mask),)
    if OPERANDS > 2:
        operands = operands + (load(z, z_contract, z_end, i * z0 + j * z1 + k * z2, mask),)
    if OPERANDS > 3:
        operands = operands + (load(w, w_contract, w_end, i * w0 + j * w1 + k * w2, mask),)
    if NUMBERS > 0:
        operands = operands + (first,)
    if NUMBERS > 1:
        operands = operands + (second,)
    if NUMBERS > 2:
        operands = operands + (third,)
    if NUMBERS > 3:
        operands = operands + (fourth,)
    if F is None:
        result = FUNCTION(*operands)
    else:
        result = FUNCTION(*operands, F=F)
    step = size.to(tl.int64)
    tl.store(out + index, result[0], mask=mask)
    if MOST > 1:
        tl.store(out + step + index, result[1], mask=mask & (parts > 1))
    if MOST > 2:
        tl.store(out + 2 * step + index, result[2], mask=mask & (parts > 2))
        tl.store(out + 3 * step + index, result[3], mask=mask & (parts > 2))
