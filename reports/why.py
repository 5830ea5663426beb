"""Explanations as data: why a kernel fails on a case, and how the worst element of its result came about."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lastbit.result import Verdict, Worst


@dataclass(frozen=True)
class Element:
    """A number in decimal, and its bits in hexadecimal; the bits are empty where only the number is known."""

    decimal: str
    bits: str = ""


@dataclass(frozen=True)
class Source:
    """An operand of a step.

    Attributes:
        name: of an argument, or of an element of a tensor of the case, such as `x[2, 17]`.
        count: how many elements; more than 1 in a reduction or dot.
        first: the first of them; none where nothing saw how they were written.
    """

    name: str
    count: int
    first: tuple[Element, ...]


@dataclass(frozen=True)
class StageMatch:
    """The stage of the reference that a step agrees with.

    Attributes:
        exact: the exact value for the worst element; NaN where fp64 does not tell it.
        lo, hi: what the contract allows.
        outside: elements that the contract excludes, of `of` that were compared.
        leaves: it is the step with which the value leaves the contract, the first culprit.
        expected: what the contract rounds the exact value to.
        format: that of the stage under the contract.
        ways: other roundings that give all of these, such as `cuts off`.
        error, contract_error: relative L2 error of the step over the elements compared, and of the contract's values.
    """

    stage: str
    exact: float
    lo: float
    hi: float
    outside: int
    of: int
    leaves: bool = False
    expected: float = math.nan
    format: str = ""
    error: float = math.nan
    contract_error: float = math.nan
    ways: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One expression, evaluated once, or an operation in it; or an element of an input, which has no line.

    Attributes:
        file, line, column, end_line, end_column: where it stands; lines from 1, columns in characters from 0.
        function: the function that it stands in.
        called: the lines of the kernel that called that, `FILE:LINE:COLUMN`, the innermost first.
        text: the expression.
        operation: what was done, such as `fmul`, `reduce`, `aten.mul`.
        dtype, shape: of the result.
        launch, program: of the Triton kernel that did it; empty for PyTorch.
        count: elements of the result that led to the worst one.
        first: these, or the first of them.
        direct: the first of them leads to the worst one by itself; otherwise all do, through a reduction or dot.
        sources: what it was computed from.
        part: it is an operation within the expression, and not all of it.
        again: for a step that stands for rounds of a loop that are left out: how many.
        match: the stage that it agrees with, if it agrees with one.
        code: the whole line of the file in which it begins, without the blanks around it.
        mend: how its result would have to be for all elements to be right, such as `rounded to bf16`; empty if unknown.
    """

    text: str
    dtype: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    function: str = ""
    called: tuple[str, ...] = ()
    operation: str = ""
    shape: tuple[int, ...] = ()
    launch: str = ""
    program: tuple[int, ...] = ()
    count: int = 0
    first: tuple[Element, ...] = ()
    direct: bool = True
    sources: tuple[Source, ...] = ()
    part: bool = False
    again: int = 0
    match: StageMatch | None = None
    code: str = ""
    mend: str = ""

    @property
    def right(self) -> str:
        """Say what its result should be, and how that is known; empty if it is not."""
        return f"should be: {self.mend}; done again so, every element is right" if self.mend else ""


def _ends(lines: str) -> tuple[str, int, int]:
    """Return the file, the first and the last line of `FILE:FIRST to LAST`."""
    file, _, numbers = lines.rpartition(":")
    first, _, last = numbers.partition(" to ")
    return file, int(first), int(last or first)


def spans(lines: str, others: str) -> bool:
    """Return whether lines, as `KernelTrace.between` has them, contain others."""
    (file, first, last), (other, begin, end) = _ends(lines), _ends(others)
    return file == other and first <= begin and end <= last


