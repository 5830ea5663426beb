"""Test of the kernels against the definitions, on numbers where they are most likely to differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from lastbit.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from lastbit.numerics.fused import cuda_sums
from lastbit.numerics.fused.operation_launch import run

# One dimension; a vector for each row; a number for each row of a block; and both sides broadcast.
_BROADCAST = ((2048,), (2048,)), ((8, 64), (64,)), ((4, 8, 16), (8, 1)), ((64, 1), (1, 32))
FUNCTIONS = frozenset(("exponential", "logistic", "correct_root", "approximate_root", "inverse_root"))
OF_DOTS = frozenset(("spans", "limiting", "straying", "enclosing"))
_ALIKE = FUNCTIONS | {"hull", "unknown_if"}  # operands of one shape
_INEXACT = frozenset(("added", "subtracted", "multiply_add"))  # either neighbour of an inexact sum is its exact part


# Relative errors, an absolute one of subnormal numbers, and a negative number, as operations take them.
_NUMBERS = (2.0**-22, 2.0**-21, 2.0**-140, -0.5)
_SUMS = 4096 * 2.0**-52  # of the magnitudes of that many terms, which are added in another order

# The smallest that have several groups, more than one row, and a sum that is no single product.
_SUMS_OF_DOTS = 3, 8, 16

Operation = Callable[..., Tensor]


@cache
def special_numbers() -> Tensor:
    """Return zeros, infinities, NaN, and numbers at, beside and between the borders and ties of the formats (fp64)."""
    numbers = [0.0, 1.0, 1.5, 3.0, 17.33, 17.25, 88.5, 104.0, 2.0**-24, 2.0**-150, 2.0**-1040, 2.0**1000, torch.inf]
    for fmt in (FP32, BF16, FP16, E4M3, E5M2):
        smallest, step = 2.0**fmt.min_exponent, fmt.epsilon
        numbers += [fmt.max, fmt.max * (1 + step / 4), fmt.max * (1 + step / 2), fmt.quantum, fmt.quantum * 1.5]
        numbers += [smallest, smallest - fmt.quantum, smallest * (1 - step / 4), 1 + step / 2, 1 + 3 * step / 2]
    positive = torch.tensor(numbers, dtype=torch.float64)
    up = torch.nextafter(positive, torch.tensor(torch.inf, dtype=torch.float64))
    positive = torch.cat([positive, up, torch.nextafter(positive, -positive)])
    return torch.cat([positive, -positive, positive.new_tensor([torch.nan])])


def operand(parts: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw stacked parts of special and random numbers: intervals in order, NaN at both ends, some unknown."""
    generator = torch.Generator().manual_seed(seed)
    pool = special_numbers()
    special = pool[torch.randint(len(pool), (parts, *shape), generator=generator)]
    scale = 2.0 ** torch.randint(-30, 30, (parts, *shape), generator=generator).double()
    ordinary = (torch.randn((parts, *shape), generator=generator).double() * scale).float().double()
    x = torch.where(torch.rand((parts, *shape), generator=generator) < 0.5, special, ordinary)
    if parts < 4:
        return x
    kind = torch.rand(shape, generator=generator)  # the ends are one number, in order, both NaN, or unknown
    second = torch.where(kind < 0.3, x[2], x[3])  # arbitrary shares: each kind is in every hundred elements
    lo, hi = torch.minimum(x[2], second), torch.maximum(x[2], second)
    lost = kind > 0.95
    return torch.stack([x[0], x[1], lo.masked_fill(lost, -torch.inf), hi.masked_fill(lost, torch.inf)])


