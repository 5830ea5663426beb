"""Blame for a broken property: the operation of torch that gives other bits for the same operands.

The property is asked again while every operation of torch is watched. What an operation gives follows from its
operands, and in many a row follows from a row of them: where these are what they were before, the result must be, too.
First it is only noted where that is not so. Then an operation that was noted is *held* to what it gave before. If the
property holds now, that operation breaks it; where no single one does, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lastbit.dtypes import DTYPE_NAMES
from lastbit.inputs import Inputs, bits_of
from lastbit.inputs.bits import bits_with_one_nan
from lastbit.invariance.property import Basis
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.relations import Tensors

BYTES, ROWS = 64 << 20, 1 << 15
"""Of results that are compared, and how many; where a property takes more, no operation is named."""
# Arbitrary: each costs calls of the kernel.
_MOST = 4  # operations that are held, each in its turn
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
_DOTS = {"mm": ("self 0",), "addmm": ("mat1 0",), "bmm": ("self 0", "mat2 0")}  # operands with rows of the result


def breaking(found: PropertyResult, basis: Basis, ask: Callable[[Basis], PropertyResult]) -> str:
    """Return what an operation of torch did that breaks a property, as a sentence; empty if none is proven to.

    `ask` finds the property of a call, as `found` is that of `basis`. Where it finds anything else while it is watched,
    as of a kernel that is compiled otherwise, nothing is said.
    """
    with suppress(Exception):  # of the kernel, which may take another way under a mode of torch
        watch = _Watch()
        if ask(watch.of(basis)) != found:
            return ""
        for operation in list(watch.noted)[:_MOST]:
            held = _Watch(operation)
            if ask(held.of(basis)).outcome is PropertyOutcome.HOLDS and not held.over:
                return f"{operation} breaks it: {held.noted[operation]}; with the first in both, the property holds."
    return ""


@dataclass(frozen=True, eq=False)
class _Kept:
    """The first result for some operands, or its row; `operands` are in words."""

    made: Tensor
    row: Any
    bits: bytes
    operands: str

    @property
    def value(self) -> Tensor:
        return self.made[self.row]

    @property
    def words(self) -> str:
        return self.operands if self.row is ... else f"row {self.row} of {self.operands}"


class _Operand:
    """The bits of an operand as they were before an operation, and its dtype and shape in words."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        strides = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
        self.words = f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} {list(self.shape)}{strides}"
        self._bits = _bytes(bits_of(tensor.detach()))
        self._kind = str(tensor.dtype)

    @property
    def whole(self) -> bytes:
        return f"{self._kind} {self.shape}".encode() + self._bits

    @property
    def kind_of_rows(self) -> bytes:
        return f"{self._kind} {self.shape[1:]}".encode()

    def row(self, row: int) -> bytes:
        return _row(self._bits, row, self.shape[0])


Operands = Mapping[str, _Operand]


