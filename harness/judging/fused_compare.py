"""Comparison by Triton kernels: one that reads everything once, one that adds up its results, one copy to the host.

`torch_compare` is the definition. Counts, maxima, histogram and the worst element equal it exactly; sums
of fp64 differ by the order of summation only, which depends on nothing but the number of elements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastbit.inputs.bits import bits_of_float
from lastbit.judging import compare_kernels as kernels
from lastbit.judging import compare_plain_kernels as plain_kernels
from lastbit.judging.compare import Begun
from lastbit.judging.figures import FloatFigures, IntegerFigures, comparison, comparison_of_integers
from lastbit.numerics import Enclosure, Format
from lastbit.numerics.formats import ordinals
from lastbit.numerics.fused import LARGE
from lastbit.numerics.fused.compiled import launcher, unspecialized

FLOATS = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
)
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_PARTS = 4


class LaunchShape(NamedTuple):
    """Elements in a block, the most programs, and the warps of each."""

    block: int
    programs: int
    warps: int


STATISTICS = LaunchShape(block=64, programs=8448, warps=1)
COUNT = LaunchShape(block=512, programs=2112, warps=8)
FINISH = LaunchShape(block=1024, programs=1, warps=4)


class Walk(NamedTuple):
    """The way through two tensors of one shape: element i lies in row i // width and column i % width of both."""

    numel: int
    width: int
    a_row: int
    a_column: int
    e_row: int
    e_column: int

    @property
    def flat(self) -> bool:
        """Whether the elements of both follow each other in memory in that order."""
        return self.width == self.numel and self.a_column == self.e_column == 1


class Sort(NamedTuple):
    """A kind of pairs of tensors, for each of which kernels are compiled.

    Attributes:
        actual: the dtype of the actual values.
        expected: the dtype of expected integers, or how many parts of fp64 there are.
        flat: the elements of both follow each other in memory; see `Walk.flat`.
        large: the kernels are for such tensors alone. Those that are not large take any number of parts, which counts
            as four, and any way to go through them.
    """

    device: torch.device
    actual: torch.dtype
    expected: int | torch.dtype
    flat: bool
    large: bool


