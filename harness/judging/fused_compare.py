"""The figures of a comparison by one kernel on a GPU, and its test against the definition, before it is trusted."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastbit import trust
from lastbit.inputs.bits import bits_of_float
from lastbit.judging import compare_kernels as kernels
from lastbit.judging import torch_compare
from lastbit.judging.compare import Begun, finished
from lastbit.judging.torch_compare import FARTHEST, unravel
from lastbit.numerics import Enclosure, Format
from lastbit.numerics.formats import FORMATS, FP64, cast, ordinals
from lastbit.numerics.fused import LARGE
from lastbit.numerics.fused.compiled import launcher, unspecialized
from lastbit.result import NEAR, Comparison, Worst


class FloatFigures(NamedTuple):
    """The figures that `finish` writes of a comparison with an enclosure; the parts of the worst element follow.

    `undecided` elements are not decided, `far` ones do not count in the bias, and `beyond_16` are those farther than
    16 ulp from the contract's value.
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
    squared_contract: float
    bias_sum: float
    max_error: float
    max_ulp: float
    budget_ratio: float
    position: float
    severity: float
    actual: float


class IntegerFigures(NamedTuple):
    """The figures that `finish` writes of a comparison of integers."""

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


def comparison(shape: torch.Size, numbers: list[float]) -> Comparison:
    """Make the statistics of floating-point numbers from `FloatFigures` and the parts of the worst element."""
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
        squared_contract=figures.squared_contract,
        max_error=figures.max_error,
        bias_sum=figures.bias_sum,
        bias_count=numel - int(figures.far),
        max_ulp=figures.max_ulp,
        ulp_histogram=_histogram(numel, figures),
        budget_ratio=figures.budget_ratio,
        worst=Worst(index, figures.actual, value, exact, lo, hi, _ulp_of(figures.severity)),
    )


def comparison_of_integers(shape: torch.Size, numbers: list[float]) -> Comparison:
    """Make the statistics of integers from `IntegerFigures`."""
    figures, numel = IntegerFigures(*numbers), shape.numel()
    index, value = unravel(int(figures.position), shape), figures.expected
    return Comparison(
        numel=numel,
        decided=numel,
        mismatched=int(figures.wrong),
        outside=int(figures.wrong),
        squared_error=figures.squared_error,
        squared_exact=figures.squared_exact,
        squared_contract=0.0,
        max_error=figures.farthest,
        max_ulp=figures.farthest,
        ulp_histogram=_histogram(numel, figures),
        worst=Worst(index, figures.actual, value, value, value, value, figures.farthest),
    )


def _histogram(numel: int, figures: FloatFigures | IntegerFigures) -> tuple[int, ...]:
    f = figures
    beyond = map(int, (numel, f.beyond_0, f.beyond_1, f.beyond_2, f.beyond_4, f.beyond_16, 0))
    return tuple(more - less for more, less in pairwise(beyond))


def _ulp_of(severity: float) -> float:
    """Return the distance in ulp of an element of that severity."""
    distance = severity - 2 * FARTHEST if severity >= 2 * FARTHEST else severity
    return math.inf if distance == FARTHEST else distance


FLOATS = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
)
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
# Small tensors are read as if they had all parts, with steps of 0, so that one kernel serves them.
_PARTS = 4


class LaunchShape(NamedTuple):
    """Elements in a block, the most programs, and the warps of each."""

    block: int
    programs: int
    warps: int


