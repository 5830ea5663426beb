"""The arithmetic of one element, to be checked by hand: each stage from the kernel's own values of those before it.

The formulas are those of the reference's source, with the names of inputs, parameters and earlier stages. For the
difference between a wrong number and the contract's there are words: a rounding left out, a cut, another format.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import FrameType

import torch
from torch import Tensor

from lastbit.chains.chain_parts import PartRecorder, reference_codes
from lastbit.diagnosing.steps import elements
from lastbit.dtypes import DTYPE_NAMES
from lastbit.interpret.places import place_of
from lastbit.judging.expected import Expected, Numbers, Trace, known_exactly
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Given, Problem
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import FORMATS, FP32, FP64, Format, Integers, around, from_ordinals, ordinals, round_to
from lastbit.reports.why import GIVES, Element, Source, Step, WorkedStage
from lastbit.result import NEAR
from lastbit.tracing.lanes import broadcasts
from lastbit.tracing.of_torch import array_of

LONGEST = 120
"""Characters of a formula, beyond which nobody computes it by hand."""
SURE = 8.0
"""Bits of evidence for another rounding: it is said of one element only if it fits all that are wrong, and so many."""
NEARLY = 0.98
"""Share of the right elements that it must give, too: exact values are known but for the last digit of fp32."""
RARE = 4.0
"""Bits that an element says for what seldom shows: a tie, or a number that is rounded twice and not where once is."""
Index = tuple[int, ...]
Legal = tuple[float, float, float, float]


def worked_arithmetic(
    seen: Observation, stage: str, index: Index, steps: Mapping[str, Step]
) -> tuple[WorkedStage, ...]:
    """Work out the stages up to `stage` that have an element belonging to the one at `index`, in the reference's order.

    `steps` maps stages to the steps that agree with them. The reference continues from the kernel's results, and from
    the one element of a stage that only a step shows. A stage that has no element there is worked out from its step.
    """
    problem, whole = seen.problem, tuple(seen.actual[stage].shape)
    shown = {name: step for name, step in steps.items() if _shows(step, problem.trace.formats.get(name))}

    def given(trace: Trace) -> dict[str, Enclosure]:
        """Return the stages to evaluate from: the kernel's tensors, or those of `trace` with its value in one place."""
        found = {}
        for name, expected in trace.stages.items():
            at = _belonging(expected.shape, index, whole)
            if name in seen.actual and isinstance(expected, Numbers):
                found[name] = Enclosure.point(seen.actual[name])
            elif name in shown and at is not None and isinstance(expected, Numbers):
                parts = expected.enclosure.full.clone()
                parts.movedim(0, -1)[at] = number_of(shown[name].first[0], shown[name].dtype)
                found[name] = Enclosure(parts)
        return found

    trace = FormulaTrace(problem=problem, given=given(problem.trace)).evaluate()
    exact = problem.unrounded.evaluate(given(problem.unrounded.trace))
    found = list[WorkedStage | None]()
    for name in list(trace.stages)[: list(trace.stages).index(stage) + 1]:
        expected, rounds, step = trace.stages[name], name in problem.contract.rounds, shown.get(name, Step(""))
        at = _belonging(expected.shape, index, whole)
        if at is None:
            found.append(of_match(step, expected, rounds=rounds))
            continue
        actual, dtype, ways = next(iter(step.first), None), step.dtype, step.match.ways if step.match else ()
        if name in seen.actual:
            tensor = seen.actual[name]
            expected = seen.as_given(name, expected, result=name in trace.results)
            rounds = rounds or expected.format != trace.formats[name]
            actual, dtype, ways = elements(array_of(tensor[at]))[0], DTYPE_NAMES[tensor.dtype], ()
            if isinstance(expected.format, Format):
                legal, numbers = legal_of(expected).reshape(4, -1), tensor.to(torch.float64).reshape(-1)
                ways = ways_of_all(numbers, legal, expected.format, rounds=rounds, dtype=dtype)
        _, value, lo, hi = legal_of(expected).movedim(0, -1)[at].tolist()
        ends = float(known_exactly(exact.stages[name]).expand(expected.shape)[at]), value, lo, hi
        plain = WorkedStage(name, at, *ends, expected.format.name, rounds, trace.formulas[name], dtype=dtype)
        found.append(_judged(plain, expected.format, actual, step, ways))
    return tuple(worked for worked in found if worked is not None)


