"""The calls of a kernel in a case, and the results in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from harness.errors import KernelError, UnsupportedCase
from harness.inputs import Inputs, Poison, differences, refilled, unequal
from harness.kernel import Kernel
from harness.result import Finding
from harness.timing import GUARDS, timed
from harness.verify.calls import Call, Caller
from harness.verify.memory import LATER
from harness.verify.other_values import OtherValues, ProblemOf, call_elsewhere, elsewhere


@dataclass(frozen=True)
class Calls:
    """The calls of a kernel in a case; of those between the first and the last one, what they showed.

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
        """What the kernel did wrong in a call, and where its calls contradict each other."""
        same = [call for call in (self.first, self.unguarded, self.last) if call is not None]
        known = dict.fromkeys(finding for call in same for finding in call.findings)
        yield from known
        if self.other is not None:
            new = [finding for finding in self.other.findings if finding not in known]
            yield from (replace(f, sentence=f"{elsewhere(self.other.case)}: {f.sentence}") for f in new)
        unsteady = list(unstable(self.kernel, self.first, self.last, self.apart))
        yield from unsteady
        if self.unguarded is not None:
            yield from (f for f in self.unguarded.apart if f.stage not in {f.stage for f in unsteady})


@dataclass(frozen=True)
class Unguarded:
    """A call without guards on allocations: what it did that it must not do, and how its results differ."""

    findings: tuple[Finding, ...]
    apart: tuple[Finding, ...]


@timed(GUARDS)
def make_calls(caller: Caller, inputs: Inputs, problem_of: ProblemOf, *, repeat: bool) -> Calls:
    """Call the kernel on `inputs`: twice, or with `repeat` four times; one that writes outside keeps its guards."""
    first = caller.guarded(inputs).kept()
    caller = caller.after(first)
    with _later():
        other = call_elsewhere(caller, inputs.case, problem_of) if repeat else None
        seen = [*first.findings, *(other.findings if other else ())]
        harmless = all(finding.kind != "wrote_outside" for finding in seen)
        unguarded = _unguarded(caller, _where_others_lay(inputs, other), first) if repeat and harmless else None
        other = other and replace(other, guards=())
        last = caller.last(inputs)
    apart = _apart(first, last, (*first.results, *caller.kernel.unordered))
    once = {n: first.actual[n] if n in first.results and n not in apart else t for n, t in last.actual.items()}
    return Calls(caller.kernel, replace(first, own={}), replace(last, actual=once), frozenset(apart), other, unguarded)


def _where_others_lay(inputs: Inputs, other: OtherValues | None) -> Inputs:
    """The same values where others lay: what a kernel has kept by the address of an input is that of others."""
    return refilled(other.guards, inputs.case) if other else inputs


@contextmanager
def _later() -> Iterator[None]:
    """Calls after the first: a kernel must not decline what it took, and lastbit holds results of the others."""
    try:
        yield
    except UnsupportedCase as error:
        raise KernelError(f"the kernel took the case and declined it in a later call: {error}") from error
    except Exception as error:
        error.add_note(LATER)
        raise


def _unguarded(caller: Caller, inputs: Inputs, first: Call) -> Unguarded:
    call = caller.unguarded(inputs)
    return Unguarded(call.findings, tuple(guard_dependent(caller.kernel, first, call)))


def unstable(kernel: Kernel, first: Call, last: Call, apart: Iterable[str]) -> Iterator[Finding]:
    """Findings for results that were not written, or whose bits differ between the first and the last call.

    Those that differ are `apart`. The bits of results that are `unordered` may.
    """
    for name in (name for name in first.results if name in apart):
        a, b = first.actual[name], last.actual[name]
        if _another_kind(a, b):
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
    """What was another way in the last call."""
    ways = ["found other bits in uninitialised memory"]
    ways += ["ran its programs in descending order"] if last.descended else []
    ways += ["stored the declared stages"] if kernel.stages else []
    return " and ".join(filter(None, [", ".join(ways[:-1]), ways[-1]]))


_UNGUARDED = "when torch's allocations are not guarded and inputs lie where others lay"


def guard_dependent(kernel: Kernel, guarded: Call, unguarded: Call) -> Iterator[Finding]:
    """Findings for results that differ when torch's allocations are not guarded, in bits unless `unordered`."""
    for name in _apart(guarded, unguarded, guarded.results):
        a, b = guarded.actual[name], unguarded.actual[name]
        if _another_kind(a, b):
            yield Finding("guards", name, f"{name} has another shape or dtype {_UNGUARDED}.")
        elif name not in kernel.unordered:
            changed = differences(a, b, Poison(), Poison()).changed
            yield Finding("guards", name, f"{changed:,} of {a.numel():,} elements of {name} differ {_UNGUARDED}.")


@timed(GUARDS)
def _apart(first: Call, second: Call, names: Iterable[str]) -> list[str]:
    """Which of the named stages differ in kind, device or a bit, where both calls gave them; none without memory."""
    a, b = first.actual, second.actual
    names = [name for name in dict.fromkeys(names) if name in a and name in b and not a[name].is_meta]
    alike = [n for n in names if not _another_kind(a[n], b[n]) and a[n].device == b[n].device]
    differing = dict(zip(alike, unequal([(a[name], b[name]) for name in alike]), strict=True))
    return [name for name in names if differing.get(name, True)]


def _another_kind(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or a.dtype != b.dtype
