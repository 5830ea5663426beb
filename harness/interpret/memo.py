"""Attributes of Triton's types and tensors, computed once and not for every object.

`block_type(element, shape)` and `tensor(handle, type)` compute their attributes from types and constants alone, which
nothing changes afterwards; making them is most of the time of Triton's language layer. The constructors replaced here
run Triton's own once for the same element type (the same object) and shape, or the same type, and copy the attributes
that it set; no attribute is named, so that this holds on any release whose constructors take these arguments. On one
where they take others, the self-test of unknown releases fails.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

# Arbitrary: more is memory in every worker, fewer are made again more often.
ENTRIES = 4096
"""How many are kept before all are forgotten."""

_new_block, _new_tensor = tl.block_type.__init__, tl.tensor.__init__
_blocks: dict[Any, Any] = {}
_tensors: dict[int, tuple[Any, dict[str, Any], list[str]]] = {}


def replace_constructors() -> None:
    """Make `tl.block_type` and `tl.tensor` remember."""
    tl.block_type.__new__ = _block
    tl.block_type.__init__, tl.tensor.__init__ = _init_block, _init_tensor


def _block(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
    """Return the block type made before for this element type and shape, or a new object."""
    return _blocks.get(_block_key(element_ty, shape)) or object.__new__(cls)


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    if not self.__dict__:
        _new_block(self, element_ty, shape)
        _keep(_blocks, _block_key(element_ty, shape), self)


def _block_key(element_ty: Any, shape: Any) -> Any:
    sides = tuple([side.value if type(side) is tl.constexpr else side for side in shape])
    return (id(element_ty), sides, *map(type, sides))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    found = _tensors.get(id(type))
    if found is None:
        _new_tensor(self, handle, type)
        of_type = {name: value for name, value in self.__dict__.items() if value is not handle}
        _keep(_tensors, id(type), (type, of_type, [name for name in self.__dict__ if name not in of_type]))
        return
    self.__dict__.update(found[1])
    for name in found[2]:
        self.__dict__[name] = handle


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= ENTRIES:
        table.clear()
    table[key] = value