def legal_of(expected: Expected) -> Tensor:
    """Return exact values, the contract's, and the ends of what it allows, fp64 [4, …]; thrice the same of integers."""
    allowed = expected.allowed
    own = allowed.full if isinstance(allowed, Enclosure) else allowed.to(torch.float64)
    return own.expand(4, *expected.shape)


def of_match(step: Step, expected: Expected, *, rounds: bool) -> WorkedStage | None:
    """Work out a stage of other rows from the element that a step shows; None if it shows none."""
    match = step.match
    if match is None or not _shows(step, expected.format):
        return None
    ends = match.exact, match.expected, match.lo, match.hi
    plain = WorkedStage(match.stage, (), *ends, expected.format.name, rounds, dtype=step.dtype)
    return _judged(plain, expected.format, step.first[0], step, match.ways)


def _judged(
    worked: WorkedStage, fmt: Format | Integers, actual: Element | None, step: Step, ways: Sequence[str]
) -> WorkedStage:
    """Add the exact value's neighbours, and the kernel's value: its distance in ulp, and how it came about if wrong."""
    below, above = neighbours(worked.exact, fmt) if isinstance(fmt, Format) else (worked.exact, worked.exact)
    worked = replace(worked, below=below, above=above, actual=actual, file=step.file, line=step.line)
    if actual is None:
        return worked
    number = number_of(actual, worked.dtype)
    may = worked.lo <= number <= worked.hi or (math.isnan(number) and math.isnan(worked.lo))
    if not isinstance(fmt, Format):
        return worked if may else replace(worked, did=f"{GIVES} {number:.0f}")
    legal = worked.exact, worked.expected, worked.lo, worked.hi
    did = "" if may else deed(number, legal, fmt, rounds=worked.rounds, dtype=worked.dtype, ways=ways)
    return replace(worked, did=did, ulp=in_ulp(number, worked.expected, fmt))


def _belonging(shape: Index, index: Index, whole: Index) -> Index | None:
    """Return the index into a stage that belongs to an element of a tensor of shape `whole`; None if none does."""
    fits = len(shape) <= len(whole) and all(size in (1, other) for size, other in zip(shape, whole, strict=False))
    return tuple(i if size > 1 else 0 for size, i in zip(shape, index, strict=False)) if fits else None


def _shows(step: Step, fmt: Format | Integers | None) -> bool:
    """Return whether one element led to the worst one, of the kind of numbers that a format has."""
    if fmt is None or not step.direct or not step.first:
        return False
    is_bool = step.first[0].decimal in ("True", "False")
    return is_bool == (fmt.name == "bool") and bool(step.first[0].bits) == isinstance(fmt, Format)


def number_of(shown: Element, dtype: str) -> float:
    """Return the number that an element shows; 1 and 0 for truth values. Nine digits identify an fp32 number."""
    if shown.decimal in ("True", "False"):
        return float(shown.decimal == "True")
    value = float(shown.decimal)
    return value if dtype in (FP64.name, "") or not shown.bits else rounded(value, FP32)


def inputs_of(problem: Problem, index: Index, whole: Index, steps: Sequence[Step]) -> tuple[Source, ...]:
    """List the input elements that lead to an element by themselves, and the parameters that are numbers.

    If `steps` lead to it only from other elements of an input that broadcasts to its shape, or if there are no steps,
    the input's element at its index is listed: the one that the reference needs, not the one that the kernel took.
    """
    at_index = dict[str, Source]()
    for name, tensor in problem.tensors.items():
        if broadcasts(tuple(tensor.shape), whole):
            last = index[len(index) - tensor.ndim :]
            at = tuple(i if size > 1 else 0 for i, size in zip(last, tensor.shape, strict=True))
            at_index[name] = Source(f"{name}[{', '.join(map(str, at))}]", 1, elements(array_of(tensor[at]))[:1])
    led = [Source(step.text, 1, step.first[:1]) for step in steps if step.operation == "input" and step.direct]
    names = {source.name for source in led}
    own = [at_index.get(source.name.partition("[")[0], source) for source in led]
    needed = [source if there.name in names else there for source, there in zip(led, own, strict=True)]
    numbers = {name: value for name, value in problem.params.items() if isinstance(value, int | float)}
    params = (Source(name, 1, (Element(str(value)),)) for name, value in numbers.items())
    return (*dict.fromkeys(needed if steps else at_index.values()), *params)


# Words for a wrong number.


def rounded(value: float, fmt: Format) -> float:
    """Round a number to a format, in its direction."""
    return float(round_to(torch.tensor(value, dtype=torch.float64), fmt))


