"""The calls of a kernel in a case: how each is made, which faults it shows, and what the calls say about each other.

Each call has its arguments, its results, and its breaches of the rules, such as writes outside. Calls with other values
of the same shapes are judged at once, so that nothing of them is held for long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lastbit.calling.performing import INPUT, Attempt, CallRequest, Performed, perform, results_of
from lastbit.calling.process_state import left_by_loading
from lastbit.case import Case
from lastbit.errors import KernelError, UnsupportedCase, UsageError
from lastbit.inputs import Inputs, Poison, build, differences, refilled, unequal, violations
from lastbit.inputs.guards import Guarded
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.result import Finding
from lastbit.shadows.following import Followed, follow
from lastbit.takes import beyond
from lastbit.timing import GUARDS, REST, timed
from lastbit.verify import placed
from lastbit.verify.device_memory import LATER

if TYPE_CHECKING:
    from lastbit.isolation.isolated import Isolated


@dataclass(frozen=True)
class Here:
    """Performs the calls of a kernel in this process, as `Isolated` does in processes of its own.

    Both raise the kernel's exceptions and `KernelError`.

    Attributes:
        kernel, device: what is called, and where it runs.
        held: results of an earlier call, whose memory is not the kernel's any more.
        parted: calls without guards on allocations run in another process than those with guards.
        over: no call can be performed any more.
    """

    kernel: Kernel
    device: torch.device
    held: Mapping[str, Tensor] = field(default_factory=dict)
    parted = over = False

    def perform(self, inputs: Inputs, asked: CallRequest) -> Performed:
        """Call the kernel on inputs, whose memory it gets."""
        return perform(self.kernel.call, inputs.guards, asked, self.device, self.held)

    def attempt(self, inputs: Inputs, asked: CallRequest, device: torch.device | None) -> Attempt:
        """Call the kernel on inputs on any device, or on copies of all of them on one."""
        return placed.in_this_process(partial(results_of, self.kernel.call, asked, self.device))(inputs, device)

    def follow(
        self,
        inputs: Inputs,
        params: Mapping[str, Any],
        results: Mapping[str, tuple[int, ...]],
        constants: Sequence[float],
    ) -> Followed:
        """Call the kernel once more and follow it on residues; `results` maps floating-point results to shapes."""
        return follow(self.kernel, inputs.hand_out(), params, tuple(results), constants)

    def after(self, own: Mapping[str, Tensor]) -> Here:
        """Return the performer of later calls of a case; `own` are the results of the first call, made just before."""
        return replace(self, held=own)


@dataclass(frozen=True)
class Caller:
    """Calls a kernel; raises its exceptions, and `KernelError` if its results cannot be judged.

    Attributes:
        kernel, device: what is called, and where it runs.
        results: names of the results that it must return.
        may_return: names of those that it may leave out.
        performer: where it is called; in this process unless another one is given.
        shapes: stage → its shape, as far as somebody says.
        later: the first call of the case is over.
    """

    kernel: Kernel
    device: torch.device
    results: tuple[str, ...]
    may_return: tuple[str, ...] = ()
    performer: Here | Isolated | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    later: bool = False

    def guarded(self, inputs: Inputs) -> Performed:
        """Call the kernel with guarded allocations, under the first poison."""
        return self._called(inputs, self._asked(inputs, poison=0))

    def unguarded(self, inputs: Inputs, replaced: str = "", threaded: bool = False) -> Performed:
        """Call the kernel with allocations as without lastbit: writes outside may spoil the process.

        In a process of its own an operator of torch can be `replaced` meanwhile, and the call `threaded`: made in a
        thread of its own, while torch has two on the CPU.
        """
        return self._called(inputs, self._asked(inputs, replaced=replaced, threaded=threaded))

    @property
    def parted(self) -> bool:
        """Return whether calls without guards on allocations run in another process than those with guards."""
        return self._performer.parted

    def last(self, inputs: Inputs) -> Performed:
        """Call the kernel under the second poison, with its stages stored and its programs in descending order."""
        return self._called(inputs, self._asked(inputs, poison=1, stages=self.kernel.stages, descending=True))

    def attempt(self, inputs: Inputs, device: torch.device | None) -> Attempt:
        """Call the kernel on inputs on any device, or on copies of them on one: see `lastbit.verify.placed`."""
        return self._performer.attempt(inputs, self._asked(inputs), device)

    def after(self, first: Performed) -> Caller:
        """Return the caller for later calls of the same case, which must return the same results in other memory."""
        performer = self._performer.after(first.own)
        return replace(self, results=first.results, may_return=(), performer=performer, later=True)

    @property
    def _performer(self) -> Here | Isolated:
        return Here(self.kernel, self.device) if self.performer is None else self.performer

    def _asked(self, inputs: Inputs, **how: Any) -> CallRequest:
        return CallRequest(inputs.case.params, self.results, self.may_return, shapes=self.shapes, **how)

    def _called(self, inputs: Inputs, asked: CallRequest) -> Performed:
        performed = self._performer.perform(inputs, asked)
        mutates = [guard.name for guard in inputs.guards if guard.name in self.kernel.mutates]
        seen = [*performed.rebound, *violations([*inputs.checks(mutates), *performed.checks]), *performed.violations]
        actual = {n: t.clone() if n in performed.inside else t for n, t in performed.actual.items()}
        if seen or mutates:
            inputs.restore()
        findings = [*left_by_loading(self.kernel.arithmetic, self.kernel.source)]
        findings += [*seen, *performed.findings, *_overlaps(performed, mutates), *performed.reused]
        own = {} if self.later else performed.own
        return replace(performed, actual=actual, own=own, checks=(), findings=tuple(findings))


def _overlaps(performed: Performed, mutates: list[str]) -> Iterator[Finding]:
    """Yield results that share memory: with another one, with an input that is not overwritten, or among elements."""
    overwritten = {f"{INPUT}{name}" for name in mutates}
    for a, b in performed.shared:
        other = b in performed.results or b.startswith(INPUT)
        if a == b and a in performed.results:
            sentence = f"elements of result {a} share memory, as after expand; writing to one changes others."
            yield Finding("overlap", a, sentence)
        elif a in performed.results and other and b not in overwritten:
            sentence = f"result {a} shares memory with {b}; writing to one changes the other."
            yield Finding("overlap", a, sentence)


_UNGUARDED = "between two calls on the same values, of which one was not guarded and had its inputs where others lay"


@timed(GUARDS)
def apart(first: Performed, second: Performed, names: Iterable[str]) -> list[str]:
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
    kernel: Kernel, guarded: Performed, unguarded: Performed, problem: Callable[[], Problem]
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


ELSEWHERE = "with other values of the same shapes"
IN_A_THREAD = ", in a thread of its own, without gradients, where torch may have two threads"
_OF_NO_LINE = 1 << 62

ProblemOf = Callable[[Inputs], Problem]
"""What the kernel has to compute for inputs."""


@dataclass(frozen=True)
class OtherValues:
    """Findings of a call on inputs of the same shapes with other values.

    Attributes:
        case: what it was called on.
        guards: the allocations of its inputs, which a later call may get; empty where nobody needs them any more.
        findings: what the kernel did that it must not do.
        apart: how its results differ from those of a call that was not guarded.
        forbidden: what the reference says against its results.
        mixed: what the kernel did that it must not do where only some inputs were these, in a call that says where.
    """

    case: Case
    guards: tuple[Guarded, ...]
    findings: tuple[Finding, ...]
    apart: tuple[Finding, ...]
    forbidden: tuple[Finding, ...]
    mixed: tuple[Finding, ...] = ()

    def located(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Prefix the sentences of findings with the inputs they are about."""
        return (replace(f, sentence=f"{elsewhere(self.case)}: {f.sentence}") for f in findings)


