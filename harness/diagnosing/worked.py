"""The arithmetic of one element, to be checked by hand: each stage from the kernel's own values of those before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lastbit.diagnosing.deeds import deed, in_ulp, neighbours, rounded, ways_of_all
from lastbit.diagnosing.formulas import FormulaTrace
from lastbit.diagnosing.steps import elements
from lastbit.dtypes import DTYPE_NAMES
from lastbit.judging.expected import Expected, Numbers, Trace, known_exactly
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import FP32, FP64, Format, Integers
from lastbit.reports.why import GIVES, Element, Source, Step, WorkedStage
from lastbit.tracing.lanes import broadcasts
from lastbit.tracing.of_torch import array_of

Index = tuple[int, ...]
AnyFormat = Format | Integers


def worked_arithmetic(
    seen: Observation, stage: str, index: Index, steps: Mapping[str, Step]
) -> tuple[WorkedStage, ...]:
    """Work out the stages up to `stage` that have an element belonging to the one at `index`, in the reference's order.

    `steps` maps stages to the steps that agree with them. The reference continues from the kernel's results, and from
    the one element of a stage that only a step shows.
    """
    problem = seen.problem
    element_of = _ElementOf(seen, index, tuple(seen.actual[stage].shape), steps)
    trace = FormulaTrace(problem=problem, given=element_of.given(problem.trace)).evaluate()
    unrounded = problem.unrounded
    exact = unrounded.evaluate(element_of.given(unrounded.trace))
    names = list(trace.stages)[: list(trace.stages).index(stage) + 1]
    found = (element_of.worked(name, trace, exact.stages[name]) for name in names)
    return tuple(worked for worked in found if worked is not None)


@dataclass(frozen=True)
class _ElementOf:
    """Elements of stages that belong to the element at `index` of a tensor of shape `whole`."""

    seen: Observation
    index: Index
    whole: Index
    steps: Mapping[str, Step]

    def step(self, name: str, fmt: AnyFormat) -> Step:
        """Return the step that agrees with a stage, if its value has the stage's kind; else an empty one."""
        step = self.steps.get(name, Step(""))
        shown = _shown(step)
        if shown is None or (shown.decimal in ("True", "False")) != (fmt.name == "bool"):
            return Step("")
        return step if bool(shown.bits) == isinstance(fmt, Format) else Step("")

    def given(self, trace: Trace) -> dict[str, Enclosure]:
        """Return the stages from which to evaluate the reference: the kernel's tensors, or else those of `trace` with
        the kernel's value in one place.
        """
        given = {name: self._given(name, expected) for name, expected in trace.stages.items()}
        return {name: own for name, own in given.items() if own is not None}

    def _given(self, name: str, expected: Expected) -> Enclosure | None:
        if not isinstance(expected, Numbers):
            return None
        if name in self.seen.actual:
            return Enclosure.point(self.seen.actual[name])
        step = self.step(name, expected.format)
        at, own = belonging(expected.shape, self.index, self.whole), _shown(step)
        if at is None or own is None:
            return None
        parts = expected.enclosure.full.clone()
        for part in parts:
            part[at] = number_of(own, step.dtype)
        return Enclosure(parts)

    def worked(self, name: str, trace: FormulaTrace, unrounded: Expected) -> WorkedStage | None:
        """Work out one stage; return None if it has no element there, and no step shows one."""
        expected = trace.stages[name]
        step = self.step(name, expected.format)
        at, rounds = belonging(expected.shape, self.index, self.whole), name in self.seen.problem.contract.rounds
        if at is None:
            return of_match(step, expected, rounds=rounds)
        actual, dtype = _shown(step), step.dtype
        ways = step.match.ways if step.match else ()
        if name in self.seen.actual:
            tensor = self.seen.actual[name]
            expected = self.seen.as_given(name, expected, result=name in trace.results)
            rounds = rounds or expected.format != trace.formats[name]
            actual, dtype = elements(array_of(tensor[at]))[0], DTYPE_NAMES[tensor.dtype]
            ways = _ways(tensor, expected, dtype, rounds=rounds)
        exact = float(known_exactly(unrounded).expand(expected.shape)[at])
        found = _expected(name, at, expected, exact, rounds=rounds)
        found = replace(found, formula=trace.formulas[name], actual=actual)
        found = replace(found, dtype=dtype, file=step.file, line=step.line)
        return found if actual is None else _judged(found, number_of(actual, dtype), expected.format, ways)


def _ways(tensor: Tensor, expected: Expected, dtype: str, *, rounds: bool) -> tuple[str, ...]:
    """Name the other roundings that give all wrong elements of a tensor."""
    allowed = expected.allowed
    if not isinstance(allowed, Enclosure) or not isinstance(expected.format, Format):
        return ()
    legal = allowed.full.expand(4, *expected.shape).reshape(4, -1)
    return ways_of_all(tensor.to(torch.float64).reshape(-1), legal, expected.format, rounds=rounds, dtype=dtype)


