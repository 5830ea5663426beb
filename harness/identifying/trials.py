"""Trials of contracts on a kernel's results: those of its op, and where none fits, those with other roundings.

Contracts that are one computation on a case are evaluated once for it. Of many contracts, one that enough cases of the
same dtypes have ruled out is not tried on the others, and not on other dtypes as long as another contract fits all. A
combination changes the roundings of a contract: of one stage, then their directions, then of two stages at once, and so
on, until something fits.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from lastbit.case import Case
from lastbit.errors import UsageError
from lastbit.judging.expected import Steps
from lastbit.judging.formula import compare_formulas
from lastbit.judging.latent import check_rows
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem, Tensors
from lastbit.numerics import FORMATS, Format, format_of
from lastbit.numerics.formats import DIRECTIONS, FP32, Direction
from lastbit.ops import Contract, Op
from lastbit.reports.identification import CombinationSearch, ContractTally
from lastbit.reports.summary import grouped
from lastbit.shadows.following import Followed

FIXED = ("bf16", "fp16")
"""Formats that a stage may be rounded to, whatever the inputs have."""

# Arbitrary: each is an evaluation of the reference for every case.
_FEW = 30  # contracts that are all tried on every case
# Arbitrary: one case may be a corner where a kernel errs; in three of the same dtypes it is another contract.
_ENOUGH = 3  # cases of the same dtypes that rule out one of more contracts, after which it is left


@dataclass(frozen=True)
class Rounding:
    """Another rounding at a stage: to the format of an input or of that name, or None for none.

    With a `direction`, the stage keeps its format and is rounded in that direction.
    """

    stage: str
    target: str | None
    direction: Direction | None = None

    def __str__(self) -> str:
        if self.direction is not None:
            return f"{self.stage} rounded {DIRECTIONS[self.direction]}"
        return f"{self.stage} {f'rounded to {self.target}' if self.target else 'unrounded'}"


@dataclass(frozen=True, eq=False)
class Variant:
    """A contract of an op, or one with other roundings at some stages."""

    op: Op
    base: Contract
    changes: tuple[Rounding, ...] = ()

    @classmethod
    def of(cls, op: Op, contract: Contract) -> Variant:
        """Make the variant of a contract whose directions differ from the op's."""
        base = op.directed(contract, {})
        return cls(op, base, tuple(Rounding(stage, None, way) for stage, way in contract.directions.items()))

    @cached_property
    def contract(self) -> Contract:
        """The contract with these changes, named after its base and the changes."""
        if not self.changes:
            return self.base
        if ways := {change.stage: change.direction for change in self.changes if change.direction is not None}:
            return self.op.directed(self.base, ways)
        moved = {change.stage for change in self.changes}
        rounds = {stage: target for stage, target in self.base.rounds.items() if stage not in moved}
        rounds |= {change.stage: change.target for change in self.changes if change.target is not None}
        return Contract(self.base.options, rounds, ", ".join([str(self.base), *map(str, self.changes)]))


def changes_of(op: Op, formats: Mapping[str, Format], main: Format) -> list[Rounding]:
    """List the possible changes of roundings: each stage unrounded, or rounded to the first input, bf16 or fp16.

    `formats` maps stages to their formats, `main` is the first input's; nothing is rounded to fp32.
    """
    found = []
    for stage, fmt in formats.items():
        if fmt != FP32:
            found.append(Rounding(stage, None))
        if main not in (FP32, fmt):
            found.append(Rounding(stage, op.inputs[0]))
        found += (Rounding(stage, name) for name in FIXED if FORMATS[name] not in (main, fmt))
    return found


def subsets(changes: Sequence[Rounding], size: int) -> Iterator[tuple[Rounding, ...]]:
    """Yield all sets of changes at `size` different stages; a format that no input has only alone."""
    several = [change for change in changes if size == 1 or change.target not in FIXED]
    for chosen in itertools.combinations(several, size):
        if len({change.stage for change in chosen}) == size:
            yield chosen


def turns_of(
    contract: Contract, formats: Mapping[str, Format], directions: Sequence[Direction]
) -> Iterator[tuple[Rounding, ...]]:
    """Yield changes of direction: of each stage that a contract rounds, and of all of them together.

    `formats` maps stages to their formats.
    """
    stages = [name for name, fmt in formats.items() if name in contract.rounds and fmt.precision < FP32.precision]
    for way in directions:
        turned = [Rounding(stage, None, way) for stage in stages if formats[stage].direction != way]
        yield from ((one,) for one in turned)
        if turned[1:]:
            yield tuple(turned)


