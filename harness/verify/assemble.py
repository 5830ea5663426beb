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
from lastbit.run import COMBINATIONS, Coverage, NotRun, Run, Spent
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


def coverage_of(planned: Iterable[Planned], results: Iterable[CaseResult]) -> tuple[Coverage, ...]:
    """Make one entry per kernel, device, choice and dtype of the planned groups."""
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
    return tuple(one for key, own in declared.items() for one in covered(key, own, judged[key], declined[key]))


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
        features = [Feature(choice, option, dtype) for option in found]
        unseen = [one for one in features if one not in seen]
        yield Coverage(
            *subject,
            choice,
            dtype,
            judged=_spelled(one for one in features if one in seen),
            declined=_spelled(one for one in unseen if one in refused),
            missing=_spelled(one for one in unseen if one not in refused),
        )


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


def _pairs_of(project: Project, *, small: bool) -> Callable[[str], Collection[Pair]]:
    """Return a function that lists the pairs of an op's combinations, whatever a kernel takes."""

    def pairs(name: str) -> Collection[Pair]:
        op = project.op(name)
        with suppress(UsageError):  # of a file of cases to which no kernel has come with all of its inputs
            groups = project.groups(name, frozenset((*op.inputs, *op.params)), small=small)
            return pairs_of(group.combination for group in groups)
        return ()

    return functools.cache(pairs)


def _spelled(features: Iterable[Feature]) -> tuple[str, ...]:
    return tuple("none" if one.option is None else str(one.option) for one in features)


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
) -> Run:
    """Assemble the run, with results in the order of the plan; of an interrupted run, as many as there are.

    The power of an interrupted run is not computed: it takes long and could not be relied on. An interruption from the
    keyboard while it is computed interrupts the run. What workers know of contracts that can be told apart is `known`,
    and which branches each kernel took in each item `taken`.
    """
    left = [(case, process.stop) for process in ended for case in process.under_way]
    results = _in_order([*recorded, *(case.errored for case, _ in left if case.died)], ended)
    given_up = [_of_given_up(key, reason) for process in ended for key, reason in process.given_up.items()]
    rest = {key: cases for process in ended for key, cases in process.rest.items()}
    told = {(r.kernel, r.device, r.group) for r in results} | rest.keys()
    missing = [n for process in ended for n in _missing(process, told | process.given_up.keys())]
    with listening(Clock()) as clock:
        try:
            project = open_project(config)
            power = () if interrupted else power_of(results, project, Separable(known))
            undecidable = () if interrupted else undecidable_of(results, project)
        except KeyboardInterrupt:
            power, undecidable, interrupted = (), (), True
    planned = [item for process in ended for item in process.items]
    run = Run(
        results=tuple(results),
        broken=INTERRUPTED if interrupted else "; ".join(_broken(ended, missing, given_up)),
        power=power,
        undecidable=undecidable,
        not_run=(
            *_of_failed(ended, rest),  # first, since it is why a reader of a red run misses cases
            *_left_out(ended),
            *(case.not_run(stop) for case, stop in left if not case.died),
            *given_up,
            *missing,
        ),
        agreement=agreement_of(results),
        environment=environment,
        spent=Spent(clock.seconds) + spent,
        coverage=(
            *combined(planned, results, _pairs_of(project, small=config.small)),
            *coverage_of(planned, results),
        ),
    )
    decides = config.strict and not config.lines  # who gives lines asks about these alone
    places = {kernel: place for place, kernel in enumerate(dict.fromkeys(item.kernel for item in planned))}
    branches = merged(sorted(taken, key=lambda one: places[one[0]]))
    return replace(run, unreached=unreached(branches, run.judged_cases, decides=decides))


def _in_order(results: Iterable[CaseResult], processes: Iterable[Ended]) -> list[CaseResult]:
    """Sort results by the plans' items, whichever worker had them when; results of one item keep their order."""
    keys = [(item.device, item.kernel, item.group) for process in processes for item in process.items]
    places = {key: place for place, key in enumerate(keys)}
    return sorted(results, key=lambda result: places.get((result.device, result.kernel, result.group), len(places)))


def _left_out(processes: Sequence[Ended]) -> Iterator[NotRun]:
    """Yield everything left out of the plans, and the cases that a failure kept from running if it stopped pytest."""
    if any(process.stop == STOPPED for process in processes):
        yield NotRun("what came after the first failure", STOPPED)
    for process in processes:
        yield from process.not_run


def _broken(processes: Iterable[Ended], missing: Iterable[NotRun], given_up: Iterable[NotRun]) -> Iterator[str]:
    """Yield the reasons for which the run is incomplete."""
    for process in processes:
        if process.stop not in ("", STOPPED):
            yield f"{process.stop}; see {process.log}"
    for lost in given_up:
        yield f"{lost.what}: {lost.reason}"
    if unknown := [n.what for n in missing if n.reason.startswith(UNKNOWN)]:
        yield f"no result of {', '.join(unknown)} was recorded"


def _of_failed(processes: Iterable[Ended], rest: Mapping[Key, int]) -> Iterator[NotRun]:
    """Yield the number of cases that failed kernels did not run, for each kernel and device."""
    for kernel, device in dict.fromkeys((item.kernel, item.device) for process in processes for item in process.items):
        if cases := sum(count for key, count in rest.items() if key[:2] == (kernel, device)):
            yield NotRun(f"{kernel} on {device}, {cases:,} more case{'s' * (cases > 1)}", HAS_FAILED, kernel, device)


def _of_given_up(key: Key, reason: str) -> NotRun:
    kernel, device, group = key
    return NotRun(f"{kernel} on {device}, the rest of group {group}", reason, kernel, device)


def _missing(process: Ended, told: Collection[Key]) -> Iterator[NotRun]:
    """Yield the planned items without a result, for each kernel, device and reason."""
    lacking: dict[tuple[str, str, str], list[str]] = {}
    for item in process.items:
        if (item.kernel, item.device, item.group) not in told:
            reason = _reason(item, process)
            lacking.setdefault((item.kernel, item.device, reason), []).append(item.group)
    planned = [(item.kernel, item.device) for item in process.items]
    for (kernel, device, reason), groups in lacking.items():
        whole = len(groups) == planned.count((kernel, device))
        of = "" if whole else f", {_listed(groups)}"
        yield NotRun(f"{kernel} on {device}{of}", reason, kernel, device)


def _reason(item: Planned, process: Ended) -> str:
    """Return the reason for which an item has no result."""
    if not item.cases:
        return NO_CASES
    if process.selected is not None and item.id not in process.selected:
        return DESELECTED
    return process.stop or f"{UNKNOWN}; see {process.log}"


def _listed(groups: Sequence[str]) -> str:
    rest = len(groups) - _MOST_GROUPS
    names = ", ".join(groups[:_MOST_GROUPS])
    return f"group{'s' * (len(groups) > 1)} {names}{f' and {rest} more' if rest > 0 else ''}"