# Programs: 64 for each of the 132 multiprocessors of an H200, of one warp as sums of a warp need no barrier.
STATISTICS = LaunchShape(block=64, programs=8448, warps=1)
# Programs: 16 for each of the 132 multiprocessors of an H200; it reads three numbers and counts.
COUNT = LaunchShape(block=512, programs=2112, warps=8)
# One program for each figure, which reads what all programs of the other kernels wrote.
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
        """Return whether the elements of both follow each other in memory in that order."""
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
            kernels.integer_statistics, STATISTICS, programs,
            (self.actual, self.expected, columns, self.walk.numel, blocks, *self.walk[1:]),
            (self.sort.flat, STATISTICS.block),
        )  # fmt: skip
        self._finish(figures, columns, programs, (1, kernels.INTEGER_SUMS, 0))
        return Begun(figures, functools.partial(comparison_of_integers, self.actual.shape))

    def outside_count(self) -> Tensor:
        """Count the elements outside: int64, on the device."""
        count = torch.zeros(1, dtype=torch.int64, device=self.actual.device)
        blocks, parts = self._blocks(COUNT), self.sort.expected if isinstance(self.sort.expected, int) else 0
        self._launch(
            kernels.count_outside, COUNT, min(blocks, COUNT.programs),
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


TESTED = tuple(fmt for fmt in FORMATS.values() if fmt is not FP64)


def trusted(sort: Sort) -> bool:
    """Check whether the kernels for tensors of this sort are trusted."""
    return trust.trusted(sort.device, sort, f"comparing {sort.actual}", lambda: difference(sort))


def difference(sort: Sort) -> str:
    """Describe the first comparison of special values in which the kernels and torch differ; empty if none."""
    return next(_of_floats(sort) if isinstance(sort.expected, int) else _of_integers(sort, sort.expected), "")


def agree(fused: Comparison, defined: Comparison) -> bool:
    """Check whether all figures are equal, but for the rounding errors of sums in another order.

    A sum of n terms of fp64 has an error of at most (n - 1) 2^-53 times the sum of their magnitudes, to first order.
    """
    error, contract = 2 * defined.numel * 2.0**-53, defined.squared_contract or 0.0
    sums = (
        (fused.squared_error, defined.squared_error, error * defined.squared_error),
        (fused.squared_exact, defined.squared_exact, error * defined.squared_exact),
        (fused.squared_contract or 0.0, contract, error * contract),
        (fused.bias_sum, defined.bias_sum, error * NEAR * defined.bias_count),
    )
    if not all(repr(a) == repr(b) or abs(a - b) <= bound < math.inf for a, b, bound in sums):
        return False
    none = {"squared_error": 0.0, "squared_exact": 0.0, "squared_contract": 0.0, "bias_sum": 0.0}
    rest = (replace(c, **none) for c in (fused, defined))  # type: ignore[arg-type]
    return repr(next(rest)) == repr(next(rest))  # NaN and signs of zeros included


def corners() -> Tensor:
    """Return fp64 numbers of both signs where formats begin, end and are halfway between neighbours, inf and NaN."""
    found = [0.0, math.inf, math.nan, 5e-324, 2.0**-1000, 2.0**1000, 3.0, 1e30]
    for fmt in TESTED:
        last = fmt.max * fmt.epsilon / 2
        found += [fmt.quantum * x for x in (0.5, 1.0, 1.5, 2.5)]
        found += [2.0**fmt.min_exponent, 2.0**fmt.min_exponent - fmt.quantum / 2, fmt.max, fmt.max + last / 2]
        found += [1 + fmt.epsilon * x for x in (0.5, 1.0, 1.5, 3.0, 16.0, 40.0)]
    positive = torch.tensor(found, dtype=torch.float64)
    return torch.cat([positive, -positive])


def specials(dtype: torch.dtype, parts: int) -> tuple[Tensor, Enclosure]:
    """Return actual values of `dtype` and an enclosure: corners in points, in intervals and where nothing is known."""
    x = corners()
    shifts = (0, 1, 2, 7, len(x) // 2, len(x) - 1)
    a = x.repeat(len(shifts))
    value, exact, other = (torch.cat([x.roll(s * k + (k > 1)) for s in shifts]) for k in (1, 2, 3))
    kind = torch.arange(len(a)) % 7
    ends = torch.stack([torch.minimum(value, other), torch.maximum(value, other)])
    ends = torch.where(kind % 3 == 0, value, ends)
    ends[:, kind == 1] = torch.tensor([[-math.inf], [math.inf]], dtype=torch.float64)
    return cast(a, dtype), Enclosure(torch.stack([exact, value, *ends] if parts > 1 else [value])[:parts])


def sets_of(a: Tensor, e: Enclosure) -> dict[str, Tensor]:
    """Return masks of subsets of the special values, so that infinities in one figure hide no error in another."""
    x = a.to(torch.float64)
    moderate = (torch.stack([x, e.exact, e.value]).abs() < 2.0**20).all(0)
    return {
        "all": torch.ones_like(moderate),
        "moderate": moderate,
        "negative": moderate & (x < e.exact),
        "allowed": moderate & ~torch_compare.outside_mask(a, e),
    }


def _of_floats(sort: Sort) -> Iterator[str]:
    assert isinstance(sort.expected, int)
    kinds = [(sort.expected, sort.flat)] if sort.large else [(1, True), (2, True), (4, False)]
    for parts, flat in kinds:
        a, e = specials(sort.actual, parts)
        for which, chosen in sets_of(a, e).items():
            actual, stacked = _laid_out(a[chosen], flat), _laid_out(e.parts[:, chosen], flat)
            actual, expected = actual.to(sort.device), Enclosure(stacked.to(sort.device))
            pair = ComparedPair.of(actual, expected, large=sort.large)
            assert pair is not None
            for fmt in TESTED:
                [fused] = finished([pair.begin(fmt)])
                defined = torch_compare.compare(actual, expected, fmt)
                if not agree(fused, defined):
                    yield f"{which} special values in {fmt.name}: {fused} instead of {defined}"
            if pair.outside_count() != torch_compare.outside_count(actual, expected):
                yield f"the number outside among {which} special values"


def _of_integers(sort: Sort, dtype: torch.dtype) -> Iterator[str]:
    edges = torch.tensor([0, 1, -1, 2, 3, 5, 16, 17, 127, -128, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63)])
    actual = _laid_out(edges.repeat(4).to(sort.actual), sort.flat).to(sort.device)
    expected = _laid_out(torch.cat([edges.roll(k) for k in range(4)]).to(dtype), sort.flat).to(sort.device)
    pair = ComparedPair.of(actual, expected, large=sort.large)
    assert pair is not None
    [fused] = finished([pair.begin_integers()])
    defined = torch_compare.compare_integers(actual, expected)
    if not agree(fused, defined):
        yield f"special integers: {fused} instead of {defined}"
    if pair.outside_count() != torch_compare.outside_count(actual, expected):
        yield "the number outside among special integers"


def _laid_out(x: Tensor, flat: bool) -> Tensor:
    """Return x as it is, or in two dimensions of which the first is contiguous in memory."""
    if flat:
        return x
    even: Tensor = x[..., : x.shape[-1] // 2 * 2].unflatten(-1, (2, -1))
    return even.transpose(-1, -2).contiguous().transpose(-1, -2)