def belonging(shape: Index, index: Index, whole: Index) -> Index | None:
    """Return the index into a stage that belongs to an element of a tensor of shape `whole`; None if none does."""
    if len(shape) > len(whole) or any(size not in (1, other) for size, other in zip(shape, whole, strict=False)):
        return None
    return tuple(i if size > 1 else 0 for size, i in zip(shape, index, strict=False))


def inputs_of(problem: Problem, index: Index, whole: Index, steps: Sequence[Step]) -> tuple[Source, ...]:
    """List the input elements that lead to an element by themselves, and the parameters that are numbers.

    If `steps` lead to it only from other elements of an input that broadcasts to its shape, or if there are no steps,
    the input's element at its index is listed: the one that the reference needs, not the one that the kernel took.
    """
    fitting = {name: t for name, t in problem.tensors.items() if broadcasts(tuple(t.shape), whole)}
    at_index = {name: _at_index(name, t, index) for name, t in fitting.items()}
    led = [Source(step.text, 1, step.first[:1]) for step in steps if step.operation == "input" and step.direct]
    names = {source.name for source in led}
    needed = [own if (own := at_index.get(_tensor(s))) and own.name not in names else s for s in led]
    if not steps:
        needed = list(at_index.values())
    numbers = {name: value for name, value in problem.params.items() if isinstance(value, int | float)}
    return (*dict.fromkeys(needed), *(Source(name, 1, (Element(str(value)),)) for name, value in numbers.items()))


def _tensor(element: Source) -> str:
    """Return the name of the tensor that an element is of."""
    return element.name.partition("[")[0]


def _at_index(name: str, tensor: Tensor, index: Index) -> Source:
    last = index[len(index) - tensor.ndim :]
    at = tuple(i if size > 1 else 0 for i, size in zip(last, tensor.shape, strict=True))
    return Source(f"{name}[{', '.join(map(str, at))}]", 1, (elements(array_of(tensor[at]))[0],))


def _shown(step: Step) -> Element | None:
    """Return the value of a step; None if several elements led to the worst one."""
    return step.first[0] if step.direct and step.first else None


def number_of(shown: Element, dtype: str) -> float:
    """Return the number that an element shows; 1 and 0 for truth values. Nine digits identify an fp32 number."""
    if shown.decimal in ("True", "False"):
        return float(shown.decimal == "True")
    value = float(shown.decimal)
    return value if dtype in (FP64.name, "") or not shown.bits else rounded(value, FP32)


def of_match(step: Step, expected: Expected, *, rounds: bool) -> WorkedStage | None:
    """Work out a stage of other rows from the element that a step shows; None if it shows none."""
    match, actual = step.match, _shown(step)
    if match is None or actual is None:
        return None
    ends = match.exact, match.expected, match.lo, match.hi
    made = _worked(match.stage, (), ends, expected.format, rounds=rounds)
    made = replace(made, actual=actual, dtype=step.dtype, file=step.file, line=step.line)
    return _judged(made, number_of(actual, step.dtype), expected.format, match.ways)


def _expected(name: str, at: Index, expected: Expected, exact: float, *, rounds: bool) -> WorkedStage:
    """Work out the allowed values of a stage, without the kernel's."""
    allowed = expected.allowed
    parts = [allowed] * 3 if isinstance(allowed, Tensor) else [allowed.value, allowed.lo, allowed.hi]
    value, lo, hi = (float(part.expand(expected.shape)[at]) for part in parts)
    return _worked(name, at, (exact, value, lo, hi), expected.format, rounds=rounds)


def _worked(
    name: str, at: Index, ends: tuple[float, float, float, float], fmt: AnyFormat, *, rounds: bool
) -> WorkedStage:
    below, above = neighbours(ends[0], fmt) if isinstance(fmt, Format) else (ends[0], ends[0])
    return WorkedStage(name, at, *ends, fmt.name, rounds, below=below, above=above)


def _judged(worked: WorkedStage, actual: float, fmt: AnyFormat, ways: Sequence[str]) -> WorkedStage:
    """Add the kernel's deed: its distance in ulp, and how it came about if the contract does not allow it."""
    may = worked.lo <= actual <= worked.hi or (math.isnan(actual) and math.isnan(worked.lo))
    if not isinstance(fmt, Format):
        return worked if may else replace(worked, did=f"{GIVES} {actual:.0f}")
    legal = worked.exact, worked.expected, worked.lo, worked.hi
    did = "" if may else deed(actual, legal, fmt, rounds=worked.rounds, dtype=worked.dtype, ways=ways)
    return replace(worked, did=did, ulp=in_ulp(actual, worked.expected, fmt))
