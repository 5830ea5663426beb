"""Differences between the results of two calls of a kernel on the same values, and the reference's objections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from lastbit.errors import KernelError, UsageError
from lastbit.inputs import Poison, differences, unequal
from lastbit.judging.judge import judge
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel
from lastbit.result import Finding
from lastbit.timing import GUARDS, REST, timed
from lastbit.verify.calls import Call

_UNGUARDED = "between two calls on the same values, of which one was not guarded and had its inputs where others lay"


@timed(GUARDS)
def apart(first: Call, second: Call, names: Iterable[str]) -> list[str]:
    """Return which of the named stages differ in kind, device or a bit, where both calls gave them.

    Results without memory never differ.
    """
    a, b = first.actual, second.actual
    names = [name for name in dict.fromkeys(names) if name in a and name in b and not a[name].is_meta]
    alike = [n for n in names if not another_kind(a[n], b[n]) and a[n].device == b[n].device]
    differing = dict(zip(alike, unequal([(a[name], b[name]) for name in alike]), strict=True))
    return [name for name in names if differing.get(name, True)]


def another_kind(a: Tensor, b: Tensor) -> bool:
    """Return whether shape or dtype differ."""
    return a.shape != b.shape or a.dtype != b.dtype


def guard_dependent(
    kernel: Kernel, guarded: Call, unguarded: Call, problem: Callable[[], Problem]
) -> Iterator[Finding]:
    """Yield findings for results that differ when torch's allocations are not guarded.

    Bits of results that are `unordered` may differ, so the reference is asked about these: `problem` gives it.
    """
    names = apart(guarded, unguarded, guarded.results)
    for name in names:
        a, b = guarded.actual[name], unguarded.actual[name]
        if another_kind(a, b):
            yield Finding("guards", name, f"{name} has another shape or dtype {_UNGUARDED}.")
        elif name not in kernel.unordered:
            changed = differences(a, b, Poison(), Poison()).changed
            yield Finding("guards", name, f"{changed:,} of {a.numel():,} elements of {name} differ {_UNGUARDED}.")
    if not set(names).isdisjoint(kernel.unordered):
        yield from forbidden(problem(), unguarded.actual, "guards", _UNGUARDED)


def forbidden(problem: Problem, actual: Mapping[str, Tensor], kind: str, where: str) -> Iterator[Finding]:
    """Judge results by the reference and yield the faults; nothing if the op is undefined for the values."""
    try:
        with timed(REST):
            judgement = judge(problem, actual, alternatives=False)
    except UsageError:
        return
    except KernelError as error:
        yield Finding(kind, "", f"{where}: {error}")
        return
    for finding in judgement.faults:
        yield Finding(kind, finding.stage, f"{where}: {finding.sentence}")
