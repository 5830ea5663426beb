"""Whether a kernel's bits depend on what they need not depend on, for a case."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from harness.case import Case
from harness.devices import made_current
from harness.inputs import Inputs, build
from harness.invariance.basis import Basis
from harness.invariance.properties import properties_of
from harness.invariance.property import result_of
from harness.judging.judge import judge
from harness.judging.problem import Problem
from harness.property_result import Outcome, PropertyResult
from harness.relation import Independent, Tensors
from harness.result import BAD, Finding
from harness.verify.calls import Caller
from harness.verify.check import Subject


def properties_on(
    subject: Subject, case: Case, names: Collection[str] = (), *, thorough: bool = False
) -> tuple[PropertyResult, ...]:
    """What is found of the named properties on a case, or of all that its op has.

    Raises what the kernel raises.
    """
    chosen = [p for name, p in properties_of(subject.op).items() if not names or name in names]
    with made_current(subject.device):
        basis = basis_of(subject, case, thorough=thorough)
        return tuple(result_of(property, basis) for property in chosen)


def basis_of(subject: Subject, case: Case, *, thorough: bool = False) -> Basis:
    """The call of the kernel on a case, and how it is called on other inputs."""
    inputs = build(case.gathered(), subject.device)
    call = partial(_results, partial(_caller, subject, {}))
    first = call(inputs)
    allows = partial(_allows, subject)
    direct = subject.performer is None
    return Basis(subject.kernel, subject.op, subject.device, inputs, first, call, allows, direct, thorough)


def _caller(subject: Subject, known: dict[frozenset[str], Caller], inputs: Inputs) -> Caller:
    """What calls the kernel on inputs of these names, which say what it must return."""
    if (names := inputs.case.names) not in known:
        results, optional = tuple(_small(subject.problem(inputs)).required), subject.op.optional_results
        known[names] = Caller(subject.kernel, subject.device, results, optional, subject.performer)
    return known[names]


def _small(problem: Problem) -> Problem:
    """The same for one of the things that the op says are independent: which results there are does not change."""
    cut = {name for things in problem.op.relations if isinstance(things, Independent) for name in things.inputs}
    return problem.on({n: t[:1] if n in cut else t for n, t in problem.tensors.items()}) if cut else problem


def _results(caller_of: Callable[[Inputs], Caller], inputs: Inputs) -> Tensors:
    """What the kernel gives, in memory of its own; nothing is left of it in its inputs."""
    call = caller_of(inputs).unguarded(inputs).kept()
    inputs.restore()
    return {name: call.actual[name] for name in call.results}


def _allows(subject: Subject, inputs: Inputs, results: Tensors) -> bool:
    judged = judge(subject.problem(inputs), dict(results), alternatives=False)
    return judged.verdict not in BAD


def findings_of(results: Sequence[PropertyResult]) -> Iterator[Finding]:
    """What fails a kernel: properties that it declares, and that are broken."""
    for one in results:
        if one.outcome is Outcome.BROKEN:
            yield Finding("variant", one.result, sentence_of(one), notice=not one.declared)


def sentence_of(one: PropertyResult) -> str:
    """A broken property in a sentence: what changes, where, and by how much."""
    where = f"{one.where}: " if one.where else ""
    rows = f" in {one.rows:,} rows" if one.rows else ""
    legal = "" if one.legal is None else "; the contract allows both" if one.legal else "; the contract excludes these"
    return (
        f"{one.name} is broken, which the kernel {'declares' if one.declared else 'does not declare'}: {where}"
        f"{one.elements:,} of {one.numel:,} elements of {one.result}{rows} differ by up to {one.ulp:g} ulp with "
        f"{one.second}{legal}."
    )
