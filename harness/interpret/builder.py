"""The operations that Triton's language layer asks its builder for, computed as the hardware computes them.

`Builder` subclasses Triton's `InterpreterBuilder`. The language layer has already inserted every promotion, so an
operation gets operands of one format and returns that format, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import itemgetter
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

from lastbit.interpret import arithmetic
from lastbit.interpret.block_pointers import Compositions
from lastbit.interpret.coalescing import advanced, alike, broadcast, filled, histogram, programs_of
from lastbit.interpret.libdevice import evaluate
from lastbit.interpret.memory import Access, LaunchMemory
from lastbit.interpret.numpy_formats import (
    BFLOAT16,
    E4M3,
    FP8_MAX,
    Array,
    DType,
    bits_of,
    converter,
    flush_subnormals,
    numpy_dtype,
    round_float,
)
from lastbit.interpret.places import here, missing

COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


ORIGIN = "lastbit.origin"
"""The attribute of a handle of addresses that names the parameter of the kernel from which they were computed."""


def origin(operands: Iterable[Any]) -> dict[str, str]:
    """Return the attributes of addresses computed from these handles: the kernel's parameter that they come from."""
    return {ORIGIN: next((x.attr[ORIGIN] for x in operands if ORIGIN in x.attr), "")}


def handle(data: Array, dtype: Any) -> Any:
    return TensorHandle(data, dtype.scalar)


def _absolute(x: Array) -> Array:
    bits = bits_of(np.ascontiguousarray(x))
    return (bits & (np.iinfo(bits.dtype).max >> 1)).view(x.dtype)


def _elementwise(function: Callable[..., Array]) -> Callable[..., Any]:
    """Return the method for an operation whose result has the type of the first operand."""

    def operation(self: Builder, arg: Any, *others: Any) -> Any:
        return self.apply(function, arg.dtype, arg, *others)

    return operation


