"""Block pointers and tensor descriptors, composed of operations on addresses and masks that every kernel asks for.

The interpreter has no operations of its own for them. So whatever watches a builder (a tape, a trace, a check of
addresses) sees ordinary ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.tools.tensor_descriptor import TensorDescriptor

from lastbit.interpret.inline_asm import inline_assembly
from lastbit.interpret.numpy_formats import Array

ALIGNMENT = 16
"""Bytes of which the tensor memory accelerator wants base, strides and innermost offsets to be multiples."""


@dataclass(frozen=True)
class View:
    """A tensor in memory of which blocks are read and written.

    Attributes:
        base: handle of the pointer to the first element.
        shape, strides: handles of integers, in elements.
        block_shape: of the blocks.
    """

    base: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    block_shape: tuple[int, ...]

    @property
    def element(self) -> Any:
        return self.base.get_element_ty()


@dataclass(frozen=True)
class BlockPointer(View):
    """The result of `tl.make_block_ptr`: a view, and the offsets at which a block begins."""

    offsets: tuple[Any, ...]


@dataclass(frozen=True)
class Descriptor(View):
    """The result of `tl.make_tensor_descriptor`; elements outside the tensor are read as `padding`, never written."""

    padding: Any


class Compositions:
    """Operations of a builder that are composed of others."""

    def create_make_block_ptr(
        self, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
    ) -> BlockPointer:
        return BlockPointer(base, tuple(shape), tuple(strides), tuple(block_shape), tuple(offsets))

    def create_advance(self, ptr: BlockPointer, offsets: Sequence[Any]) -> BlockPointer:
        add: Any = self.create_add  # type: ignore[attr-defined]
        return replace(ptr, offsets=tuple(add(x, y) for x, y in zip(ptr.offsets, offsets, strict=True)))

    def create_tensor_pointer_load(
        self, ptr: BlockPointer, boundary_check: Any, padding: Any, cache: Any, eviction: Any, is_volatile: Any
    ) -> Any:
        builder: Any = self
        place = _positions(builder, ptr, ptr.offsets)
        where = _addresses(builder, ptr, place)
        if not boundary_check:
            return builder.create_load(where, cache, eviction, is_volatile)
        mask, fill = _inside(builder, ptr, place, boundary_check), _fill(builder, ptr, padding)
        return builder.create_masked_load(where, mask, fill, cache, eviction, is_volatile)

    def create_tensor_pointer_store(
        self, ptr: BlockPointer, value: Any, boundary_check: Any, cache: Any, eviction: Any
    ) -> None:
        builder: Any = self
        place = _positions(builder, ptr, ptr.offsets)
        where = _addresses(builder, ptr, place)
        if boundary_check:
            mask = _inside(builder, ptr, place, boundary_check)
            builder.create_masked_store(where, value, mask, cache, eviction)
        else:
            builder.create_store(where, value, cache, eviction)

    def create_make_tensor_descriptor(
        self, base: Any, shape: Any, strides: Any, block_shape: Any, is_signed: bool, padding: Any
    ) -> Descriptor:
        builder: Any = self
        check = partial(_aligned_tensor, _bytes(base.get_element_ty()))
        checked = builder.create_of_arrays(check, base, *strides[:-1])
        return Descriptor(checked, tuple(shape), tuple(strides), tuple(block_shape), padding)

    def create_descriptor_load(self, desc: Descriptor, indices: Sequence[Any], *caching: Any) -> Any:
        return _load(self, desc, _positions(self, desc, indices, aligned=True))

    def create_descriptor_store(self, desc: Descriptor, value: Any, indices: Sequence[Any]) -> None:
        _store(self, desc, _positions(self, desc, indices, aligned=True), value)

    def create_descriptor_gather(self, desc: Descriptor, x_offsets: Any, y_offset: Any, type: Any) -> Any:
        return _load(self, *_rows(self, desc, x_offsets, y_offset))

    def create_descriptor_scatter(self, desc: Descriptor, value: Any, x_offsets: Any, y_offset: Any) -> None:
        _store(self, *_rows(self, desc, x_offsets, y_offset), value)

    def create_descriptor_reduce(self, kind: Any, desc: Descriptor, value: Any, indices: Sequence[Any]) -> None:
        builder: Any = self
        place = _positions(builder, desc, indices, aligned=True)
        where, mask = _addresses(builder, desc, place), _inside(builder, desc, place)
        element, name = desc.element, kind.name
        if element.is_floating():
            if name != "ADD":
                raise NotImplementedError(f"the descriptor's atomic {name.lower()} of {element} is not interpreted")
            name = "FADD"
        elif name in ("MIN", "MAX") and not element.is_int_signed():
            name = f"U{name}"
        operation = getattr(ir.ATOMIC_OP, name)
        builder.create_atomic_rmw(operation, where, value, mask, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU)

    def create_inline_asm(
        self, asm: str, constraints: str, values: Sequence[Any], types: Sequence[Any], is_pure: bool, pack: int
    ) -> Any:
        return inline_assembly(self, asm, constraints, values, types, pack)


def _load(builder: Any, desc: Descriptor, place: list[Any]) -> Any:
    where, mask = _addresses(builder, desc, place), _inside(builder, desc, place)
    return builder.create_masked_load(where, mask, _fill(builder, desc, desc.padding), None, None, False)


def _store(builder: Any, desc: Descriptor, place: list[Any], value: Any) -> None:
    where, mask = _addresses(builder, desc, place), _inside(builder, desc, place)
    builder.create_masked_store(where, value, mask, None, None)


def _rows(builder: Any, desc: Descriptor, x_offsets: Any, y_offset: Any) -> tuple[Descriptor, list[Any]]:
    """Return a descriptor of blocks with a row for each of `x_offsets`, and the indices of its rows and columns."""
    rows = builder.create_of_arrays(lambda x: x[..., None].astype(np.int64), x_offsets, dtype=tl.int64)
    gathered = replace(desc, block_shape=(x_offsets.data.shape[-1], desc.block_shape[-1]))
    return gathered, [rows, _positions(builder, gathered, [y_offset, y_offset], aligned=True)[1]]


def _positions(builder: Any, view: View, offsets: Sequence[Any], aligned: bool = False) -> list[Any]:
    """Return for each dimension the indices of the block's elements along it, as arrays of the block's rank."""
    last = len(view.block_shape) - 1
    found = []
    for i, (offset, size) in enumerate(zip(offsets, view.block_shape, strict=True)):
        multiple = max(1, ALIGNMENT // _bytes(view.element)) if aligned and i == last else 1
        along = partial(_along, (size, *(1,) * (last - i)), last + 1, multiple)
        found.append(builder.create_of_arrays(along, offset, dtype=tl.int64))
    return found


def _along(shape: tuple[int, ...], ndim: int, multiple: int, offset: Array) -> Array:
    if (offset % multiple).any():
        raise ValueError(f"the innermost offset of a tensor descriptor is no multiple of {ALIGNMENT} bytes")
    return _of_rank(ndim, offset.astype(np.int64)) + np.arange(shape[0]).reshape(shape)


def _of_rank(ndim: int, scalar: Array) -> Array:
    """Reshape a scalar to `ndim` dimensions of size 1, behind the axis of programs if it has one."""
    return scalar.reshape(*scalar.shape[:-1], *(1,) * ndim)


def _addresses(builder: Any, view: View, place: list[Any]) -> Any:
    weigh = partial(_weighted, len(place))
    offset = builder.create_of_arrays(weigh, *place, *view.strides, dtype=tl.int64)
    base = builder.create_splat(tl.block_type(view.base.dtype, list(view.block_shape)), view.base)
    return builder.create_addptr(base, offset)


def _weighted(ndim: int, *parts: Array) -> Array:
    pairs = zip(parts[:ndim], parts[ndim:], strict=True)
    total: Array = sum(index * _of_rank(ndim, stride.astype(np.int64)) for index, stride in pairs)  # type: ignore[assignment]
    return total


def _inside(builder: Any, view: View, place: list[Any], dimensions: Iterable[int] | None = None) -> Any:
    """Return which elements of the block lie in the tensor, as far as `dimensions` tell; None for all."""
    within = partial(_within, view.block_shape, tuple(range(len(place))) if dimensions is None else tuple(dimensions))
    return builder.create_of_arrays(within, *place, *view.shape, dtype=tl.int1)


def _within(block_shape: tuple[int, ...], dimensions: tuple[int, ...], *parts: Array) -> Array:
    ndim = len(block_shape)
    inside: Array = np.ones(block_shape, np.bool_)
    for i in dimensions:
        inside = inside & (parts[i] >= 0) & (parts[i] < _of_rank(ndim, parts[ndim + i]))
    return inside


def _fill(builder: Any, view: View, padding: Any) -> Any:
    """Return the value that is read outside of the tensor, as a block; None if it is undefined."""
    if padding is None:
        return None
    value = np.nan if padding == ir.PADDING_OPTION.PAD_NAN else 0
    zero = builder.get_null_value(view.element)
    return builder.create_of_arrays(lambda x: np.full(view.block_shape, value, x.dtype), zero)


def _aligned_tensor(itemsize: int, base: Array, *strides: Array) -> Array:
    if (base % ALIGNMENT).any() or any((stride * itemsize % ALIGNMENT).any() for stride in strides):
        raise ValueError(f"base and strides of a tensor descriptor are multiples of {ALIGNMENT} bytes")
    return base


def _bytes(element: Any) -> int:
    return max(1, int(element.primitive_bitwidth) // 8)


def described_tensor(value: TensorDescriptor) -> dict[str, tuple[Any, str]]:
    """Return the values that a descriptor made outside of a kernel hands to it: name → (value, annotation)."""
    sides = {f"shape{i}": (int(side), "i32") for i, side in enumerate(value.shape)}
    strides = {f"stride{i}": (int(stride), "i64") for i, stride in enumerate(value.strides)}
    return {"base": (value.base, ""), **sides, **strides}


def descriptor_key(value: TensorDescriptor) -> tuple[Any, ...]:
    """Return a key that is equal for descriptors which a kernel tells apart by the values they hand to it alone."""
    if getattr(value, "round_f32_to_tf32", False):
        raise NotImplementedError("a tensor descriptor that rounds to tf32 is not interpreted")
    return tuple(value.block_shape), value.padding


def host_descriptor(value: TensorDescriptor, tensors: dict[str, Any]) -> Any:
    """Return the descriptor as the kernel sees it, made of the tensors that `described_tensor` named."""
    shape, strides = ([tensors[f"{part}{i}"] for i in range(len(value.shape))] for part in ("shape", "stride"))
    padding = ir.PADDING_OPTION.PAD_NAN if value.padding == "nan" else ir.PADDING_OPTION.PAD_ZERO
    base, block_shape = tensors["base"], [int(side) for side in value.block_shape]
    handle = Descriptor(base.handle, _handles(shape), _handles(strides), tuple(block_shape), padding)
    return tl.tensor_descriptor(handle, shape, strides, tl.block_type(base.type.element_ty, block_shape))


def _handles(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.handle for x in tensors)
