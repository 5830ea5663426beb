"""Memory as the programs of a launch see it: every access is looked up in the tensors that the launch was given.

An access moves bits. It stays within one tensor nearly always; then it is an indexing of that tensor's memory. What
lies in no tensor is not touched: a load of it gives what a masked lane gives, and a `Fault` is noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter as memory
from triton._C.libtriton import ir

from lastbit.interpret.address_ranges import Given
from lastbit.interpret.coalescing import (
    Lanes,
    OffsetAddresses,
    broadcast,
    first_of,
    lanes_of,
    ranges_of,
    taken,
    windows,
)
from lastbit.interpret.decisions import mask_seen
from lastbit.interpret.faults import noted, outside, uninitialised
from lastbit.interpret.numpy_formats import Array, DType, bits_of
from lastbit.interpret.places import Place
from lastbit.interpret.racing import Races
from lastbit.interpret.speculation import Conflict, Speculation


@dataclass(frozen=True)
class Access:
    """One operation's access to memory: called with addresses and operands, it loads, stores or updates.

    Attributes:
        owner: has the `memory` of the launch that runs.
        kind: `load`, `store` or another method of `Memory`.
        dtype: of what is loaded or stored.
        rank: axes of a program's addresses; arrays may have one in front of them, of programs.
        place: in the source; None if unknown.
        origin: the parameter of the kernel from which the addresses were computed; empty if unknown.
        operation: of an atomic access.
    """

    owner: Any
    kind: str
    dtype: DType
    rank: int
    place: Place | None
    origin: str = ""
    operation: Any = None

    @property
    def raw(self) -> DType:
        return _RAW[self.dtype.itemsize]

    @property
    def highest(self) -> Any:
        """All bits set."""
        return _HIGHEST[self.dtype.itemsize]

    @property
    def shift(self) -> int:
        """Binary digits of an address that count bytes of an element."""
        return self.dtype.itemsize.bit_length() - 1

    def __call__(self, where: Array, *arrays: Array) -> Any:
        return self.advanced(where, None, *arrays)

    def advanced(self, base: Array, count: Array | None, *arrays: Array) -> Any:
        """Perform the access at `count` elements after the addresses `base`, or at `base` itself if `count` is None."""
        addresses = OffsetAddresses(base, count, self.dtype.itemsize)
        return getattr(self.owner.memory, self.kind)(self, addresses, *arrays)


_RAW = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)}
_HIGHEST = {width: raw.type(np.iinfo(raw).max) for width, raw in _RAW.items()}


@dataclass
class LaunchMemory:
    """The memory that the programs of a launch may touch, and the record of their accesses.

    Attributes:
        tensors: the tensors that it was given.
        ids: the indices of the program that runs in the grid, an array of shape [1] each; of several, [programs, 1].
        stored: regions that are stored to, as far as that is known; who loads from others does not matter.
        speculation: what the programs of a batch have touched; None while one program runs.
        races: the uses of memory by programs that run one after the other; None if nobody asks for races.
        unfilled: places at which a mask left lanes undefined; one of them may be `refilled` with another value.
        foreign: addresses may also come from numbers, of which nothing is known.
    """

    tensors: list[Given] = field(default_factory=list)
    ids: tuple[Array, ...] = ()
    stored: set[int] = field(default_factory=set)
    speculation: Speculation | None = None
    races: Races | None = None
    unfilled: set[Place | None] = field(default_factory=set)
    refilled: Place | None = None
    foreign: bool = False

    @property
    def program(self) -> tuple[int, ...]:
        """The program that runs; of several, the first."""
        return tuple(int(x.item(0)) for x in self.ids)

    def copies(self) -> dict[int, Array]:
        """Return region → the bytes that it holds."""
        return {x.region: x.shared_bytes().copy() for x in self.tensors}

    def restore(self, copies: dict[int, Array]) -> None:
        """Let memory hold these bytes again."""
        for tensor in self.tensors:
            tensor.shared_bytes()[:] = copies[tensor.region]

    def differing(self, copies: dict[int, Array]) -> Given | None:
        """Return a tensor in whose region memory differs from `copies` (region → bytes); None if there is none."""
        now = self.copies()
        return next((x for x in self.tensors if (now[x.region] != copies[x.region]).any()), None)

    # Accesses.

    def load(
        self, access: Access, where: OffsetAddresses, mask: Array | None = None, fill: Array | None = None
    ) -> Array:
        """Load the bits at addresses; masked lanes get the bits of `fill`, or undefined ones without it."""
        if access.rank > 1 and (turned := where.turned) is not None:
            swapped = [None if x is None else x.swapaxes(-1, -2) for x in (mask, fill)]
            return np.ascontiguousarray(self.load(access, turned, *swapped).swapaxes(-1, -2))
        mask = _excluding(access, mask)
        undefined = self._undefined(access, fill is None and mask is not None)
        other = undefined if fill is None else bits_of(np.ascontiguousarray(fill))
        lanes = lanes_of(where, mask)
        if (found := self._lookup(access, lanes)) is not None:
            tensor, index = found
            values = taken(tensor.view(access.raw), index, lanes, mask, other)
            if tensor.blank is not None and tensor.itemsize == access.dtype.itemsize:
                self._require_written(access, tensor, where, values, mask)
            return values.view(access.dtype)
        addresses, inside = self._allowed(access, where.all, mask)
        other = np.where(inside if mask is None else inside | ~mask, other, undefined)
        values = memory.load(addresses, inside, np.zeros(addresses.shape, access.raw), access.raw)
        return np.where(inside, values, other).view(access.dtype)

    def store(self, access: Access, where: OffsetAddresses, value: Array, mask: Array | None = None) -> None:
        """Store bits at addresses, but for those that a mask excludes; of two at one address, the last."""
        mask = _excluding(access, mask)
        bits = bits_of(np.ascontiguousarray(value))
        lanes = lanes_of(where, mask)
        if (found := self._lookup(access, lanes, bits)) is not None:
            tensor, index = found
            _put(tensor.view(access.raw), index, lanes, bits, self.speculation)
        else:
            addresses, inside = self._allowed(access, where.all, mask)
            memory.store(addresses, np.ascontiguousarray(np.broadcast_to(bits, addresses.shape)), inside)

    def update(self, access: Access, where: OffsetAddresses, value: Array, mask: Array) -> Array:
        """Update the elements atomically, program by program and one after the other; return their previous values."""
        addresses, value, inside = self._of_every_program(access, where.all, value, mask)
        if value.dtype.itemsize == 2 and value.dtype.kind not in "iu":
            old = _update_16_bit(access.operation[0], addresses, value, inside)
        else:
            operation, sem = access.operation[1:]
            raw = bits_of(value) if access.operation[0] == ir.ATOMIC_OP.XCHG else value
            old = memory.atomic_rmw(operation, addresses, raw, inside, sem)
        return np.where(inside, bits_of(old), self._undefined(access, False)).view(value.dtype)

    def exchange(self, access: Access, where: OffsetAddresses, expected: Array, value: Array) -> Array:
        """Compare and swap bits, program by program and one after the other; return the previous values."""
        expected, value = (bits_of(np.ascontiguousarray(x)) for x in (expected, value))
        addresses, value, inside = self._of_every_program(access, where.all, value, np.ones(1, bool))
        expected = np.ascontiguousarray(np.broadcast_to(expected, addresses.shape))
        old = np.zeros(addresses.shape, access.raw)
        old[inside] = memory.atomic_cas(addresses[inside], expected[inside], value[inside], access.operation)
        return old.view(access.dtype)

    def _of_every_program(self, access: Access, where: Array, value: Array, mask: Array) -> list[Array]:
        """Broadcast addresses, values and mask, over programs too if several run; mask what may not be touched."""
        shape = np.broadcast_shapes(where.shape, value.shape, mask.shape)
        if self.speculation is not None and len(shape) == access.rank:
            shape = (len(self.speculation.now), *shape)
        where, value, mask = (np.ascontiguousarray(np.broadcast_to(x, shape)) for x in (where, value, mask))
        if (found := self._lookup(access, Lanes(where, 1, mask))) is None:
            where, mask = self._allowed(access, where, mask)
        elif self.speculation is not None:
            self.speculation.save(found[0].view(access.raw), found[1][mask])
        return [where, value, mask]

    # Where an access goes.

    def _undefined(self, access: Access, matters: bool) -> Any:
        """Return the value of lanes left undefined by a mask: NaN by default, -1 in integers, so that a use shows."""
        if not matters:
            return access.highest
        self.unfilled.add(access.place)
        return access.raw.type(0) if access.place is not None and access.place == self.refilled else access.highest

    def _require_written(
        self, access: Access, tensor: Given, where: OffsetAddresses, values: Array, mask: Array | None
    ) -> None:
        blank = values == access.raw.type(tensor.blank)
        if not blank.any() or (mask is not None and not (blank := blank & mask).any()):
            return
        if self.speculation is not None:
            raise Conflict
        addresses = np.broadcast_to(where.all, blank.shape)[blank]
        noted(uninitialised(access.place, tensor, addresses, self.program))

    def _lookup(self, access: Access, lanes: Lanes, bits: Array | None = None) -> tuple[Given, Array] | None:
        """Return the one tensor that holds all lanes, and the lanes' indices in it; None if there is no such tensor.

        `bits` are about to be stored.
        """
        if (first := first_of(lanes)) is None:
            return None
        bytes_of_run = lanes.run * access.dtype.itemsize
        for tensor in self.tensors:
            if tensor.start <= first and first + bytes_of_run <= tensor.stop:
                index = (lanes.starts - np.uint64(tensor.start)).view(np.int64) >> access.shift  # in front: negative
                touches = self.speculation is not None and (access.kind != "load" or tensor.region in self.stored)
                low, high = ranges_of(index, lanes, access.rank if touches else None)
                if low.min() < 0 or high.max() * access.dtype.itemsize + bytes_of_run > tensor.stop - tensor.start:
                    continue
                if not self._surely_in(access, tensor, lanes):
                    continue
                if access.kind != "load" and tensor.region not in self.stored:
                    self.stored.add(tensor.region)
                    if self.speculation is not None:
                        raise Conflict  # loads from there have not been noted
                if self.speculation is not None and tensor.region in self.stored:
                    self._touch(access, tensor, index, lanes, low, high)
                if self.races is not None:
                    self._use(self.races, access, tensor, index, lanes, bits)
                return tensor, index
        return None

    def _surely_in(self, access: Access, tensor: Given, lanes: Lanes) -> bool:
        """Return whether no lane is in a gap between elements, or begins within an element."""
        width = access.dtype.itemsize
        if tensor.layout[1]:
            held = tensor.holds(lanes.starts, lanes.run * width)
            if not (held if lanes.live is None else held | ~lanes.live).all():
                return False
        if tensor.itemsize == width and not self.foreign:
            return True
        odd = (lanes.starts - np.uint64(tensor.start)) % np.uint64(width) != 0
        return not (odd if lanes.live is None else odd & lanes.live).any()

    def _touch(self, access: Access, tensor: Given, index: Array, lanes: Lanes, low: Array, high: Array) -> None:
        assert self.speculation is not None
        width, now = access.dtype.itemsize, self.speculation.now
        units = width // tensor.unit
        if units * tensor.unit != width:
            raise Conflict

        def every_unit() -> tuple[Array, Array]:
            who = now.reshape(-1, *(1,) * (access.rank - lanes.axes))
            first, who, live = np.broadcast_arrays(index, who, True if lanes.live is None else lanes.live)
            count = lanes.run * units
            return (first[live][:, None] * units + np.arange(count)).reshape(-1), who[live].repeat(count)

        last = high * width + (lanes.run * width - 1)
        self.speculation.touch(tensor, low * width, last, every_unit, access.kind != "load")

    def _use(self, races: Races, access: Access, tensor: Given, index: Array, lanes: Lanes, bits: Array | None) -> None:
        width, live = access.dtype.itemsize, np.True_ if lanes.live is None else lanes.live
        index, live = np.broadcast_arrays(index, live)
        steps = np.arange(lanes.run * width)
        offset = (index[live][:, None] * width + steps).reshape(-1)
        if access.kind == "load":
            races.loads(self.program, access.place, tensor, offset)
            return
        new = np.zeros(0, np.uint8)
        if bits is not None:
            bits = bits[..., : lanes.run] if lanes.axes else bits
            inner = (lanes.run,) if lanes.axes else ()
            new = np.ascontiguousarray(np.broadcast_to(bits, index.shape + inner)[live]).view(np.uint8).reshape(-1)
        races.stores(self.program, access.place, tensor, offset, new, bits is None)

    def _allowed(self, access: Access, where: Array, mask: Array | None) -> tuple[Array, Array]:
        """Return the addresses, and which of them may be touched; record a fault for the others."""
        where, mask = (np.ascontiguousarray(x) for x in np.broadcast_arrays(where, True if mask is None else mask))
        if not mask.any():
            return where, mask
        if self.speculation is not None:
            raise Conflict
        if self.foreign:
            return where, mask
        inside = np.zeros(where.shape, bool)
        for tensor in self.tensors:
            inside |= tensor.holds(where, access.dtype.itemsize)
        if (astray := mask & ~inside).any():
            tensors = [x for x in self.tensors if x.name == access.origin] or self.tensors
            width = access.dtype.itemsize
            noted(outside(access.kind, access.place, tensors, where[astray], width, self.program))
        return where, mask & inside


def _excluding(access: Access, mask: Array | None) -> Array | None:
    """Return a mask, or None in place of one that excludes no lane."""
    if mask is None:
        return None
    lanes = int(np.count_nonzero(mask))
    mask_seen(access.place, mask, lanes, access.rank)
    return None if lanes == mask.size else mask


def _put(view: Array, index: Array, lanes: Lanes, bits: Array, speculation: Speculation | None) -> None:
    """Store the lanes' elements, one after the other."""
    run: tuple[int, ...] = ()
    if lanes.axes:
        view, bits, run = windows(view, lanes.run), bits[..., : lanes.run], (lanes.run,)
    live = np.True_ if lanes.live is None else lanes.live
    shape = np.broadcast_shapes(index.shape, bits.shape[: bits.ndim - len(run)], live.shape)
    index, bits = broadcast(index, shape), broadcast(bits, shape + run)
    if lanes.live is None:
        index, bits = index.reshape(-1), bits.reshape(-1, *run)
    else:
        live = broadcast(lanes.live, shape)
        index, bits = index[live], bits[live]
    if speculation is not None:
        speculation.save(view, index)
    view[index] = bits


def _update_16_bit(operation: Any, where: Array, value: Array, inside: Array) -> Array:
    """Update bf16 or fp16 in memory atomically, one after the other; return the previous values."""
    if operation not in (ir.ATOMIC_OP.FADD, ir.ATOMIC_OP.XCHG):
        raise NotImplementedError(f"no NVIDIA GPU has an atomic {operation} on {value.dtype}")
    old, raw, one = np.zeros_like(value), np.dtype(np.uint16), np.ones(1, bool)
    for i in zip(*np.nonzero(inside), strict=True):
        address = where[i].reshape(1)
        old[i] = memory.load(address, one, np.zeros(1, raw), raw).view(value.dtype)[0]
        new = old[i] + value[i] if operation == ir.ATOMIC_OP.FADD else value[i]
        memory.store(address, bits_of(np.asarray(new, value.dtype).reshape(1)), one)
    return old
