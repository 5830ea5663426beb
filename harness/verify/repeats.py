"""The calls of a kernel in a case, and the results in which they differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.errors import KernelError, UnsupportedCase
from harness.inputs import Inputs, bits_of, build, unwritten
from harness.kernel import Kernel
from harness.result import Finding
from harness.timing import GUARDS, timed
from harness.verify.calls import Call, Caller
from harness.verify.memory import LATER

ELSEWHERE = "with other values of the same shapes"


@dataclass(frozen=True)
class Calls:
    """The calls of a kernel in a case.

    Attributes:
        kernel: the kernel.
        first, last: on the inputs of the case; the last one under another poison, with stages, in descending order.
        other: inputs of the same shapes with other values, and the call on them, between these two.
        unguarded: on the inputs of the case after that, without guards on allocations.
    """

    kernel: Kernel
    first: Call
    last: Call
    other: tuple[Inputs, Call] | None = None
    unguarded: Call | None = None

    def findings(self) -> Iterator[Finding]:
        """What the kernel did wrong in a call, and where its calls contradict each other."""
        same = [call for call in (self.first, self.unguarded, self.last) if call is not None]
        known = dict.fromkeys(finding for call in same for finding in call.findings)
        yield from known
        if self.other is not None:
            inputs, other = self.other
            new = (finding for finding in other.findings if finding not in known)
            yield from (replace(f, sentence=f"{elsewhere(inputs)}: {f.sentence}") for f in new)
        unsteady = list(unstable(self.kernel, self.first, self.last))
        yield from unsteady
        if self.unguarded is not None:
            apart = guard_dependent(self.kernel, self.first, self.unguarded)
            yield from (finding for finding in apart if finding.stage not in {f.stage for f in unsteady})


@timed(GUARDS)
def make_calls(caller: Caller, inputs: Inputs, *, repeat: bool) -> Calls:
    """Call the kernel on `inputs`: twice, or with `repeat` four times; one that writes outside keeps its guards."""
    first = caller.guarded(inputs)
    caller = replace(caller, held=first.own)
    with _later():
        other = _other(caller, inputs) if repeat else None
        seen = [*first.findings, *(other[1].findings if other else ())]
        harmless = all(finding.kind != "wrote_outside" for finding in seen)
        unguarded = caller.unguarded(inputs) if repeat and harmless else None
        return Calls(caller.kernel, first, caller.last(inputs), other, unguarded)


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


def _other(caller: Caller, inputs: Inputs) -> tuple[Inputs, Call] | None:
    """The call with other values; None where the kernel declines them."""
    case = inputs.case
    others = build(replace(case, seed=(case.seed + 1) % 2**63), caller.device)
    try:
        return others, caller.guarded(others)
    except UnsupportedCase:
        return None
    except Exception as error:
        error.add_note(elsewhere(others))
        raise


def elsewhere(inputs: Inputs) -> str:
    """Which inputs a finding is about that are not those of the case."""
    return f"{ELSEWHERE}, in {inputs.case}"


def unstable(kernel: Kernel, first: Call, last: Call) -> Iterator[Finding]:
    """Findings for results that were not written, or whose bits differ between the first and the last call.

    The bits of results that are `unordered` may differ.
    """
    for name in first.results:
        a, b = first.actual[name], last.actual[name]
        if _another_kind(a, b):
            yield Finding("nondeterministic", name, f"{name} has another shape or dtype in a second call.")
            continue
        poison = unwritten(first.poisoned[name], last.poisoned[name])
        blank, stale = int(poison.own.sum()), int(poison.other.sum())
        share = f"of {a.numel():,} elements of {name} were"
        if blank:
            yield Finding("unwritten", name, f"{blank:,} {share} never written.")
        if stale:
            yield Finding("uninitialised", name, f"{stale:,} {share} computed from memory that was never written.")
        changed = 0 if name in kernel.unordered else _changed(a, b) - blank - stale
        if changed > 0:
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


_UNGUARDED = "when torch's allocations are not guarded"


def guard_dependent(kernel: Kernel, guarded: Call, unguarded: Call) -> Iterator[Finding]:
    """Findings for results that differ when torch's allocations are not guarded, in bits unless `unordered`."""
    for name in guarded.results:
        a, b = guarded.actual[name], unguarded.actual[name]
        if _another_kind(a, b):
            yield Finding("guards", name, f"{name} has another shape or dtype {_UNGUARDED}.")
        elif name not in kernel.unordered and (changed := _changed(a, b)):
            yield Finding("guards", name, f"{changed:,} of {a.numel():,} elements of {name} differ {_UNGUARDED}.")


def differ(first: Call, second: Call, names: tuple[str, ...]) -> bool:
    """Whether any bit of the named stages differs, where both calls gave them."""
    a, b = first.actual, second.actual
    return any(_another_kind(a[n], b[n]) or _changed(a[n], b[n]) for n in names if n in a and n in b)


def _another_kind(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or a.dtype != b.dtype


@timed(GUARDS)
def _changed(a: Tensor, b: Tensor) -> int:
    """How many elements differ in bits; those of complex numbers, which no op has, count in parts."""
    x, y = (bits_of(torch.view_as_real(t) if t.is_complex() else t) for t in (a, b))
    return int((x != y).sum())
