"""Assembly of a run from the recorded results and the plan, with reasons for items that have no result.

Every planned item is looked for among the results. One without any is listed with the reason, as far as it is known; if
nothing explains it, the run is broken.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lastbit.branches.branch_sites import merged, unreached
from lastbit.case import Case, Choices, Option, parse_case
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.inputs.choices import Feature, all_features, features_of
from lastbit.inputs.combinations import Pair, pairs_of, told
from lastbit.result import TURNED_DOWN, CaseResult
from lastbit.run import COMBINATIONS, Coverage, NotRun, Power, Run, Spent, Undecidable
from lastbit.timing import Clock, listening
from lastbit.verify.notes import (
    HAS_FAILED,
    INTERRUPTED,
    STOPPED,
    Ended,
    Key,
    Planned,
)
from lastbit.verify.power import Question, Separable, agreement_of, power_of, undecidable_of
from lastbit.verify.project import Project, open_project

Subject = tuple[str, str]


def covered(
    subject: Subject, declared: Iterable[Choices], judged: Iterable[Case], declined: Iterable[Case] = ()
) -> Iterator[Coverage]:
    """Yield the coverage of a kernel on a device, from the cases it was judged on and those it turned down."""
    options: dict[str, dict[Option, None]] = {}
    wanted: dict[tuple[str, str], dict[Option, None]] = {}
    for choices in declared:
        for choice, own in choices.items():
            options.setdefault(choice, {}).update(dict.fromkeys(own))
        for one in all_features(choices):
            wanted.setdefault((one.choice, one.dtype), {})[one.option] = None
    merged = {choice: tuple(own) for choice, own in options.items()}
    seen, refused = ({f for case in some for f in features_of(case, merged)} for some in (judged, declined))
    for (choice, dtype), found in wanted.items():
        judged_, declined_, missing = list[str](), list[str](), list[str]()
        for option in found:
            one = Feature(choice, option, dtype)
            into = judged_ if one in seen else declined_ if one in refused else missing
            into.append("none" if option is None else str(option))
        yield Coverage(*subject, choice, dtype, tuple(judged_), tuple(declined_), tuple(missing))


def combined(
    planned: Iterable[Planned], results: Iterable[CaseResult], every: Callable[[str], Collection[Pair]]
) -> Iterator[Coverage]:
    """Yield for each kernel and device which two dtypes or options that go together met in a case.

    Of `every` pair of an op, those that a kernel does not take are `declined`; an option that it takes with none is
    said once. Kernels that are one function share its cases, so that a pair of one counts for all of them.
    Those that a run leaves out by its design are `missing`.
    """
    seen: dict[tuple[str, str, str], set[bool]] = {}
    for result in results:
        if result.counted:
            seen.setdefault((result.kernel, result.device, result.group), set()).add(result.verdict in TURNED_DOWN)
    functions = dict[tuple[str, str, str], dict[str, list[Planned]]]()
    for item in planned:
        if item.combination:
            key = item.op, item.device, item.source or item.kernel
            functions.setdefault(key, {}).setdefault(item.kernel, []).append(item)
    for (op, device, _), kernels in functions.items():
        items = [item for own in kernels.values() for item in own]
        refused = [seen.get((item.kernel, item.device, item.group), set()) for item in items]
        rows = [item.combination for item in items]
        judged, declined = (
            pairs_of(row for row, known in zip(rows, refused, strict=True) if verdict in known)
            for verdict in (False, True)
        )
        rows += [row for item in items for row in item.left]
        taken = [pair for pair in pairs_of(rows) if pair in judged or pair not in declined]
        options = {option for pair in taken for option in pair}
        lost = [pair for pair in (*declined, *every(op)) if pair not in taken]
        alone = {told(option): None for pair in lost for option in pair if option not in options}
        both = {told(*pair): None for pair in lost if options.issuperset(pair)}
        met, missing = (tuple(told(*p) for p in taken if (p in judged) is met) for met in (True, False))
        yield from (Coverage(kernel, device, COMBINATIONS, "", met, (*alone, *both), missing) for kernel in kernels)


# What fits into the line of a reason; all stand in the records.
_MOST_GROUPS = 3

DESELECTED = "left out by -k, --deselect or another option or plugin of pytest"
NO_CASES = "its groups of cases have no examples, and no case was to be generated"
UNKNOWN = "no result was recorded, and nothing says why"


def isolation_of(ended: Iterable[Ended]) -> dict[str, str]:
    """Describe the isolation of kernel processes, for each type of device that had any."""
    told = [f"{process.device_type}: {process.isolated}" for process in ended if process.isolated]
    return {"isolated": "; ".join(told)} if told else {}


def assembled(
    config: Config,
    ended: Sequence[Ended],
    recorded: Sequence[CaseResult],
    *,
    environment: Mapping[str, str],
    spent: Spent,
    interrupted: bool,
    known: Mapping[Question, bool] = MappingProxyType({}),
    taken: Iterable[tuple[str, Any]] = (),
    before: Mapping[Subject, tuple[Sequence[Power], Sequence[Undecidable]]] = MappingProxyType({}),
) -> Run:
    """Assemble the run, with results in the order of the plan; of an interrupted run, as many as there are.

    The power of an interrupted run is not computed: it takes long and could not be relied on. An interruption from the
    keyboard while it is computed interrupts the run. What workers know of contracts that can be told apart is `known`,
    and which branches each kernel took in each item `taken`. Of kernels that an earlier run has judged, what could be
    told apart and decided was known `before`.
    """
    planned = [item for process in ended for item in process.items]
    under_way = [(case, process.stop) for process in ended for case in process.under_way]
    # In the order of the plans' items, whichever worker had them when; results of one item keep their order.
    order = {(item.device, item.kernel, item.group): place for place, item in enumerate(planned)}
    results = [*recorded, *(case.errored for case, _ in under_way if case.died)]
    results.sort(key=lambda result: order.get((result.device, result.kernel, result.group), len(order)))

    given_up = []
    for process in ended:
        for (kernel, device, group), reason in process.given_up.items():
            given_up.append(NotRun(f"{kernel} on {device}, the rest of group {group}", reason, kernel, device))
    rest = {key: cases for process in ended for key, cases in process.rest.items()}
    told = {(r.kernel, r.device, r.group) for r in results} | rest.keys()
    missing = [n for process in ended for n in _missing(process, told | process.given_up.keys())]
    not_run = []
    # What failed kernels did not run comes first, since it is why a reader of a red run misses cases.
    for kernel, device in dict.fromkeys((item.kernel, item.device) for item in planned):
        if cases := sum(count for key, count in rest.items() if key[:2] == (kernel, device)):
            more = f"{kernel} on {device}, {cases:,} more case{'s' * (cases > 1)}"
            not_run.append(NotRun(more, HAS_FAILED, kernel, device))
    if any(process.stop == STOPPED for process in ended):
        not_run.append(NotRun("what came after the first failure", STOPPED))
    not_run += [note for process in ended for note in process.not_run]
    not_run += [*(case.not_run(stop) for case, stop in under_way if not case.died), *given_up, *missing]

    with listening(Clock()) as clock:
        try:
            project = open_project(config)
            judged = [result for result in results if (result.kernel, result.device) not in before]
            power = () if interrupted else power_of(judged, project, Separable(known))
            undecidable = () if interrupted else undecidable_of(judged, project)
        except KeyboardInterrupt:
            power, undecidable, interrupted = (), (), True
    subjects = [*dict.fromkeys((result.kernel, result.device) for result in results)]
    for kept_power, kept_undecidable in () if interrupted else before.values():
        power, undecidable = (*power, *kept_power), (*undecidable, *kept_undecidable)
    power = tuple(sorted(power, key=lambda one: subjects.index((one.kernel, one.device))))
    subjects = [*Run(tuple(results)).subjects()]
    undecidable = tuple(sorted(undecidable, key=lambda one: subjects.index((one.kernel, one.device))))
    broken = [f"{process.stop}; see {process.log}" for process in ended if process.stop not in ("", STOPPED)]
    broken += [f"{lost.what}: {lost.reason}" for lost in given_up]
    if unknown := [n.what for n in missing if n.reason.startswith(UNKNOWN)]:
        broken.append(f"no result of {', '.join(unknown)} was recorded")
    run = Run(
        results=tuple(results),
        broken=INTERRUPTED if interrupted else "; ".join(broken),
        power=power,
        undecidable=undecidable,
        not_run=tuple(not_run),
        agreement=agreement_of(results),
        environment=environment,
        spent=Spent(clock.seconds) + spent,
        coverage=tuple(_coverage(planned, results, project, small=config.small)),
    )
    decides = config.strict and not config.lines  # who gives lines asks about these alone
    places = {kernel: place for place, kernel in enumerate(dict.fromkeys(item.kernel for item in planned))}
    branches = merged(sorted(taken, key=lambda one: places[one[0]]))
    return replace(run, unreached=unreached(branches, run.judged_cases, decides=decides))


def _coverage(
    planned: Sequence[Planned], results: Sequence[CaseResult], project: Project, *, small: bool
) -> Iterator[Coverage]:
    """Yield what combinations were judged, then one entry per kernel, device, choice and dtype of planned groups."""

    @functools.cache
    def every_pair(name: str) -> Collection[Pair]:
        """List the pairs of an op's combinations, whatever a kernel takes."""
        op = project.op(name)
        with suppress(UsageError):  # of a file of cases to which no kernel has come with all of its inputs
            groups = project.groups(name, frozenset((*op.inputs, *op.params)), small=small)
            return pairs_of(group.combination for group in groups)
        return ()

    yield from combined(planned, results, every_pair)
    declared: dict[Subject, list[Choices]] = {}
    for item in planned:
        declared.setdefault((item.kernel, item.device), []).append(item.choices)
    judged, declined = defaultdict[Subject, list[Case]](list), defaultdict[Subject, list[Case]](list)
    parsed = functools.cache(parse_case)  # kernels have cases in common
    for result in results:
        with suppress(UsageError):  # of cases that could not be made there is no line
            kind = declined if result.verdict in TURNED_DOWN else judged
            if result.counted:
                kind[result.kernel, result.device].append(parsed(result.case))
    for key, own in declared.items():
        yield from covered(key, own, judged[key], declined[key])


def _missing(process: Ended, told: Collection[Key]) -> Iterator[NotRun]:
    """Yield the planned items without a result, for each kernel, device and reason."""
    lacking: dict[tuple[str, str, str], list[str]] = {}
    for item in process.items:
        if (item.kernel, item.device, item.group) not in told:
            reason = process.stop or f"{UNKNOWN}; see {process.log}"
            if process.selected is not None and item.id not in process.selected:
                reason = DESELECTED
            reason = reason if item.cases else NO_CASES
            lacking.setdefault((item.kernel, item.device, reason), []).append(item.group)
    planned = [(item.kernel, item.device) for item in process.items]
    for (kernel, device, reason), groups in lacking.items():
        of, rest = "", len(groups) - _MOST_GROUPS
        if len(groups) != planned.count((kernel, device)):
            names = ", ".join(groups[:_MOST_GROUPS])
            of = f", group{'s' * (len(groups) > 1)} {names}{f' and {rest} more' if rest > 0 else ''}"
        yield NotRun(f"{kernel} on {device}{of}", reason, kernel, device)
