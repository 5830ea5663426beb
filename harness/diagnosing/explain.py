"""Why a kernel fails on a case: the line, the arithmetic of the worst element, and what the errors look like."""

from __future__ import annotations

import math
from functools import cached_property
from types import TracebackType

from harness.config import Config
from harness.diagnosing.trace import trace_kernel
from harness.outcomes.explanation import Explanation
from harness.outcomes.trace import KernelTrace
from harness.result import Verdict
from harness.verify.inprocess import planned
from harness.verify.plan import Planned
from harness.verify.worker import Worker, WorkerEnded


class Explainer:
    """Explains failures of kernels, in a process of its own.

    `config` names one device and holds the lines of the cases that are to be explained.
    """

    def __init__(self, config: Config) -> None:
        self._worker = Worker(config)

    def __enter__(self) -> Explainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.__exit__(kind, error, trace)

    @cached_property
    def planned(self) -> tuple[Planned, ...]:
        """The kernels that there are for the case lines."""
        return self._worker.do(planned)

    def explain(self, kernel: str, line: str, *, seconds: float = math.inf) -> Explanation:
        """Why a kernel fails on a case line; with the reason if it ends its process."""
        item = next(item for item in self.planned if item.kernel == kernel)
        try:
            trace = self._worker.do(trace_kernel, kernel, line)
        except WorkerEnded as ended:
            names = item.kernel, item.op, item.contract, line, item.device
            trace = KernelTrace(*names, verdict=Verdict.ERRORED, reason=str(ended))
        return Explanation(kernel, item.device, line, trace.verdict, trace)
