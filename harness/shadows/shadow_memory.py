"""Residues of memory, storage by storage, so that views, strides and writes in place need no rule."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lastbit.numerics.residues import Residues

# Arbitrary: of as many, residues are found about as fast as those that are not alike.
_FEW = 1 << 12  # elements of a storage that may be those of a tensor without canaries

_Kind = tuple[int, bool]
"""Of elements: their size, and whether they are floats."""


@dataclass
class _Block:
    """A storage, kept so that no other gets its addresses, and the residues of its elements, [4, n].

    Its elements are of one kind; once it was written to, its residues as another kind are unknown. `bits` are the bytes
    that it held when the residues were found: if they have changed, something else has written to it.
    """

    storage: torch.UntypedStorage
    kind: _Kind
    numbers: Tensor
    written: bool = False
    bits: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def keep(self) -> None:
        """Copy the bytes that the storage holds now."""
        self.bits = bytes_of(self.storage).clone()

    @property
    def is_kept(self) -> bool:
        """Return whether a storage of floats still holds the bytes that were copied."""
        return not self.kind[1] or torch.equal(self.bits, bytes_of(self.storage))

    @property
    def end(self) -> int:
        return self.storage.data_ptr() + self.storage.nbytes()


class ShadowMemory:
    """Residues of floating-point tensors on the CPU; what was never written has those of the values found there.

    Attributes:
        unseen: called where a storage turns up that was neither registered nor written, or one that was written by
            something else, such as NumPy or another thread; what it holds is OPEN then. Without it, it is what it is.
    """

    def __init__(self) -> None:
        self.unseen: Callable[[], None] | None = None
        self._blocks: dict[int, _Block] = {}
        self._bases: list[int] = []

    def register(self, tensor: Tensor) -> None:
        """Add the storage of a tensor, with the residues of its values, unless it is known."""
        self._block(tensor)

    def allocate(self, tensor: Tensor) -> None:
        """Add the storage of a tensor to which nothing was written: all of it is OPEN."""
        self._new_block(tensor, _values(tensor.untyped_storage(), tensor.dtype).opened.numbers)

    def read(self, tensor: Tensor) -> Residues:
        """Return the residues of a tensor; OPEN if its memory holds another dtype."""
        block = self._block(tensor)
        if block.kind != _kind(tensor.dtype):
            return Residues.of(tensor).opened
        if self.unseen is not None and not block.is_kept:
            block = self._unseen(tensor, self.unseen)
        return Residues(_view(block.numbers, tensor).clone())

    def write(self, tensor: Tensor, residues: Residues) -> None:
        """Store the residues of a tensor, broadcast to its shape."""
        numbers = residues.numbers.reshape(4, *[1] * (tensor.ndim + 1 - residues.numbers.ndim), *residues.shape)
        if tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes():  # nothing of it remains
            self._new_block(tensor, torch.zeros(4, tensor.numel(), dtype=torch.int64))
        block = self._block(tensor)
        if block.kind != _kind(tensor.dtype):
            self._retype(block, tensor.dtype)
        _view(block.numbers, tensor).copy_(numbers)
        block.written = True
        block.keep()

    def bits(self, tensor: Tensor) -> Tensor:
        """Return the bytes that the storage of a tensor held when its residues were found."""
        return self._block(tensor).bits

    def open_unchanged(self, tensor: Tensor, before: Tensor) -> None:
        """Make those elements of a tensor's storage OPEN whose bytes equal the bytes `before`."""
        block = self._block(tensor)
        size = block.numbers.shape[1] * block.kind[0]
        same = (block.bits[:size] == before[:size]).view(-1, block.kind[0]).all(1)
        block.numbers = _opened_at(block.numbers, same)

    def holds(self, addresses: np.ndarray, dtype: torch.dtype) -> bool:
        """Return whether any of these addresses lies in a known storage of this dtype's kind."""
        return any(block.kind == _kind(dtype) for block, _, _ in self._at(addresses, dtype.itemsize))

    def load(self, addresses: np.ndarray, values: Tensor) -> Residues:
        """Return the residues at addresses of elements; outside of known storages, those of the `values` loaded.

        They are OPEN where the storage was written to as another dtype.
        """
        found = self._at(addresses, values.itemsize)
        if len(found) == 1 and found[0][0].kind == _kind(values.dtype) and bool(found[0][1].all()):
            return Residues(found[0][0].numbers[:, found[0][2].view(values.shape)])
        numbers = Residues.of(values).numbers
        for block, inside, places in found:
            if block.kind == _kind(values.dtype):
                numbers[:, inside] = block.numbers[:, places]
            elif block.written:
                numbers = _opened_at(numbers, inside)
        return Residues(numbers)

    def store(self, addresses: np.ndarray, residues: Residues, dtype: torch.dtype) -> None:
        """Store residues at addresses of elements, in known storages.

        A storage of other elements of the same size keeps its dtype, and is OPEN there; any other one takes this dtype.
        """
        numbers = residues.numbers.expand(4, *addresses.shape)
        for block, inside, places in self._at(addresses, dtype.itemsize):
            if block.kind[0] != dtype.itemsize:
                self._retype(block, dtype)
            found = numbers[:, inside]
            if block.kind != _kind(dtype):
                found = _opened_at(block.numbers[:, places], torch.ones(places.shape, dtype=torch.bool))
            block.numbers[:, places] = found
            block.written = True
            block.keep()

    def _retype(self, block: _Block, dtype: torch.dtype) -> None:
        """Change a storage's dtype, with the residues of its values in that dtype."""
        residues = _values(block.storage, dtype)
        block.kind, block.numbers = _kind(dtype), (residues.opened if block.written else residues).numbers

    def _at(self, addresses: np.ndarray, itemsize: int) -> list[tuple[_Block, Tensor, Tensor]]:
        """Return the storages that contain addresses, each with a mask of the addresses and its elements' indices."""
        found = []
        ends = [self._base(int(end)) for end in (addresses.min(), addresses.max())] if addresses.size else [0, -1]
        first, last = (bisect_right(self._bases, base) for base in ends)
        for base in self._bases[max(first - 1, 0) : last]:
            block = self._blocks[base]
            inside = (addresses >= base) & (addresses < block.end)
            if inside.any():
                places = (addresses[inside] - np.uint64(base)).astype(np.int64) // itemsize
                found.append((block, torch.from_numpy(inside), torch.from_numpy(places)))
        return found

    def _base(self, address: int) -> int:
        number = bisect_right(self._bases, address)
        return self._bases[number - 1] if number else -1

    def _block(self, tensor: Tensor) -> _Block:
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if (block := self._blocks.get(base)) is not None and block.storage.nbytes() == storage.nbytes():
            return block
        if self.unseen is not None and tensor.is_floating_point() and storage.nbytes():
            return self._unseen(tensor, self.unseen)
        return self._new_block(tensor, _values(storage, tensor.dtype).numbers)

    def _unseen(self, tensor: Tensor, told: Callable[[], None]) -> _Block:
        told()
        return self._new_block(tensor, _values(tensor.untyped_storage(), tensor.dtype).opened.numbers)

    def _new_block(self, tensor: Tensor, numbers: Tensor) -> _Block:
        """Make a block of a tensor's storage in its dtype, with these residues."""
        storage = tensor.untyped_storage()
        known = (base := storage.data_ptr()) in self._blocks
        block = self._blocks[base] = _Block(storage, _kind(tensor.dtype), numbers)
        block.keep()
        if not known:
            insort(self._bases, base)
        return block


