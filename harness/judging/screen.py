"""Blocks in which all numbers are expected to lie within their enclosures: most of a large case.

Each stage is compared as soon as the reference records it, and nothing of it is kept. The figures are asked for later:
the device compares one block while the host begins the next. A block in which an element lies outside has to be judged
in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lastbit.judging.compare import Begun, finished
from lastbit.judging.expected import Expected, RowSum
from lastbit.judging.latent import explain_rows
from lastbit.judging.observation import Observation
from lastbit.judging.tally import Tally
from lastbit.judging.trace import Trace
from lastbit.result import Comparison


@dataclass
class _Compared(Trace):
    """A trace that compares each recorded stage with the kernel's values.

    It keeps only sums over rows and the latent stages.
    """

    seen: Observation = field(kw_only=True)
    begun: dict[str, Begun | Comparison] = field(default_factory=dict)

    def record(self, name: str, expected: Expected) -> None:
        self.formats[name] = expected.format
        if isinstance(expected, RowSum) or name in self.seen.latent_stages:
            self.stages[name] = expected
        if not isinstance(expected, RowSum) and self.seen.says(name, expected):
            allowed = self.seen.as_given(name, expected, result=name in self.results)
            self.begun[name] = allowed.begin(self.seen.actual[name])


@dataclass(frozen=True, eq=False)
class Screened:
    """Some rows, but not all, that are being compared: from the inputs, and from the kernel's own earlier stages."""

    seen: Observation
    cumulative: _Compared
    isolated: _Compared

    @classmethod
    def begin(cls, seen: Observation) -> Screened:
        """Begin to compare; errors as of `Problem.evaluate`."""
        cumulative = isolated = _Compared(seen=seen)
        seen.problem.evaluate(trace=cumulative)
        if len(seen.actual) > 1:
            isolated = _Compared(seen=seen)
            seen.problem.evaluate(seen.actual, isolated)
        return cls(seen, cumulative, isolated)

    @property
    def tally(self) -> Tally:
        """The tally of these rows; the device is waited for. Rows are checked if no element lies outside."""
        traces = [self.cumulative, self.isolated]
        found = iter(finished([begun for trace in traces for begun in trace.begun.values()]))
        cumulative, isolated = ({name: self.seen.located(next(found)) for name in trace.begun} for trace in traces)
        tally = Tally(cumulative, isolated, self.cumulative.sums, self.isolated.sums)
        through = self.seen.through_latent(self.cumulative)
        if tally.failed or not any(self.seen.actual[name].numel() for name in through):
            return tally
        check = explain_rows(self.seen, self.cumulative).check
        return replace(tally, rows=check, in_rows=self.seen.in_rows(check, through))