@dataclass(frozen=True)
class KernelTrace:
    """The steps that led to one element of a kernel's result.

    Attributes:
        verdict: of the case as `lastbit verify` judges it.
        reason: why there is nothing to trace; empty if there is.
        stage: what the element is of.
        worst: the element.
        steps: from the inputs to the element.
        all: every operation of the program that wrote it, if they were asked for.
        stages: for each stage of the reference, in its order, the step that agrees with it best, if one does.
        leaves: the step with which the value leaves what the contract allows: that which is blamed, or else the first
            stage that is wrong; none of a kernel that passes.
        blamed: the step that is wrong for sure, if one is.
        mended: the steps of which each could be mended by itself, that one first.
        between: the lines that lead from what is right to what is wrong, `FILE:FIRST to LAST`.
        since: the stages that are right there.
        until: the one that is wrong.
        held: another stage, right by itself, that the kernel has in place of that; empty if it has none.
        by: the case with other numbers by which the lines were found; empty if it is this one.
        wrong: the first stage that does not follow from the kernel's own earlier ones; empty if that was not found.
        unmatched: stages up to the element's with which no step agrees.
        notes: what is wrong beside values, and what a reader must know about the steps.
        idle: options of the contract that change nothing in the case.
    """

    kernel: str
    op: str
    contract: str
    case: str
    device: str
    verdict: Verdict
    reason: str = ""
    stage: str = ""
    worst: Worst | None = None
    steps: tuple[Step, ...] = ()
    all: tuple[Step, ...] = ()
    stages: tuple[Step, ...] = ()
    leaves: Step | None = None
    blamed: Step | None = None
    mended: tuple[Step, ...] = ()
    between: tuple[str, ...] = ()
    since: tuple[str, ...] = ()
    until: str = ""
    held: str = ""
    by: str = ""
    wrong: str = ""
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def lines(self) -> float:
        """Number of lines that lead from what is right to what is wrong; 0 if a stage is taken for another."""
        if self.held or not self.between:
            return 0 if self.held else math.inf
        return sum(last - first + 1 for _, first, last in map(_ends, self.between))

    @property
    def told(self) -> tuple[str, ...]:
        """The lines in which the mistake is said to be, as `between` has them."""
        return self.between if self.blamed is None else (f"{self.blamed.file}:{self.blamed.line}",)

    @property
    def exit_code(self) -> int:
        """0 the kernel passes, 1 it fails, 2 it raised or nothing can be traced, 3 it does not take the case."""
        if self.verdict in (Verdict.UNSUPPORTED, Verdict.SKIPPED):
            return 3
        return 2 if self.reason else int(self.verdict is Verdict.FAILED)


GIVES = "gives"
"""The verb of what a kernel did that is no rounding, such as `gives 1.5, 3 ulp away`."""


@dataclass(frozen=True)
class WorkedStage:
    """A stage of the reference for one element, as it follows from the kernel's own values of the stages before it.

    A stage that was not seen before it stands for itself, with what the contract allows for it.

    Attributes:
        index: of the element of the stage.
        formula: what the reference computes, in names of inputs, parameters and stages; empty where it cannot be read.
        exact: the result of the formula, not rounded; NaN where fp64 does not tell it.
        expected, lo, hi: what the contract makes of it, and what it allows.
        format: that of the stage under the contract.
        rounds: the contract rounds to it, and does not only hold the stage in it.
        below, above: the neighbours of the exact value in that format; equal if it is one of its numbers.
        actual: the kernel's value; none where it was not seen.
        dtype: what the kernel holds it in.
        ulp: |actual - expected| in units in the last place that the expected value has in the format.
        did: what the kernel did in place of what the contract does, such as `does not round`; empty if that is allowed.
        file, line: where the kernel computes it; no line where that was not seen.
    """

    stage: str
    index: tuple[int, ...]
    exact: float
    expected: float
    lo: float
    hi: float
    format: str
    rounds: bool
    formula: str = ""
    below: float = math.nan
    above: float = math.nan
    actual: Element | None = None
    dtype: str = ""
    ulp: float = math.nan
    did: str = ""
    file: str = ""
    line: int = 0

    @property
    def misrounded(self) -> bool:
        """The kernel rounds the value in another way, or does not round it; otherwise it has another value, if any."""
        return bool(self.did) and not self.did.startswith(GIVES)


