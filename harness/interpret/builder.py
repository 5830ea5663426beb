"""The operations that Triton's language layer asks its builder for, computed as the hardware computes them.

`Builder` subclasses Triton's `InterpreterBuilder`. The language layer has already inserted every promotion, so an
operation gets operands of one format and returns that format, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

from harness.interpret import arithmetic
from harness.interpret.formats import (
    BFLOAT16,
    E4M3,
    FP8_MAX,
    Array,
    bits_of,
    convert,
    flush_subnormals,
    numpy_dtype,
    round_float,
)
from harness.interpret.libdevice import evaluate

COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
FLOAT16 = np.dtype(np.float16)


def handle(data: Array, dtype: Any) -> Any:
    return TensorHandle(data, dtype.scalar)


class Builder(InterpreterBuilder):  # type: ignore[misc]
    """Triton's interpreting builder with hardware number formats."""

    # The default makes every integer operation compute an overflow check whose outcome only a debug build reports.
    options = InterpreterOptions(sanitize_overflow=False)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Triton's interpreter has no operation {name.removeprefix('create_')!r}")

    # What Python sees of values, and what it computes itself. A recording builder has the same methods.

    def observe(self, arg: Any, read: Callable[[Any], Any]) -> Any:
        """The value of the only element, by `bool` or `int`."""
        return read(arg.data.item())

    def get_number(self, value: int, dtype: Any) -> Any:
        return handle(np.array([value], dtype=numpy_dtype(dtype)), dtype)

    def create_of_arrays(self, function: Callable[..., Array], *args: Any) -> Any:
        """A function of arrays that has no effect; the result is of the dtype of the first."""
        return handle(function(*(x.data for x in args)), args[0].dtype)

    def entered(self, function: Any) -> None:
        """A function of the kernel begins."""

    def give_up(self) -> None:
        """What follows depends on more than operations tell."""

    # Constants: the compiler's builder takes them as C floats, so they round to fp32 first.

    def get_fp16(self, value: float) -> Any:
        return handle(np.array([value], dtype=np.float32).astype(np.float16), tl.float16)

    def get_bf16(self, value: float) -> Any:
        return handle(np.array([value], dtype=np.float32).astype(BFLOAT16), tl.bfloat16)

    # Memory: loads and stores move bits.

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = ptrs.get_element_ty()
        stored = numpy_dtype(dtype)
        raw = np.dtype(f"u{stored.itemsize}")
        if other is None:  # undefined by Triton's documentation: NaN, or -1 in an integer, so that a use of it shows
            fill = np.full(ptrs.data.shape, -1, dtype=f"i{stored.itemsize}").view(raw)
        else:
            fill = bits_of(np.ascontiguousarray(other.data))
        loaded = memory.load(ptrs.data, _data(mask), fill, raw)
        return handle(loaded.view(stored), dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return memory.store(ptrs.data, bits_of(np.ascontiguousarray(value.data)), _data(mask))

    def create_atomic_rmw(self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        data = val.data
        if data.dtype not in (BFLOAT16, FLOAT16):
            return super().create_atomic_rmw(operation, ptr, val, mask, sem, scope)
        ptrs, mask_data, data = np.broadcast_arrays(ptr.data, _data(mask), data)
        old = np.zeros(data.shape, dtype=data.dtype)
        for i in zip(*np.nonzero(mask_data), strict=True):
            old[i] = _update_16_bit(operation, ptrs[i], data[i])
        return handle(old, val.dtype)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        raw = tuple(TensorHandle(bits_of(np.ascontiguousarray(x.data)), _UNSIGNED[x.data.itemsize]) for x in (cmp, val))
        found = super().create_atomic_cas(ptr, *raw, sem, scope)
        return handle(found.data.view(cmp.data.dtype), cmp.dtype)

    # Conversions.

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return handle(convert(src.data, numpy_dtype(dst_type)), dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding: Any) -> Any:
        toward_zero = rounding == ir.ROUNDING_MODE.RTZ
        target = numpy_dtype(dst_type)
        if toward_zero and target == E4M3:
            raise NotImplementedError("no NVIDIA GPU rounds to fp8e4nv toward zero")
        return handle(convert(src.data, target, toward_zero), dst_type)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        return handle(np.ascontiguousarray(src.data).view(numpy_dtype(dst_type)), dst_type)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    # Arithmetic.

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        x, y = lhs.data, rhs.data
        if x.dtype in FP8_MAX:
            raise TypeError(f"no NVIDIA GPU computes in {lhs.dtype.scalar}; cast the operands of {op.__name__} first")
        if op in COMPARISONS:
            return handle(op(x, y), tl.int1)
        if x.dtype == np.bool_ and op in (np.add, np.subtract, np.multiply):
            op = np.bitwise_and if op is np.multiply else np.bitwise_xor  # one-bit integers wrap
        return handle(op(x, y).astype(x.dtype, copy=False), lhs.dtype)

    def create_minimumf(self, lhs: Any, rhs: Any) -> Any:
        return handle(arithmetic.minimum(lhs.data, rhs.data, propagate_nan=True), lhs.dtype)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return handle(arithmetic.minimum(lhs.data, rhs.data), lhs.dtype)

    def create_maximumf(self, lhs: Any, rhs: Any) -> Any:
        return handle(arithmetic.maximum(lhs.data, rhs.data, propagate_nan=True), lhs.dtype)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return handle(arithmetic.maximum(lhs.data, rhs.data), lhs.dtype)

    def create_clampf(self, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        propagate = propagate_nans == ir.PROPAGATE_NAN.ALL
        raised = arithmetic.maximum(arg.data, low.data, propagate)
        return handle(arithmetic.minimum(raised, high.data, propagate), arg.dtype)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        return handle(arithmetic.fma(x.data, y.data, z.data), z.dtype)

    def create_umulhi(self, lhs: Any, rhs: Any) -> Any:
        return handle(arithmetic.multiply_high(lhs.data, rhs.data), lhs.dtype)

    def create_ashr(self, lhs: Any, rhs: Any) -> Any:
        return handle(np.right_shift(lhs.data, rhs.data), lhs.dtype)

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> Any:
        return handle(np.where(cond.data, lhs.data, rhs.data), lhs.dtype)

    def create_fabs(self, arg: Any) -> Any:
        bits = bits_of(np.ascontiguousarray(arg.data))
        return handle((bits & (np.iinfo(bits.dtype).max >> 1)).view(arg.data.dtype), arg.dtype)

    def unary_op(self, arg: Any, op: Any) -> Any:
        exact = op in (np.negative, np.abs, np.sqrt)
        return handle((op if exact else arithmetic.via_float64(op))(arg.data), arg.dtype)

    # Measured on an H200: these flush fp32 subnormals, sqrt_rn, exp and log do not.

    def create_exp2(self, arg: Any) -> Any:
        return handle(flush_subnormals(arithmetic.via_float64(np.exp2)(arg.data)), arg.dtype)

    def create_sqrt(self, arg: Any) -> Any:
        return handle(np.sqrt(flush_subnormals(arg.data)), arg.dtype)

    def create_floor(self, arg: Any) -> Any:
        return handle(np.floor(flush_subnormals(arg.data)), arg.dtype)

    def create_ceil(self, arg: Any) -> Any:
        return handle(np.ceil(flush_subnormals(arg.data)), arg.dtype)

    def create_rsqrt(self, arg: Any) -> Any:
        return handle(arithmetic.rsqrt(arg.data), arg.dtype)

    def create_erf(self, arg: Any) -> Any:
        wide = torch.from_numpy(arg.data.astype(np.float64))
        return handle(torch.erf(wide).numpy().astype(arg.data.dtype), arg.dtype)

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, arguments: list[Any], return_type: Any, is_pure: bool
    ) -> Any:
        result = evaluate(symbol, [x.data for x in arguments])
        return handle(result.astype(numpy_dtype(return_type), copy=False), return_type)

    # Products of matrices: exact products, accumulated in fp32 (int32) in no particular order.

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        x, y = a.data, b.data
        if d.data.dtype.kind == "i":
            return handle(np.matmul(x, y, dtype=d.data.dtype) + d.data, d.dtype)
        wide = np.float64 if x.dtype == np.float64 else np.float32
        x, y = x.astype(wide), y.astype(wide)
        if a.data.dtype == np.float32 and input_precision == ir.INPUT_PRECISION.TF32:
            x, y = _tf32(x), _tf32(y)
        product = np.matmul(x, y) + d.data.astype(wide)
        return handle(round_float(product, d.data.dtype), d.dtype)


_UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def _data(mask: Any) -> Array:
    """The mask as an array; block pointers and descriptors pass it bare."""
    return np.asarray(mask if isinstance(mask, np.ndarray) else mask.data)


def _tf32(x: Array) -> Array:
    """fp32 as a tensor core reads it for tf32: the 13 low bits are ignored."""
    return (bits_of(x) & np.uint32(0xFFFFE000)).view(np.float32)


def _update_16_bit(operation: Any, pointer: Any, value: Any) -> Any:
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
