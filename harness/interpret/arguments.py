"""The arguments of a launch, typed as the compiler types them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from functools import cache, cached_property, lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import _normalize_ty, mangle_type, type_canonicalisation_dict
from triton.tools.tensor_descriptor import TensorDescriptor

from lastbit.interpret.block_pointers import described_tensor, descriptor_key, host_descriptor
from lastbit.interpret.builder import ORIGIN
from lastbit.interpret.numpy_formats import Array, convert, numpy_dtype


def bind(function: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return name → argument, in the order of the parameters, defaults included; TypeError as from a call."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(bound) == len(names) == len(args) + len(kwargs) and all(name in bound for name in names):
        return {name: bound[name] for name in names}
    return inspect.getcallargs(function, *args, **kwargs)


class Arguments:
    """The arguments of a launch as the kernel sees them.

    Attributes:
        bound: the arguments, by name.
        arrays, dtypes: what the pointers and scalars hold, and their types.
        key: what the course of a program may depend on: constants, and the types. None if that is unknown.
    """

    def __init__(self, function: Any, bound: Mapping[str, Any]) -> None:
        self.bound = bound
        self.arrays: list[Array] = []
        self.dtypes: list[Any] = []
        self._names: list[str] = []
        self._constants: dict[str, Any] = {}
        self._descriptors: dict[str, TensorDescriptor] = {}
        annotations = _annotations(function)
        key = tuple([self._add(name, value, annotations.get(name, "")) for name, value in bound.items()])
        self.key = None if None in key else key

    def _add(self, name: str, value: Any, annotation: str) -> Any:
        if "constexpr" in annotation:
            self._constants[name] = value
            return constant_key(value)
        if isinstance(value, TensorDescriptor):
            self._descriptors[name] = value
            parts = described_tensor(value)
            return tuple([self._add(f"{name}.{part}", *parts[part]) for part in parts]), descriptor_key(value)
        if (parameter := _parameter(value, annotation)) is not None:
            mangled, array = parameter
            self.arrays.append(array)
            self.dtypes.append(_type_named(mangled))
            self._names.append(name)
            return mangled
        seen = self._constants[name] = _stock_implicit_cvt(value)
        return constant_key(value) if seen is value else None

    @cached_property
    def handles(self) -> list[Any]:
        named = zip(self._names, self.arrays, self.dtypes, strict=True)
        return [TensorHandle(array, dtype, {ORIGIN: name}) for name, array, dtype in named]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Name → pointer or scalar tensor, or constant."""
        tensors = dict(zip(self._names, map(tl.tensor, self.handles, self.dtypes), strict=True))
        for name, value in self._descriptors.items():
            tensors[name] = host_descriptor(value, {x: tensors.pop(f"{name}.{x}") for x in described_tensor(value)})
        return {**self._constants, **tensors}


def _parameter(value: Any, annotation: str) -> tuple[str, Array] | None:
    """Return the mangled type of a pointer or scalar and an array of its value; None for any other argument.

    A Python float is fp32 unless annotated; an integer is i32, or i64 or u64 where it does not fit.
    """
    if isinstance(value, torch.Tensor):
        return _mangled(value), np.array([value.data_ptr()], dtype=np.uint64)
    if type(value) is int:
        mangled, array = _integer(value, annotation)
        return mangled, array.copy()
    return _number(value, annotation) if isinstance(value, (bool, int, float)) else None


def _number(value: Any, annotation: str) -> tuple[str, Array]:
    """Return the mangled type of a scalar, and an array that holds it."""
    mangled = annotation if annotation in _CANONICAL else _mangled(value)
    wide = np.array([value], dtype=np.float64 if isinstance(value, float) else None)
    return mangled, convert(wide, numpy_dtype(_type_named(mangled)))


def _mangled(value: Any) -> str:
    """Return what the compiler calls the type of an argument; asked, its native code would import Gluon."""
    if isinstance(value, torch.Tensor):
        name = type_canonicalisation_dict.get(str(value.dtype).removeprefix("torch."))
        return f"*{name}" if name else str(mangle_type(value))
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
        return str(mangle_type(value))
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


_integer = lru_cache(maxsize=4096, typed=True)(_number)
_CANONICAL = frozenset(type_canonicalisation_dict.values())


def as_parameter(value: Any, annotation: str = "") -> Any:
    """Return a launch argument as the kernel sees it: a pointer or scalar tensor of the type the compiler gives it."""
    if (parameter := _parameter(value, annotation)) is None:
        return _stock_implicit_cvt(value)
    dtype = _type_named(parameter[0])
    return tl.tensor(TensorHandle(parameter[1], dtype), dtype)


_stock_implicit_cvt = interpreter._implicit_cvt


@cache
def _annotations(function: Any) -> dict[str, str]:
    return {name: _normalize_ty(ty) for name, ty in inspect.get_annotations(function).items()}


@cache
def _type_named(mangled: str) -> Any:
    return tl.str_to_ty(mangled, None)


def constant_key(value: Any) -> Any:
    """Return a key that is equal for constants which a kernel cannot tell from each other; None if that is unknown."""
    if isinstance(value, tl.constexpr):
        inner = constant_key(value.value)
        return None if inner is None else ("constexpr", inner)
    if isinstance(value, (tuple, list)):
        parts = tuple(constant_key(part) for part in value)
        return None if None in parts else (type(value), parts)
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, tl.dtype):
        return type(value), str(value)
    known = isinstance(value, (int, str, torch.dtype, InterpretedFunction, FunctionType, Enum, type(None)))
    return (type(value), value) if known else None
