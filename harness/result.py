"""Results as data: what a comparison measured, what was concluded, and what a reader is told."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from lastbit.property_result import PropertyResult

_NUMBERS = re.compile(r"\b\d[\w.,+-]*")


class Verdict(StrEnum):
    """Outcome of a case, worst last; see `Verdict.worst`."""

    PASSED = "PASSED"
    SKIPPED = "SKIPPED"
    UNSUPPORTED = "UNSUPPORTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAILED = "FAILED"
    ERRORED = "ERRORED"

    @staticmethod
    def worst(*verdicts: Verdict) -> Verdict:
        return max(verdicts, key=list(Verdict).index, default=Verdict.SKIPPED)


BAD = frozenset({Verdict.FAILED, Verdict.ERRORED})
"""Verdicts that a kernel has to answer for."""

TURNED_DOWN = frozenset({Verdict.SKIPPED, Verdict.UNSUPPORTED})
"""Verdicts on cases that were not run."""


@dataclass(frozen=True)
class Worst:
    """One element: its index and values; `lo` and `hi` bound what the contract allows, `exact` is NaN if not known."""

    index: tuple[int, ...]
    actual: float
    expected: float
    exact: float
    lo: float
    hi: float
    ulp: float

    @property
    def is_allowed(self) -> bool:
        """Return whether the contract allows the element."""
        return self.lo <= self.actual <= self.hi or (math.isnan(self.actual) and math.isnan(self.lo))


ULP_BINS = (0, 1, 2, 4, 16)
"""Upper ends of the bins of an ulp histogram; a last bin holds everything above."""

NEAR = ULP_BINS[-1]
"""Distance in ulp up to which an error says how a value was rounded; beyond, it overflowed, cancelled or is wrong."""


AMPLIFIED = 2
"""Factor of the sum of unit roundoffs up to which a contract's relative error comes of its roundings alone.