def call_elsewhere(caller: Caller, case: Case, problem_of: ProblemOf) -> OtherValues | None:
    """Call the kernel on `case` with another seed and judge its results; None where the kernel declines the values."""
    case = replace(case, seed=(case.seed + 1) % 2**63)
    inputs = build(case, caller.device)
    try:
        call = caller.guarded(inputs)
        unseen = caller.unguarded(inputs) if caller.parted and is_harmless(call.findings) else None
    except UnsupportedCase:
        return None
    except Exception as error:
        error.add_note(elsewhere(case))
        raise
    problem = problem_of(inputs)
    guards = inputs.guards
    del inputs  # and the copy that the reference gets
    differing = () if unseen is None else tuple(guard_dependent(caller.kernel, call, unseen, lambda: problem))
    del unseen
    against = forbidden(problem, call.actual, "other_values", elsewhere(case))
    return OtherValues(case, guards, call.findings, differing, tuple(against))


def call_mixed(
    caller: Caller, case: Case, other: OtherValues, problem_of: ProblemOf, known: Sequence[Finding]
) -> OtherValues:
    """Call the kernel on the first input of `case` and the other inputs of `other`; return `other` with the findings.

    A kernel that keeps a result for some of its inputs, such as the weight, gives that of another call here. Where
    calls without guards have a process of their own, this one is made in a thread of its own, without gradients and
    with two threads of torch, as in a user's process, and an op with one input is called on that of `other`. All other
    calls have one thread: their bits are compared, and those of a sum may depend on it. Findings that are `known` are
    not told again.
    """
    first, *rest = (spec.name for spec in case.tensors)
    if not (other.guards and (rest or caller.parted)):
        return other
    where = f"{ELSEWHERE} for all inputs but {first}" if rest else ELSEWHERE
    where += IN_A_THREAD if caller.parted else ""
    where += f", in {case if rest else other.case}"
    named = replace(case, seed=case.seed ^ _OF_NO_LINE)  # the case of nothing else, among the problems that are kept
    inputs = replace(refilled(other.guards, case, [first] if rest else []), case=named)
    try:
        call = caller.unguarded(inputs, threaded=True) if caller.parted else caller.guarded(inputs)
    except UnsupportedCase:
        if caller.parted:  # a kernel could tell this call by its thread, and decline none but it
            raise
        return other
    except Exception as error:
        error.add_note(where)
        raise
    against = forbidden(problem_of(inputs), call.actual, "other_values", where)
    new = [found for found in call.findings if found not in (*known, *other.findings)]
    mixed = (replace(found, sentence=f"{where}: {found.sentence}") for found in new)
    return replace(other, forbidden=tuple(against), mixed=tuple(mixed))


