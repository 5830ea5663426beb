"""Identification of the contracts that a kernel keeps, from its results alone, whatever contract it claims."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lastbit.case import Case, parse_case
from lastbit.identifying.trials import Trial, TrialSample, Variant, search_roundings, try_all
from lastbit.inputs import build
from lastbit.judging.observation import Observation
from lastbit.ops import Contract, Op, joined
from lastbit.reports.identification import Answer, Candidate, CombinationSearch, Identification, name
from lastbit.reports.summary import grouped
from lastbit.result import OF_STAGES, TURNED_DOWN, Verdict
from lastbit.verify.check import Subject, examine, takes, unsupported
from lastbit.verify.drawing import draw
from lastbit.verify.formula_check import followed_in, is_small
from lastbit.verify.narrowing import narrowed
from lastbit.verify.power import Separable
from lastbit.verify.worker import Watch, Workplace, unwatched

# Arbitrary: each tells apart what remains, and takes as long as the cases before it.
_ROUNDS = 2  # in which cases are added until nothing else that could be told from a kernel's contract fits


def identify_kernel(place: Workplace, kernel: str, *, most: int) -> Identification:
    """Ask `identify` about a kernel, on the configured lines or on cases that are as small as for a CPU.

    Generated cases are added as long as they do not tell apart two contracts that others can.
    """
    subject = place.subjects[kernel]
    seen = observe(subject, cases_of(place, subject, small=True), watch=place.watch)
    found = identified(subject, seen, most=most)
    for _ in range(0 if place.config.lines else _ROUNDS):
        telling = dict.fromkeys(line for one in found.answers for line in one.telling.values())
        if not telling:
            break
        seen += observe(subject, map(parse_case, telling), watch=place.watch)
        found = identified(subject, seen, most=most)
    return found


def cases_of(place: Workplace, subject: Subject, *others: Subject, small: bool) -> Iterator[Case]:
    """Yield the configured case lines of the kernels' op; without lines, generated cases that all kernels take."""
    config, op, kernels = place.config, subject.op, [one.kernel for one in (subject, *others)]
    if config.lines:
        yield from (case for line in config.lines if (case := parse_case(line)).op == op.name)
        return
    accepts = frozenset.intersection(*(kernel.accepts for kernel in kernels))
    groups = place.project.groups(op.name, accepts, small=small)
    for kernel in kernels:
        groups = narrowed(groups, kernel, op)
    for group in groups:
        yield from draw(group, config.cases_per_group, config.seed)


@dataclass(frozen=True)
class Observed:
    """Results of a kernel on cases.

    Attributes:
        samples: the cases in which it gave something, and what.
        unsupported: reason → how many cases it turned down for it.
        errors: what it raised, with the case.
        beside: what else was wrong, whatever its values are.
    """

    samples: tuple[TrialSample, ...]
    unsupported: Mapping[str, int]
    errors: tuple[str, ...]
    beside: tuple[str, ...]

    def __add__(self, more: Observed) -> Observed:
        samples = sorted((*self.samples, *more.samples), key=lambda sample: sample.size)
        unsupported = Counter(self.unsupported) + Counter(more.unsupported)
        beside = tuple(dict.fromkeys((*self.beside, *more.beside)))
        return Observed(tuple(samples), unsupported, (*self.errors, *more.errors), beside)


def observe(subject: Subject, cases: Iterable[Case], *, watch: Watch = unwatched) -> Observed:
    """Call the kernel on the cases and record its results.

    The kernel is followed on residues in small cases, in the first of each set of dtypes, and where enclosures decide
    nothing.
    """
    samples = list[TrialSample]()
    unsupported, errors, beside = Counter[str](), list[str](), dict[str, str]()
    met = set[str]()
    for case in cases:
        with watch(case):
            own = _meaningful(subject, case)
            result, actual = examine(own, case)
        if result.verdict is Verdict.ERRORED:
            errors.append(f"{result.reason} in {case}")
        elif result.verdict in TURNED_DOWN:
            unsupported[result.reason] += 1
        beside |= {f.kind: f"{f.sentence} In {case}" for f in result.findings if f.kind not in OF_STAGES}
        if any(tensor.numel() for tensor in actual.values()):
            follows = case.dtypes not in met or is_small(case) or result.verdict is Verdict.INCONCLUSIVE
            met.add(case.dtypes)
            with watch(case):
                inputs = build(case.gathered(), own.device)
                observation = Observation.of(own.problem(inputs), actual)
                followed = followed_in(own, case, inputs, result.results) if follows else None
                samples.append(TrialSample(case, observation, followed))
    samples.sort(key=lambda sample: sample.size)
    return Observed(tuple(samples), unsupported, tuple(errors), tuple(beside.values()))


