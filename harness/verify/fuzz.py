"""One item of a plan: its examples, its designed cases, then what Hypothesis draws; the first failure is shrunk.

Only what a run would have without a failure counts as a case. What is tried while a failure is shrunk is recorded as
such, and replays are answered from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky

from harness.case import Case
from harness.inputs.bits import key_of
from harness.result import BAD, TURNED_DOWN, CaseResult, Verdict
from harness.verify.check import verify_case
from harness.verify.drawing import designed_cases, free
from harness.verify.plan import Item
from harness.verify.sharing import Verify, directly

Record = Callable[[CaseResult], None]
Started = Callable[[Item, Case], None]

_SHRINK_CASES = 60  # tried after a failure; a smaller case helps the reader, but not at any price


class CaseFailed(Exception):
    """A kernel failed a case."""

    def __init__(self, result: CaseResult) -> None:
        super().__init__(result.case)
        self.result = result


class CaseErrored(CaseFailed):
    """A kernel raised, or returned something that cannot be judged."""


def run_item(
    item: Item, *, cases: int, seed_: int, record: Record, started: Started, verify: Verify = directly
) -> None:
    """Run the item's examples, its designed cases, and what Hypothesis draws besides; about `cases` of these two.

    Each result is recorded.

    Raises:
        CaseFailed: with the smallest failing case that was found.
    """
    explorer = _Explorer(item, record, started, verify)
    fixed = (*item.group.examples, *designed_cases(item.group, seed_))
    failures = [r for case in fixed if (r := explorer.run(case)).verdict in BAD]
    if failures:
        raise _failure(failures[0])
    left = item.group.left_to_draw(cases)
    if not left:
        return

    @seed(key_of(seed_, item.group.name))
    @settings(
        max_examples=left,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(free(item.group))
    def explore(case: Case) -> None:
        explorer.explore(case)

    try:
        explore()
    except CaseFailed as error:
        raise error.with_traceback(None) from None
    except Flaky:
        if not explorer.failures:
            raise
        raise _failure(explorer.failures[0]) from None


def unfinished(item: Item, reason: str) -> CaseResult:
    """The result of an item whose cases could not be made: an error of the op's strategy, say."""
    subject, group = item.subject, item.group.name
    case = f"{subject.kernel.op} (group {group})"
    return subject.outcome(Verdict.ERRORED, case, "", reason=reason, group=group)


def _failure(result: CaseResult) -> CaseFailed:
    return (CaseErrored if result.verdict is Verdict.ERRORED else CaseFailed)(result)


class _Explorer:
    """Runs cases, remembers their results, and stops shrinking after a number of tries.

    A contract that one case of the item has ruled out for some dtypes is not tried on others of these dtypes.
    """

    def __init__(self, item: Item, record: Record, started: Started, verify: Verify) -> None:
        self.item, self.record, self.started, self.verify = item, record, started, verify
        self.known: dict[str, CaseResult] = {}
        self.failures: list[CaseResult] = []
        self.shrinks = 0
        self.repeated: set[object] = set()
        self.settled: dict[str, set[str]] = {}

    def run(self, case: Case) -> CaseResult:
        line = str(case)
        if line in self.known:
            return self.known[line]
        settled = self.settled.setdefault(case.dtypes, set())

        def attempt() -> CaseResult:
            self.started(self.item, case)
            return verify_case(self.item.subject, case, repeat=self._repeats(case), settled=settled)

        result = self.verify(attempt)
        settled |= {contract for contract, elements in result.ruled_out.items() if elements}
        result = replace(result, group=self.item.group.name, counted=not self.failures)
        self.record(result)
        self.known[line] = result
        if result.verdict not in TURNED_DOWN:
            self.repeated.add(_kind(case))
        return result

    def _repeats(self, case: Case) -> bool:
        """Whether the case is called with other values, too: the first of its kind, and whatever a reader asked for.

        While a failure is shrunk every case is, because the failure may be one that needs it.
        """
        return self.item.asked or bool(self.failures) or _kind(case) not in self.repeated

    def explore(self, case: Case) -> None:
        if self.failures:
            if str(case) not in self.known and self.shrinks >= _SHRINK_CASES:
                return
            self.shrinks += 1
        result = self.run(case)
        if result.verdict in BAD:
            self.failures.append(result)
            raise _failure(result)


def _kind(case: Case) -> object:
    """What makes a kernel take another path within an item: dtypes, layout of the first tensor, which tensors."""
    main = case.tensors[0]
    return case.dtypes, main.strides is None and not main.offset, frozenset(t.name for t in case.tensors)