def neighbours(value: float, fmt: Format) -> tuple[float, float]:
    """Return the numbers of a format next below and above a value; the value twice if the format holds it."""
    below, above = map(float, around(torch.tensor(value, dtype=torch.float64), fmt))
    return (below, above) if math.isfinite(value) else (value, value)


def in_ulp(actual: float, expected: float, fmt: Format) -> float:
    """Return |actual - expected| in units in the last place of `expected`; infinite if one of them is not finite."""
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    if not (math.isfinite(actual) and math.isfinite(expected)):
        return math.inf
    exponent = max(math.frexp(expected)[1] - 1, fmt.min_exponent) if expected else fmt.min_exponent
    return abs(actual - expected) / math.ldexp(1.0, exponent - fmt.precision + 1)


def ways_of_all(actual: Tensor, legal: Tensor, fmt: Format, *, rounds: bool, dtype: str) -> tuple[str, ...]:
    """Return the other roundings that give every wrong element and nearly every right one, such as `cuts off`.

    Args:
        actual: what the kernel has for the elements of a stage, [n], fp64.
        legal: their exact values, the contract's, and the ends of what it allows, [4, n].
        fmt: the format of the stage.
        rounds: the contract rounds to it, and does not only hold the stage in it.
        dtype: in which the kernel holds them.
    """
    finite = torch.isfinite(actual) & torch.isfinite(legal[0])
    if not bool((finite & ((actual < legal[2]) | (actual > legal[3]))).any()):
        return ()
    every = torch.unique(torch.cat([actual.unsqueeze(0), legal])[:, finite], dim=1)
    actual, legal = every[0], every[1:]
    wrong = (actual < legal[2]) | (actual > legal[3])
    count, right = int(wrong.sum()), NEARLY * float((~wrong).sum())

    def fits(bits: float, given: Tensor) -> bool:
        return bits * count >= SURE and bool(given[wrong].all()) and bool(given[~wrong].sum() >= right)

    own = _of_format(actual, legal[0], wrong, fmt) if rounds else ()
    if found := tuple(name for name, bits, given in own if fits(bits, given)):
        return found
    others = sorted((f for f in FORMATS.values() if f != fmt.nearest), key=lambda f: (f.name != dtype, f.precision))
    digits = FORMATS[dtype].precision if dtype in FORMATS else fmt.precision
    for verb in ("rounds", "cuts off"):
        for f in others:
            made = round_to(legal, f if verb == "rounds" else f.toward("zero"))
            bits = math.inf if f.name == dtype else float(digits - f.precision)
            if f.precision < FP32.precision and fits(bits, (made == actual).any(0)):
                return (f"{verb} to {f.name}",)
    return ()


def _of_format(actual: Tensor, exact: Tensor, wrong: Tensor, fmt: Format) -> Iterator[tuple[str, float, Tensor]]:
    """Yield other roundings to the format of a stage, what an element says for each in bits, and those it gives."""
    cut, own, nearest = (round_to(exact, f) for f in (fmt.toward("zero"), fmt, fmt.nearest))
    after = torch.copysign(from_ordinals(ordinals(cut.abs(), fmt) + 1, fmt), exact)
    tie = exact == (cut + after) / 2
    yield "leaves out a rounding before this one, and rounds", 1.0, own == actual
    yield "rounds the tie the other way", RARE, tie & (cut + after - own == actual) | ~tie & ~wrong
    yield "saturates", SURE, nearest.isinf() & (actual == cut) | ~wrong
    yield "cuts off", 1.0, cut == actual
    if fmt.direction != "nearest":
        yield "rounds (to nearest)", 1.0, nearest == actual
    for f in FORMATS.values():
        if fmt.precision < f.precision < FP64.precision:
            yield f"rounds twice (by way of {f.name})", RARE, round_to(round_to(exact, f), fmt) == actual


def deed(actual: float, legal: Legal, fmt: Format, *, rounds: bool, dtype: str, ways: Sequence[str] = ()) -> str:
    """Describe how a kernel came to a number that the contract excludes, as a verb: `does not round, and holds …`.

    `legal` are the exact value, the contract's, and the ends of what it allows; `ways` the other roundings that all
    wrong elements of the stage have, of which all are named.
    """
    exact, expected = legal[:2]
    if not all(map(math.isfinite, (actual, exact))):
        return f"{GIVES} {actual:.9g}"
    if ways:
        return f"{' or '.join(ways)}, and {GIVES} {actual:.9g}"
    if rounds and rounded(actual, fmt) != actual and in_ulp(actual, exact, fmt) < 1:
        narrow = dtype in FORMATS and FORMATS[dtype].precision < FP32.precision
        return f"{'holds' if narrow else 'does not round, and holds'} {actual:.9g} in {dtype or 'more digits'}"
    ulp = in_ulp(actual, expected, fmt)
    return f"{GIVES} {actual:.9g}{f', {ulp:,.4g} ulp away' if ulp <= NEAR else ''}"


