"""Patterns of the wrong elements of a stage: their values, their places, and inputs from which they would follow.

Each sentence is a fact about the tensors at hand. `As if` stands before another input or parameter with which the
reference allows every element, and none of the wrong ones to be what the contract has for it; where the kernel was
followed, its residues are those of that reference, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lastbit.inputs.poison import held_before
from lastbit.judging.expected import Expected, Numbers
from lastbit.judging.formula import compare_formulas
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem, Tensors
from lastbit.numerics import FORMATS, Format, cast, format_of, remembering, round_to
from lastbit.numerics.formats import ordinals
from lastbit.reports.why import NEARLY_RIGHT
from lastbit.result import CaseResult
from lastbit.shadows.following import Followed

SECONDS = 1.5
"""Of the processor, for which other inputs and parameters are tried."""
ALLOCATIONS = 32
"""Of a call, whose filling is looked for in elements that nothing wrote."""
SEVERAL = 3
"""Elements that have something in common; two have it too often."""


@remembering()
def diagnose(
    seen: Observation, result: CaseResult, followed: Callable[[], Followed | None] = lambda: None
) -> tuple[str, ...]:
    """Return sentences about the first stage that is wrong, the most telling first; there may be none.

    `followed` gives the residues of the kernel, if it can be followed: it is asked where it matters. Contracts that
    allow every bit are no guesses: the result has their names.
    """
    wrong = Wrong.of(seen, result)
    if wrong is None:
        return ()
    alike = list(values(wrong))
    found = alike or ([] if result.explained_by else list(guessed(wrong, followed)))
    found = [*found, *places(wrong)]
    return tuple(found or ([] if result.explained_by else neighbours(wrong)))


@dataclass(frozen=True, eq=False)
class Wrong:
    """The elements of a stage that the contract excludes.

    Attributes:
        seen: the problem and what the kernel gave.
        stage: the first stage with such elements.
        given: the kernel's own earlier stages, from which the reference goes on.
        expected: what the stage must be then, as it is stored.
        mask: which of its elements cannot be.
    """

    seen: Observation
    stage: str
    given: Tensors
    expected: Expected
    mask: Tensor

    @classmethod
    def of(cls, seen: Observation, result: CaseResult) -> Wrong | None:
        """Find the wrong elements of the first failing stage; None if no stage fails, none if only a formula does."""
        failing = result.failing_stage
        stage = failing.name if failing is not None else next((f.stage for f in result.findings if f.stage), "")
        if stage not in seen.actual:
            return None
        order = list(seen.problem.trace.stages)
        earlier = order[: order.index(stage)] if failing is not None and failing.isolated.outside else []
        given = {name: seen.actual[name] for name in earlier if name in seen.actual}
        trace = seen.problem.evaluate(given)
        expected = seen.as_given(stage, trace.stages[stage], result=stage in trace.results)
        return cls(seen, stage, given, expected, expected.outside(seen.actual[stage]))

    @property
    def problem(self) -> Problem:
        return self.seen.problem

    @cached_property
    def actual(self) -> Tensor:
        """The kernel's values in fp64."""
        return self.seen.actual[self.stage].to(torch.float64)

    @cached_property
    def value(self) -> Tensor:
        """The contract's values in fp64."""
        return self.expected.value.to(torch.float64)

    @cached_property
    def exact(self) -> Tensor:
        own = self.expected
        return own.enclosure.exact.expand(own.shape) if isinstance(own, Numbers) else self.value

    @cached_property
    def count(self) -> int:
        return int(self.mask.sum())

    @property
    def all(self) -> str:
        """All wrong elements, as the subject of a sentence."""
        return "The one wrong element" if self.count == 1 else f"All {self.count:,} wrong elements"

    @property
    def be(self) -> str:
        return "is" if self.count == 1 else "are"


# What wrong elements hold.