def as_stored(problem: Problem, actual: Tensors) -> Contract:
    """Return the contract that also rounds each result left in fp32 to the dtype in which it is stored."""
    contract, trace = problem.contract, problem.trace
    given = [name for name in trace.results if name in actual]
    formats = {name: format_of(actual[name].dtype) for name in given if actual[name].is_floating_point()}
    rounds = {name: fmt.name for name, fmt in formats.items() if trace.stages[name].format == FP32 != fmt}
    return Contract(contract.options, {**contract.rounds, **rounds}, str(contract)) if rounds else contract


@dataclass(frozen=True, eq=False)
class TrialSample:
    """A case with the results of a kernel, and its residues where it was followed."""

    case: Case
    seen: Observation
    followed: Followed | None = None

    @property
    def problem(self) -> Problem:
        return self.seen.problem

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self.seen.actual.values())


@dataclass(frozen=True)
class ContractOutcome:
    """The outcome of a contract on one case.

    Attributes:
        computation: number of the computation that it is there; -1 where it has no meaning.
        steps: that computation.
    """

    computation: int
    tally: ContractTally
    steps: Steps


@dataclass(eq=False)
class Trial:
    """A contract with its tallies per set of dtypes and its outcomes per case in which it was tried."""

    variant: Variant
    tallies: dict[str, ContractTally] = field(default_factory=dict)
    outcomes: dict[TrialSample, ContractOutcome] = field(default_factory=dict)

    @property
    def contract(self) -> Contract:
        return self.variant.contract

    def fits(self, dtypes: str) -> bool:
        return self.tallies.get(dtypes, ContractTally()).fits

    def computations(self, seen: Sequence[TrialSample]) -> tuple[int | None, ...]:
        """Return the number of its computation in each case; contracts with equal numbers compute the same there."""
        return tuple(self.outcomes[o].computation if o in self.outcomes else None for o in seen)


def try_all(variants: Sequence[Variant], samples: Sequence[TrialSample]) -> list[Trial]:
    """Try every contract on every case.

    Of many contracts, one is left that enough cases of some dtypes have ruled out; and as long as another fits all, one
    that any case of other dtypes has.
    """
    trials, many = [Trial(variant) for variant in variants], len(variants) > _FEW
    together = grouped((sample.case.dtypes, sample) for sample in samples)
    known = defaultdict[TrialSample, list[ContractOutcome]](list)
    remaining = trials
    for dtypes, own in sorted(together.items(), key=lambda pair: pair[1][0].problem.main_format.precision):
        _try(remaining, dtypes, own, many, known)
        remaining = [trial for trial in remaining if trial.fits(dtypes) or not many]
    for dtypes, own in together.items():
        left = [trial for trial in trials if dtypes not in trial.tallies]
        if remaining:
            for trial in left:
                trial.tallies[dtypes] = ContractTally(untried=len(own))
        else:
            _try(left, dtypes, own, many, known)
    return trials


def _try(
    trials: Sequence[Trial],
    dtypes: str,
    samples: Sequence[TrialSample],
    many: bool,
    known: Mapping[TrialSample, list[ContractOutcome]],
) -> None:
    """Try contracts on cases of the same dtypes; of many, leave one that enough of them have ruled out."""
    for sample in samples:
        for trial in trials:
            before = trial.tallies.get(dtypes, ContractTally())
            if many and before.against >= _ENOUGH:
                trial.tallies[dtypes] = before + ContractTally(untried=1)
            else:
                outcome = trial.outcomes[sample] = _outcome(sample, trial.contract, known[sample])
                trial.tallies[dtypes] = before + outcome.tally


def _outcome(sample: TrialSample, contract: Contract, known: list[ContractOutcome]) -> ContractOutcome:
    """Evaluate a contract on a case; a new computation is added to the `known` ones."""
    seen = sample.seen.under(contract)
    for outcome in known:
        if seen.problem.takes(outcome.steps):
            return outcome
    try:
        tally = _tally(seen, sample.followed)
    except UsageError:
        return ContractOutcome(-1, ContractTally(cases=1, against=1, undefined=1), Steps())
    outcome = ContractOutcome(len(known), tally, seen.problem.steps)
    known.append(outcome)
    return outcome


def _tally(seen: Observation, followed: Followed | None) -> ContractTally:
    """Count the elements of one case that a contract excludes; if none, check its rows, then the formula."""
    trace = seen.problem.trace
    results = seen.of_stages(name for name in trace.results if name in seen.actual)
    elements = sum(tensor.numel() for tensor in results.actual.values())
    outside = int(results.count_outside(trace))
    tally = ContractTally(cases=1, against=int(outside > 0), elements=elements, outside=outside)
    if outside:
        return tally
    if results.has_latent:
        rows = check_rows(results.under(as_stored(seen.problem, results.actual)))
        tally = replace(tally, against=int(rows.unexplained > 0), rows=rows.rows, unexplained=rows.unexplained)
    if tally.against or followed is None:
        return tally
    # Residues tell apart contracts of different formulas that enclosures allow.
    for compared in compare_formulas(results.problem, followed.results, results.actual).values():
        tally += ContractTally(followed=compared.numel, equal=compared.equal, differing=compared.differs)
    return replace(tally, against=int(tally.differing > 0))