# Formulas.


@dataclass
class FormulaTrace(Trace):
    """A trace that also records the formula of each stage.

    What is no input, parameter, number or stage keeps the name that the reference has for it. A formula is empty if it
    cannot be read, is long, or is such a name alone.
    `given` are enclosures of stages from which the reference continues, if there are any.
    """

    problem: Problem = field(kw_only=True)
    given: Given = field(default_factory=dict)
    formulas: dict[str, str] = field(default_factory=dict)
    _named: list[tuple[object, str]] = field(default_factory=list)
    _begun: list[FrameType] = field(default_factory=list)

    def evaluate(self) -> FormulaTrace:
        """Run the reference and return this trace with all stages recorded."""
        self.problem.evaluate(self.given, self)
        self._begun.clear()
        return self

    def record(self, name: str, expected: Expected) -> None:
        """Record the next stage and its formula, which is read off the frame that calls `stage`.

        The names of the inputs are learnt from the frame of the reference, or of a part of a chain, when it begins.
        """
        frame = sys._getframe(2)
        while frame.f_code is PartRecorder.__call__.__code__ and frame.f_back is not None:
            frame = frame.f_back
        codes, outer = reference_codes(self.problem.op), frame
        while outer.f_code not in codes and outer.f_back is not None:
            outer = outer.f_back
        if outer.f_code in codes and not any(outer is begun for begun in self._begun):
            self._begun.append(outer)
            bundles = [value for value in outer.f_locals.values() if is_dataclass(value)]
            inputs = {f.name: getattr(b, f.name) for b in bundles for f in fields(b)} | dict(outer.f_locals)
            self._named += ((inputs.get(own), name) for own, name in codes[outer.f_code].items())
        self.formulas[name] = self._formula(frame)
        super().record(name, expected)
        made = expected.enclosure if isinstance(expected, Numbers) else None
        self._named.append((self.given.get(name, made), name))

    def _formula(self, frame: FrameType) -> str:
        try:
            call = ast.parse(place_of(frame.f_code, frame.f_lasti).text, mode="eval").body
        except SyntaxError:
            return ""
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            return ""
        known = {id(value): name for value, name in self._named if value is not None}
        named: ast.expr = _Renamed(frame, known, self.problem.params).visit(call.args[1])
        formula = ast.unparse(named)
        alone = isinstance(named, ast.Name) and named.id not in known.values()  # computed elsewhere
        return "" if alone or len(formula) > LONGEST else formula


@dataclass
class _Renamed(ast.NodeTransformer):
    """Gives the variables of a formula the names of the inputs, parameters and stages that they hold.

    Attributes:
        known: identity of a value → the input or stage that it is.
    """

    frame: FrameType
    known: Mapping[int, str]
    params: Mapping[str, object]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        variables = self.frame.f_locals
        if node.id not in variables:
            return node  # a function of the module
        value = variables[node.id]
        if name := self.known.get(id(value), node.id if node.id in self.params else ""):
            return ast.Name(name)
        if callable(value):
            return ast.Name(getattr(value, "__name__", node.id))
        is_plain = isinstance(value, int | str | None) or (isinstance(value, float) and math.isfinite(value))
        return ast.Constant(value) if is_plain else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of `stage` within a formula by the name of the stage."""
        match node:
            case ast.Call(ast.Name("stage"), [ast.Constant(name), *_]):
                return ast.Name(str(name))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Keep only the branch that was taken."""
        test = compile(ast.Expression(node.test), self.frame.f_code.co_filename, "eval")
        with suppress(Exception):  # a variable of the function that it is in, say
            taken = node.body if eval(test, self.frame.f_globals, dict(self.frame.f_locals)) else node.orelse
            return self.visit(taken)  # type: ignore[no-any-return]
        return self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Leave out an upper bound that is None."""
        found = self.generic_visit(node)
        if isinstance(node.upper, ast.Constant) and node.upper.value is None:
            node.upper = None
        return found
