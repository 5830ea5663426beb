"""What `lastbit explain` found: the line that is wrong, arithmetic to check by hand, and what the errors look like."""

from __future__ import annotations

from dataclasses import dataclass

from harness.outcomes.trace import KernelTrace, Step
from harness.result import Verdict


@dataclass(frozen=True)
class Explanation:
    """Why a kernel fails on a case.

    Attributes:
        trace: the way of the worst element, its stages and culprits. Of a kernel on an accelerator it is that of the
            same case on the CPU.
        diagnoses: sentences about the pattern of the errors, those that explain most first.
        smallest: the smallest case found that fails in the same way, with its values in the line; empty if none was.
        test: a test to paste, which fails on that case.
        reason: why there is less than one could expect; empty if nothing is missing.
    """

    kernel: str
    device: str
    case: str
    verdict: Verdict
    trace: KernelTrace
    diagnoses: tuple[str, ...] = ()
    smallest: str = ""
    test: str = ""
    reason: str = ""

    @property
    def culprit(self) -> Step | None:
        """The likeliest place of the mistake."""
        return next(iter(self.trace.culprits), None)