class _Watch(TorchDispatchMode):
    """Notes which operations give other bits for the same operands; the one `held` gives the first ones again.

    Attributes:
        noted: operation → what it did first, in words.
        over: not every operation was looked at, since there are too many.
    """

    def __init__(self, held: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: dict[str, str] = {}
        self.over = False
        self._held, self._bytes, self._rows = held, 0, 0
        self._known: dict[bytes, _Kept] = {}

    def of(self, basis: Basis) -> Basis:
        """Watch the call of the basis, and the calls that are compared with it."""

        def call(inputs: Inputs) -> Tensors:
            with self:
                return basis.call(inputs)

        return replace(basis, results=call(basis.inputs), call=call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema.arguments
        given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
        tensors = {f"{name} {i}": x for name, value in given.items() for i, x in enumerate(_tensors(value))}
        self.over |= self._bytes > BYTES or self._rows > ROWS
        free = func.overloadpacket.__name__ in _UNWRITTEN or torch.Tag.nondeterministic_seeded in func.tags
        if self.over or free or not all(_is_plain(x) for x in tensors.values()):
            return func(*args, **kwargs)
        operands = {name: _Operand(x) for name, x in tensors.items()}
        result = func(*args, **kwargs)
        written = [given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
        memory = {x.untyped_storage()._cdata for x in tensors.values()}
        fresh = [x for x in _tensors(result) if _is_plain(x) and x.untyped_storage()._cdata not in memory]
        for part, made in enumerate([*_tensors(written), *fresh]):
            self._compare(func, given, operands, part, made)
        return result

    def _compare(self, func: Any, given: Mapping[str, Any], operands: Operands, part: int, made: Tensor) -> None:
        """Compare a result with the first one for the same operands, or each row with that for the same rows."""
        by_row = _by_row(func, given, operands, made)
        own = [operands[name] for name in by_row]
        others = blake2b(b"".join(x.whole for name, x in operands.items() if name not in by_row)).digest()
        shape = tuple(made.shape[1:] if by_row else made.shape)
        arguments = tree_map_only(Tensor, lambda _: "tensor", dict(given))
        common = f"{func} {part} {arguments} {by_row} {made.dtype} {shape}".encode() + others
        common += b"".join(x.kind_of_rows for x in own)
        words, copy = ", ".join(x.words for x in operands.values()), made.detach().clone()
        bits = _bytes(bits_with_one_nan(copy))
        places: Sequence[Any] = range(len(copy)) if by_row else [...]
        self._bytes, self._rows = self._bytes + copy.nbytes, self._rows + len(places)
        for row in places:
            key = blake2b(common + b"".join([x.row(row) for x in own]), digest_size=16).digest()
            now = _row(bits, row, len(copy)) if by_row else bits
            first = self._known.get(key)
            if first is None:
                self._known[key] = _Kept(copy, row, now, words)
            elif first.bits != now:
                operation = f"torch.ops.{func.overloadpacket}"
                if operation not in self.noted:
                    both = first, _Kept(copy, row, now, words)
                    gave = ["NaN" if x.value.to(torch.float64).isnan().any() else "numbers" for x in both]
                    one, other = gave if gave[0] != gave[1] else ("some bits", "others")
                    calls = f"in one call ({both[0].words}) and {other} in another ({both[1].words})"
                    self.noted[operation] = f"of the same operands it makes {one} {calls}"
                if operation == self._held:
                    made.detach()[row].copy_(first.value)


def _bytes(bits: Tensor) -> bytes:
    """Return the memory of a tensor of integers, row by row."""
    return bits.cpu().contiguous().numpy().tobytes()


def _row(rows: bytes, row: int, count: int) -> bytes:
    size = len(rows) // count
    return rows[row * size : (row + 1) * size]


def _by_row(func: Any, given: Mapping[str, Any], operands: Operands, made: Tensor) -> list[str]:
    """Name the operands whose row i, with the other operands whole, decides row i of the result; none if unknown."""
    name = func.overloadpacket.__name__
    sides = len(next(iter(operands.values())).shape) if operands else 0
    if name in _DOTS:
        rows = _DOTS[name]
    elif torch.Tag.pointwise in func.tags:
        rows = tuple(n for n, x in operands.items() if len(x.shape) == made.ndim)
    elif "normalized_shape" in given and "grad_out" not in given:  # gradients of weights are sums over rows
        rows = ("input 0",) if sides > len(given["normalized_shape"]) else ()
    elif (torch.Tag.reduction in func.tags or "half_to_float" in given) and given.get("dim") not in (None, []):
        dims = given["dim"] if isinstance(given["dim"], (list, tuple)) else [given["dim"]]
        rows = ("self 0",) if all(dim % sides for dim in dims) else ()
    else:
        rows = ()
    return [n for n in rows if made.ndim and n in operands and operands[n].shape[:1] == made.shape[:1]]


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex() and tensor.device.type != "meta"
