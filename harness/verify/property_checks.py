"""Properties of a kernel's bits on a case: whether they depend on something they need not depend on, and on which cases
that is asked, also for ops without a group of such cases.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from lastbit.case import Case, Group
from lastbit.devices import made_current
from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.inputs import Inputs, build
from lastbit.invariance.properties import properties_of, result_of
from lastbit.invariance.property import Anew, Basis, Property
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.relations import Independent, Tensors
from lastbit.result import BAD, TURNED_DOWN, CaseResult, Finding, Verdict
from lastbit.takes import beyond
from lastbit.timing import PROPERTIES, timed
from lastbit.verify.case_calls import Caller
from lastbit.verify.check import Subject, after_raising, unsupported
from lastbit.verify.device_memory import is_lost
from lastbit.verify.drawing import draw

NAME = "properties"
"""Name of the group that is made for such an op."""

_ORDINARY = ("normal", "contiguous")  # a regime, a layout
# Arbitrary: more are drawn for nothing, fewer may all have few rows.
_DRAWN = 8  # cases of a group, among which one has many rows


def asked_cases(subject: Subject, groups: Sequence[Group], *, count: int = 0, seed: int = 0) -> list[Case]:
    """Return the cases for properties: of groups made for them, or the most ordinary ones of all groups."""
    own = [group for group in groups if group.properties] or [ordinary_group(subject, groups)]
    cases = dict.fromkeys(case for group in own for case in draw(group, count, seed))
    return [case for case in cases if not unsupported(subject.kernel, case)]


def ordinary_group(subject: Subject, groups: Iterable[Group]) -> Group:
    """Return a group of the most ordinary cases that the kernel takes, with the most rows.

    There is one per dtype of the op's first tensor.
    """
    best: dict[str, Case] = {}
    for case in (case for group in groups for case in _drawn(group)):
        if not case.displaced and not unsupported(subject.kernel, case):
            dtype = case[subject.op.inputs[0]].dtype
            best[dtype] = max(best.get(dtype, case), case, key=lambda case: _rank(subject, case))
    return Group(NAME, examples=tuple(best.values()), properties=True)


def _drawn(group: Group) -> Iterator[Case]:
    """Draw cases of a group, with ordinary values and layouts where it can choose them."""
    if group.choices and group.strategy is not None:
        chosen = {}
        for choice, options in group.choices.items():
            chosen[choice] = next((option for option in _ORDINARY if option in options), options[0])
        group = replace(group, designed=(chosen,) * _DRAWN, drawn=0)
    yield from draw(group, _DRAWN)


def _rank(subject: Subject, case: Case) -> tuple[int, int]:
    """Return a sort key: the number of ordinary tensors, then of rows."""
    ordinary = sum(t.regime in _ORDINARY and t.strides is None and not t.offset for t in case.tensors)
    main = case[subject.op.inputs[0]]
    return ordinary - len(case.tensors), math.prod(main.shape[:-1])


_VERDICTS = {PropertyOutcome.BROKEN: Verdict.FAILED, PropertyOutcome.ERRORED: Verdict.ERRORED}


def in_a_run(subject: Subject) -> tuple[str, ...]:
    """Return the properties that `lastbit verify` asks: those that the kernel declares, and all quick ones."""
    known = properties_of(subject.op)
    return tuple(name for name, one in known.items() if one.quick or name in subject.kernel.invariant)


def with_properties(
    subject: Subject,
    case: Case,
    result: CaseResult,
    names: Collection[str] = (),
    begins: Callable[[], object] = lambda: None,
) -> CaseResult:
    """Add the outcomes of a case's properties to its result; a broken one fails it if the kernel declares it.

    The properties in `names` are asked, by default those of a run; `begins` is called before each to restart the clock.
    A case that has failed before is not asked. An exception of the kernel becomes the outcome of the case.
    """
    if result.verdict in BAD | TURNED_DOWN:
        return result
    start = time.perf_counter()
    try:
        found = properties_on(subject, case, names or in_a_run(subject), begins=begins)
        if is_lost(subject.device):
            raise LastbitError("the device cannot be used any more after calls that look for properties")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the kernel's own code runs here
        result, raised = after_raising(subject, result, error)
        print(raised, end="", file=sys.stderr)
    else:
        findings = tuple(findings_of(found))
        verdict = Verdict.worst(result.verdict, *(_VERDICTS[one.outcome] for one in found if one.fails))
        errored = [sentence_of(one) for one in found if one.fails and one.outcome is PropertyOutcome.ERRORED]
        reason = errored[0] if errored else result.reason
        findings = (*findings, *result.findings)
        result = replace(result, verdict=verdict, findings=findings, properties=found, reason=reason)
    return replace(result, seconds=result.seconds + time.perf_counter() - start)


@timed(PROPERTIES)
def properties_on(
    subject: Subject,
    case: Case,
    names: Collection[str] = (),
    *,
    thorough: bool = False,
    anew: Anew | None = None,
    begins: Callable[[], object] = lambda: None,
) -> tuple[PropertyResult, ...]:
    """Ask whether a kernel has the named properties on a case, by default all of its op.

    `anew` makes the call in a new process: see `lastbit.verify.asking`; `begins` is called before each property.
    Exceptions of the kernel on the case itself are passed on, except for `UnsupportedCase`: then no property is
    applicable.
    """
    chosen = [p for name, p in properties_of(subject.op).items() if not names or name in names]
    with made_current(subject.device):
        try:
            basis = basis_of(subject, case, thorough=thorough, anew=anew)
        except UnsupportedCase as error:
            nothing, reason = PropertyOutcome.NOT_APPLICABLE, f"the kernel does not take the case: {error}"
            promised = subject.kernel.invariant
            return tuple(PropertyResult(p.name, nothing, p.name in promised, reason=reason) for p in chosen)
        return tuple(_found(subject, property, basis, begins) for property in chosen)


def _found(subject: Subject, property: Property, basis: Basis, begins: Callable[[], object]) -> PropertyResult:
    """Ask one property; raise if the kernel's exception leaves its process or device unusable."""
    begins()
    found = result_of(property, basis)
    if found.outcome is PropertyOutcome.ERRORED and (subject.is_lost or is_lost(subject.device)):
        raise LastbitError(f"calls that look for {property.name} {found.reason}")
    return found


