"""Results as data: what a comparison measured, what was concluded, and what a reader is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from harness.row_check import RowCheck


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

_NOTHING_RUN = frozenset({Verdict.SKIPPED, Verdict.UNSUPPORTED})


@dataclass(frozen=True)
class Worst:
    """One element: its index and values; `lo` and `hi` bound what the contract allows."""

    index: tuple[int, ...]
    actual: float
    expected: float
    exact: float
    lo: float
    hi: float
    ulp: float


ULP_BINS = (0, 1, 2, 4, 16)
"""Upper ends of the bins of an ulp histogram; a last bin holds everything above."""

NEAR = ULP_BINS[-1]
"""Distance in ulp up to which an error says how a value was rounded; beyond, it overflowed, cancelled or is wrong."""


@dataclass(frozen=True)
class Comparison:
    """Statistics of one stage's actual values against an enclosure: scalars and indices, never tensors.

    Attributes:
        numel: elements compared.
        decided: elements for which the contract allows exactly one value.
        mismatched: elements that differ from the contract's correctly rounded value.
        outside: elements that no kernel which keeps the contract can give, NaN and inf included.
        special: elements of `outside` whose class (NaN, +inf, -inf, finite) is wrong.
        squared_error, squared_exact: sums over finite elements, for `rel_l2`.
        max_error: largest |actual - exact|.
        bias: mean of (|actual| - |exact|) in ulp of the stage's format, over elements within `NEAR` of the exact value;
            negative means toward zero; NaN if these are fewer than half.
        max_ulp: largest distance from the contract's value, in ulp of the stage's format.
        ulp_histogram: counts per bin of `ULP_BINS`.
        budget_ratio: largest |actual - middle| / radius over elements that have freedom; above 1 is outside.
        worst: the element farthest outside, or else farthest from the contract's value.
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

    @property
    def rel_l2(self) -> float:
        """‖actual - exact‖ / ‖exact‖ over finite elements; 0 where both are 0."""
        if self.squared_exact == 0:
            return math.inf if self.squared_error else 0.0
        return math.sqrt(self.squared_error / self.squared_exact)

    @property
    def bias(self) -> float:
        shown = self.bias_count and 2 * self.bias_count >= self.numel
        return self.bias_sum / self.bias_count if shown else math.nan

    def __add__(self, other: Comparison) -> Comparison:
        """Statistics of both sets of elements together."""
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
            max_error=max(self.max_error, other.max_error),
            bias_sum=self.bias_sum + other.bias_sum,
            bias_count=self.bias_count + other.bias_count,
            max_ulp=max(self.max_ulp, other.max_ulp),
            ulp_histogram=tuple(a + b for a, b in bins),
            budget_ratio=max(self.budget_ratio, other.budget_ratio),
            worst=farther.worst,
        )


def _severity(comparison: Comparison) -> tuple[bool, float]:
    worst = comparison.worst
    return (comparison.outside > 0, -1.0 if worst is None else worst.ulp)


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
    """

    name: str
    dtype: str
    result: bool
    cumulative: Comparison
    isolated: Comparison
    fingerprint: str = ""
    in_rows: int = 0

    @property
    def decided(self) -> int:
        """Elements that could not have been otherwise: with one legal value, or in a row that one value explains."""
        return max(self.cumulative.decided, self.isolated.decided, self.in_rows)


@dataclass(frozen=True)
class Finding:
    """One fact for a reader: what is wrong, where, with numbers, in one sentence. A notice fails nothing."""

    kind: str
    stage: str
    sentence: str
    notice: bool = False


@dataclass(frozen=True)
class CaseResult:
    """One kernel on one case.

    Attributes:
        ruled_out: alternative contract → elements of the actual result that it forbids.
        explained_by: contracts of the op that allow every bit of a result which failed.
        reason: why a case was skipped, unsupported, inconclusive or errored.
        group: the group of cases that it was drawn from.
        fingerprint: hash of the input bits, the same on every device.
        counted: generated rather than tried while a failure was shrunk.
        source: file and line of the kernel.
    """

    case: str
    op: str
    kernel: str
    contract: str
    device: str
    dtypes: str
    verdict: Verdict
    stages: tuple[StageResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    rows: RowCheck | None = None
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    explained_by: tuple[str, ...] = ()
    reason: str = ""
    group: str = ""
    fingerprint: str = ""
    seconds: float = 0.0
    counted: bool = True
    source: str = ""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that fail the case."""
        return tuple(finding for finding in self.findings if not finding.notice)

    @property
    def notices(self) -> tuple[Finding, ...]:
        """The findings that inform and fail nothing."""
        return tuple(finding for finding in self.findings if finding.notice)

    @property
    def strict(self) -> CaseResult:
        """The same with every notice as a fault."""
        findings = tuple(replace(finding, notice=False) for finding in self.findings)
        failed = [Verdict.FAILED for _ in self.notices]
        return replace(self, verdict=Verdict.worst(self.verdict, *failed), findings=findings)

    @property
    def failing_stage(self) -> StageResult | None:
        """The first stage that goes wrong from the kernel's own earlier values, or else from the inputs."""
        local = (s for s in self.stages if s.isolated.outside)
        return next(local, next((s for s in self.stages if s.cumulative.outside), None))


def simplest(contracts: Sequence[str], claimed: str) -> tuple[str, ...]:
    """The contracts that differ from the claimed one in no more options than they need to.

    One is left out if another of them makes some of its changes and no others.
    """
    changes = {name: frozenset(name.split("+")) ^ frozenset(claimed.split("+")) for name in contracts}
    return tuple(name for name in contracts if not any(other < changes[name] for other in changes.values()))


