"""One item of a plan: its examples, its designed cases, then what Hypothesis draws; the first failure is made small.

Only what the item consists of counts as a case. What is tried while a failure is made small is recorded as such. The
item is performed in the process that calls its kernel, or that starts the processes that do.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

from lastbit.calling.uses_compile import is_compiled
from lastbit.case import SEED_BITS, Case, parse_case
from lastbit.errors import UsageError
from lastbit.floating_point import kept_floating_point
from lastbit.inputs.given import is_given
from lastbit.isolation.elsewhere import Kernels
from lastbit.kernel import Kernel
from lastbit.numerics import remembering
from lastbit.result import BAD, DEPTH, OF_DECLARATIONS, TURNED_DOWN, CaseResult, Finding, Verdict
from lastbit.takes import told
from lastbit.verify.check import Subject, first_line, takes, verify_case
from lastbit.verify.device_memory import Verify, directly, give_back
from lastbit.verify.drawing import draw
from lastbit.verify.formula_check import SMALL, is_small, with_formula
from lastbit.verify.isolating import in_processes
from lastbit.verify.narrowing import advice_for
from lastbit.verify.notes import HAS_FAILED
from lastbit.verify.ordinary import plainest
from lastbit.verify.plan import SIZED, Item
from lastbit.verify.power import untold
from lastbit.verify.property_checks import with_properties
from lastbit.verify.result_recorder import CaseRecorder
from lastbit.verify.shrink import shrink

Record = Callable[[CaseResult], None]
Started = Callable[..., None]
"""Takes note that a case of an item is about to run, and whether it is `counted`."""

Probe = Callable[[Subject], str]
"""Looks for a sum that is not as its kernel declares; returns a sentence, empty if there is none in sight."""

# Arbitrary: the first one tells most contracts apart, and more than one is rarely in vain.
_MOST_TELLING = 3
"""Times that cases are added to an item which tell contracts apart."""


# Measured: larger ones took 33 of the 45 s in which sized cases of four ops were followed, as they have many programs.
_SIZED = 1 << 14
"""Elements of a sized case in which a kernel is followed on residues."""

_TELLING = 1 << 8
"""Elements of a case from which on it is preferred the fewer it has."""


class CaseFailed(Exception):
    """A kernel failed a case, or raised, or returned something that cannot be judged.

    Attributes:
        result: of the smallest case that was found.
    """

    def __init__(self, result: CaseResult) -> None:
        super().__init__(result.case)
        self.result = result


class NoCase(Exception):
    """No case could be drawn for an item, through no fault of the kernel; the message says which limit allows none."""


class Stopped(Exception):
    """The kernel has failed in another item."""


def run_item(item: Item, records: CaseRecorder, probe: Probe = lambda subject: "") -> Sequence[CaseResult]:
    """Run the item's examples and other cases, recording each result; the first failure is made small.

    Where none of them has told the kernel's contract from another one that it can be told from, cases that can tell
    them apart follow. Returns the results that count.

    Unless all are to go on, a kernel that has failed runs nothing more, and it is told how much that is before the
    failure is made small, which the process may not survive. Lines that a reader asked for are all run, as they are:
    the reader wants to know of these. In a run of random seeds, all other cases have seeds that nobody knows before the
    kernel has been loaded.

    Raises:
        CaseFailed: with the smallest failing case that was found.
        UsageError: the kernel declares what its op does not have.
        NoCase: none of its cases could be drawn.
        Stopped: the kernel has failed in another item; the message says so.
    """
    if item.refused:
        raise UsageError(item.refused)
    explorer = Explorer(item, records.record, records.started, records.verify_on(item.subject.device), probe=probe)
    key = item.subject.kernel.name, str(item.subject.device)

    def has_failed() -> bool:
        return records.failures is not None and key in records.failures

    def run_all(cases: Sequence[Case]) -> None:
        failed = []
        for case in cases:
            result = explorer.run(case)
            if explorer.is_lost:
                raise CaseFailed(result)
            if result.verdict in BAD:
                failed.append((case, result))
        if failed:
            raise CaseFailed(failed[0][1] if item.asked else explorer.shrunk(*failed[0], cases))

    def run_until_failure(cases: Sequence[Case]) -> None:
        for place, case in enumerate(cases):
            if has_failed():
                records.tell("left", len(cases) - place)
                raise Stopped(HAS_FAILED)
            result = explorer.run(case)
            if result.verdict in BAD:
                records.learn([key])
                if rest := len(cases) - place - 1:
                    records.tell("left", rest)
                raise CaseFailed(explorer.shrunk(case, result, cases))

    if not item.asked and has_failed():
        records.tell("left", item.planned(records.cases).cases)
        raise Stopped(HAS_FAILED)
    drawn = draw(item.group, records.cases, records.seed)
    if not drawn and item.planned(records.cases).cases:
        taken = item.subject.kernel.takes
        allowed = f"{told(taken)} allows" if taken else "the kernel's signature allows"
        raise NoCase(f"lastbit found no case of group {item.group.name} that {allowed}")
    run = run_all if records.failures is None or item.asked else run_until_failure
    cases = [reseeded(case) if records.random and not item.asked else case for case in item.own(drawn)]
    explorer.prefer(cases)
    run(cases)
    for _ in range(0 if item.asked else _MOST_TELLING):
        if not (telling := untold(explorer.results, item.subject.op, records.separable, explorer.takes)):
            break
        explorer.tells_apart = True
        run(telling)
    return explorer.results


def reseeded(case: Case, seed: int | None = None) -> Case:
    """Replace a case's seed, by default by one that nobody could know before, unless the line lists its values."""
    given = any(is_given(tensor.regime) for tensor in case.tensors)
    return case if given else replace(case, seed=secrets.randbits(SEED_BITS) if seed is None else seed)