_SMALL = 2.0**-6
"""What an eps or a least scale is below: a number beside which it would not be seen."""


def with_other_numbers(kernel: Kernel, case: Case) -> Case:
    """Return the case with other numbers for its parameters, as far as the kernel declares that it takes them.

    Small ones become a quarter, others a quarter of themselves: a scale, cap or limit then changes ordinary results,
    and so does an eps. What is 0, infinite, NaN, an integer or a word stays.
    """
    for name, value in case.params.items():
        if isinstance(value, float) and value and math.isfinite(value):
            number = math.copysign(0.25, value) if abs(value) < _SMALL else value / 4
            other = replace(case, params={**case.params, name: number})
            case = case if beyond(kernel.takes, other) else other
    return case


def call_renumbered(caller: Caller, inputs: Inputs, problem_of: ProblemOf) -> tuple[Finding, ...]:
    """Call the kernel on `inputs` with other numbers for its parameters; return what the reference says against it.

    A kernel that keeps what it was first passed with tensors of these shapes, such as eps, is wrong here. There is no
    finding where no number changes, the op is not defined for them, or the kernel raises: no case says that it must
    take them.
    """
    changed = replace(inputs, case=with_other_numbers(caller.kernel, inputs.case))
    if changed.case == inputs.case:
        return ()
    problem = problem_of(changed)
    try:
        given = replace(caller, results=tuple(problem.required), may_return=tuple(problem.may_return))
        call = given.guarded(changed)
    except Exception:
        inputs.restore()
        return ()
    before = inputs.case.params
    told = [
        f"{name}={value} (not {before[name]})" for name, value in changed.case.params.items() if value != before[name]
    ]
    where = f"in a later call, with the same tensors and {', '.join(told)}"
    return tuple(dict.fromkeys((*call.findings, *forbidden(problem, call.actual, "other_parameters", where))))