def _meaningful(subject: Subject, case: Case) -> Subject:
    """Return a kernel that claims no contract under one of its op that gives the case a meaning, if there is one."""
    if subject.kernel.contract or takes(subject, case) or unsupported(subject.kernel, case):
        return subject
    others = (
        replace(subject, kernel=replace(subject.kernel, contract=str(c)))
        for c in subject.op.candidates(subject.contract)
    )
    return next((other for other in others if takes(other, case)), subject)


def identify(subject: Subject, cases: Iterable[Case], *, most: int, watch: Watch = unwatched) -> Identification:
    """Try every contract of the op on what the kernel gives for `cases`, and at most `most` combinations beyond."""
    return identified(subject, observe(subject, cases, watch=watch), most=most)


def identified(subject: Subject, seen: Observed, *, most: int) -> Identification:
    """Try every contract of the op on results already observed, and `most` combinations of roundings beyond."""
    op, samples = subject.op, seen.samples
    claim = str(subject.contract) if subject.kernel.contract or len(op.contracts()) == 1 else ""
    claimed = subject.contract
    trials = try_all([Variant(op, contract) for contract in op.contracts()], samples) if samples else []
    found = {str(claimed): Variant.of(op, claimed)} if claimed.directions else {}
    claims, made = try_all(list(found.values()), samples), CombinationSearch()
    for dtypes, cases in _by_dtypes(samples).items():  # other roundings are searched for dtypes that none fits
        if not any(trial.fits(dtypes) for trial in (*trials, *claims)):
            variants, own = search_roundings(op, trials, cases, most)
            found |= {str(variant.contract): variant for variant in variants}
            made = CombinationSearch(made.tried + own.tried, max(made.points, own.points), max(made.left, own.left))
    trials = [*trials, *try_all(list(found.values()), samples)]
    candidates = _candidates(op, trials, samples, claim)
    kept = [candidate for candidate, _ in candidates if candidate.total.fits]
    return Identification(
        kernel=subject.kernel.name,
        op=op.name,
        device=str(subject.device),
        claim=claim,
        candidates=tuple(c for c, _ in candidates),
        answers=tuple(_answers(subject, candidates, samples)),
        untold=tuple(_untold(op, kept)),
        cases=len(samples),
        unsupported=seen.unsupported,
        errors=seen.errors,
        beside=seen.beside,
        followed=sum(bool(sample.followed and sample.followed.results) for sample in samples),
        opaque=tuple(dict.fromkeys(o for sample in samples if sample.followed for o in sample.followed.opaque)),
        contracts=len(op.contracts()),
        search=made,
    )


def _by_dtypes(seen: Sequence[TrialSample]) -> dict[str, list[TrialSample]]:
    return grouped((sample.case.dtypes, sample) for sample in seen)


Candidates = list[tuple[Candidate, Trial]]
"""Candidates with the trial of the contract that stands for each."""


def _candidates(op: Op, trials: Sequence[Trial], seen: Sequence[TrialSample], claim: str) -> Candidates:
    """Group trials that compute the same in every case, nearest first; a claimed contract stands for its group."""
    together = grouped(((bool(trial.variant.changes), trial.computations(seen)), trial) for trial in trials)
    names: dict[str, tuple[str, tuple[str, ...]]] = {}
    found = []
    for alike in together.values():
        alike.sort(key=lambda t: (str(t.contract) != claim, op.deviations(t.variant.base)))
        contracts, first = tuple(str(trial.contract) for trial in alike), alike[0]
        changes = tuple(map(str, first.variant.changes)) if len(alike) == 1 else ()
        if first.variant.changes:
            fixed, free = names[str(first.variant.base)] if changes else ("", ())
        else:
            fixed, free = _shared(op, [trial.contract for trial in alike])
            names |= dict.fromkeys(contracts, (fixed, free))
        is_changed = bool(first.variant.changes)
        found.append((Candidate(contracts, fixed, free, first.tallies, is_changed, changes), first))

    def rank(pair: tuple[Candidate, Trial]) -> tuple[bool, tuple[float, ...], bool, int]:
        candidate, trial = pair
        deviations = op.deviations(trial.variant.base)
        return not candidate.total.fits, candidate.total.distance, claim not in candidate.contracts, deviations

    return sorted(found, key=rank)


