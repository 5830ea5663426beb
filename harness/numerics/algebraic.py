"""The residues of enclosures, beside their bounds: rules for functions of numbers, applied while they are followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import reduce, wraps
from operator import mul
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from lastbit.numerics.formats import round_ends, round_to
from lastbit.numerics.remembered import is_remembered, remembered
from lastbit.numerics.residues import Residues, constant, recognised_parameters

if TYPE_CHECKING:
    from lastbit.numerics.enclosure import Enclosure

A = ParamSpec("A")
T = TypeVar("T")

_following: ContextVar[bool] = ContextVar("following", default=False)
_noted: ContextVar[list[Any] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[Any]]:
    """Give a list of all enclosures that are computed with within, and of what comes of them, with residues."""
    found: list[Any] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


@contextmanager
def following_residues(on: bool = True) -> Iterator[None]:
    """Give every enclosure that is made within its residues, beside its bounds."""
    token = _following.set(on)
    try:
        yield
    finally:
        _following.reset(token)


def is_following() -> bool:
    """Return whether residues are followed."""
    return _following.get()


def algebraic(rule: Callable[..., Any], *, of_enclosures: bool = False) -> Callable[[Callable[A, T]], Callable[A, T]]:
    """Decorate a function of enclosures with its rule for residues, remembered with it if it is `@remembered`.

    `rule` takes the same arguments: residues in place of enclosures and numbers, or, with `of_enclosures`, enclosures
    as they are, of which it asks the residues. It returns the residues of each enclosure that the function returns.
    """

    def decorate(function: Callable[A, T]) -> Callable[A, T]:
        def with_residues(known: tuple[tuple[float, ...], ...], *args: Any, **kwargs: Any) -> Any:
            """Call the function and the rule; `known` are the numbers that constants may be made of."""
            with following_residues(False):
                result = cast(Any, function)(*map(_plain, args), **kwargs)
            return _with(result, rule(*args, **kwargs) if of_enclosures else rule(*map(residues_of, args), **kwargs))

        made = remembered(with_residues) if is_remembered(function) else with_residues

        @wraps(function)
        def followed(*args: A.args, **kwargs: A.kwargs) -> T:
            if not _following.get():
                return function(*args, **kwargs)
            followed = cast(T, made(recognised_parameters(), *args, **kwargs))
            if (noted := _noted.get()) is not None:
                noted += [x for x in (*args, followed) if hasattr(x, "algebra")]
            return followed

        return followed

    return decorate


def residues_of(operand: Any) -> Any:
    """Return the residues of an enclosure or a number, also in lists of these; anything else as it is."""
    if isinstance(operand, list | tuple):
        return [residues_of(each) for each in operand]
    if isinstance(operand, bool):
        return operand
    if isinstance(operand, int | float):
        return constant(float(operand))
    return getattr(operand, "residues", operand)


def _plain(operand: Any) -> Any:
    """Return an enclosure without its residues, also in lists of these, so that it is the one without `following`."""
    if isinstance(operand, list | tuple):
        return type(operand)([_plain(each) for each in operand])
    return operand if getattr(operand, "algebra", None) is None else replace(operand, algebra=None)


def _with(result: Any, made: Any) -> Any:
    """Return enclosures with the residues made for them, OPEN where the computed value is not finite."""
    if isinstance(result, list | tuple):
        return type(result)([_with(*pair) for pair in zip(result, made, strict=True)])
    made = made if made.shape == result.shape else made.moved(lambda n: n.expand(4, *result.shape))
    return replace(result, algebra=made.seen(result.value))


def point(values: Tensor | float) -> Residues:
    """Return the residues of known numbers; a single one of floating point is a constant of the formula."""
    numbers = torch.as_tensor(values)
    return constant(float(numbers)) if numbers.ndim == 0 and numbers.is_floating_point() else Residues.of(numbers)


def rounded(x: Enclosure, fmt: Any) -> Residues:
    """Return the residues of numbers rounded to a format; integers are exact numbers, OPEN where they may be others."""
    if fmt.is_integer:
        return integers(round_to(x.value, fmt).clamp(fmt.lowest, fmt.max), *round_ends(x.lo, x.hi, fmt))
    return x.residues.rounded(fmt, x.value, (x.lo, x.hi))


def integers(value: Tensor, lo: Tensor, hi: Tensor) -> Residues:
    """Return the residues of numbers that are chosen by the values, OPEN where they may be others."""
    return Residues.of(value).open_where(lo != hi)


def hull(first: Residues, *others: Residues) -> Residues:
    """Return the residues of the first of several right numbers, OPEN where another one differs."""
    result = first
    for other in others:
        result = (result + zero_of(other)).or_another(other)  # of the shape of both
    return result


def zero_of(x: Residues) -> Residues:
    """Return zeros in the shape of x."""
    return Residues(torch.zeros_like(x.numbers) + torch.tensor([0, 0, -1, 0]).view(4, *[1] * len(x.shape)))


def added_to(x: Enclosure, other: Enclosure | float, *, sign: int = 1) -> Residues:
    """Return the residues of x + other, or x - other; a number of extreme size that changes nothing is none."""
    a, b = x.value, getattr(other, "value", None)
    b = torch.as_tensor(other) if b is None else b
    u: Residues = x.residues.beside(a, b)
    v: Residues = residues_of(other).beside(b, a)
    return u + v if sign > 0 else u - v


def product(*factors: Residues) -> Residues:
    return reduce(mul, factors)


def added(terms: list[Enclosure], fmt: Any = None) -> Residues:
    """Return the residues of a sum of a few terms, from first to last, each addition rounded; OPEN where another order
    may round otherwise.
    """
    result, sums = terms[0].residues, [terms[0].value, terms[0].lo, terms[0].hi]
    for term in terms[1:]:
        result = result + term.residues
        if fmt is not None:
            sums = [total + part for total, part in zip(sums, (term.value, term.lo, term.hi), strict=True)]
            result = result.rounded(fmt, sums[0], (sums[1], sums[2]))
            sums = [round_to(total, fmt) for total in sums]
    return result if fmt is None else result.open_where(torch.full((), len(terms) > 2))


def chosen(truth: Any, a: Enclosure | float, b: Enclosure | float) -> Residues:
    """Return the residues of `where`: OPEN where a kernel may choose otherwise, and the two are not one."""
    x, y = residues_of(a), residues_of(b)
    if isinstance(truth, Tensor):
        return Residues.where(truth, x, y)
    return Residues.where(truth.value, x, y).open_where(truth.open & ~x.equal(y))


def larger(a: Enclosure | float, b: Enclosure | float, nan: str = "propagate", *, sign: int = 1) -> Residues:
    """Return the residues of the larger of two, with a negative sign the smaller."""
    from lastbit.numerics.enclosure import Enclosure  # which imports this module

    x, y = (each if isinstance(each, Enclosure) else Enclosure.point(torch.tensor(each)) for each in (a, b))
    take = (x.value >= y.value) if sign > 0 else (x.value <= y.value)
    either = (x.lo <= y.hi) & (y.lo <= x.hi)
    return Residues.where(take, x.residues, y.residues).open_where(either & ~x.residues.equal(y.residues))


def clamped(x: Enclosure, low: float, high: float) -> Residues:
    """Return the residues of numbers limited to an interval between two constants."""
    result = x.residues
    for limit, sign in ((low, 1), (high, -1)):
        if abs(limit) != float("inf"):
            beyond, may = ((x.value < limit), (x.lo < limit)) if sign > 0 else ((x.value > limit), (x.hi > limit))
            must = (x.hi < limit) if sign > 0 else (x.lo > limit)
            at = constant(limit)
            result = Residues.where(beyond, at, result).open_where(may & ~must & ~x.residues.equal(at))
    return result


def largest(x: Enclosure, nan: str = "propagate", *, sign: int = 1) -> Residues:
    """Return the residues of the largest element of the last dimension, OPEN where another number may be it."""
    value, lo, hi = (x.value, x.lo, x.hi) if sign > 0 else (-x.value, -x.hi, -x.lo)
    if value.shape[-1] == 0:
        return Residues.of(value.new_zeros((*value.shape[:-1], 1)))
    at = torch.where(torch.isnan(value), -torch.inf, value).argmax(-1, keepdim=True)
    result = Residues(x.residues.numbers.gather(-1, at.expand(4, *at.shape)))
    least = torch.where(torch.isnan(lo), -torch.inf, lo).amax(-1, keepdim=True)
    return result.open_where(((hi >= least) & ~x.residues.equal(result)).any(-1, keepdim=True))


def magnitude(x: Enclosure) -> Residues:
    """Return the residues of |x|, OPEN where the sign may be the other."""
    residues = x.residues
    return Residues.where(x.value < 0, -residues, residues).open_where((x.lo < 0) & (x.hi > 0))


def largest_magnitude(x: Enclosure) -> Residues:
    """Return the residues of the largest |element| of the last dimension."""
    return largest(replace(abs(x), algebra=magnitude(x)))


def mean(x: Residues) -> Residues:
    """Return the mean over the last dimension, which is kept."""
    return x.total() / constant(float(x.shape[-1]))


def sigmoid(x: Residues) -> Residues:
    """Return exp(x) / (1 + exp(x)), which is 0 of -inf."""
    power = x.exp()
    return power / (power + constant(1.0))


def cumulative(x: Residues) -> Residues:
    """Return the sums of all prefixes of the last dimension."""
    rows = [x[..., : n + 1].total() for n in range(x.shape[-1])]
    return Residues(torch.cat([row.numbers for row in rows], -1)) if rows else x


def _tanh(x: Residues) -> Residues:
    power, one = x.exp(), constant(1.0)
    return (one - constant(2.0) / (power * power + one)).with_function_of("tanh")


FORMULAS: dict[str, Callable[..., Residues]] = {
    "divide": Residues.__truediv__,
    "sqrt": Residues.sqrt,
    "rsqrt": lambda x: x.sqrt().reciprocal(),
    "sigmoid": sigmoid,
    "exp": Residues.exp,
    "exp2": lambda x: (x * constant(0.6931471805599453)).exp(),
    "log": Residues.log,
    "log2": lambda x: x.log() * constant(1.4426950408889634),
    "log1p": lambda x: (x + constant(1.0)).log(),
    "expm1": lambda x: x.exp() - constant(1.0),
    "tanh": _tanh,
    "erf": lambda x: x.function("erf", odd=True),
    "sin": lambda x: x.function("sin", odd=True),
    "cos": lambda x: x.function("cos", even=True),
}
"""What primitives do to residues, by their names."""


def function(primitive: Any, x: Enclosure) -> Residues:
    """Return the residues of a function of one argument: by its formula, or as one without algebra."""
    rule = FORMULAS.get(primitive.name)
    return x.residues.function(primitive.name) if rule is None else rule(x.residues)


def chosen_by_value(function: Callable[A, Enclosure]) -> Callable[A, Enclosure]:
    """Decorate a function to integers or powers of two, whose residues are those of its value."""

    @wraps(function)
    def followed(*args: A.args, **kwargs: A.kwargs) -> Enclosure:
        result = function(*args, **kwargs)
        return _with(result, integers(result.value, result.lo, result.hi)) if _following.get() else result

    return followed


def unknown(x: Residues, *masks: Tensor | None) -> Residues:
    """Return the residues, OPEN where nothing is to be known."""
    for mask in masks:
        x = x.open_where(mask)
    return x


def sum_of_rows(*factors: Enclosure) -> Residues | None:
    """Return the residues of the sum over all leading dimensions of a product, [N]; None unless they are followed."""
    if not _following.get():
        return None
    terms = product(*(x.residues for x in factors))
    return Residues(terms.numbers.reshape(4, -1, terms.shape[-1])).total(-2, keepdim=False)


def moments(x: Residues) -> tuple[Residues, Residues]:
    """Return mean and biased variance over the last dimension."""
    center = mean(x)
    return center, mean((x - center) * (x - center))


def rescaled(tiles: list[Residues], factors: list[Residues]) -> list[Residues]:
    """Return the terms of each tile times all factors that come after it."""
    counted, later = [tiles[-1]], None
    for tile, factor in zip(reversed(tiles[:-1]), reversed(factors), strict=True):
        later = factor if later is None else later * factor
        counted.append(tile * later)
    return counted[::-1]


def shares(x: Residues) -> Residues:
    """Return exp(x) divided by its sum over the last dimension."""
    terms = x.exp()
    return terms / terms.total()


def gathered(x: Enclosure, index: Any, dim: int = -1) -> Residues:
    """Return the residues of gathered elements, OPEN where another element may be chosen and differs."""
    if isinstance(index, Tensor):
        return x.residues.moved(lambda n: n.gather(dim if dim < 0 else dim + 1, index.long().expand(4, *index.shape)))
    result = x.residues.moved(lambda n: n.gather(-1, index.value.expand(4, *index.shape)))
    return result.open_where((index.allowed & ~x.residues.equal(result)).any(-1, keepdim=True))


def grouped_dot(rows: Enclosure, groups: Any, matrices: Any, width: int, pieces: int = 1) -> Residues:
    """Return the residues of the rows of each group times its matrix; 0 of rows of no group."""
    numbers = zero_of(Residues(torch.zeros(4, rows.shape[0], width, dtype=torch.int64))).numbers
    for group, own in groups.rows.items():
        matrix = matrices(torch.tensor([group])).enclosure.residues
        numbers[:, own] = (rows.residues[own] @ matrix[0]).numbers
    return Residues(numbers)


def grouped_outer(left: Enclosure, right: Enclosure, groups: Any) -> Residues:
    """Return the residues of the sums of outer products over the rows of each group."""
    shape = 4, groups.count, left.shape[1], right.shape[1]
    numbers = zero_of(Residues(torch.zeros(shape, dtype=torch.int64))).numbers
    for group, own in groups.rows.items():
        numbers[:, group] = (left.residues[own].moved(lambda n: n.mT) @ right.residues[own]).numbers
    return Residues(numbers)