A value that is rounded once has at most the unit roundoff of its format as relative error. Roots, quotients and
products hand on what their operands have, squares twice that, and so do sums unless their terms cancel.
"""


@dataclass(frozen=True)
class Comparison:
    """Statistics of one stage's actual values against an enclosure: scalars and indices, never tensors.

    Attributes:
        numel: elements compared.
        decided: elements for which the contract allows exactly one value.
        mismatched: elements that differ from the contract's correctly rounded value.
        outside: elements that no kernel which keeps the contract can give, NaN and inf included.
        special: elements of `outside` whose class (NaN, +inf, -inf, finite) is wrong.
        squared_error, squared_exact: sums of (actual - exact)² and exact² over the elements of which both and the
            contract's value are finite, for `rel_l2`.
        max_error: largest |actual - exact|.
        bias: mean of (|actual| - |exact|) in ulp of the stage's format, over elements within `NEAR` of the exact value;
            negative means toward zero; NaN if these are fewer than half.
        max_ulp: largest distance from the contract's value, in ulp of the stage's format.
        ulp_histogram: counts per bin of `ULP_BINS`.
        budget_ratio: largest |actual - middle| / radius over elements that have freedom; above 1 is outside.
        worst: the element farthest outside, or else farthest from the contract's value.
        squared_contract: sum of (contract's value - exact)² over the elements of the other sums, for `contract_l2`;
            None where unknown.
    """

    numel: int = 0
    decided: int = 0
    mismatched: int = 0
    outside: int = 0
    special: int = 0
    squared_error: float = 0.0
    squared_exact: float = 0.0
    max_error: float = 0.0
    bias_sum: float = 0.0
    bias_count: int = 0
    max_ulp: float = 0.0
    ulp_histogram: tuple[int, ...] = (0,) * (len(ULP_BINS) + 1)
    budget_ratio: float = 0.0
    worst: Worst | None = None
    squared_contract: float | None = None

    @property
    def rel_l2(self) -> float:
        """‖actual - exact‖ / ‖exact‖ over finite elements; 0 where both are 0."""
        return _relative(self.squared_error, self.squared_exact)

    @property
    def contract_l2(self) -> float:
        """‖contract's value - exact‖ / ‖exact‖ over the same elements; NaN in records of an older lastbit."""
        return math.nan if self.squared_contract is None else _relative(self.squared_contract, self.squared_exact)

    @property
    def near_ulp(self) -> float:
        """Ulp of the farthest element outside, or else of the farthest within `NEAR`: its bin's end if some are not."""
        if self.outside and self.worst is not None:
            return self.worst.ulp
        filled = (end for end, count in zip(ULP_BINS, self.ulp_histogram, strict=False) if count)
        return self.max_ulp if self.max_ulp <= NEAR else max(filled, default=0)

    @property
    def bias(self) -> float:
        shown = self.bias_count and 2 * self.bias_count >= self.numel
        return self.bias_sum / self.bias_count if shown else math.nan

    def __add__(self, other: Comparison) -> Comparison:
        """Combine the statistics of both sets of elements."""
        farther = other if _severity(other) > _severity(self) else self
        bins = zip(self.ulp_histogram, other.ulp_histogram, strict=True)
        return Comparison(
            numel=self.numel + other.numel,
            decided=self.decided + other.decided,
            mismatched=self.mismatched + other.mismatched,
            outside=self.outside + other.outside,
            special=self.special + other.special,
            squared_error=self.squared_error + other.squared_error,
            squared_exact=self.squared_exact + other.squared_exact,
            squared_contract=_sum_of_known(self.squared_contract, other.squared_contract),
            max_error=max(self.max_error, other.max_error),
            bias_sum=self.bias_sum + other.bias_sum,
            bias_count=self.bias_count + other.bias_count,
            max_ulp=max(self.max_ulp, other.max_ulp),
            ulp_histogram=tuple(a + b for a, b in bins),
            budget_ratio=max(self.budget_ratio, other.budget_ratio),
            worst=farther.worst,
        )


def _relative(squared_error: float, squared_exact: float) -> float:
    if squared_exact == 0:
        return math.inf if squared_error else 0.0
    return math.sqrt(squared_error / squared_exact)


def _sum_of_known(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else first + second


def _severity(comparison: Comparison) -> tuple[bool, float]:
    worst = comparison.worst
    return (comparison.outside > 0, -1.0 if worst is None else worst.ulp)


@dataclass(frozen=True)
class Need:
    """The value of the latent stage that explains one row, or group, and the contract's."""

    value: float
    expected: float

    @property
    def ratio(self) -> float:
        return self.value / self.expected if self.expected else math.inf


@dataclass(frozen=True)
class Needs:
    """Latent values that rows need although no value within the enclosure of the latent stage explains them.

    Attributes:
        rows: those that were searched.
        found: those that another value explains, whatever it is.
        least, most: of these, the ones whose value has the smallest and the largest ratio to the contract's.
    """

    rows: int = 0
    found: int = 0
    least: Need | None = None
    most: Need | None = None

    def __add__(self, other: Needs) -> Needs:
        known = [need for need in (self.least, self.most, other.least, other.most) if need is not None]
        ratios = [need.ratio for need in known]
        return Needs(
            self.rows + other.rows,
            self.found + other.found,
            known[ratios.index(min(ratios))] if known else None,
            known[ratios.index(max(ratios))] if known else None,
        )


@dataclass(frozen=True)
class RowCheck:
    """A count of the rows that one value of the latent stage explains bit for bit, of those that could be tried.

    Attributes:
        split: rows of at most 32 columns that two values explain, one for each half of the columns.
        needs: of rows that are neither.
        also: other stages whose values explain a row together with it.
    """

    stage: str
    rows: int = 0
    explained: int = 0
    split: int = 0
    needs: Needs = field(default_factory=Needs)
    also: tuple[str, ...] = ()

    @property
    def stages(self) -> str:
        """The names of all stages whose values explain a row."""
        return " and ".join((self.stage, *self.also))

    @property
    def unexplained(self) -> int:
        return self.rows - self.explained - self.split

    def __add__(self, other: RowCheck) -> RowCheck:
        return RowCheck(
            self.stage,
            self.rows + other.rows,
            self.explained + other.explained,
            self.split + other.split,
            self.needs + other.needs,
            self.also,
        )


@dataclass(frozen=True)
class StageResult:
    """One stage of one kernel on one case.

    Attributes:
        name: the stage.
        dtype: format of the stage under the contract.
        result: the kernel must return it; otherwise the kernel let it be seen.
        cumulative: against the enclosure that follows from the inputs of the case.
        isolated: against the enclosure that follows from the kernel's own values of earlier stages.
        fingerprint: hash of the actual bits.
        in_rows: elements in rows that one latent value had to explain.
        roundoff: sum of the unit roundoffs of the stages up to this one; infinite in records of an older lastbit.
        constant: elements that follow from no arithmetic, as in an ignored row; see `lastbit.judging.decided`.
        equal: elements whose residues are those of the contract, where the kernel was followed: its formula, whatever
            the order of its sums; see `lastbit.judging.formula`.
        differing: elements that follow from another formula.
    """

    name: str
    dtype: str
    result: bool
    cumulative: Comparison
    isolated: Comparison
    fingerprint: str = ""
    in_rows: int = 0
    roundoff: float = math.inf
    constant: int = 0
    equal: int = 0
    differing: int = 0

    @property
    def extreme(self) -> bool:
        """The contract itself loses more than its roundings explain, or lets a kernel lose more than `NEAR` times that.

        Something overflows, underflows or cancels. Records of an older lastbit do not say.
        """
        seen, allowed = self.cumulative, not (self.cumulative.outside or self.isolated.outside)
        return seen.contract_l2 > AMPLIFIED * self.roundoff or (allowed and seen.rel_l2 > NEAR * self.roundoff)

    @property
    def decided(self) -> int:
        """Elements that could not have been otherwise: with one legal value, in a row that one value explains, or of
        the contract's formula.

        Those that are `constant` are not among them.
        """
        counts = self.cumulative.decided, self.isolated.decided, self.in_rows, self.equal
        return max(max(counts) - self.constant, 0)


@dataclass(frozen=True)
class Finding:
    """One fact for a reader: what is wrong, where, with numbers, in one sentence. A notice fails nothing."""

    kind: str
    stage: str
    sentence: str
    notice: bool = False


OF_PROPERTIES = frozenset({"broken_property"})
"""Kinds of findings of which the subject is a property; the values of every stage may be allowed."""

DEPTH = "depth"
"""The kind of a finding: a sum of the kernel has a higher tree than the kernel declares."""

OF_DECLARATIONS = OF_PROPERTIES | {DEPTH}
"""Kinds of findings about what a kernel declares, which a smaller case would not show better."""

OF_VALUES = frozenset({"outside", "special", "rows"})
"""Kinds of findings that say no more than that values are not those of the contract."""

OF_FORMULA = "formula"
"""The kind of a finding: the kernel computes another formula, whatever its values are."""

OF_STAGES = ("outside", "special", "rows", "lanes", OF_FORMULA)
"""Kinds of findings that are about the values of a stage."""

SANITIZED = frozenset({"memcheck", "initcheck", "racecheck", "synccheck", "race", "masked"})
"""Kinds of findings that only a run with --sanitize has: of compute-sanitizer's tools, and of interpreted programs."""


@dataclass(frozen=True)
class Judgement:
    """A verdict and everything it rests on.

    Attributes:
        ruled_out: alternative contract → elements that lie outside it in the first block of rows that rules it out, of
            results, or of stages where no result does; 0 if none of the first 2^22 elements does.
        explained_by: contracts of the op that allow every bit of a result which failed.
        reason: why a case was skipped, unsupported, inconclusive or errored.
        opaque: operations of the kernel that have no residues, where it was followed.
        idle: options of the contract that change nothing here, as one about an input that the case lacks; see `told`.
    """

    verdict: Verdict
    stages: tuple[StageResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    rows: RowCheck | None = None
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    explained_by: tuple[str, ...] = ()
    reason: str = ""
    opaque: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that fail the case."""
        return tuple(finding for finding in self.findings if not finding.notice)

    @property
    def notices(self) -> tuple[Finding, ...]:
        """The findings that inform and fail nothing."""
        return tuple(finding for finding in self.findings if finding.notice)

    @property
    def results(self) -> tuple[str, ...]:
        """The results that were judged."""
        return tuple(stage.name for stage in self.stages if stage.result)

    @property
    def not_ruled_out(self) -> tuple[str, ...]:
        """The alternative contracts that are another computation here, and allow every element all the same."""
        return tuple(contract for contract, outside in self.ruled_out.items() if not outside)

    @property
    def failing_stage(self) -> StageResult | None:
        """The first stage that goes wrong from the kernel's own earlier values, or else from the inputs."""
        local = (s for s in self.stages if s.isolated.outside)
        return next(local, next((s for s in self.stages if s.cumulative.outside), None))


@dataclass(frozen=True, kw_only=True)
class CaseResult(Judgement):
    """The judgement on one kernel on one case.

    Attributes:
        group: the group of cases that it was drawn from.
        fingerprint: hash of the input bits, the same on every device.
        counted: generated rather than tried while a failure was shrunk.
        source: file and line of the kernel.
        properties: what its bits were found to depend on, where the case is one that asks.
        declined: the kernel raised `UnsupportedCase`, although signature and declaration take the case.
    """

    case: str
    op: str
    kernel: str
    contract: str
    device: str
    dtypes: str
    group: str = ""
    fingerprint: str = ""
    seconds: float = 0.0
    counted: bool = True
    source: str = ""
    properties: tuple[PropertyResult, ...] = ()
    declined: bool = False

    def judged(self, judgement: Judgement) -> CaseResult:
        """Replace the judgement on this case."""
        return replace(self, **{f.name: getattr(judgement, f.name) for f in fields(Judgement)})

    @property
    def way(self) -> tuple[str, ...]:
        """A key for the way it failed: the error without numbers, or the first wrong stage and finding."""
        if self.verdict is Verdict.ERRORED:
            return self.verdict, _NUMBERS.sub("#", self.reason)
        stage = self.failing_stage
        return self.verdict, stage.name if stage else "", *(finding.kind for finding in self.faults[:1])

    @property
    def strict(self) -> CaseResult:
        """This result with every notice as a fault."""
        findings = tuple(replace(finding, notice=False) for finding in self.findings)
        failed = [Verdict.FAILED for _ in self.notices]
        return replace(self, verdict=Verdict.worst(self.verdict, *failed), findings=findings)


def told(contract: str, idle: Collection[str]) -> str:
    """Word a contract for a reader, without options that change nothing here.

    >>> told("native_multiply+rounded_sum", ["rounded_sum"])
    'native_multiply'
    """
    return "+".join(option for option in contract.split("+") if option not in idle) or contract


def idle_in(results: Iterable[CaseResult]) -> tuple[str, ...]:
    """List the options of a contract that change nothing in any of the cases that were judged."""
    judged = [result.idle for result in results if result.stages]
    return tuple(option for option in judged[0] if all(option in each for each in judged)) if judged else ()


def simplest(contracts: Sequence[str], claimed: str) -> tuple[str, ...]:
    """Keep the contracts that differ from the claimed one in no more options than they need to.

    One is left out if another of them makes some of its changes and no others.
    """
    changes = {name: frozenset(name.split("+")) ^ frozenset(claimed.split("+")) for name in contracts}
    return tuple(name for name in contracts if not any(other < changes[name] for other in changes.values()))