def unfinished(item: Item, reason: str, verdict: Verdict = Verdict.ERRORED) -> CaseResult:
    """Make the result of an item whose cases could not be made, such as after an error in the op's strategy."""
    subject, group = item.subject, item.group.name
    case = f"{subject.kernel.op} (group {group})"
    return subject.outcome(verdict, case, "", reason=reason, group=group)


def features_of(case: Case, accepts: Set[str]) -> frozenset[object]:
    """Return what likely decides the path of a kernel in a case, each apart from the others.

    That is its dtypes, the layout of its main tensor, what is given of the tensors and parameters that the kernel
    `accepts`, and parameters that are words or switches.
    """
    main, names = case.tensors[0], case.names
    words = ((name, value) for name, value in case.params.items() if isinstance(value, str | bool))
    plain = main.strides is None and not main.offset
    return frozenset({case.dtypes, plain, *((name, name in names) for name in accepts), *words})


_renumbered: dict[int, tuple[Kernel, set[str]]] = {}
"""Kernel → itself, so that it lives on, and the parameters for which it was given other numbers in this process."""


class Explorer:
    """Runs the cases of an item one after another and records the results.

    A contract that one of them has ruled out for some dtypes is not tried on others of these dtypes.

    Attributes:
        item: whose cases they are.
        results: of those that count.
        tells_apart: whether its cases are there to tell contracts apart: then each is followed on residues, too.
    """

    def __init__(
        self,
        item: Item,
        record: Record,
        started: Started,
        verify: Verify = directly,
        features: Callable[[Case], Set[object]] | None = None,
        probe: Probe = lambda subject: "",
    ) -> None:
        self.results: list[CaseResult] = []
        self.tells_apart = False
        self.item, self._record, self._started, self._verify = item, record, started, verify
        self._features = features or partial(features_of, accepts=item.subject.kernel.accepts)
        self._probe: Probe | None = probe if item.subject.kernel.depth and not item.subject.performer else None
        self._repeated: set[object] = set()
        self._renumbered = _renumbered.setdefault(id(item.subject.kernel), (item.subject.kernel, set()))[1]
        self._followed: set[object] = set()
        self._preferred: set[Case] | None = None
        self._settled: dict[str, set[str]] = {}

    def prefer(self, cases: Iterable[Case]) -> None:
        """Follow the kernel in the cheapest of these cases that have each feature, and not in the first ones.

        Fewer than `_TELLING` elements are dear, as they may be all constants or no number at all.
        """
        self._preferred, seen = set(), set[object]()
        for case in sorted(filter(is_small, cases), key=lambda c: c.numel if c.numel >= _TELLING else SMALL - c.numel):
            if not (features := self._features(case)) <= seen:
                self._preferred.add(case)
                seen |= features

    def run(self, case: Case) -> CaseResult:
        """Run a case of the item and record its result.

        The kernel is called with other values, too, if the case is the first of a novel item with one of its features,
        or a reader asked for it; with other numbers for its parameters, if no such case of this process had these.
        """
        features, numbers = self._features(case), {name for name, v in case.params.items() if isinstance(v, float)}
        repeat = self.item.asked or (self.item.novel and not features <= self._repeated)
        renumber = self.item.asked or (
            not numbers <= self._renumbered and not is_compiled(self.item.subject.kernel.call)
        )
        result = self._verified(case, repeat=repeat, renumber=renumber)
        if repeat and result.verdict not in TURNED_DOWN:
            self._repeated |= features
            self._renumbered |= numbers
        self.results.append(result)
        self._record(result)
        return result

    def shrunk(self, case: Case, failed: CaseResult, alike: Sequence[Case]) -> CaseResult:
        """Shrink a failing case; return the result of the smallest case found to fail alike. `alike` are of its group.

        A case of which only declarations are broken stays as it is, since the number of rows it needs is the finding.
        Where the kernel passes the smallest case in another layout, with elements or in another shape, the result has
        advice on a declaration.
        """
        if failed.faults and all(finding.kind in OF_DECLARATIONS for finding in failed.faults):
            return failed
        smallest = failed

        def fails(case: Case) -> bool:
            """Run a case outside of the item, with all calls; record a failure in another way as skipped.

            Nobody has said that the kernel is meant for it.
            """
            nonlocal smallest
            result = replace(self._verified(case, repeat=True, counted=False), counted=False)
            fails_alike = result.way == smallest.way
            if fails_alike:
                smallest = result
            elif result.verdict in BAD:
                reason = f"fails, but not as the case that is made smaller: {': '.join(result.way)}"
                result = replace(result, verdict=Verdict.SKIPPED, stages=(), findings=(), reason=reason)
            self._record(result)
            return fails_alike

        def passes(case: Case) -> bool:
            return self.takes(case) and self._verified(case, repeat=True, counted=False).verdict is Verdict.PASSED

        shrink(case, self.item.subject.op, alike, self.takes, fails)
        errored = smallest.verdict is Verdict.ERRORED
        if advice := advice_for(parse_case(smallest.case), passes, raised=errored):
            if errored:
                smallest = replace(smallest, reason=f"{smallest.reason.removesuffix('.')}. {advice}")
            else:
                first, *others = smallest.findings
                findings = (replace(first, sentence=f"{first.sentence} {advice}"), *others)
                smallest = replace(smallest, findings=findings)
            smallest = replace(smallest, counted=False)
            self._record(smallest)
        return smallest

    @property
    def is_lost(self) -> bool:
        """Return whether the process in which the kernel is called has ended."""
        return self.item.subject.is_lost

    def takes(self, case: Case) -> bool:
        """Return whether the kernel's signature and the reference take a case, and it can still be run."""
        return not self.is_lost and takes(self.item.subject, case)

    def _verified(self, case: Case, *, repeat: bool, renumber: bool = True, counted: bool = True) -> CaseResult:
        settled = self._settled.setdefault(case.dtypes, set())

        def attempt() -> CaseResult:
            begins = partial(self._started, self.item, case, counted=counted)
            begins()
            with remembering():  # for the formula, the reference is evaluated once more
                result = verify_case(self.item.subject, case, repeat=repeat, renumber=renumber, settled=settled)
                if self._asks_for_formula(case, result, counted=counted):
                    result = with_formula(self.item.subject, case, result, begins)
            if counted and self._probe and result.verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE):
                begins()
                wrong, self._probe = self._probe(self.item.subject), None
                if wrong:
                    findings = (Finding(DEPTH, "", wrong), *result.findings)
                    result = replace(result, verdict=Verdict.FAILED, findings=findings)
            asks = self.item.group.properties and counted
            return with_properties(self.item.subject, case, result, self.item.properties, begins) if asks else result

        result = self._verify(attempt)
        settled |= {contract for contract, elements in result.ruled_out.items() if elements}
        return replace(result, group=self.item.group.name)

    def _asks_for_formula(self, case: Case, result: CaseResult, *, counted: bool) -> bool:
        """Return whether to follow the kernel on residues in a case.

        Follow it where enclosures decide nothing, in cases that a reader asked for or that are to tell contracts apart
        and have not, in sized ones that are not large or have few rows, and in small cases of a novel item until each
        of their features has been followed, the preferred ones if there are any. What a kernel does from some size on
        may be wrong by less than the rounding of its result.
        """
        tells = self.tells_apart and bool(result.not_ruled_out)
        if result.verdict is Verdict.INCONCLUSIVE or self.item.asked or tells or not counted:
            return True
        if self.item.novel and self.item.group.name == SIZED:
            few_rows = case.numel <= 4 * case.tensors[0].shape[-1]  # such as a vocabulary of 16,385 in two rows
            if few_rows or is_small(case, _SIZED):
                return True
        features = self._features(case)
        if features <= self._followed or not self.item.novel or not is_small(case):
            return False
        if self._preferred is not None and case not in self._preferred:
            return False
        self._followed |= features
        return True


