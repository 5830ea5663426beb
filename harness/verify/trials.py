"""Contracts tried on what a kernel gave: those of its op, and where none fits, those with other roundings.

Contracts that are one computation on a case are evaluated once for it. Of many contracts, one that enough cases of the
same dtypes have ruled out is not tried on the others. A combination changes the roundings of a contract: of one stage,
then of two at once, and so on, until something fits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.case import Case
from harness.errors import UsageError
from harness.numerics import Format, format_of
from harness.op import Contract, Op
from harness.outcomes.identification import Search, Tally
from harness.verify.evaluate import Params, Tensors, Trace, evaluate, same_computation
from harness.verify.latent import check_rows
from harness.verify.roundings import Variant, as_stored, changes_of, forbidden, subsets

_FEW = 30  # contracts that are all tried on every case
_ENOUGH = 3  # cases of the same dtypes that rule out one of more contracts, after which it is left


@dataclass(frozen=True, eq=False)
class Observation:
    """A case, its inputs, and what the kernel gave for it."""

    case: Case
    tensors: Tensors
    actual: Tensors

    @property
    def params(self) -> Params:
        return dict(self.case.params)

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self.actual.values())


@dataclass(frozen=True)
class Outcome:
    """A contract on one case.

    Attributes:
        computation: number of the computation that it is there; -1 where it has no meaning.
        trace: the formats of the stages and the options that were asked for, without values.
    """

    computation: int
    tally: Tally
    trace: Trace


@dataclass(eq=False)
class Trial:
    """A contract, and how it did: per set of dtypes, and per case in which it was tried."""

    variant: Variant
    tallies: dict[str, Tally] = field(default_factory=dict)
    outcomes: dict[Observation, Outcome] = field(default_factory=dict)

    @property
    def contract(self) -> Contract:
        return self.variant.contract

    def fits(self, dtypes: str) -> bool:
        return self.tallies.get(dtypes, Tally()).fits

    def computations(self, seen: Sequence[Observation]) -> tuple[int | None, ...]:
        """What it computes on each case; two contracts with the same numbers are one there."""
        return tuple(self.outcomes[o].computation if o in self.outcomes else None for o in seen)


def try_all(op: Op, variants: Sequence[Variant], seen: Sequence[Observation]) -> list[Trial]:
    """Every contract on every case, unless there are many of them and enough cases have ruled one out."""
    trials = [Trial(variant) for variant in variants]
    for observation in seen:
        dtypes = observation.case.dtypes
        known: list[tuple[Contract, Outcome]] = []
        for trial in trials:
            before = trial.tallies.get(dtypes, Tally())
            if len(variants) > _FEW and before.against >= _ENOUGH:
                trial.tallies[dtypes] = before + Tally(untried=1)
            else:
                outcome = trial.outcomes[observation] = _outcome(op, trial.contract, observation, known)
                trial.tallies[dtypes] = before + outcome.tally
    return trials


def _outcome(op: Op, contract: Contract, seen: Observation, known: list[tuple[Contract, Outcome]]) -> Outcome:
    """How a contract does on a case; a computation that is new is added to the `known` ones."""
    for other, outcome in known:
        if same_computation(outcome.trace, op, other, contract, seen.tensors):
            return outcome
    try:
        trace = evaluate(op, contract, seen.tensors, seen.params)
    except UsageError:
        return Outcome(-1, Tally(cases=1, against=1, undefined=1), Trace())
    tally = _tally(op, contract, seen, trace)
    outcome = Outcome(len(known), tally, Trace(formats=trace.formats, consulted=trace.consulted))
    known.append((contract, outcome))
    return outcome


def _tally(op: Op, contract: Contract, seen: Observation, trace: Trace) -> Tally:
    """The figures of a contract on one case; rows are tried if every element is possible."""
    results = {name: seen.actual[name] for name in trace.results}
    elements = sum(tensor.numel() for tensor in results.values())
    wrong = forbidden(trace, contract, results)
    if wrong or op.latent is None or not any(results[s].numel() for s in op.latent.through if s in results):
        return Tally(cases=1, against=int(wrong > 0), elements=elements, forbidden=wrong)
    rows = check_rows(op, as_stored(contract, trace, results), seen.tensors, seen.params, results, trace)
    return Tally(
        cases=1, against=int(rows.unexplained > 0), elements=elements, rows=rows.rows, unexplained=rows.unexplained
    )


def search(op: Op, trials: Sequence[Trial], seen: Sequence[Observation], most: int) -> tuple[list[Variant], Search]:
    """The variants with the fewest changed roundings, and then deviations, that fit every case; `most` are tried.

    The cases are those of one set of dtypes. The sharpest of them, which rule out the most contracts, come first.
    """
    bases = list({trial.computations(seen): trial for trial in reversed(trials)}.values())
    sharpest = sorted(seen, key=lambda o: sum(o in t.outcomes and not t.outcomes[o].tally.against for t in bases))
    known = {_key(t.contract, t, seen) for t in bases}
    done = Search()
    while True:
        size = done.points + 1
        ways = {_key(v.contract, t, seen): v for t in bases for v in _combinations(op, t, seen, size)}
        new = [variant for key, variant in ways.items() if key not in known]
        if not new:
            return [], done
        if done.tried + len(new) > most:
            return [], Search(done.tried, done.points, len(new))
        known |= ways.keys()
        done = Search(done.tried + len(new), size)
        if fitting := [v for v in new if all(_allows(op, v.contract, o) for o in sharpest)]:
            least = min(op.deviations(v.base) for v in fitting)
            return [v for v in fitting if op.deviations(v.base) == least], done


def _combinations(op: Op, trial: Trial, seen: Sequence[Observation], size: int) -> Iterator[Variant]:
    """The contract of a trial with the rounding of `size` stages changed, in every way."""
    if op.inputs[0] not in op.integers:
        main = format_of(seen[0].tensors[op.inputs[0]].dtype)
        changes = changes_of(op, _formats(trial, seen), main)
        yield from (Variant(trial.contract, chosen) for chosen in subsets(changes, size))


def _formats(trial: Trial, seen: Sequence[Observation]) -> dict[str, Format]:
    """The stages of numbers that a contract has in these cases."""
    traces = (trial.outcomes[o].trace for o in seen if o in trial.outcomes)
    return {name: fmt for trace in traces for name, fmt in trace.formats.items() if isinstance(fmt, Format)}


def _key(contract: Contract, trial: Trial, seen: Sequence[Observation]) -> Hashable:
    """What tells the contract of a trial, changed or not, from others on these cases."""
    stages = _formats(trial, seen)
    asked = {option for o in seen if o in trial.outcomes for option in trial.outcomes[o].trace.consulted}
    rounds = frozenset((stage, target) for stage, target in contract.rounds.items() if stage in stages)
    return frozenset(asked.intersection(contract.options)), rounds, frozenset(stages)


def _allows(op: Op, contract: Contract, seen: Observation) -> bool:
    """Whether a contract allows every bit of a case."""
    try:
        trace = evaluate(op, contract, seen.tensors, seen.params)
    except UsageError:
        return False
    return not _tally(op, contract, seen, trace).against
