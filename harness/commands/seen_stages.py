"""The stages of kernels that declare none, as they are seen in a case of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from lastbit.case import Case, parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.trace import stages_in_sight
from lastbit.dtypes import BY_NAME
from lastbit.errors import LastbitError
from lastbit.kernel import REVISION_MARK
from lastbit.reports.progress import doing
from lastbit.reports.summary import plural
from lastbit.reports.why import KernelTrace
from lastbit.result import CaseResult, Verdict
from lastbit.run import Run
from lastbit.verify.worker import Worker, planned

SECONDS = 30.0
"""In which the stages of all kernels are looked for."""

LEAST, MOST = 64, 1 << 16
"""Elements of the first input of a case on which stages are looked for: enough to say something, and soon traced."""

ORDINARY = frozenset({"normal", "uniform", "gates", "fan_in", "scale_random"})
"""Regimes whose values are neither extreme nor made for exact sums."""

DEVICE = "cpu"


def ordinary_of(run: Run) -> list[CaseResult]:
    """Choose the cases in which stages are looked for: of the ordinary ones that a kernel passed on the CPU, one for
    each dtype of the first input of its op, with the fewest parameters and then the fewest elements.

    Kernels with a visible stage other than results are left out.
    """
    showing = {result.kernel for result in run.results if any(not stage.result for stage in result.stages)}
    found: dict[tuple[str, str], list[tuple[int, int, str, CaseResult]]] = {}
    for result in run.results:
        own = result.kernel not in showing and REVISION_MARK not in result.kernel
        if own and result.device == DEVICE and result.counted and result.verdict is Verdict.PASSED:
            case = parse_case(result.case)
            if is_ordinary(case):
                first = case.tensors[0]
                entry = len(case.params), first.numel, result.case, result
                found.setdefault((result.kernel, first.dtype), []).append(entry)
    return [min(entries, key=lambda entry: entry[:3])[3] for entries in found.values()]


def is_ordinary(case: Case) -> bool:
    """Check whether a case has contiguous tensors and ordinary numbers, neither few nor very many."""
    first, *_ = case.tensors
    contiguous = all(t.strides is None and not t.offset and not t.device for t in case.tensors)
    numbers = [t for t in case.tensors if BY_NAME[t.dtype].floating]
    return (
        contiguous and first in numbers and LEAST <= first.numel <= MOST and all(t.regime in ORDINARY for t in numbers)
    )


def traced(
    config: Config,
    passed: Sequence[CaseResult],
    *,
    worker: Callable[..., Worker] = Worker,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[KernelTrace]:
    """Yield the stages that are found in these cases; nothing for a kernel whose stages cannot be seen."""
    if not passed:
        return
    what = f"looking for the stages of {plural(len({result.kernel for result in passed}), 'kernel')}"
    own = replace(config, device_plan=DevicePlan((DEVICE,), ("of the run",)))
    with doing(what), worker(own) as process, suppress(LastbitError):
        process.do(planned)  # it has started when the clock begins to run
        latest = clock() + SECONDS
        for result in passed:
            if clock() < latest:
                yield from _stages(process, result)


def _stages(process: Worker, result: CaseResult) -> Iterator[KernelTrace]:
    with suppress(LastbitError):
        trace = process.do(stages_in_sight, result.kernel, result.case)
        if trace.stages:
            yield trace
