"""Guesses about the calculation: the reference with another input or parameter, which must give the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lastbit.judging.problem import Problem
from lastbit.numerics import FORMATS, Enclosure, cast, format_of

_NARROW = ("bf16", "fp16")

FREE_OF_PARAMS = 4.0
"""There are few other parameters, as a power of two."""

Make = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, eq=False)
class Guess:
    """The problem that a kernel seems to have solved.

    Attributes:
        words: complete "as if ...".
        problem: that problem.
        stages: what stages are in it that are no function of its inputs.
        free: how many of such guesses could have been made, as a power of two.
    """

    words: str
    problem: Problem
    stages: Mapping[str, Enclosure] = field(default_factory=dict)
    free: float = 9.0


def of_params(problem: Problem) -> Iterator[Guess]:
    """Each parameter with another value."""
    op = problem.op
    for name, value in {**op.params, **problem.params}.items():
        for other in _other_values(value, op.params[name]):
            params = {**problem.params, name: other}
            if other is None:
                del params[name]
            changed = Problem(op, problem.contract, problem.tensors, params, problem.premises)
            yield Guess(f"{name} were {_value(other)}, not {_value(value)}", changed, free=FREE_OF_PARAMS)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "left out" if value is None else str(value)


def _other_values(value: object, default: object) -> Iterator[object]:
    """Likely mistakes; None stands for leaving the parameter out."""
    if isinstance(default, bool | int | float | str) and default != value:
        yield default
    if default is None and value is not None:
        yield None
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 2 * value, 0)
    elif isinstance(value, float) and math.isfinite(value):
        yield 0.0
        if 0 < value < 1e-2:
            yield from (eps for eps in (1e-3, 1e-5, 1e-6, 1e-8, 1e-12) if eps != value)
        if value:
            yield from (1.0, -value, 1 / value, value * value, 2 * value, value / 2, math.sqrt(abs(value)))


def of_inputs(problem: Problem, matters: Callable[[str, Tensor], bool]) -> Iterator[Guess]:
    """Each input that matters left out, or other than it is; one kind of change after the other.

    `matters` says whether a result depends on an input, from what it could be instead.
    """
    op, tensors = problem.op, problem.tensors
    names = [name for name, tensor in tensors.items() if tensor.numel() and matters(name, torch.zeros_like(tensor))]

    def guess(words: str, name: str, made: Tensor | None) -> Iterator[Guess]:
        if made is not None and not same(made, tensors[name]):
            yield Guess(words.format(name), problem.on({**tensors, name: made}))

    for name in names:
        if name in op.optional:
            yield Guess(f"{name} were left out", problem.on({n: t for n, t in tensors.items() if n != name}))
    for words, change in (*_exchanges(problem), *_CHANGES[:2]):
        for name in names:
            yield from guess(words, name, change(tensors[name]))
    for name in names:
        for words, made in (*_misread(tensors[name]), *_tails(tensors[name], -1)):
            yield from guess(words, name, made)
    for words, change in _CHANGES[2:]:
        for name in names:
            yield from guess(words, name, change(tensors[name]))
    for name in names:
        others = (made for axis in range(tensors[name].ndim - 1) for made in _tails(tensors[name], axis))
        for words, made in (*_along_axes(tensors[name]), *others):
            yield from guess(words, name, made)


def inputs_rounded(problem: Problem) -> Iterator[Guess]:
    """Each input rounded to a narrower format."""
    for name, tensor in problem.tensors.items():
        for fmt in _NARROW if tensor.is_floating_point() and tensor.numel() else ():
            if format_of(tensor.dtype).precision > FORMATS[fmt].precision:
                made = tensor.to(FORMATS[fmt].dtype).to(tensor.dtype)
                if not same(made, tensor):
                    yield Guess(f"{name} were rounded to {fmt}", problem.on({**problem.tensors, name: made}), free=2.0)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _floats(change: Callable[[Tensor], Tensor]) -> Make:
    """A change of floating-point numbers, computed in fp64 and rounded to what they are."""

    def changed(tensor: Tensor) -> Tensor | None:
        return cast(change(tensor.to(torch.float64)), tensor.dtype) if tensor.is_floating_point() else None

    return changed


_CHANGES: tuple[tuple[str, Make], ...] = (
    ("{} were all ones, not applied", _floats(torch.ones_like)),
    ("{} were all zeros", _floats(torch.zeros_like)),
    ("{} were added to itself", _floats(lambda x: 2 * x)),
    ("the sign of {} were the other one", _floats(torch.neg)),
    ("1 were added to {}", _floats(lambda x: x + 1)),
    ("1 were subtracted from {}", _floats(lambda x: x - 1)),
    ("the magnitude of {} were taken", _floats(torch.abs)),
    ("{} were transposed", lambda t: t.mT if t.ndim > 1 and t.shape[-1] == t.shape[-2] else None),
)


def _exchanges(problem: Problem) -> Iterator[tuple[str, Make]]:
    """Another input of the same shape in place of one."""
    for name, tensor in problem.tensors.items():

        def other(own: Tensor, tensor: Tensor = tensor) -> Tensor | None:
            return tensor if own.shape == tensor.shape and own.dtype == tensor.dtype else None

        yield f"{name} were read in place of {{}}", other


def _misread(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Strided memory read as if it were contiguous, altogether or in all dimensions but the last two."""
    if tensor.is_contiguous() or not tensor.numel():
        return
    shape = tensor.shape
    steps = [math.prod(shape[n + 1 :]) for n in range(tensor.ndim)]
    yield from _as_strided(tensor, steps, "{} were read as if it were contiguous")
    if tensor.ndim > 2:
        row = tensor.stride(-2)
        steps = [*(math.prod(shape[n + 1 : -1]) * row for n in range(tensor.ndim - 1)), tensor.stride(-1)]
        yield from _as_strided(tensor, steps, f"the rows of {{}} all followed each other at {row} elements")


def _as_strided(tensor: Tensor, strides: list[int], words: str) -> Iterator[tuple[str, Tensor]]:
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    if last < tensor.untyped_storage().nbytes() // tensor.element_size():
        yield words, tensor.as_strided(tensor.shape, strides)


def _along_axes(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Indices off by one, or one index for all."""
    for axis, size in enumerate(tensor.shape):
        if size < 2:
            continue
        first = f"index 0 of dimension {axis}" if tensor.ndim > 1 else "element 0"
        where = f"one index of dimension {axis}" if tensor.ndim > 1 else "one element"
        for shift, which in ((1, "early"), (-1, "late")):
            yield f"{{}} were read {where} too {which}", tensor.roll(shift, axis)
        yield f"{first} of {{}} were read for all", tensor.narrow(axis, 0, 1).expand_as(tensor).contiguous()
        yield f"{{}} were read in reverse order in dimension {axis}", tensor.flip(axis)


def _tails(tensor: Tensor, axis: int) -> Iterator[tuple[str, Tensor]]:
    if tensor.ndim:
        yield from (("{} were " + words, made) for words, made in tails(tensor, axis % tensor.ndim))


def tails(tensor: Tensor, axis: int) -> Iterator[tuple[str, Tensor]]:
    """Zeros from a multiple of a power of two on, and in the last index."""
    size = tensor.shape[axis]
    starts = {(size - 1) >> bits << bits for bits in range(max(1, (size - 1).bit_length()))} | {size - 1}
    for start in sorted(starts - {0}, reverse=True):
        made = tensor.clone()
        made.narrow(axis, start, size - start).zero_()
        which = f"index {start} of dimension {axis}" if tensor.ndim > 1 else f"element {start}"
        yield f"zero from {which} on, in the last {size - start} of {size}", made