def basis_of(subject: Subject, case: Case, *, thorough: bool = False, anew: Anew | None = None) -> Basis:
    """Make the basis of comparisons: the call on the case, and functions to call on other inputs or anew."""
    known: dict[frozenset[str], Caller] = {}  # the names of inputs decide on the results that the kernel must return

    def call(inputs: Inputs) -> Tensors:
        """Call the kernel and return its results in memory of their own; the inputs are restored.

        Raises:
            UnsupportedCase: the kernel declares that it takes less.
        """
        if (names := inputs.case.names) not in known:
            known[names] = replace(subject.caller(_small(subject.problem(inputs))), shapes=None)
        if outside := beyond(subject.kernel.takes, inputs.case):
            raise UnsupportedCase(f"the kernel declares that it takes less: {outside}")
        called = known[names].unguarded(inputs).kept()
        inputs.restore()
        return {name: called.actual[name] for name in called.results}

    def allows(inputs: Inputs, results: Tensors) -> bool:
        return judge(subject.problem(inputs), dict(results), alternatives=False).verdict not in BAD

    inputs = build(case.gathered(), subject.device)
    first, direct = call(inputs), subject.performer is None
    return Basis(subject.kernel, subject.op, subject.device, inputs, first, call, allows, direct, thorough, anew=anew)


def findings_of(results: Iterable[PropertyResult]) -> Iterator[Finding]:
    """Yield findings for broken properties that the kernel declares, and for bits that its contract excludes."""
    yield from (Finding("broken_property", one.name, sentence_of(one)) for one in results if one.fails)


def _small(problem: Problem) -> Problem:
    """Cut independent inputs to one each; the names of the results stay the same."""
    cut = {name for things in problem.op.relations if isinstance(things, Independent) for name in things.inputs}
    return problem.on({n: t[:1] if n in cut else t for n, t in problem.tensors.items()}) if cut else problem


def sentence_of(one: PropertyResult) -> str:
    """Describe a broken property: the change, its place and its size; for one that errored, the reason."""
    if one.outcome is PropertyOutcome.ERRORED:
        return f"whether {one.name} holds, nobody knows: {one.reason}"
    promised = (
        "which the kernel declares, is broken" if one.declared else "which the kernel does not declare, is broken"
    )
    where = f": {one.where}" if one.where else ""
    rows = f" in {one.rows:,} rows" if one.rows else ""
    legal = {
        None: "",
        True: "; the contract allows both",
        False: ", and these are not legal: the contract excludes them",
    }
    return (
        f"{one.name}, {promised}{where}; {one.elements:,} of {one.numel:,} elements of {one.result}{rows} differ by up "
        f"to {one.ulp:g} ulp, first seen with {one.second}{legal[one.legal]}.{one.library and f' {one.library}'}"
    )
