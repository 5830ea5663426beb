"""The entry: everything that is looked for, the most telling first."""

from __future__ import annotations

import itertools
import time

import torch

from lastbit.diagnosing.patterns.factors import Factors
from lastbit.diagnosing.patterns.moved import moves
from lastbit.diagnosing.patterns.places import places, region_of
from lastbit.diagnosing.patterns.row_sums import row_sums
from lastbit.diagnosing.patterns.search import explained
from lastbit.diagnosing.patterns.terms import terms_of
from lastbit.diagnosing.patterns.values import neighbours, values
from lastbit.diagnosing.patterns.wrong import Wrong
from lastbit.judging.observation import Observation
from lastbit.numerics import remembering
from lastbit.result import CaseResult

_SECONDS = 1.5  # that guesses are tried, about


@remembering()
def diagnose(seen: Observation, result: CaseResult) -> tuple[str, ...]:
    """What the errors of the first wrong stage look like, a sentence each, the most telling first.

    A sentence is said only if it holds for nearly all wrong elements and would not by chance; there may be none. Of
    contracts that allow every bit nothing is said: the result has their names.
    """
    wrong = Wrong.of(seen, result)
    if wrong is None:
        return ()
    terms = terms_of(wrong)
    where = places(wrong, terms)
    region = region_of(wrong, where)
    alike = list(values(wrong))
    factors = Factors(wrong, region, terms)
    found = [*alike, *itertools.islice(factors.others(), 0 if alike else 1)]
    known = bool(result.explained_by)
    telling, rest = ([], []) if found or known else factors.sentences()
    until = time.perf_counter() + _SECONDS
    everywhere = torch.ones_like(region) if alike else region
    found += explained(wrong, everywhere, contracts=not known, until=until)
    found += [*row_sums(wrong), *telling, *(() if alike else moves(wrong, region))]
    found += [*(() if found else rest), *(place.sentence for place in where)]
    if not found and not known:
        found += neighbours(wrong)
    return tuple(found)
