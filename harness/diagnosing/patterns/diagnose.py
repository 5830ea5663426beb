"""The entry: everything that is looked for, the most telling first."""

from __future__ import annotations

from harness.diagnosing.patterns.moved import moves
from harness.diagnosing.patterns.places import places, region_of
from harness.diagnosing.patterns.terms import terms_of
from harness.diagnosing.patterns.values import neighbours, values
from harness.diagnosing.patterns.wrong import Wrong
from harness.judging.observation import Observation
from harness.numerics import remembering
from harness.result import CaseResult

_SECONDS = 1.5  # that the search takes, about


@remembering()
def diagnose(seen: Observation, result: CaseResult) -> tuple[str, ...]:
    """What the errors of the first wrong stage look like, a sentence each, the most telling first.

    A sentence is said only if it holds for nearly all wrong elements and would not by chance; there may be none.
    """
    found = [f"{_listed(result.explained_by)} allows every bit."] if result.explained_by else []
    wrong = Wrong.of(seen, result, _SECONDS)
    if wrong is None:
        return tuple(found)
    terms = terms_of(wrong)
    where = places(wrong, terms)
    region = region_of(wrong, where)
    found += [*values(wrong), *moves(wrong, region)]
    found += [place.sentence for place in where]
    if not found:
        found += neighbours(wrong)
    return tuple(found)


def _listed(contracts: tuple[str, ...]) -> str:
    word = "The contract" if len(contracts) == 1 else "Each of the contracts"
    return f"{word} {', '.join(contracts)}"