class Builder(Compositions, InterpreterBuilder):  # type: ignore[misc]
    """Triton's interpreting builder with hardware number formats."""

    # The default makes every integer operation compute an overflow check whose outcome only a debug build reports.
    options = InterpreterOptions(sanitize_overflow=False)
    memory = LaunchMemory()

    def __getattr__(self, name: str) -> Any:
        return missing(name.removeprefix("create_"))()

    # What Python sees of values, and what it computes itself. A recording builder has the same methods.

    def observe(self, arg: Any, read: Callable[[Any], Any]) -> Any:
        """Return the only element of a handle's array, read by `bool` or `int`."""
        return read(arg.data.item())

    def get_number(self, value: int, dtype: Any) -> Any:
        return handle(np.array([value], dtype=numpy_dtype(dtype)), dtype)

    def create_of_arrays(self, function: Callable[..., Array], *args: Any, dtype: Any = None) -> Any:
        """Apply a function of arrays that has no side effect; without a `dtype` the result has the first operand's.

        Like every function of arrays, it takes arrays with an additional leading axis, of programs, beside others
        without one.
        """
        return self.apply(function, args[0].dtype if dtype is None else dtype, *args)

    def apply(self, function: Callable[..., Array], dtype: Any, *args: Any) -> Any:
        """Apply `function` to the arrays of handles; if `dtype` is None, for its side effect, without a result."""
        result = function(*[x.data for x in args])
        if dtype is None:
            return None
        made = handle(result, dtype)
        if dtype.scalar.is_ptr():
            made.attr = origin(args)
        return made

    def entered(self, function: Any) -> None:
        """Ignore that a function of the kernel begins; builders that watch programs override this."""

    def returned(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Ignore that a function of the kernel has been called; builders that watch programs override this."""

    def give_up(self) -> None:
        """Ignore that the rest of the program depends on more than its operations tell; recorders override this."""

    def create_grid_dependency_wait(self) -> None:
        """Do nothing: launches run one after the other, so that earlier ones have ended."""

    create_grid_dependency_launch_dependents = create_grid_dependency_wait

    def create_clock(self) -> Any:
        """Return nanoseconds since an arbitrary time."""
        return handle(np.array([perf_counter_ns()], dtype=np.uint64), tl.uint64)

    # Constants: the compiler's builder takes them as C floats, so they round to fp32 first.

    def get_fp16(self, value: float) -> Any:
        return handle(np.array([value], dtype=np.float32).astype(np.float16), tl.float16)

    def get_bf16(self, value: float) -> Any:
        return handle(np.array([value], dtype=np.float32).astype(BFLOAT16), tl.bfloat16)

    # Memory: loads and stores move bits.

    def access(self, kind: str, ptr: Any, operation: Any = None) -> Access:
        """Return the access that an operation of the kernel makes at the addresses `ptr`."""
        element = numpy_dtype(ptr.get_element_ty())
        return Access(self, kind, element, ptr.data.ndim, here(), ptr.attr.get(ORIGIN, ""), operation)

    # How they are cached is two arguments up to Triton 3.8 and one from 3.9 on.

    def create_load(self, ptr: Any, *caching: Any) -> Any:
        return self.apply(self.access("load", ptr), ptr.get_element_ty(), ptr)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        given = () if other is None else (other,)
        return self.apply(self.access("load", ptrs), ptrs.get_element_ty(), ptrs, mask, *given)

    def create_store(self, ptr: Any, val: Any, *caching: Any) -> Any:
        self.apply(self.access("store", ptr), None, ptr, val)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        self.apply(self.access("store", ptrs), None, ptrs, value, mask)

    def create_atomic_rmw(self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        known = (operation, self.ir_rmw_op_to_interpreter_rmw_op[operation], self.ir_sem_to_interpreter_sem[sem])
        return self.apply(self.access("update", ptr, known), val.dtype, ptr, val, mask)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        access = self.access("exchange", ptr, self.ir_sem_to_interpreter_sem[sem])
        return self.apply(access, cmp.dtype, ptr, cmp, val)

    # Conversions.

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return self.apply(converter(src.data.dtype, numpy_dtype(dst_type)), dst_type, src)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding: Any) -> Any:
        toward_zero = rounding == ir.ROUNDING_MODE.RTZ
        target = numpy_dtype(dst_type)
        if toward_zero and target == E4M3:
            raise NotImplementedError("no NVIDIA GPU rounds to fp8e4nv toward zero")
        return self.apply(converter(src.data.dtype, target, toward_zero), dst_type, src)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        target = numpy_dtype(dst_type)
        return self.apply(lambda x: np.ascontiguousarray(x).view(target), dst_type, src)

    def create_int_to_ptr(self, src: Any, dst_type: Any) -> Any:
        return self.apply(self._as_addresses, dst_type, src)

    def _as_addresses(self, numbers: Array) -> Array:
        self.memory.foreign = True
        return np.ascontiguousarray(numbers).view(np.uint64)

    create_ptr_to_int = create_bitcast

    # Arithmetic.

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        x, y = lhs.data.dtype, rhs.data.dtype
        if x in FP8_MAX:
            raise TypeError(f"no NVIDIA GPU computes in {lhs.dtype.scalar}; cast the operands of {op.__name__} first")
        if op in COMPARISONS:
            return self.apply(op, tl.int1, lhs, rhs)
        if x == np.bool_ and op in (np.add, np.subtract, np.multiply):
            op = np.bitwise_and if op is np.multiply else np.bitwise_xor  # one-bit integers wrap
        return self.apply(_in_first_dtype(op, x, y), lhs.dtype, lhs, rhs)

    create_idiv = _elementwise(lambda x, y: (x - np.fmod(x, y)) // y)
    create_minimumf = _elementwise(partial(arithmetic.minimum, propagate_nan=True))
    create_minnumf = _elementwise(arithmetic.minimum)
    create_maximumf = _elementwise(partial(arithmetic.maximum, propagate_nan=True))
    create_maxnumf = _elementwise(arithmetic.maximum)
    create_fma = _elementwise(arithmetic.fma)
    create_umulhi = _elementwise(arithmetic.multiply_high)
    create_ashr = _elementwise(np.right_shift)
    create_fabs = _elementwise(_absolute)
    create_rsqrt = _elementwise(arithmetic.rsqrt)
    create_erf = _elementwise(lambda x: torch.erf(torch.from_numpy(x.astype(np.float64))).numpy().astype(x.dtype))

    # Measured on an H200: these flush fp32 subnormals, sqrt_rn, exp and log do not.
    create_exp2 = _elementwise(lambda x: flush_subnormals(arithmetic.via_float64(np.exp2)(x)))
    create_sqrt = _elementwise(lambda x: np.sqrt(flush_subnormals(x)))
    create_floor = _elementwise(lambda x: np.floor(flush_subnormals(x)))
    create_ceil = _elementwise(lambda x: np.ceil(flush_subnormals(x)))

    def create_clampf(self, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        propagate = propagate_nans == ir.PROPAGATE_NAN.ALL

        def clamp(x: Array, low: Array, high: Array) -> Array:
            return arithmetic.minimum(arithmetic.maximum(x, low, propagate), high, propagate)

        return self.apply(clamp, arg.dtype, arg, low, high)

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> Any:
        return self.apply(arithmetic.select, lhs.dtype, cond, lhs, rhs)

    def unary_op(self, arg: Any, op: Any) -> Any:
        exact = op in (np.negative, np.abs, np.sqrt)
        return self.apply(op if exact else arithmetic.via_float64(op), arg.dtype, arg)

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, arguments: list[Any], return_type: Any, is_pure: bool
    ) -> Any:
        target = numpy_dtype(return_type)
        return self.apply(lambda *xs: evaluate(symbol, list(xs)).astype(target, copy=False), return_type, *arguments)

    # Products of matrices: exact products, accumulated in fp32 (int32) in no particular order.

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        truncated = a.data.dtype == np.float32 and input_precision == ir.INPUT_PRECISION.TF32
        return self.apply(partial(_dot, truncated), d.dtype, a, b, d)

    # Shapes and addresses. Axes are counted from the right: what is in front of those of one program are programs.

    def create_get_program_id(self, axis: int) -> Any:
        return handle(self.memory.ids[axis], tl.int32)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        shape = tuple(ret_ty.shape)
        return self.apply(lambda x: filled(x, shape), arg.dtype, arg)

    def create_unsplat(self, arg: Any) -> Any:
        rank = arg.data.ndim
        return self.apply(lambda x: x.reshape(*programs_of(x, rank), -1)[..., :1], arg.dtype, arg)

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        shape, rank = tuple(shape), arg.data.ndim
        return self.apply(lambda x: broadcast(x, programs_of(x, rank) + shape), arg.dtype, arg)

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        rank = arg.data.ndim
        index = (..., None) + (slice(None),) * (rank - axis % (rank + 1))
        return self.apply(itemgetter(index), arg.dtype, arg)

    def create_reshape(self, arg: Any, shape: Any, allow_reorder: Any) -> Any:
        shape, rank = tuple(shape), arg.data.ndim
        return self.apply(lambda x: x.reshape(programs_of(x, rank) + shape), arg.dtype, arg)

    def create_trans(self, arg: Any, perm: Any) -> Any:
        perm = tuple(axis - len(perm) for axis in perm)
        return self.apply(lambda x: np.transpose(x, (*range(x.ndim - len(perm)), *perm)), arg.dtype, arg)

    def create_cat(self, lhs: Any, rhs: Any) -> Any:
        rank = lhs.data.ndim
        return self.apply(lambda x, y: np.concatenate(alike(rank, x, y), axis=-rank), lhs.dtype, lhs, rhs)

    def create_join(self, lhs: Any, rhs: Any) -> Any:
        return self.apply(lambda x, y: np.stack(np.broadcast_arrays(x, y), axis=-1), lhs.dtype, lhs, rhs)

    def create_split(self, val: Any) -> Any:
        return self.part(val, 0), self.part(val, 1)

    def part(self, val: Any, i: int) -> Any:
        """Return element `i` along the last axis."""
        return self.apply(itemgetter((..., i)), val.dtype, val)

    def create_gather(self, src: Any, indices: Any, axis: int) -> Any:
        rank = src.data.ndim
        back = axis % rank - rank

        def gather(x: Array, i: Array) -> Array:
            x, i = alike(rank, x, i)
            return np.take_along_axis(x, i, axis=back)

        return self.apply(gather, src.dtype, src, indices)

    def create_histogram(self, data: Any, bins: int, mask: Any) -> Any:
        counted = (data,) if mask is None else (data, mask)
        return self.apply(partial(histogram, bins), tl.int32, *counted)

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        width = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        return self.apply(lambda x, n: advanced(x, n, width), ptr.dtype, ptr, offset)


@cache
def _in_first_dtype(op: Callable[..., Array], x: DType, y: DType) -> Callable[..., Array]:
    """Return `op` on arrays of dtypes `x` and `y`, with a result of dtype `x`."""
    if op(np.ones(1, x), np.ones(1, y)).dtype == x:
        return op
    return lambda a, b: op(a, b).astype(x)


def _dot(truncated: bool, a: Array, b: Array, d: Array) -> Array:
    if d.dtype.kind == "i":
        product: Array = np.matmul(a, b, dtype=d.dtype) + d
        return product
    if truncated:
        a, b = _tf32(a.astype(np.float32)), _tf32(b.astype(np.float32))
    return _accumulated(a, b, d)


def _accumulated(a: Array, b: Array, d: Array) -> Array:
    """Return a @ b + d in fp64, rounded: sums of products of 16-bit floats are exact unless 30 binades apart.

    In fp32 the bits of a row would depend on its place in the tile: BLAS adds the last rows of some heights otherwise.
    """
    return round_float(np.matmul(a.astype(np.float64), b.astype(np.float64)) + d.astype(np.float64), d.dtype)


def _tf32(x: Array) -> Array:
    """Return fp32 as a tensor core reads it for tf32: the 13 low bits are ignored."""
    return (bits_of(x) & np.uint32(0xFFFFE000)).view(np.float32)