def _shared(op: Op, contracts: Sequence[Contract]) -> tuple[str, tuple[str, ...]]:
    """Name a group of contracts by the options they share, and list the axes of which it has every option.

    Both are empty if the group is not a product of some options of each axis.
    """
    kept = {contract.options for contract in contracts}
    chosen = {
        axis: [option for option in choices if any(options[n] == option for options in kept)]
        for n, (axis, choices) in enumerate(op.axes.items())
    }
    free = tuple(axis for axis, options in chosen.items() if len(options) == len(op.axes[axis]) > 1)
    bound = [options for axis, options in chosen.items() if axis not in free]
    if math.prod(map(len, chosen.values())) != len(kept):
        return "", ()
    if op.presets:
        return (str(contracts[0]), free) if all(len(options) == 1 for options in bound) else ("", ())
    named = joined(" or ".join(options) for options in bound if "" not in options)
    without = [" or ".join(options[1:]) for options in bound if "" in options[:-1]]
    return ", ".join([named, *(f"with or without {options}" for options in without)]), free


def _untold(op: Op, kept: Sequence[Candidate]) -> Iterator[str]:
    """Yield the options that could stand in the first contract that is kept, in place of its own of the same axis."""
    own = [candidate for candidate in kept if not candidate.changed]
    if not own or own[0] is not kept[0]:
        return
    fit = {op.contract(contract).options for candidate in own for contract in candidate.contracts}
    first, named = op.contract(own[0].contracts[0]).options, own[0].fixed.replace(",", "").replace("+", " ").split()
    for n, (axis, choices) in enumerate(op.axes.items()):
        others = [one for one in choices if one != first[n] and (*first[:n], one, *first[n + 1 :]) in fit]
        if axis in own[0].free or not others:
            continue
        if len(others) == len(choices) - 1 > 1:
            yield f"any {axis}"
        else:
            yield from (one or f"no {first[n]}" for one in others if one not in named)


def _answers(subject: Subject, candidates: Candidates, seen: Sequence[TrialSample]) -> Iterator[Answer]:
    """Yield what fits each set of dtypes: of the candidates that fit all, or of any where none does."""
    separable = Separable()
    throughout = [pair for pair in candidates if pair[0].total.fits]

    def order(pair: tuple[Candidate, Trial]) -> tuple[bool, bool, int]:
        """Sort candidates that fit all dtypes first, then the claimed one, then the fewest deviations."""
        candidate, deviations = pair[0], subject.op.deviations(pair[1].variant.base)
        return not candidate.total.fits, str(subject.contract) not in candidate.contracts, deviations

    for dtypes, cases in _by_dtypes(seen).items():
        fitting = [(c, trial) for c, trial in throughout or candidates if trial.fits(dtypes)]
        fitting.sort(key=order)
        fits = tuple(c for c, _ in fitting)
        telling = dict(_telling(subject.op, separable, fitting, cases))
        coinciding = tuple(c for c in fits[1:] if not c.changed and not fits[0].changed and name(c) not in telling)
        yield Answer(dtypes, len(cases), fits, coinciding, telling)


def _telling(
    op: Op, separable: Separable, fitting: Candidates, seen: Sequence[TrialSample]
) -> Iterator[tuple[str, str]]:
    """Yield the candidates, among contracts of the op, with a case of these dtypes that tells each from the first."""
    own = [(c, trial) for c, trial in fitting if not c.changed]
    lacking = op.optional_results.difference(stage for sample in seen for stage in sample.seen.actual)
    for candidate, trial in own[1:] if own[:1] == fitting[:1] else []:
        first = own[0][1]
        apart = [o.case for o in seen if first.outcomes[o].computation != trial.outcomes[o].computation]
        if (case := separable.probe(op, first.contract, trial.contract, lacking, apart)) is not None:
            yield name(candidate), str(case)
