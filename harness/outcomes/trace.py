"""Results of `lastbit explain --trace`: how the worst element of a kernel's result came about, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    wrong: str = ""
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 the kernel passes, 1 it fails, 2 it raised or nothing can be traced, 3 it does not take the case."""
        if self.verdict in (Verdict.UNSUPPORTED, Verdict.SKIPPED):
            return 3
        return 2 if self.reason else int(self.verdict is Verdict.FAILED)