def values(wrong: Wrong) -> Iterator[str]:
    """Say what value all wrong elements have: unwritten memory, NaN, zero, infinity, or one number."""
    at, several = wrong.actual[wrong.mask], wrong.count >= SEVERAL
    stored = wrong.seen.actual[wrong.stage]
    if not wrong.count:
        return
    if several and stored.element_size() > 1 and bool(held_before(stored, ALLOCATIONS)[wrong.mask].all()):
        yield f"{wrong.all} hold what memory was filled with before the kernel got it: they were never written."
    elif bool(torch.isnan(at).all()):
        yield f"{wrong.all} {wrong.be} NaN{_overflow(wrong) or _where_from(wrong)}."
    elif bool(torch.isnan(wrong.value[wrong.mask]).all()):
        yield f"{wrong.all} must be NaN and {wrong.be} not{_where_from(wrong)}."
    elif bool((at == 0).all()):
        yield f"{wrong.all} {wrong.be} 0."
    elif several and bool((at == at[0]).all()):
        yield f"{wrong.all} are the same number, {_number(float(at[0]))}{_limit(wrong, float(at[0]))}."
    elif bool(torch.isinf(at).all()):
        yield f"{wrong.all} {wrong.be} infinite{_overflow(wrong)}."


def _limit(wrong: Wrong, value: float) -> str:
    """Say that a number is the largest of a format, or a parameter."""
    if largest := next((name for name, fmt in FORMATS.items() if abs(value) == fmt.max), ""):
        return f", the largest of {largest}"
    named = next((n for n, p in wrong.problem.params.items() if isinstance(p, float) and p == abs(value)), "")
    return f", which is {'-' * (value < 0)}{named}" if named else ""


def _overflow(wrong: Wrong) -> str:
    """Name the narrowest format whose range the exact values of exactly the wrong elements exceed."""
    exact, right = wrong.exact[wrong.mask].abs(), wrong.exact[~wrong.mask].abs()
    for name in ("e4m3", "e5m2", "fp16", "bf16"):
        largest = FORMATS[name].max
        if bool((exact > largest).all()) and not bool((right > largest).any()):
            return f": their exact values are beyond {_number(largest)}, the largest of {name}, and no others are"
    return ""


def _where_from(wrong: Wrong) -> str:
    """Name the input or earlier stage that is not finite in exactly these elements, rows or columns."""
    mask, stages = wrong.mask, wrong.problem.trace.stages
    numbers = {name: t for name, t in wrong.problem.tensors.items() if t.is_floating_point()}
    finite = all(bool(torch.isfinite(t).all()) for t in numbers.values())
    for name, stage in stages.items():
        if name == wrong.stage:
            break
        if isinstance(stage, Numbers) and not stage.of_all_rows:
            numbers[name] = wrong.given.get(name, stage.enclosure.exact)
    for name, tensor in numbers.items():
        bad = ~torch.isfinite(tensor)
        if not bool(bad.any()):
            continue
        nan, inf = bool(torch.isnan(tensor).any()), bool(torch.isinf(tensor).any())
        kinds = "NaN or infinities" if nan and inf else "NaN" if nan else "infinities"
        if bad.shape == mask.shape and torch.equal(bad, mask):
            return f": just the elements in which {name} has {kinds}"
        are_rows = bad.ndim == mask.ndim and bad.shape[:-1] == mask.shape[:-1]
        if are_rows and torch.equal(bad.any(-1, keepdim=True).expand_as(mask), mask):
            return f": whole rows, those in which {name} has {kinds}"
        if mask.ndim and bad.ndim and bad.shape[-1] == mask.shape[-1]:
            columns = bad.flatten(0, -2).any(0) if bad.ndim > 1 else bad
            if torch.equal(columns.expand_as(mask), mask):
                return f": whole columns, those in which {name} has {kinds}"
    return ", although every input is finite" if finite else ""