def examples(name: str, operands: int) -> Iterator[list[Tensor]]:
    """Yield operands of every number of parts, in shapes that broadcast along rows, columns and groups if allowed."""
    if name in cuda_sums.OPERATIONS:
        yield from _terms(name)
        return
    if name in OF_DOTS:
        yield from _of_dots(name)
        return
    shapes = itertools.cycle(_BROADCAST if name not in _ALIKE else _BROADCAST[:1])
    for (first, second), (ours, theirs) in zip(itertools.product((1, 2, 4), repeat=2), shapes, strict=False):
        if name in FUNCTIONS and first != second:  # of an argument and what torch made of it
            continue
        given = [operand(*((second, theirs) if n % 2 else (first, ours)), seed=n) for n in range(operands)]
        if name == "logistic":  # the last operand has one part for each end
            given[2] = given[2][: first // 2 or 1][:2]
        if name == "unknown_if":
            given[1] = (given[1][:1] > 0).double()
        yield given


def _terms(name: str) -> Iterator[list[Tensor]]:
    """Yield terms, whose first parts are ends so that the magnitudes count for all; or facts about terms."""
    shapes = ((3, 1000), (2, 0)) if name == "bounded" else ((3, 1000), (40, 7), (1, 20000), (1, 1), (2, 0))
    for parts, shape in itertools.product((1, 2, 4), shapes):
        if name == "bounded":
            facts = torch.cat([operand(4, shape, seed=seed + parts) for seed in (0, 5, 10)])[:10]
            yield [torch.cat([facts[:7], (facts[7:] > 0).double()])]
        else:
            terms = operand(parts, shape[::-1] if name == "facts_of_columns" else shape, seed=parts)
            terms = terms.masked_fill(terms.isfinite() & (terms.abs() > 2.0**900), 3.0)  # sums overflow in no order
            ends = terms[min(2, parts - 1) :]
            yield [torch.cat([ends] * (parts // len(ends)))]


def _of_dots(name: str) -> Iterator[list[Tensor]]:
    """Yield operands for the operations of dots: intervals, or sums with limits of rows, columns and everything."""
    x, y = operand(4, _SUMS_OF_DOTS, seed=0), operand(2, _SUMS_OF_DOTS, seed=1)
    x[1, 0] = torch.nan
    if name == "spans":
        yield from ([x], [x.mT])
    elif name == "limiting":
        radius = y[1:].abs().masked_fill_(x[2:3] == x[3:], 0.0)
        yield from ([y[:1], radius], [x[1:2], torch.zeros(1, dtype=torch.float64)])
    elif name == "straying":
        units = (x[:1].abs().nan_to_num(0.0, 0.0) % 1) * 2.0**26
        for quantum in (1.0, FP32.quantum):
            yield from ([size, *_limits(quantum)] for size in (y[:1].abs(), y[1:].abs(), units.floor() * quantum))
    elif name == "enclosing":
        yield [x, y.abs(), *itertools.islice(_limits(1.0), 2)]


def _limits(quantum: float) -> Iterator[Tensor]:
    """Yield limits of left factors, right ones and everything, for sums on a lattice of this quantum and others."""
    for seed, shape in enumerate(((3, 8, 1), (3, 1, 16), ())):
        generator, most = torch.Generator().manual_seed(seed), 1.0 if seed == 1 else quantum
        kind = torch.randint(-1, 2, shape, generator=generator).double()
        quanta = torch.where(torch.rand(shape, generator=generator) < 0.75, most, operand(1, shape, seed)[0].abs())
        largest = -torch.nan_to_num(operand(1, shape, seed + 1)[0].abs(), nan=0.0, posinf=0.0)
        yield torch.stack([quanta.nan_to_num(1.0), kind, largest, largest])


def difference(
    name: str, definition: Operation, operands: int, numbers: int, fmt: Format | None, device: torch.device, large: bool
) -> str:
    """Describe where the kernel on `device` differs from the definition on the CPU; empty if nowhere."""
    found = (compared(name, definition, given, numbers, fmt, device, large) for given in examples(name, operands))
    return next(filter(None, found), "")


def compared(
    name: str,
    definition: Operation,
    given: list[Tensor],
    numbers: int,
    fmt: Format | None,
    device: torch.device,
    large: bool,
) -> str:
    """Describe a difference for these operands; empty also where the kernel does not take them."""
    constants = _NUMBERS[:numbers]
    expected = definition(*given, *constants, **({} if fmt is None else {"fmt": fmt}))
    actual = run(name, tuple(x.to(device) for x in given), constants, fmt, large=large)
    if actual is None or not (found := unlike(name, actual.cpu(), expected)):
        return ""
    return f"on operands {', '.join(str(list(x.shape)) for x in given)} it gives {found}"


def unlike(name: str, actual: Tensor, expected: Tensor) -> str:
    """Describe the first number that differs; zeros are alike, and NaN."""
    if actual.shape != expected.shape:
        return f"{list(actual.shape)} and not {list(expected.shape)}"
    wrong = (actual != expected) & ~(torch.isnan(actual) & torch.isnan(expected))
    if name in cuda_sums.OPERATIONS and name != "bounded":
        wrong[:6] &= ~((actual[:6] - expected[:6]).abs() <= _SUMS * actual[5])
    if name in _INEXACT:
        wrong[0] &= torch.nextafter(actual[0], expected[0]) != expected[0]
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{actual[place].item()!r} and not {expected[place].item()!r}, part {place[0]}"