def _kind(dtype: torch.dtype) -> _Kind:
    return dtype.itemsize, dtype.is_floating_point


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """View a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _values(storage: torch.UntypedStorage, dtype: torch.dtype) -> Residues:
    """Return the residues of a whole storage, read as elements of a dtype.

    Those of the canaries around a tensor, which are all alike, are those of the first one.
    """
    size = storage.nbytes() // dtype.itemsize
    values = torch.empty(0, dtype=dtype).set_(storage, 0, (size,), (1,))
    if size <= _FEW:
        return Residues.of(values)
    bits = bytes_of(storage)[: size * dtype.itemsize].numpy().view(f"u{dtype.itemsize}")
    others = np.flatnonzero(bits != bits[:1])
    begin, end = (int(others[0]), int(others[-1]) + 1) if len(others) else (0, 0)
    inside, around = Residues.of(values[begin:end]), Residues.of(values[:1]).numbers
    return Residues(torch.cat([around.expand(4, begin), inside.numbers, around.expand(4, size - end)], 1))


def _opened_at(numbers: Tensor, mask: Tensor) -> Tensor:
    return Residues(numbers).open_where(mask).numbers


def _view(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Return the view [4, …] of residues [4, n] for a tensor whose storage has n elements."""
    strides = numbers.stride(0), *tensor.stride()
    return torch.as_strided(numbers, (4, *tensor.shape), strides, tensor.storage_offset())