def neighbours(wrong: Wrong) -> Iterator[str]:
    """Say that the wrong elements are next to the right values, and on which side."""
    fmt = wrong.expected.format
    at, value = wrong.actual[wrong.mask], wrong.value[wrong.mask]
    if not isinstance(fmt, Format) or not wrong.count or not bool((torch.isfinite(at) & torch.isfinite(value)).all()):
        return
    farthest = int((ordinals(at, fmt) - ordinals(round_to(value, fmt), fmt)).abs().max())
    if farthest > 2:
        return
    ulps = "1 ulp" if farthest == 1 else f"at most {farthest} ulp"
    up, down = (int((sign * (at.abs() - value.abs()) > 0).sum()) for sign in (1, -1))
    if wrong.count >= 8 and not (up and down):  # eight on one side by chance: 1 in 128
        yield f"{wrong.all} {wrong.be} off by {ulps} {'toward' if down else 'away from'} zero."
    else:
        sides = f", {up:,} away from zero and {down:,} toward it" if wrong.count > 1 else ""
        yield f"{wrong.all} {wrong.be} off by {ulps}{sides}: {NEARLY_RIGHT}"


# Where they are.

_DENSE = 0.75  # share of the indices of a pattern that have a wrong element
_PART = 0.9  # of an axis, the largest part that counts as one
_PERIODS = 65  # below, every period is tried, and from there on powers of two
_CHANCE = 1e-3  # that as many wrong elements, thrown at random, keep to a region as small, in one of _PATTERNS
_PATTERNS = 100


@dataclass(frozen=True)
class Unit:
    """Name of an index in singular and plural, and words that follow the numbers."""

    one: str
    several: str
    of: str = ""


def places(wrong: Wrong) -> Iterator[str]:
    """Describe where the wrong elements are: along each axis, by an input of integers, or by the size of an input."""
    if wrong.count < SEVERAL:
        return
    found = False
    for sentence, region in (*_along_axes(wrong.mask), *_of_integers(wrong)):
        inside = int(region.expand_as(wrong.mask).sum())
        chance = wrong.count * math.log(inside / wrong.mask.numel()) + math.log(_PATTERNS)
        if wrong.count >= _DENSE * inside or chance < math.log(_CHANCE):
            found = True
            yield f"{sentence}{_share(wrong.mask, region)}."
    if not found:
        yield from _beyond_a_size(wrong)


def _share(mask: Tensor, region: Tensor) -> str:
    size, count = int(region.expand_as(mask).sum()), int(mask.sum())
    return f", in all of {size:,} elements" if count == size else f", in {count:,} of {size:,} elements"