@dataclass(frozen=True)
class Explanation:
    """The explanation of why a kernel fails on a case.

    Attributes:
        trace: the way of the worst element, its stages and culprits. Of a kernel on an accelerator it is that of the
            same case on the CPU.
        explained_by: the simplest contracts that allow every bit.
        diagnoses: what all wrong elements are, and where; before that, what torch has given wrongly.
        smallest: the smallest case found that fails in the same way, with its values in the line; empty if none was.
        test: a test to paste, which fails on that case; empty if no assertion on a result would.
        reason: why there is less than one could expect; empty if nothing is missing.
        findings: the sentences that the case fails for.
        stage, worst: the element that is explained, and what it is of; none if nothing could be compared.
        inputs: the elements of the inputs that it must come from, and the parameters.
        arithmetic: the stages up to that of the element, in the order of the reference.
    """

    kernel: str
    device: str
    case: str
    verdict: Verdict
    trace: KernelTrace
    explained_by: tuple[str, ...] = ()
    diagnoses: tuple[str, ...] = ()
    smallest: str = ""
    test: str = ""
    reason: str = ""
    findings: tuple[str, ...] = ()
    stage: str = ""
    worst: Worst | None = None
    inputs: tuple[Source, ...] = ()
    arithmetic: tuple[WorkedStage, ...] = ()

    @classmethod
    def of_nothing(
        cls, kernel: str, op: str, contract: str, case: str, device: str, *, verdict: Verdict, reason: str
    ) -> Explanation:
        """Make an empty explanation with the reason why there is none."""
        trace = KernelTrace(kernel, op, contract, case, device, verdict=verdict, reason=reason)
        return cls(kernel, device, case, verdict, trace, reason=reason)

    @property
    def culprit(self) -> Step | None:
        """The place of the mistake, where it is sure."""
        return self.trace.blamed

    @property
    def deciding(self) -> WorkedStage | None:
        """The stage that is to blame: the one that the trace found wrong, or else the first that is not allowed."""
        wrong = [worked for worked in self.arithmetic if worked.did]
        return next((worked for worked in wrong if worked.stage == self.trace.wrong), next(iter(wrong), None))

    @property
    def is_sure(self) -> bool:
        """The stage that is to blame is computed in the line that is wrong."""
        first, second = self.culprit, self.deciding
        return first is not None and second is not None and (first.file, first.line) == (second.file, second.line)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The elements of inputs that the kernel's value came from by themselves, and that are not those it must."""
        needed = {source.name for source in self.inputs}
        led = (step.text for step in self.trace.steps if step.operation == "input" and step.direct)
        return tuple(name for name in dict.fromkeys(led) if needed and name not in needed)

    @property
    def testable(self) -> bool:
        """Return whether a test can show the failure: the kernel raises, or values are wrong before any side effect.

        The smallest tensors fail for the first finding. A trace on the same device knows all that are not of values.
        """
        if self.worst is None or self.verdict is not Verdict.FAILED:
            return True
        if self.findings and self.findings[0] in self.trace.notes:
            return False
        return not self.worst.is_allowed or (bool(self.trace.stage) and self.trace.device == self.device)

    @property
    def without_vain_test(self) -> Explanation:
        """The explanation without a test that would pass."""
        return self if self.testable else replace(self, test="")

    @property
    def exit_code(self) -> int:
        """0 the kernel passes, 1 it fails, 2 it raised or gave nothing to compare, 3 it does not take the case."""
        if self.verdict in (Verdict.UNSUPPORTED, Verdict.SKIPPED):
            return 3
        if self.verdict is Verdict.PASSED:  # also where there was no element to compare
            return 0
        return 2 if self.worst is None else int(self.verdict is Verdict.FAILED)
