"""The memory access of one operation of a kernel, as a function of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lastbit.interpret.formats import Array, DType
from lastbit.interpret.lanes import OffsetAddresses
from lastbit.interpret.places import Place


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
