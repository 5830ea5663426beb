"""Results of `lastbit agree`: whether two kernels of one op give the same bits, and where and why they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Apart:
    """The element in which two kernels are farthest apart, of the smallest case in which they differ.

    Attributes:
        index: of the element.
        values: what each kernel gave, in decimal.
        case: the line of the case.
    """

    index: tuple[int, ...]
    values: tuple[str, str]
    case: str


@dataclass(frozen=True)
class StageAgreement:
    """A stage that both kernels gave, over all cases.

    Attributes:
        stage: its name.
        result: it is a result; otherwise both kernels show it besides.
        cases, elements: in which it was compared.
        unequal_cases, unequal_elements: in which bits differ; all NaNs count as one.
        ulp: the largest distance of numbers; infinite where one is a NaN, or the dtypes differ.
        apart: where, if anywhere.
    """

    stage: str
    result: bool
    cases: int
    elements: int
    unequal_cases: int = 0
    unequal_elements: int = 0
    ulp: float = 0.0
    apart: Apart | None = None


@dataclass(frozen=True)
class KernelSide:
    """One of the two kernels, and the contracts that it keeps.

    Attributes:
        kernel: its name.
        claim: the contract that it claims.
        kept: the contracts of the op that allow every bit that it gave, the likeliest first.
        unsupported: reason → cases that it turned down for it.
        errors: what it raised, with the case.
        beside: what else is wrong with it, a sentence for each kind, as bits that differ from call to call.
    """

    kernel: str
    claim: str
    kept: tuple[str, ...] = ()
    unsupported: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Does:
    """The behaviour of a kernel at a stage.

    Attributes:
        contract: the one of its contracts that is nearest to the other kernel's.
        options: the options in which that differs from the other one; empty for options without a name.
        rounds_to: the format that it rounds the stage to; empty if it does not round it.
        recorded: the contract has the stage at all.
        place: the file, line and expression of the kernel that agree with the stage, where they were found.
    """

    contract: str
    options: tuple[str, ...]
    rounds_to: str = ""
    recorded: bool = True
    place: str = ""


@dataclass(frozen=True)
class Parting:
    """The first stage at which the contracts of two kernels compute different values, and what each does there."""

    stage: str
    does: tuple[Does, Does]


@dataclass(frozen=True)
class Agreement:
    """Two kernels on the cases that both take.

    Attributes:
        op, device: of the kernels.
        sides: the two kernels.
        cases: cases in which both gave something.
        unequal_cases: those in which a result differs in a bit.
        stages: what both gave, in the order of the reference.
        common: contracts that both keep; bits that differ then are legal for both.
        parting: where contracts part, if both keep some and none of them in common.
        line: the smallest case in which a result differs; empty if there is none.
    """

    op: str
    device: str
    sides: tuple[KernelSide, KernelSide]
    cases: int = 0
    unequal_cases: int = 0
    stages: tuple[StageAgreement, ...] = ()
    common: tuple[str, ...] = ()
    parting: Parting | None = None
    line: str = ""

    @property
    def results(self) -> tuple[StageAgreement, ...]:
        return tuple(stage for stage in self.stages if stage.result)

    @property
    def shown(self) -> str:
        """The first stage that both kernels show and that differs; empty if there is none."""
        return next((stage.stage for stage in self.stages if stage.unequal_elements), "")

    @property
    def exit_code(self) -> int:
        """0 all results are equal, 1 some are not, 2 a kernel raised, 3 there was nothing to compare."""
        if any(side.errors for side in self.sides):
            return 2
        return 3 if not self.cases else int(self.unequal_cases > 0)