def search_roundings(
    op: Op, trials: Sequence[Trial], seen: Sequence[TrialSample], most: int
) -> tuple[list[Variant], CombinationSearch]:
    """Find variants with the fewest changed roundings, then deviations, that fit every case; `most` are tried.

    Other directions are tried when no other rounding of one stage fits; either neighbour, which allows the most, when
    nothing else does. The cases are those of one set of dtypes. The sharpest of them, which rule out the most
    contracts, come first.
    """
    own = [trial for trial in trials if not trial.variant.changes]
    bases = list({trial.computations(seen): trial for trial in reversed(own)}.values())
    sharpest = sorted(seen, key=lambda o: sum(o in t.outcomes and not t.outcomes[o].tally.against for t in bases))
    known = {_key(t.contract, t, seen) for t in bases}
    done = CombinationSearch()

    def fitting(combinations: Callable[[Trial], Iterator[Variant]]) -> list[Variant] | None:
        """Return the new variants that fit; None if there are no new ones, or too many."""
        nonlocal done
        ways = {_key(v.contract, t, seen): v for t in bases for v in combinations(t)}
        new = [variant for key, variant in ways.items() if key not in known]
        if not new or done.tried + len(new) > most:
            done = replace(done, left=len(new))
            return None
        known.update(ways)
        done = replace(done, tried=done.tried + len(new))
        allowed = []
        for variant in new:  # by values first, which take a third of the time
            by_value = all(_allows(variant.contract, o, None) for o in sharpest)
            if by_value and all(_allows(variant.contract, o, o.followed) for o in sharpest if o.followed is not None):
                allowed.append(variant)
        fits = [(len(v.changes), op.deviations(v.base), v) for v in allowed]
        least = min((found[:2] for found in fits), default=None)
        return [variant for *strayed, variant in fits if tuple(strayed) == least]

    while (found := fitting(partial(_combinations, op, seen, done.points + 1))) is not None:
        done = replace(done, points=done.points + 1)
        if not found and done.points == 1:
            found = fitting(partial(_turned, op, seen, ("zero", "ties_away")))
        if found:
            return found, done
    left = done.left
    for directions in (("zero", "ties_away"), ("either",)):  # the first two again where no other rounding was tried
        found = fitting(partial(_turned, op, seen, directions))
        left += done.left if found is None else 0
        if found:
            break
    return found or [], replace(done, left=left)


def _combinations(op: Op, seen: Sequence[TrialSample], size: int, trial: Trial) -> Iterator[Variant]:
    """Yield the contract of a trial with the roundings of `size` stages changed, in every way."""
    if op.inputs[0] not in op.integers:
        changes = changes_of(op, _formats(trial, seen), seen[0].problem.main_format)
        yield from (Variant(op, trial.contract, chosen) for chosen in subsets(changes, size))


def _turned(op: Op, seen: Sequence[TrialSample], directions: Sequence[Direction], trial: Trial) -> Iterator[Variant]:
    """Yield the contract of a trial with one stage, or all of them, rounded in another direction."""
    for chosen in turns_of(trial.contract, _formats(trial, seen), directions):
        yield Variant(op, trial.contract, chosen)


def _formats(trial: Trial, seen: Sequence[TrialSample]) -> dict[str, Format]:
    """Map the stages of numbers that a contract has in these cases to their formats."""
    return {n: fmt for o in seen if o in trial.outcomes for n, fmt in trial.outcomes[o].steps.numbers.items()}


def _key(contract: Contract, trial: Trial, seen: Sequence[TrialSample]) -> Hashable:
    """Return a key of the computation that a contract, changed or not, is on these cases."""
    stages = _formats(trial, seen)
    asked = {option for o in seen if o in trial.outcomes for option in trial.outcomes[o].steps.consulted}
    rounds = frozenset((stage, target) for stage, target in contract.rounds.items() if stage in stages)
    return frozenset(asked.intersection(contract.options)), rounds, frozenset(stages)


def _allows(contract: Contract, sample: TrialSample, followed: Followed | None) -> bool:
    try:
        return not _tally(sample.seen.under(contract), followed).against
    except UsageError:
        return False