@dataclass(frozen=True)
class Power:
    """Whether a run could tell a kernel's contract from an alternative, for one set of dtypes.

    Attributes:
        cases: cases in which the alternative is a different computation.
        ruled_out: elements that the alternative forbids and the kernel gave.
        separable: whether some input of these cases' shapes and dtypes can tell the two apart.
    """

    kernel: str
    device: str
    dtypes: str
    alternative: str
    cases: int
    ruled_out: int
    separable: bool

    @property
    def missing(self) -> bool:
        """The alternative could have been ruled out, and never was."""
        return self.separable and self.ruled_out == 0


LEAST_DECIDED = 0.01
"""Share of the elements of a result that a run must have decided, or nobody can say that the kernel passed."""


@dataclass(frozen=True)
class Decided:
    """How many elements of a result could not have been otherwise, in one format, over all cases of a run.

    Attributes:
        numel: elements compared.
        decided: those with one legal value, seen from the inputs or from the kernel's own stages, or in a row that one
            latent value had to explain.
    """

    kernel: str
    device: str
    stage: str
    dtype: str
    numel: int
    decided: int

    @property
    def missing(self) -> bool:
        """Fewer were decided than a run must decide."""
        return self.decided < LEAST_DECIDED * self.numel


@dataclass(frozen=True)
class NotRun:
    """Something that was asked for, or exists, and was not run, with the reason.

    Attributes:
        kernel, device: whose cases they are, where they were planned; empty for what no plan has.
    """

    what: str
    reason: str
    kernel: str = ""
    device: str = ""


@dataclass(frozen=True)
class Agreement:
    """How often two devices gave the same bits for the same input bits, per kernel and stage."""

    kernel: str
    stage: str
    devices: tuple[str, str]
    tensors: int
    equal: int


@dataclass(frozen=True)
class Run:
    """All results of one run, and the environment that they were made in.

    Attributes:
        broken: why the run ended before everything had run; empty if it did not.
    """

    results: tuple[CaseResult, ...]
    power: tuple[Power, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    agreement: tuple[Agreement, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    broken: str = ""

    def subjects(self) -> tuple[tuple[str, str], ...]:
        """The (kernel, device) pairs of the run, in order of appearance; after a kernel its other revisions, K@REV."""
        found = dict.fromkeys((r.kernel, r.device) for r in self.results)
        names = {kernel: kernel.partition("@") for kernel, _ in found}
        order = list(dict.fromkeys(name for name, _, _ in names.values()))
        return tuple(sorted(found, key=lambda subject: (order.index(names[subject[0]][0]), names[subject[0]][2])))

    def of(self, kernel: str, device: str) -> tuple[CaseResult, ...]:
        """The counted results of one kernel on one device."""
        return tuple(r for r in self.results if (r.kernel, r.device) == (kernel, device) and r.counted)

    def decided(self, kernel: str, device: str) -> tuple[Decided, ...]:
        """What the run decided of each result of a kernel on a device, per format."""
        found: dict[tuple[str, str], list[StageResult]] = {}
        for result in self.of(kernel, device):
            for stage in result.stages:
                if stage.result:
                    found.setdefault((stage.name, stage.dtype), []).append(stage)
        return tuple(
            Decided(kernel, device, name, dtype, sum(s.cumulative.numel for s in seen), sum(s.decided for s in seen))
            for (name, dtype), seen in found.items()
        )

    def verdict(self, kernel: str, device: str) -> Verdict:
        """FAILED or ERRORED if any case is; INCONCLUSIVE if a contract was never ruled out or a result not decided."""
        verdicts = {r.verdict for r in self.results if (r.kernel, r.device) == (kernel, device)}
        if bad := verdicts & BAD:
            return Verdict.worst(*bad)
        if any(p.missing for p in self.power if (p.kernel, p.device) == (kernel, device)):
            return Verdict.INCONCLUSIVE
        if any(d.missing for d in self.decided(kernel, device)):
            return Verdict.INCONCLUSIVE
        return Verdict.PASSED if Verdict.PASSED in verdicts else Verdict.worst(*verdicts)

    @property
    def unverified(self) -> tuple[tuple[str, str], ...]:
        """The (kernel, device) pairs that were planned and of which no case was run, or none that the kernel takes."""
        planned = dict.fromkeys([*self.subjects(), *((n.kernel, n.device) for n in self.not_run if n.kernel)])
        ran = {(r.kernel, r.device) for r in self.results if r.verdict not in _NOTHING_RUN}
        return tuple(subject for subject in planned if subject not in ran)

    @property
    def overall(self) -> Verdict | None:
        """The verdict on the whole run: the worst of its kernels that decides; None if nothing was verified.

        SKIPPED if all that was verified passed, but a kernel was not verified.
        """
        verdicts = {self.verdict(*subject) for subject in self.subjects()}
        if self.broken:
            return Verdict.ERRORED
        decisive = (Verdict.ERRORED, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED)
        decided = next((verdict for verdict in decisive if verdict in verdicts), None)
        return Verdict.SKIPPED if decided is Verdict.PASSED and self.unverified else decided

    @property
    def exit_code(self) -> int:
        """0 all passed, 1 findings or a kernel left inconclusive, 2 something broken, 3 a kernel was not verified."""
        codes = {Verdict.PASSED: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAILED: 1, Verdict.ERRORED: 2}
        overall = self.overall
        return codes.get(overall, 3) if overall else 3
