"""Repeated calls of a kernel in a case, and the results in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from lastbit.errors import KernelError, UnsupportedCase
from lastbit.inputs import Inputs, differences, refilled
from lastbit.kernel import Kernel
from lastbit.result import Finding
from lastbit.timing import GUARDS, timed
from lastbit.verify.apart import another_kind, apart, guard_dependent
from lastbit.verify.calls import Call, Caller
from lastbit.verify.memory import LATER
from lastbit.verify.other_values import OtherValues, ProblemOf, call_elsewhere, call_mixed, is_harmless


@dataclass(frozen=True)
class Calls:
    """The first and last call of a kernel in a case, and the findings of those between.

    Attributes:
        kernel: the kernel.
        first, last: on the inputs of the case; the last one under another poison, with stages, in descending order. A
            result that is the same in both is held once.
        apart: results that differ between these two.
        other: a call with other values of the same shapes, between these two.
        unguarded: one on the values of the case after that, where the other ones lay, without guards on allocations.
    """

    kernel: Kernel
    first: Call
    last: Call
    apart: frozenset[str]
    other: OtherValues | None = None
    unguarded: Unguarded | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield the kernel's faults in each call, and contradictions between its calls."""
        same = [call for call in (self.first, self.unguarded, self.last) if call is not None]
        known = dict.fromkeys(finding for call in same for finding in call.findings)
        yield from known
        if self.other is not None:
            yield from self.other.located([finding for finding in self.other.findings if finding not in known])
            yield from self.other.mixed
        unsteady = list(unstable(self.kernel, self.first, self.last, self.apart))
        yield from unsteady
        told = {finding.stage for finding in unsteady}
        if self.unguarded is not None:
            own = [finding for finding in self.unguarded.apart if finding.stage not in told]
            yield from own
            told.update(finding.stage for finding in own)
        if self.other is not None:
            yield from self.other.located([finding for finding in self.other.apart if finding.stage not in told])


@dataclass(frozen=True)
class Unguarded:
    """A call without guards on allocations: its findings, and how its results differ from a guarded call's."""

    findings: tuple[Finding, ...]
    apart: tuple[Finding, ...]


@timed(GUARDS)
def make_calls(caller: Caller, inputs: Inputs, problem_of: ProblemOf, *, repeat: bool) -> Calls:
    """Call the kernel on `inputs` twice, or with `repeat` five times; one that writes outside keeps its guards."""
    first = caller.guarded(inputs).kept()
    caller = caller.after(first)
    with _later():
        other = call_elsewhere(caller, inputs.case, problem_of) if repeat else None
        harmless = is_harmless([*first.findings, *(other.findings if other else ())])
        if other and harmless and not other.forbidden:
            other = call_mixed(caller, inputs.case, other, problem_of, first.findings)
            harmless = is_harmless(other.mixed)
        unguarded = (
            _unguarded(caller, _where_others_lay(inputs, other), first, problem_of) if repeat and harmless else None
        )
        other = other and replace(other, guards=())
        last = caller.last(inputs)
    differing = apart(first, last, (*first.results, *caller.kernel.unordered))
    once = {n: first.actual[n] if n in first.results and n not in differing else t for n, t in last.actual.items()}
    last = replace(last, actual=once)
    return Calls(caller.kernel, replace(first, own={}), last, frozenset(differing), other, unguarded)


def _where_others_lay(inputs: Inputs, other: OtherValues | None) -> Inputs:
    """Put the inputs where others lay, so that anything a kernel has kept by an input's address is stale."""
    return refilled(other.guards, inputs.case) if other else inputs


@contextmanager
def _later() -> Iterator[None]:
    """Guard later calls: declining a case that was taken is a fault, and other errors get a note."""
    try:
        yield
    except UnsupportedCase as error:
        raise KernelError(f"the kernel took the case and declined it in a later call: {error}") from error
    except Exception as error:
        error.add_note(LATER)
        raise


def _unguarded(caller: Caller, inputs: Inputs, first: Call, problem_of: ProblemOf) -> Unguarded:
    call = caller.unguarded(inputs)
    found = guard_dependent(caller.kernel, first, call, partial(problem_of, inputs))
    return Unguarded(call.findings, tuple(found))


def unstable(kernel: Kernel, first: Call, last: Call, apart: Iterable[str]) -> Iterator[Finding]:
    """Yield findings for results that were not written, or whose bits differ between the first and the last call.

    `apart` names the results that differ. Results that are `unordered` may differ in bits.
    """
    for name in (name for name in first.results if name in apart):
        a, b = first.actual[name], last.actual[name]
        if another_kind(a, b):
            yield Finding("nondeterministic", name, f"{name} has another shape or dtype in a second call.")
            continue
        found = differences(a, b, first.poison[name], last.poison[name])
        share = f"of {a.numel():,} elements of {name} were"
        if found.unwritten:
            yield Finding("unwritten", name, f"{found.unwritten:,} {share} never written.")
        if found.uninitialised:
            sentence = f"{found.uninitialised:,} {share} computed from memory that was never written."
            yield Finding("uninitialised", name, sentence)
        changed = found.changed - found.unwritten - found.uninitialised
        if changed > 0 and name not in kernel.unordered:
            sentence = (
                f"{changed:,} of {a.numel():,} elements of {name} differ between two calls on the same input; the "
                f"second {_otherwise(kernel, last)}."
            )
            yield Finding("nondeterministic", name, sentence)


def _otherwise(kernel: Kernel, last: Call) -> str:
    """Describe the conditions of the last call that were different."""
    ways = ["found other bits in uninitialised memory"]
    ways += ["ran its programs in descending order"] if last.descended else []
    ways += ["stored the declared stages"] if kernel.stages else []
    return " and ".join(filter(None, [", ".join(ways[:-1]), ways[-1]]))
