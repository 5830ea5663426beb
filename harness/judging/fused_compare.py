"""Comparison by Triton kernels: one that reads everything once, one that adds up its results, one copy to the host.

`torch_compare` is the definition. Counts, maxima, histogram and the worst element equal it exactly; sums
of fp64 differ by the order of summation only, which depends on nothing but the number of elements.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.inputs.bits import bits_of_float
from harness.judging import compare_kernels as kernels
from harness.judging import compare_plain_kernels as plain_kernels
from harness.judging.compare import Begun
from harness.judging.torch_compare import FARTHEST, unravel
from harness.numerics import Enclosure, Format
from harness.numerics.formats import ordinals
from harness.result import Comparison, Worst

FLOATS = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
)
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Launch(NamedTuple):
    """Elements in a block, the most programs, and the warps of each."""

    block: int
    programs: int
    warps: int


STATISTICS = Launch(block=64, programs=8448, warps=1)
COUNT = Launch(block=512, programs=2112, warps=8)
FINISH = Launch(block=1024, programs=1, warps=4)


class Walk(NamedTuple):
    """How two tensors of one shape are gone through: element i lies in row i // width and column i % width of both."""

    numel: int
    width: int
    a_row: int
    a_column: int
    e_row: int
    e_column: int

    @property
    def flat(self) -> bool:
        """Whether both lie in memory as they are gone through."""
        return self.width == self.numel and self.a_column == self.e_column == 1


class Sort(NamedTuple):
    """What the kernels are compiled for: the dtype of the actual values, and parts of fp64 or a dtype of integers."""

    device: torch.device
    actual: torch.dtype
    expected: int | torch.dtype
    flat: bool


class FloatFigures(NamedTuple):
    """What `finish` writes of a comparison with an enclosure; the parts of the worst element follow.

    `undecided` and `far` are what is not decided and what does not count in the bias; `beyond_16` are the elements
    farther than 16 ulp from the contract's value.
    """

    undecided: float
    mismatched: float
    outside: float
    special: float
    far: float
    beyond_0: float
    beyond_1: float
    beyond_2: float
    beyond_4: float
    beyond_16: float
    squared_error: float
    squared_exact: float
    bias_sum: float
    max_error: float
    max_ulp: float
    budget_ratio: float
    position: float
    severity: float
    actual: float


class IntegerFigures(NamedTuple):
    """What `finish` writes of a comparison of integers."""

    wrong: float
    beyond_0: float
    beyond_1: float
    beyond_2: float
    beyond_4: float
    beyond_16: float
    squared_error: float
    squared_exact: float
    position: float
    farthest: float
    actual: float
    expected: float


def sort_of(actual: Tensor, expected: Enclosure | Tensor) -> Sort | None:
    """What is needed for these tensors; None where there is no kernel for them."""
    e = expected if isinstance(expected, Tensor) else expected.parts
    kind: int | torch.dtype
    if isinstance(expected, Tensor):
        known, kind = {actual.dtype, e.dtype} <= INTEGERS, e.dtype
    else:
        known, kind = actual.dtype in FLOATS and e.dtype == torch.float64, len(e)
    walk = walk_of(actual, expected)
    return Sort(actual.device, actual.dtype, kind, walk.flat) if known and walk and actual.device == e.device else None


def walk_of(actual: Tensor, expected: Enclosure | Tensor) -> Walk | None:
    """How to go through `actual`, which is not empty, and what broadcasts to it; None if rows and columns do not do."""
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


def begin(actual: Tensor, expected: Enclosure, fmt: Format) -> Begun:
    """Begin to compare tensors that have a `Sort`, in a format of less than 53 bits."""
    return Begun(_float_figures(actual, expected, fmt), functools.partial(_comparison, actual.shape))


def begin_integers(actual: Tensor, expected: Tensor) -> Begun:
    """Begin to compare tensors of integers or truth values that have a `Sort`."""
    return Begun(_integer_figures(actual, expected), functools.partial(_comparison_of_integers, actual.shape))


def _comparison(shape: torch.Size, numbers: list[float]) -> Comparison:
    figures, numel = FloatFigures(*numbers[: len(FloatFigures._fields)]), shape.numel()
    known = numbers[len(FloatFigures._fields) :]
    exact, value, lo, hi = (known + known[-1:] * 3)[:4]
    index = unravel(int(figures.position), shape)
    return Comparison(
        numel=numel,
        decided=numel - int(figures.undecided),
        mismatched=int(figures.mismatched),
        outside=int(figures.outside),
        special=int(figures.special),
        squared_error=figures.squared_error,
        squared_exact=figures.squared_exact,
        max_error=figures.max_error,
        bias_sum=figures.bias_sum,
        bias_count=numel - int(figures.far),
        max_ulp=figures.max_ulp,
        ulp_histogram=_histogram(numel, figures),
        budget_ratio=figures.budget_ratio,
        worst=Worst(index, figures.actual, value, exact, lo, hi, _ulp_of(figures.severity)),
    )