def call_unguarded(
    caller: Caller, inputs: Inputs, first: Performed, problem_of: ProblemOf
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Call the kernel without guards on allocations; return its findings, and how it differs from the first call."""
    call = caller.unguarded(inputs)
    return call.findings, tuple(guard_dependent(caller.kernel, first, call, partial(problem_of, inputs)))


def is_harmless(findings: Iterable[Finding]) -> bool:
    """Return whether no write outside was found; after one, calls without guards could spoil the process."""
    return all(finding.kind != "wrote_outside" for finding in findings)


def elsewhere(case: Case) -> str:
    """Describe a case with other values, for findings about it."""
    return f"{ELSEWHERE}, in {case}"


@dataclass(frozen=True)
class Calls:
    """The first and last call of a kernel in a case, and the findings of those between.

    Attributes:
        kernel: the kernel.
        first, last: on the inputs of the case; the last one under another poison, with stages, in descending order. A
            result that is the same in both is held once.
        apart: results that differ between these two.
        other: a call with other values of the same shapes, between these two.
        unguarded: findings of a call on the values of the case after that, where the other ones lay, without guards on
            allocations, and how its results differ from those of the first call.
        renumbered: what is wrong with one on the values of the case with other numbers for its parameters.
    """

    kernel: Kernel
    first: Performed
    last: Performed
    apart: frozenset[str]
    other: OtherValues | None = None
    unguarded: tuple[tuple[Finding, ...], tuple[Finding, ...]] = ((), ())
    renumbered: tuple[Finding, ...] = ()

    def findings(self) -> Iterator[Finding]:
        """Yield the kernel's faults in each call, and contradictions between its calls."""
        of_unguarded, unguarded_apart = self.unguarded
        known = dict.fromkeys([*self.first.findings, *of_unguarded, *self.last.findings])
        yield from known
        if self.other is not None:
            yield from self.other.located([finding for finding in self.other.findings if finding not in known])
            yield from self.other.mixed
        unsteady = list(unstable(self.kernel, self.first, self.last, self.apart))
        own = [finding for finding in unguarded_apart if finding.stage not in {found.stage for found in unsteady}]
        yield from (*unsteady, *own)
        if self.other is not None:
            told = {finding.stage for finding in (*unsteady, *own)}
            yield from self.other.located([finding for finding in self.other.apart if finding.stage not in told])


@timed(GUARDS)
def make_calls(caller: Caller, inputs: Inputs, problem_of: ProblemOf, *, repeat: bool, renumber: bool = False) -> Calls:
    """Call the kernel on `inputs` twice, or with `repeat` five times, and six times if it is to `renumber` parameters.

    A kernel that writes outside keeps its guards.

    Results of the first call are copied, because a later call could write to them. What a call shows is settled before
    the next one, for the sake of memory: beside what the kernel needs itself, a case holds four times its inputs and
    three times its results while it sees other values, then twice its inputs, three times its results and the stages.
    """
    first = caller.guarded(inputs).kept()
    caller = caller.after(first)
    with _later():
        other = call_elsewhere(caller, inputs.case, problem_of) if repeat else None
        harmless = is_harmless([*first.findings, *(other.findings if other else ())])
        if other and harmless and not other.forbidden:
            other = call_mixed(caller, inputs.case, other, problem_of, first.findings)
            harmless = is_harmless(other.mixed)
        # Where the others lay anything that a kernel has kept by an input's address is stale.
        there = refilled(other.guards, inputs.case) if repeat and harmless and other else inputs
        unguarded = call_unguarded(caller, there, first, problem_of) if repeat and harmless else ((), ())
        other = other and replace(other, guards=())
        del there
        sound = repeat and harmless and not (other and other.forbidden)
        renumbered = call_renumbered(caller, inputs, problem_of) if renumber and sound else ()
        last = caller.last(inputs)
    differing = apart(first, last, (*first.results, *caller.kernel.unordered))
    once = {n: first.actual[n] if n in first.results and n not in differing else t for n, t in last.actual.items()}
    last = replace(last, actual=once)
    return Calls(caller.kernel, replace(first, own={}), last, frozenset(differing), other, unguarded, renumbered)


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


def unstable(kernel: Kernel, first: Performed, last: Performed, apart: Iterable[str]) -> Iterator[Finding]:
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
            ways = ["found other bits in uninitialised memory"]
            ways += ["ran its programs in descending order"] if last.descended else []
            ways += ["stored the declared stages"] if kernel.stages else []
            sentence = (
                f"{changed:,} of {a.numel():,} elements of {name} differ between two calls on the same input; the "
                f"second {' and '.join(filter(None, [', '.join(ways[:-1]), ways[-1]]))}."
            )
            yield Finding("nondeterministic", name, sentence)