_MUCH = 1 << 30  # bytes that a worker may hold between items: to look for what can be given back takes 0.1 s


Look = Callable[[Subject, Case], str]
"""Looks for the stages of a kernel in a case; returns them as text, empty if there are none in sight."""


def perform(
    item: Item,
    records: CaseRecorder,
    kernels: Kernels | None,
    look: Look = lambda subject, case: "",
    probe: Probe = lambda subject: "",
) -> None:
    """Run the cases of an item, whose kernel is called in processes of `kernels` if there are any.

    In its first case a `probe` may find that a sum is not as the kernel declares, if it is called in this process. In
    some of the cases of an item that `shows` it, stages are looked for with `look`, which changes no verdict.

    Raises:
        CaseFailed: with the smallest failing case that was found.
        Stopped: the kernel has failed in another item.
    """
    device = item.subject.device
    try:
        seen = records.watched(item) if kernels is None else nullcontext()
        with kept_floating_point(), seen, in_processes(item, kernels, records.timeout) as prepared:
            results = run_item(prepared, records, probe)
            for case in plainest(results) if item.shows else ():
                with suppress(Exception, SystemExit), records.looking():
                    if found := look(item.subject, case):
                        records.tell("stages", found)
    except (CaseFailed, Stopped):
        raise
    except NoCase as error:
        records.record(unfinished(item, str(error), Verdict.SKIPPED))
    except Exception as error:
        records.record(unfinished(item, first_line(error)))
        raise
    finally:
        give_back(device, beyond=_MUCH)  # another worker may need it while this one waits for its next item
