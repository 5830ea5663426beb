"""Memory that the judge shares with kernel processes: files without a name, or memory of a device.

What a judge looks at and what it keeps lies elsewhere. It copies inputs there before a call, and what it finds there
after the call to memory of its own: whoever writes there later changes nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lastbit.isolation.runner import exported

# Arbitrary: smaller blocks are each a file and a mapping for a few numbers.
_LEAST = 1 << 18  # bytes of a block
_numbers = itertools.count(1)


@dataclass(eq=False)
class SharedBlock:
    """A piece of memory that is shared whole.

    Attributes:
        number: what the judge and its kernel processes call it.
        words: all of it as int64, as the judge sees it.
        descriptor: of the file; None for memory of a device.
        handle: by which another process opens memory of a device; None for a file.
    """

    number: int
    words: Tensor
    descriptor: int | None
    handle: list[int | str] | None

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def as_json(self) -> dict[str, Any]:
        """The fields that a kernel process needs to map the block, beside the descriptor."""
        return {"number": self.number, "bytes": self.nbytes, "cuda": self.handle}


def fresh(device: torch.device, size: int) -> SharedBlock:
    """Return memory of at least `size` bytes that no kernel process has ever had, or can still have."""
    if device.type == "cpu":
        return _of_file(size)
    torch.cuda.empty_cache()  # and what was given to one before goes back to the device
    pool = torch.cuda.MemPool()
    block = _of_device(device, size, pool)
    weakref.finalize(block, lambda pool: None, pool)  # which lives as long as the block
    return block


# Above, a power of two would waste up to as much again of memory that counts.
_FEW = 64 << 20  # bytes up to which blocks are powers of two, so that one serves many cases


def _of_file(size: int) -> SharedBlock:
    size = max(_LEAST, 1 << (size - 1).bit_length()) if size <= _FEW else -(-size // _LEAST) * _LEAST
    descriptor = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # of Linux alone
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    words = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.int64)
    block = SharedBlock(next(_numbers), words, descriptor, None)
    weakref.finalize(block, os.close, descriptor)
    return block


def _of_device(device: torch.device, size: int, pool: object) -> SharedBlock:
    """Allocate a segment of device memory: another process that opens a part of a segment has all of it."""
    size = -(-max(size, _LEAST_SEGMENT) // _SEGMENTS) * _SEGMENTS
    with torch.cuda.use_mem_pool(pool, device):  # type: ignore[arg-type]
        words = torch.zeros(size // 8, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)  # or it would be zeroed after another process has written to it
    return SharedBlock(next(_numbers), words, None, [words.device.index, *exported(words.data_ptr())])


_LEAST_SEGMENT, _SEGMENTS = 10 << 20, 2 << 20  # bytes from which torch's allocator gives segments of their own


def memory_of(device: torch.device) -> int:
    """Return how many bytes of memory a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass
class Blocks:
    """The blocks of a judge: those that a case has in use by the memory of its tensors, and those that are free."""

    used: dict[int, SharedBlock] = field(default_factory=dict)
    free: list[SharedBlock] = field(default_factory=list)
    pools: dict[torch.device, object] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin another case: free the blocks of the last one, and give back those that it did not use."""
        self.free = list(self.used.values())
        self.used = {}

    def of(self, words: Tensor) -> SharedBlock:
        """Return the block for the memory of a tensor; the same one each time in a case."""
        return self.sized(words.data_ptr(), words.device, words.nbytes + _ROOM)

    def sized(self, key: int, device: torch.device, size: int) -> SharedBlock:
        """Return the block of a key, with `size` bytes or more."""
        block = self.used.get(key)
        if block is None or block.nbytes < size or block.words.device != device:
            fitting = [
                b for b in self.free if size <= b.nbytes <= _WASTE * size + _LEAST_SEGMENT and b.words.device == device
            ]
            block = min(fitting, key=lambda b: b.nbytes, default=None)
            if block is None and device.type == "cpu":
                block = _of_file(size)
            elif block is None:
                if device not in self.pools:
                    self.pools[device] = torch.cuda.MemPool()
                block = _of_device(device, size, self.pools[device])
            self.free = [b for b in self.free if b is not block]
            self.used[key] = block
        return block

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in (*self.used.values(), *self.free))

    def numbers(self) -> set[int]:
        """Return the numbers of all blocks."""
        return {block.number for block in (*self.used.values(), *self.free)}


_ROOM = 256  # bytes by which the start of a tensor is moved, so that its address is aligned as the judge's is
# Arbitrary: higher holds large blocks for small tensors, lower makes a new block for nearly every case.
_WASTE = 4
