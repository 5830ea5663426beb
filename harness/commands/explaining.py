"""Why the kernels of a run fail: found when its results are there."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.explainer import Explainer
from lastbit.diagnosing.mends import LEAST as LEAST_WRONG
from lastbit.errors import LastbitError
from lastbit.judges.confined_explanations import ConfinedExplainer
from lastbit.kernel import REVISION_MARK
from lastbit.reports.progress import doing
from lastbit.reports.summary import KernelFailure, problems
from lastbit.reports.why import Explanation
from lastbit.result import OF_STAGES, CaseResult, Verdict
from lastbit.run import Run
from lastbit.verify.check import first_line

OF_A_RUN, OF_A_KERNEL = 60.0, 15.0
"""Seconds in which the failures of a run are explained: all of them, and those of one kernel on one device."""

Named = tuple[str, str, str]
"""Kernel, device and case of a result."""

# Arbitrary: an explanation takes seconds, and causes repeat among contracts and dtypes.
MOST_CAUSES = 3
"""Of a kernel on a device that are explained."""

NO_TIME = "there was no time left for it"
INTERRUPTED = "it was interrupted"


def with_explanations(config: Config, run: Run, *, elsewhere: Mapping[str, str] = MappingProxyType({})) -> Run:
    """Add to a run why its kernels fail, as far as time allows.

    Of a run whose kernels have processes of their own, failures are explained in confined ones. It changes no verdict
    and raises nothing: what goes wrong is the reason of an explanation. An interruption from the keyboard ends it, and
    the run has what was found until then. Devices that are not here, with the reason, are `elsewhere`.
    """
    all_failures = failures_of(run)
    failures = [failure for failure in all_failures if failure.device not in elsewhere]
    explaining = partial(explained, explainer=ConfinedExplainer) if config.isolate else explained
    explanations, ended = list[Explanation](), ""
    try:
        wider = wider_of(run, failures)
        passed = passed_of(run, failures)
        own = of_run(config, [*failures, *wider.values()])
        for explanation in explaining(own, failures, wider=wider, passed=passed):
            explanations.append(explanation)
    except KeyboardInterrupt:
        ended = INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        ended = _bug(error)
    explanations += [unexplained(failure, ended) for failure in failures[len(explanations) :]]
    explanations += [unexplained(f, elsewhere[f.device]) for f in all_failures if f.device in elsewhere]
    return replace(run, explanations=tuple(explanations))


def of_run(config: Config, results: Sequence[CaseResult]) -> Config:
    """Restrict the configuration to the cases and kernels of some results, without revisions."""
    kernels = tuple(dict.fromkeys(result.kernel for result in results))
    lines = tuple(dict.fromkeys(result.case for result in results))
    return replace(config, ops=(), kernels=kernels, lines=lines, revisions={}, timeout=OF_A_KERNEL)


def failures_of(run: Run) -> list[CaseResult]:
    """Choose the failures to explain: the smallest failing case of each kernel's problem of values on a device.

    There are `MOST_CAUSES` of them at most, and the first of each kernel comes before any second.
    """
    found, counts = list[CaseResult](), Counter[tuple[str, str]]()
    for problem, device, bad in _of_values(run):
        smallest = replace(problem, bad=bad).smallest
        counts[smallest.kernel, device] += 1
        if counts[smallest.kernel, device] <= MOST_CAUSES:
            found.append(smallest)
    return sorted(found, key=lambda result: result.device)


def wider_of(run: Run, failures: Sequence[CaseResult]) -> dict[Named, CaseResult]:
    """Map each failure to the smallest case of the same problem with enough wrong elements to name a line."""
    found: dict[Named, CaseResult] = {}
    for problem, _, bad in _of_values(run):
        own = [failure for failure in failures if any(failure is result for result in bad)]
        many = tuple(r for r in bad if r.failing_stage and r.failing_stage.cumulative.outside >= LEAST_WRONG)
        found |= {_named(failure): replace(problem, bad=many).smallest for failure in own if many}
    return found


def _of_values(run: Run) -> Iterator[tuple[KernelFailure, str, tuple[CaseResult, ...]]]:
    """Yield each problem with each device on which values of this revision are wrong, and the results that say so."""
    for problem in problems(run):
        wrong = [r for r in problem.bad if r.verdict is Verdict.FAILED and REVISION_MARK not in r.kernel]
        wrong = [r for r in wrong if any(finding.kind in OF_STAGES for finding in r.faults)]
        for device in dict.fromkeys(result.device for result in wrong):
            yield problem, device, tuple(result for result in wrong if result.device == device)


def passed_of(run: Run, failures: Sequence[CaseResult]) -> dict[tuple[str, str], list[str]]:
    """Map the kernel and device of each failure to the cases that passed."""
    found: dict[tuple[str, str], list[str]] = {(failure.kernel, failure.device): [] for failure in failures}
    for result in run.results:
        if result.verdict is Verdict.PASSED and (result.kernel, result.device) in found:
            found[result.kernel, result.device].append(result.case)
    return found


def _named(result: CaseResult) -> Named:
    return result.kernel, result.device, result.case


def explained(
    config: Config,
    failures: Sequence[CaseResult],
    *,
    wider: Mapping[Named, CaseResult] = MappingProxyType({}),
    passed: Mapping[tuple[str, str], Sequence[str]] = MappingProxyType({}),
    explainer: Callable[[Config], Explainer | ConfinedExplainer] = Explainer,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Explanation]:
    """Explain each of the failures, in their order; those for which there is no time say so.

    Where no line is sure, that is asked of the case that is `wider`, too, and branches are compared with those of the
    cases of the kernel on the device that `passed`.
    """
    latest = clock() + OF_A_RUN
    for device, group in groupby(failures, key=lambda failure: failure.device):
        own = replace(config, device_plan=DevicePlan((device,), ("of the run",)))
        with explainer(own) as process:
            for failure in group:
                with doing(f"explaining {failure.kernel} on {device}"):
                    others = passed.get((failure.kernel, device), ())
                    found = _explained(process, failure, lambda: latest - clock(), others)
                    more = wider.get(_named(failure), failure)
                    if found.worst and found.culprit is None and more is not failure and latest > clock():
                        again = _explained(process, more, lambda: latest - clock())
                        found = found if again.culprit is None else again
                yield found


def _explained(
    process: Explainer | ConfinedExplainer,
    failure: CaseResult,
    left: Callable[[], float],
    passed: Sequence[str] = (),
) -> Explanation:
    """Explain a failure within the seconds that are left; the process starts before a kernel's time begins."""
    if left() <= 0:
        return unexplained(failure, NO_TIME)
    try:
        if all(item.kernel != failure.kernel for item in process.planned):
            return unexplained(failure, "the kernel is not there any more")
        seconds = max(0.0, min(left(), OF_A_KERNEL))
        found = process.explain(failure.kernel, failure.case, seconds=seconds, passed=passed)
    except LastbitError as error:
        return unexplained(failure, str(error))
    except Exception as error:
        return unexplained(failure, _bug(error))
    if found.verdict is failure.verdict:
        return found.without_vain_test
    if found.verdict is Verdict.PASSED:
        otherwise = "it passed when it was run again: what it gives is not the same each time"
    else:
        otherwise = f"it gave nothing to compare when it was run again: {found.reason or found.verdict}"
    return unexplained(failure, otherwise)


def _bug(error: Exception) -> str:
    return f"this is a bug of lastbit: {first_line(error)}"


def unexplained(failure: CaseResult, reason: str) -> Explanation:
    """Make an empty explanation that carries the reason why there is none."""
    names = failure.kernel, failure.op, failure.contract, failure.case, failure.device
    return Explanation.of_nothing(*names, verdict=failure.verdict, reason=reason)
