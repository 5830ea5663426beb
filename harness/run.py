"""A run as data: its results, whether it could have seen something else, and what was not run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lastbit.reports.why import Explanation, KernelTrace
from lastbit.result import BAD, TURNED_DOWN, CaseResult, StageResult, Verdict


@dataclass(frozen=True)
class Power:
    """The power of a run to tell a kernel's contract from an alternative, for one set of dtypes.

    Attributes:
        cases: cases in which the alternative is a different computation and was asked about.
        ruled_out: elements that the kernel gave and that lie outside the alternative, of stages if of no result.
        separable: whether some input of these cases' shapes and dtypes can tell the two apart, if sums are exact.
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


# Arbitrary: of fewer than half, the verdict would be on another kernel than the one that was declared.
LEAST_JUDGED = 0.5
"""Share of the cases that a kernel takes by its declaration and must not decline, or nobody can say that it passed."""

# Arbitrary: fp32 sums of many terms decide next to nothing, and that is to be told from little.
LEAST_DECIDED = 0.01
"""Share of the elements of a result that a run must have decided, or nobody can say that the kernel passed."""


@dataclass(frozen=True)
class Decided:
    """A count of the elements of a result that could not have been otherwise, in one format, over all cases of a run.

    Attributes:
        numel: elements compared, without constant ones.
        decided: those of them with one legal value, seen from the inputs or from the kernel's own stages, or in a row
            that one latent value had to explain.
        decidable: other inputs, or a known order of sums, could decide as much as a run must.
        by_formula: all elements follow from the contract's formula in the cases in which the kernel was followed.
    """

    kernel: str
    device: str
    stage: str
    dtype: str
    numel: int
    decided: int
    decidable: bool = True
    by_formula: bool = False

    @property
    def few(self) -> bool:
        """Fewer were decided than a run must decide."""
        return not self.by_formula and self.decided < LEAST_DECIDED * self.numel

    @property
    def missing(self) -> bool:
        """Fewer were decided, and a run could have decided as many."""
        return self.decidable and self.few


@dataclass(frozen=True)
class Undecidable:
    """A result that stays open in every run: were each sum rounded once, too few elements would have one legal value.

    What leaves them open are primitives, such as an exponential and a logarithm that may each err by a few units.
    """

    kernel: str
    device: str
    stage: str
    dtype: str


COMBINATIONS = "combinations"
"""The choice of two dtypes or options that go together."""


@dataclass(frozen=True)
class Coverage:
    """The options of a choice in the cases that a kernel was judged on.

    Attributes:
        choice: what cases choose, as in `lastbit.inputs.choices`: `x regime`, `eps`; or `COMBINATIONS`, of which the
            options are pairs: `x=bf16 × no residual`.
        dtype: of the tensor, where its regimes and layouts count by dtype.
        judged: options that some judged case had.
        declined: options that only cases had which the kernel does not take.
        missing: options that no case had.
    """

    kernel: str
    device: str
    choice: str
    dtype: str
    judged: tuple[str, ...]
    declined: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


REFUSAL, ERROR, DEVICE, EXTENT = "refusal", "error", "device", "extent"
"""Why a branch that no case takes may be no gap: it raises, an error or another device leads to it, or it is none.

The last is a loop that never ran twice, or a mask.
"""


@dataclass(frozen=True)
class Unreached:
    """A branch in the source of kernels that no case of a run took, although cases came to where it begins.

    Attributes:
        file, line: where it is.
        function: the one that it is in.
        text: the condition or loop as it is written, from `if` on.
        never: `true`, `false`, `partly true`, `ran`, `ran twice`, `matched` or `caught`.
        why: `REFUSAL`, `ERROR`, `DEVICE`, `EXTENT`; empty for what handles inputs.
        kernels: those that came there.
        cases: how many cases these were judged on.
        wanted: what would have to hold in a case that reaches it, where the source says so.
        decides: its kernels are inconclusive while nobody takes it, as --strict asks.
    """

    file: str
    line: int
    function: str
    text: str
    never: str
    kernels: tuple[str, ...]
    cases: int
    why: str = ""
    wanted: str = ""
    decides: bool = False


@dataclass(frozen=True)
class NotRun:
    """An item that was asked for, or exists, and was not run, with the reason.

    Attributes:
        kernel, device: whose cases they are, where they were planned; empty for what no plan has.
    """

    what: str
    reason: str
    kernel: str = ""
    device: str = ""


@dataclass(frozen=True)
class DeviceAgreement:
    """The number of results in which two devices gave the same bits for the same input bits, per kernel and stage."""

    kernel: str
    stage: str
    devices: tuple[str, str]
    tensors: int
    equal: int