def _along_axes(mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    for axis, size in enumerate(mask.shape):
        others = [other for other in range(mask.ndim) if other != axis]
        at = (mask.any(others) if others else mask).nonzero().reshape(-1).tolist()
        if len(at) == size or (pattern := pattern_of(at, size, _unit(mask, axis))) is None:
            continue
        region = torch.zeros(size, dtype=torch.bool, device=mask.device)
        region[torch.tensor(pattern[1], device=mask.device)] = True
        yield pattern[0], region.reshape([size if other == axis else 1 for other in range(mask.ndim)])


def _unit(mask: Tensor, axis: int) -> Unit:
    """Return the name of an index along an axis."""
    if mask.ndim == 1:
        return Unit("element", "elements")
    if axis == mask.ndim - 1:
        return Unit("column", "columns")
    return Unit("row", "rows") if mask.ndim == 2 else Unit("index", "indices", f" of dimension {axis}")


def pattern_of(at: Sequence[int], size: int, unit: Unit) -> tuple[str, Sequence[int]] | None:
    """Describe the pattern of the indices `at` among `size`, with all indices that fit it; None if there is none."""
    first, last = at[0], at[-1]
    if len(at) == 1:
        end = ", the last," if first == size - 1 else ", the first," if first == 0 else ""
        return f"Only {unit.one} {first}{unit.of or f' of {size}'}{end} is wrong", at
    span = range(first, last + 1)
    if len(at) >= _DENSE * len(span) and len(span) <= _PART * size:
        which = "last " if last == size - 1 else "first " if first == 0 else ""
        edge = last + 1 if which == "first " else first
        power = edge & -edge
        multiple = f"up to a multiple of {power}" if which == "first " else f"from a multiple of {power} on"
        to = f", {multiple}" if power >= 4 else ""
        many = f"the {which}{len(span)}" if which else f"{len(span)} of {size}"
        return f"Only {unit.several} {first} to {last}{unit.of} are wrong: {many}{to}", span
    powers = (1 << n for n in range(size.bit_length()))
    repeated = []
    for step in sorted({step for step in (*range(2, _PERIODS), *powers) if 1 < step <= size // 2}):
        start, stop = min(i % step for i in at), max(i % step for i in at) + 1
        if stop - start <= _DENSE * step:
            repeated.append(((stop - start) / step, step, start, stop))
    for _, step, start, stop in sorted(repeated) if len(at) > SEVERAL else ():
        indices = [i for i in range(size) if start <= i % step < stop]
        if len(at) >= _DENSE * len(indices):
            return f"Only {_repeats(step, start, stop, unit)} are wrong", indices
    listed = f"{', '.join(map(str, at[:-1]))} and {last}"
    return (f"Only {unit.several} {listed}{unit.of or f' of {size}'} are wrong", at) if len(at) <= SEVERAL else None


def _repeats(step: int, start: int, stop: int, unit: Unit) -> str:
    if stop - start == 1:
        return f"{unit.several} {start}, {start + step}, {start + 2 * step} and so on{unit.of}, every {_ordinal(step)},"
    where = f"the last {step - start}" if stop == step else f"the first {stop}" if start == 0 else f"{stop - start}"
    which = "" if start == 0 or stop == step else f", from its {_ordinal(start + 1)} on,"
    return f"{where} of every {step} {unit.several}{unit.of}{which}"


def _of_integers(wrong: Wrong) -> Iterator[tuple[str, Tensor]]:
    """Describe wrong rows that are exactly those with one number in an input of integers."""
    mask = wrong.mask
    for name in wrong.problem.op.integers & wrong.problem.tensors.keys():
        ids = wrong.problem.tensors[name]
        common = 0
        while common < min(ids.ndim, mask.ndim) and ids.shape[common] == mask.shape[common]:
            common += 1
        if not common or ids.ndim > common + 1:
            continue
        rows = mask.flatten(common).any(-1) if mask.ndim > common else mask
        for value in () if bool(rows.all()) else ids[rows].unique().tolist()[:64]:
            has = ids == value
            has = has.any(-1) if ids.ndim > common else has
            if torch.equal(has, rows) and int(has.sum()) > 1:
                where = "is" if ids.ndim == common else "has"
                region = has.reshape([*has.shape, *[1] * (mask.ndim - common)])
                yield f"It is wrong exactly where {name} {where} {value}", region


def _beyond_a_size(wrong: Wrong) -> Iterator[str]:
    """Describe wrong elements that are exactly those in which an input is beyond a threshold."""
    right = ~wrong.mask & (wrong.value != 0)  # what is zero either way says nothing
    if int(right.sum()) < SEVERAL or wrong.count > _PART * wrong.mask.numel():
        return
    for name, tensor in wrong.problem.tensors.items():
        if not tensor.is_floating_point() or tensor.shape != wrong.mask.shape:
            continue
        own = tensor.to(torch.float64)
        for sign, kind, there in ((1, "", own), (-1, "", -own), (1, "|", own.abs())):
            least, most = float(there[wrong.mask].min()), float(there[right].max())
            if not least > most:  # NaN too
                continue
            a, b = sign * most, sign * least
            which, rest = f"{_number(b)} or {'more' if sign > 0 else 'less'}", f"; it is right up to {_number(a)}"
            if a * b <= 0:
                signs = ("positive", "negative") if b else ("not negative", "not positive")
                which, rest = "not 0" if kind else signs[sign < 0], ""
            yield f"It is wrong exactly where {kind}{name}{kind} is {which}{_share(wrong.mask, there > most)}{rest}."
            return


# What they would follow from.

Guess = tuple[str, Problem]
"""Words that complete "as if ...", and the problem that a kernel seems to have solved."""


def guessed(wrong: Wrong, followed: Callable[[], Followed | None]) -> Iterator[str]:
    """Name the first other input or parameter with which the reference gives all that the kernel gave."""
    until = time.process_time() + SECONDS
    for words, problem in guesses(wrong.problem):
        if time.process_time() > until:
            return
        try:
            follows = _follows(wrong, problem, followed)
        except Exception:  # anybody's reference may raise anything, such as ZeroDivisionError for a group size of 0
            continue
        if follows:
            does = "allows" if followed() is None else "gives"
            yield f"As if {words}: that {does} all that the kernel gave."
            return


def _follows(wrong: Wrong, problem: Problem, followed: Callable[[], Followed | None]) -> bool:
    """Return whether another problem allows every result of the kernel, and excludes the contract's wrong elements."""
    trace, seen, stage = problem.evaluate(), wrong.seen, wrong.stage
    found = seen.expected(trace).get(stage)
    if found is None or any(bool(outside.any()) for outside in seen.outside(trace).values()):
        return False
    own = torch.where(wrong.mask, wrong.value, wrong.actual).to(seen.actual[stage].dtype)
    if not bool(found.outside(own)[wrong.mask].all()):
        return False
    known = followed()
    compared = {} if known is None else compare_formulas(problem, known.results)
    if any(c.differs for c in compared.values()):
        return False
    return wrong.count > 0 or (stage in compared and compared[stage].equal > 0)


def guesses(problem: Problem) -> Iterator[Guess]:
    """Yield problems with other parameters or other inputs, the likeliest first."""
    yield from _of_params(problem)
    yield from _of_inputs(problem)
    for name, tensor in problem.tensors.items():
        for fmt in ("bf16", "fp16") if tensor.is_floating_point() and tensor.numel() else ():
            made = tensor.to(FORMATS[fmt].dtype).to(tensor.dtype)
            if format_of(tensor.dtype).precision > FORMATS[fmt].precision and not torch.equal(made, tensor):
                yield f"{name} were rounded to {fmt}", problem.on({**problem.tensors, name: made})


def _of_params(problem: Problem) -> Iterator[Guess]:
    op = problem.op
    for name, value in {**op.params, **problem.params}.items():
        for other in _other_values(value, op.params[name]):
            params = {**problem.params, name: other}
            if other is None:
                del params[name]
            now, then = (f"{v:g}" if isinstance(v, float) else "left out" if v is None else v for v in (value, other))
            changed = Problem(op, problem.contract, problem.tensors, params, problem.premises)
            yield f"{name} were {then}, not {now}", changed


def _other_values(value: object, default: object) -> Iterator[object]:
    """Yield values that may stand for a parameter by mistake; None leaves it out."""
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


def _of_inputs(problem: Problem) -> Iterator[Guess]:
    """Yield problems with one input left out or changed, if the results depend on it; one kind of change at a time."""
    op, tensors = problem.op, problem.tensors
    names = [name for name, tensor in tensors.items() if tensor.numel() and _matters(problem, name)]

    def guess(name: str, made: Iterable[tuple[str, Tensor | None]]) -> Iterator[Guess]:
        for words, tensor in made:
            if tensor is not None and tensor.shape == tensors[name].shape and not torch.equal(tensor, tensors[name]):
                yield words.format(name), problem.on({**tensors, name: tensor})

    for name in names:
        if name in op.optional:
            yield f"{name} were left out", problem.on({n: t for n, t in tensors.items() if n != name})
    for name in names:
        own = tensors[name]
        others = ((n, t) for n, t in tensors.items() if n != name and t.dtype == own.dtype)
        yield from guess(name, ((f"{n} were read in place of {{}}", t) for n, t in others))
    for name in names:
        yield from guess(name, _misread(tensors[name]))
    for name in names:
        yield from guess(name, ((words, change(tensors[name])) for words, change in _CHANGES))
    for name in names:
        axes = range(tensors[name].ndim)
        yield from guess(name, (made for axis in reversed(axes) for made in _along(tensors[name], axis)))


def _matters(problem: Problem, name: str) -> bool:
    """Return whether setting an input to zero changes a result."""
    other = problem.on({**problem.tensors, name: torch.zeros_like(problem.tensors[name])})
    try:
        stages = other.trace.stages
    except Exception:  # as in `guessed`
        return True
    return any(not problem.trace.stages[n].same(stages[n]) for n in problem.trace.results if n in stages)


def _floats(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor | None]:
    """Wrap a change of floating-point numbers: compute in fp64 and round to their dtype."""
    return lambda t: cast(change(t.to(torch.float64)), t.dtype) if t.is_floating_point() else None


_CHANGES: tuple[tuple[str, Callable[[Tensor], Tensor | None]], ...] = (
    ("{} were all ones, not applied", _floats(torch.ones_like)),
    ("{} were all zeros", _floats(torch.zeros_like)),
    ("{} were added to itself", _floats(lambda x: 2 * x)),
    ("the sign of {} were the other one", _floats(torch.neg)),
    ("1 were added to {}", _floats(lambda x: x + 1)),
    ("1 were subtracted from {}", _floats(lambda x: x - 1)),
    ("the magnitude of {} were taken", _floats(torch.abs)),
    ("{} were transposed", lambda t: t.mT if t.ndim > 1 and t.shape[-1] == t.shape[-2] else None),
)


def _misread(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Yield strided memory read as if contiguous, in all dimensions or in all but the last two."""
    if tensor.is_contiguous() or not tensor.numel():
        return
    shape, row = tensor.shape, tensor.stride(-2) if tensor.ndim > 1 else 0
    packed = [math.prod(shape[n + 1 :]) for n in range(tensor.ndim)]
    rows = [*(math.prod(shape[n + 1 : -1]) * row for n in range(tensor.ndim - 1)), tensor.stride(-1)]
    words = "{} were read as if it were contiguous", f"the rows of {{}} all followed each other at {row} elements"
    for said, steps in zip(words, (packed, rows) if tensor.ndim > 2 else (packed,), strict=False):
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        if last < tensor.untyped_storage().nbytes() // tensor.element_size():
            yield said, tensor.as_strided(shape, steps)


def _along(tensor: Tensor, axis: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor read wrongly along an axis: off by one, one index for all, reversed, or zero from an index on."""
    size = tensor.shape[axis]
    if size < 2:
        return
    one = "one element" if tensor.ndim == 1 else f"one index of dimension {axis}"
    at = "element {}" if tensor.ndim == 1 else f"index {{}} of dimension {axis}"
    for shift, which in ((1, "early"), (-1, "late")):
        yield f"{{}} were read {one} too {which}", tensor.roll(shift, axis)
    yield f"{at.format(0)} of {{}} were read for all", tensor.narrow(axis, 0, 1).expand_as(tensor).contiguous()
    yield f"{{}} were read in reverse order in dimension {axis}", tensor.flip(axis)
    starts = {(size - 1) >> bits << bits for bits in range(max(1, (size - 1).bit_length()))} | {size - 1}
    for start in sorted(starts - {0}, reverse=True):
        made = tensor.clone()
        made.narrow(axis, start, size - start).zero_()
        yield f"{{}} were zero from {at.format(start)} on, in the last {size - start} of {size}", made


def _number(value: float) -> str:
    """Format a number with four digits; a whole number with all of them."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.4g}"


def _ordinal(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