@dataclass(frozen=True, eq=False)
class ComparedPair:
    """A tensor that is not empty and the values expected of it, as the kernels take them.

    Attributes:
        expected: stacked parts, or integers.
        contract, end: how far an element's value is from its exact part, and each end from what comes before.
    """

    actual: Tensor
    expected: Tensor
    walk: Walk
    sort: Sort
    contract: int = 0
    end: int = 0

    @classmethod
    def of(cls, actual: Tensor, expected: Enclosure | Tensor, *, large: bool | None = None) -> ComparedPair | None:
        """Pair both, None where there is no kernel for them; `large` chooses the kernels, by default the size does."""
        large = actual.numel() >= LARGE if large is None else large
        walk = walk_of(actual, expected)
        e = expected if isinstance(expected, Tensor) else expected.parts
        if walk is None or actual.device != e.device:
            return None
        flat = large and walk.flat
        if isinstance(expected, Tensor):
            sort = Sort(actual.device, actual.dtype, e.dtype, flat, large)
            return cls(actual, e, walk, sort) if {actual.dtype, e.dtype} <= INTEGERS else None
        sort = Sort(actual.device, actual.dtype, len(e) if large else _PARTS, flat, large)
        step = e.stride(0)
        known = actual.dtype in FLOATS and e.dtype == torch.float64
        return cls(actual, e, walk, sort, step * (len(e) > 1), step * (len(e) > 2)) if known else None

    def begin(self, fmt: Format) -> Begun:
        """Begin to compare numbers, in a format of less than 53 bits."""
        parts, blocks = self.sort.expected, self._blocks(STATISTICS)
        assert isinstance(parts, int)
        programs = min(blocks, STATISTICS.programs)
        figures, columns = self._room(len(FloatFigures._fields) + parts, (len(FloatFigures._fields) - 1) * programs)
        where = (self.contract, self.end, self.walk.numel, blocks, *self.walk[1:])
        self._launch(
            kernels.float_statistics, STATISTICS, programs,
            (self.actual, self.expected, columns, *where, *_format(fmt)), (parts, self.sort.flat, STATISTICS.block),
        )  # fmt: skip
        self._finish(figures, columns, programs, (parts, kernels.FLOAT_SUMS, kernels.FLOAT_MAXIMA))
        return Begun(figures, functools.partial(comparison, self.actual.shape))

    def begin_integers(self) -> Begun:
        """Begin to compare integers or truth values."""
        blocks, size = self._blocks(STATISTICS), len(IntegerFigures._fields)
        programs = min(blocks, STATISTICS.programs)
        figures, columns = self._room(size, (size - 2) * programs)
        self._launch(
            plain_kernels.integer_statistics, STATISTICS, programs,
            (self.actual, self.expected, columns, self.walk.numel, blocks, *self.walk[1:]),
            (self.sort.flat, STATISTICS.block),
        )  # fmt: skip
        self._finish(figures, columns, programs, (1, plain_kernels.INTEGER_SUMS, 0))
        return Begun(figures, functools.partial(comparison_of_integers, self.actual.shape))

    def outside_count(self) -> Tensor:
        """Count the elements outside: int64, on the device."""
        count = torch.zeros(1, dtype=torch.int64, device=self.actual.device)
        blocks, parts = self._blocks(COUNT), self.sort.expected if isinstance(self.sort.expected, int) else 0
        self._launch(
            plain_kernels.count_outside, COUNT, min(blocks, COUNT.programs),
            (self.actual, self.expected, count, self.contract, self.end, self.walk.numel, blocks, *self.walk[1:]),
            (parts, self.sort.flat, COUNT.block),
        )  # fmt: skip
        return count[0]

    def _blocks(self, grid: LaunchShape) -> int:
        return -(-self.walk.numel // grid.block)

    def _room(self, figures: int, columns: int) -> list[Tensor]:
        """Allocate memory for figures, and for the partial results that they are made of."""
        room = torch.empty(figures + columns, dtype=torch.float64, device=self.actual.device)
        return [room[:figures], room[figures:]]

    def _finish(self, figures: Tensor, columns: Tensor, programs: int, constants: tuple[int, int, int]) -> None:
        self._launch(
            kernels.finish, FINISH, sum(constants[1:]) + 1,
            (columns, figures, self.actual, self.expected, self.contract, self.end, programs, *self.walk[1:]),
            (*constants, self.sort.flat, FINISH.block),
        )  # fmt: skip

    def _launch(
        self, kernel: Any, grid: LaunchShape, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        if self.sort.large:  # worth a kernel for each alignment
            with torch.cuda.device_of(self.actual):
                kernel[(programs,)](*arguments, *constants, num_warps=grid.warps, enable_fp_fusion=False)
        else:
            dtypes = self.actual.dtype, self.expected.dtype
            start = launcher(unspecialized(kernel), constants, self.actual.device, dtypes, grid.warps)
            start((programs, 1), arguments)


def walk_of(actual: Tensor, expected: Enclosure | Tensor) -> Walk | None:
    """Find the way through `actual`, not empty, and `expected`, broadcast to it; None if that takes more strides."""
    e = expected if isinstance(expected, Tensor) else expected.parts[0]
    merged: list[tuple[int, int, int]] = []  # size and both strides, of dimensions that are one step of memory each
    for size, row, e_row in zip(actual.shape, actual.stride(), e.expand(actual.shape).stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (row * size, e_row * size):
            size *= merged.pop()[0]
        merged.append((size, row, e_row))
    if len(merged) > 2:
        return None
    width, a_column, e_column = merged.pop() if merged else (1, 1, 1)
    _, a_row, e_row = merged.pop() if merged else (1, 0, 0)
    return Walk(actual.numel(), width, a_row, a_column, e_row, e_column)


@functools.cache
def _format(fmt: Format) -> tuple[int, int, int, int, int]:
    """Describe a format to the kernels in integers.

    Bits of an fp64 significand that it lacks; the biased exponent of its smallest normal number; the bits of the number
    whose last place is the format's quantum; the ordinal of what overflows; the first ordinal that has no sign.
    """
    limit = int(ordinals(torch.tensor(math.inf, dtype=torch.float64), fmt))
    shift = bits_of_float(fmt.quantum * 2.0**52)
    return 53 - fmt.precision, fmt.min_exponent + 1023, shift, limit, limit + (fmt.overflow == "inf")