@dataclass(frozen=True)
class Spent:
    """The time of a run by its parts.

    Attributes:
        seconds: part, as in `lastbit.timing` → seconds, over all processes.
        processes: how many noted their time.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    processes: int = 0

    def __add__(self, other: Spent) -> Spent:
        parts = dict.fromkeys([*self.seconds, *other.seconds])
        seconds = {part: self.seconds.get(part, 0.0) + other.seconds.get(part, 0.0) for part in parts}
        return Spent(seconds, self.processes + other.processes)


@dataclass(frozen=True)
class VerdictOrigin:
    """Where the verdict on a kernel is from, in a run that keeps verdicts.

    Attributes:
        run: name of an earlier run that judged it, of which nothing has changed; empty if this run did.
        why: why this one did, and why its verdict is not kept, if so.
    """

    kernel: str
    device: str
    run: str = ""
    why: str = ""


@dataclass(frozen=True)
class Run:
    """All results of one run, and the environment that they were made in.

    Attributes:
        broken: why the run ended before everything had run; empty if it did not.
        spent: where its time went; empty for a run of an older lastbit.
        undecidable: results of which it decided too little, and could not have decided more.
        coverage: of what cases choose from; empty for a run of lines that a reader gave.
        explanations: of a failure for each of the first causes of a kernel, as far as time allowed.
        traces: of kernels that declare no stages, on ordinary cases: their stages and nothing else.
        unreached: branches of the kernels' own files that no case took; None where nobody could see.
        origins: where each verdict is from; empty where none is kept.
    """

    results: tuple[CaseResult, ...]
    power: tuple[Power, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    agreement: tuple[DeviceAgreement, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    broken: str = ""
    spent: Spent = field(default_factory=Spent)
    coverage: tuple[Coverage, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    traces: tuple[KernelTrace, ...] = ()
    undecidable: tuple[Undecidable, ...] = ()
    unreached: tuple[Unreached, ...] | None = None
    origins: tuple[VerdictOrigin, ...] = ()

    def subjects(self) -> tuple[tuple[str, str], ...]:
        """List the (kernel, device) pairs of the run, in order of appearance; revisions K@REV follow their kernel."""
        found = dict.fromkeys((r.kernel, r.device) for r in self.results)
        names = {kernel: kernel.partition("@") for kernel, _ in found}
        order = list(dict.fromkeys(name for name, _, _ in names.values()))
        return tuple(sorted(found, key=lambda subject: (order.index(names[subject[0]][0]), names[subject[0]][2])))

    @cached_property
    def _results(self) -> Mapping[tuple[str, str], list[CaseResult]]:
        """Map kernel and device to their results, which reports ask for a thousand times."""
        found: dict[tuple[str, str], list[CaseResult]] = {}
        for result in self.results:
            found.setdefault((result.kernel, result.device), []).append(result)
        return found

    def of(self, kernel: str, device: str) -> tuple[CaseResult, ...]:
        """Return the counted results of one kernel on one device."""
        return tuple(r for r in self._results.get((kernel, device), ()) if r.counted)

    def decided(self, kernel: str, device: str) -> tuple[Decided, ...]:
        """Count the decided elements of each result of a kernel on a device, per format."""
        found: dict[tuple[str, str], list[StageResult]] = {}
        for result in self.of(kernel, device):
            for stage in result.stages:
                if stage.result:
                    found.setdefault((stage.name, stage.dtype), []).append(stage)
        return tuple(
            Decided(
                kernel,
                device,
                name,
                dtype,
                sum(s.cumulative.numel - s.constant for s in seen),
                sum(s.decided for s in seen),
                Undecidable(kernel, device, name, dtype) not in self.undecidable,
                any(s.equal for s in seen) and all(s.equal == s.cumulative.numel for s in seen if s.equal),
            )
            for (name, dtype), seen in found.items()
        )

    def left_out(self, kernel: str) -> tuple[Unreached, ...]:
        """List the branches for which a kernel is inconclusive because no case reached them."""
        return tuple(one for one in self.unreached or () if one.decides and kernel in one.kernels)

    def judged_cases(self, kernels: Collection[str]) -> int:
        """Count the cases on which kernels were judged, on all devices."""
        return sum(r.kernel in kernels and r.counted and r.verdict not in TURNED_DOWN for r in self.results)

    def judged(self, kernel: str, device: str) -> tuple[int, int]:
        """Count the cases on which a kernel was judged, and with them those that it declined."""
        results = self.of(kernel, device)
        judged = sum(r.verdict not in TURNED_DOWN for r in results)
        return judged, judged + sum(r.declined for r in results)

    def verdict(self, kernel: str, device: str) -> Verdict:
        """Return FAILED or ERRORED if any case is; INCONCLUSIVE if a contract was never ruled out, or too little
        decided, or with --strict, code that handles inputs was not reached.

        Too little is `LEAST_DECIDED` of the elements of a result, and `LEAST_JUDGED` of the cases.
        """
        verdicts = {r.verdict for r in self._results.get((kernel, device), ())}
        if bad := verdicts & BAD:
            return Verdict.worst(*bad)
        if any(p.missing for p in self.power if (p.kernel, p.device) == (kernel, device)):
            return Verdict.INCONCLUSIVE
        if any(d.missing for d in self.decided(kernel, device)) or self.left_out(kernel):
            return Verdict.INCONCLUSIVE
        judged, planned = self.judged(kernel, device)
        if 0 < judged < LEAST_JUDGED * planned:
            return Verdict.INCONCLUSIVE
        return Verdict.PASSED if Verdict.PASSED in verdicts else Verdict.worst(*verdicts)

    @property
    def unverified(self) -> tuple[tuple[str, str], ...]:
        """The (kernel, device) pairs that were planned and of which no case was run, or none that the kernel takes."""
        planned = dict.fromkeys([*self.subjects(), *((n.kernel, n.device) for n in self.not_run if n.kernel)])
        ran = {(r.kernel, r.device) for r in self.results if r.verdict not in TURNED_DOWN}
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