def _comparison_of_integers(shape: torch.Size, numbers: list[float]) -> Comparison:
    figures, numel = IntegerFigures(*numbers), shape.numel()
    index, value = unravel(int(figures.position), shape), figures.expected
    return Comparison(
        numel=numel,
        decided=numel,
        mismatched=int(figures.wrong),
        outside=int(figures.wrong),
        squared_error=figures.squared_error,
        squared_exact=figures.squared_exact,
        max_error=figures.farthest,
        max_ulp=figures.farthest,
        ulp_histogram=_histogram(numel, figures),
        worst=Worst(index, figures.actual, value, value, value, value, figures.farthest),
    )


def outside_count(actual: Tensor, expected: Enclosure | Tensor) -> Tensor:
    """How many elements of `actual` are outside, for tensors that have a `Sort`."""
    walk = walk_of(actual, expected)
    assert walk is not None
    e, parts = (expected, 0) if isinstance(expected, Tensor) else (expected.parts, len(expected.parts))
    count = torch.zeros(1, dtype=torch.int64, device=actual.device)
    blocks = -(-walk.numel // COUNT.block)
    with torch.cuda.device_of(actual):
        plain_kernels.count_outside[(min(blocks, COUNT.programs),)](
            actual, e, count, e.stride(0) if parts else 0, walk.numel, blocks, *walk[1:],
            PARTS=parts, FLAT=walk.flat, BLOCK=COUNT.block, **_options(COUNT),
        )  # fmt: skip
    return count[0]


def _float_figures(actual: Tensor, expected: Enclosure, fmt: Format) -> Tensor:
    walk = walk_of(actual, expected)
    assert walk is not None
    parts, blocks = expected.parts, -(-walk.numel // STATISTICS.block)
    programs = min(blocks, STATISTICS.programs)
    size = len(FloatFigures._fields) + len(parts)
    room = torch.empty(size + (len(FloatFigures._fields) - 1) * programs, dtype=torch.float64, device=actual.device)
    figures, columns = room[:size], room[size:]
    with torch.cuda.device_of(actual):
        kernels.float_statistics[(programs,)](
            actual, parts, columns, parts.stride(0), walk.numel, blocks, *walk[1:], *_format(fmt),
            PARTS=len(parts), FLAT=walk.flat, BLOCK=STATISTICS.block, **_options(STATISTICS),
        )  # fmt: skip
        kernels.finish[(kernels.FLOAT_SUMS + kernels.FLOAT_MAXIMA + 1,)](
            columns, figures, actual, parts, parts.stride(0), programs, *walk[1:],
            PARTS=len(parts), SUMS=kernels.FLOAT_SUMS, MAXIMA=kernels.FLOAT_MAXIMA,
            FLAT=walk.flat, BLOCK=FINISH.block, **_options(FINISH),
        )  # fmt: skip
    return figures


def _integer_figures(actual: Tensor, expected: Tensor) -> Tensor:
    walk = walk_of(actual, expected)
    assert walk is not None
    blocks = -(-walk.numel // STATISTICS.block)
    programs, size = min(blocks, STATISTICS.programs), len(IntegerFigures._fields)
    room = torch.empty(size + (size - 2) * programs, dtype=torch.float64, device=actual.device)
    figures, columns = room[:size], room[size:]
    with torch.cuda.device_of(actual):
        plain_kernels.integer_statistics[(programs,)](
            actual, expected, columns, walk.numel, blocks, *walk[1:],
            FLAT=walk.flat, BLOCK=STATISTICS.block, **_options(STATISTICS),
        )  # fmt: skip
        kernels.finish[(plain_kernels.INTEGER_SUMS + 1,)](
            columns, figures, actual, expected, 0, programs, *walk[1:],
            PARTS=1, SUMS=plain_kernels.INTEGER_SUMS, MAXIMA=0, FLAT=walk.flat, BLOCK=FINISH.block, **_options(FINISH),
        )  # fmt: skip
    return figures


def _options(launch: Launch) -> dict[str, Any]:
    return {"num_warps": launch.warps, "enable_fp_fusion": False}


@functools.cache
def _format(fmt: Format) -> tuple[int, int, int, int, int]:
    """What the kernels need to know of a format, as integers.

    Bits of an fp64 significand that it lacks; the biased exponent of its smallest normal number; the bits of the number
    whose last place is the format's quantum; the ordinal of what overflows; the first ordinal that has no sign.
    """
    limit = int(ordinals(torch.tensor(math.inf, dtype=torch.float64), fmt))
    shift = bits_of_float(fmt.quantum * 2.0**52)
    return 53 - fmt.precision, fmt.min_exponent + 1023, shift, limit, limit + (fmt.overflow == "inf")


def _histogram(numel: int, figures: FloatFigures | IntegerFigures) -> tuple[int, ...]:
    f = figures
    beyond = map(int, (numel, f.beyond_0, f.beyond_1, f.beyond_2, f.beyond_4, f.beyond_16, 0))
    return tuple(more - less for more, less in pairwise(beyond))


def _ulp_of(severity: float) -> float:
    """The distance of an element of that severity."""
    distance = severity - 2 * FARTHEST if severity >= 2 * FARTHEST else severity
    return math.inf if distance == FARTHEST else distance
