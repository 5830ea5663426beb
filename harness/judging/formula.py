"""The formula that a kernel computes, by the residues of its results: it is the contract's, or it is another one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.expected import Numbers, Steps
from lastbit.judging.problem import Problem
from lastbit.numerics import format_of
from lastbit.numerics.residues import Residues
from lastbit.ops import Contract
from lastbit.result import OF_FORMULA, Finding, told


@dataclass(frozen=True)
class Compared:
    """The counts of a comparison of a result's residues with the contract's.

    Attributes:
        numel: elements that are finite under the contract.
        equal: those whose residues are the contract's: they follow from its formula, in some order of its sums.
        differs: those that follow from another formula, or from one that rounds elsewhere.
        first: the index of the first of these.
    """

    numel: int
    equal: int
    differs: int
    first: tuple[int, ...] = ()


def compare_formulas(
    problem: Problem, given: Mapping[str, Residues], stored: Mapping[str, Tensor] | None = None
) -> dict[str, Compared]:
    """Compare the residues of a kernel's results, by name, with those of the contract.

    Where the contract allows tensors of other dtypes, these are what is `stored`: its numbers are rounded to them.
    """
    own, stages = problem.residues, problem.trace.stages
    found = {}
    for name in problem.trace.results:
        if name not in given or not isinstance(expected := stages[name].finished, Numbers):
            continue
        finite = torch.isfinite(expected.value)
        theirs, ours = given[name], own[name]
        kept = None if stored is None or not stored[name].is_floating_point() else format_of(stored[name].dtype)
        if kept is not None and kept != expected.format.nearest:  # codes that are integers are exact
            ours = ours.rounded(kept, expected.enclosure.value, (expected.enclosure.lo, expected.enclosure.hi))
        equal, differs = ours.equal(theirs), ours.differs(theirs) & finite
        numel, same, others = torch.stack([finite, equal & finite, differs]).flatten(1).sum(1).tolist()
        first = tuple(differs.nonzero()[0].tolist()) if others else ()
        found[name] = Compared(numel, same, others, first)
    return found


def kept_apart(problem: Problem, given: Mapping[str, Residues], alternatives: list[Contract]) -> dict[str, int]:
    """Count for each alternative the elements of the results that follow from the contract and not from it."""
    own = problem.residues
    found = {}
    for other in alternatives:
        with suppress(UsageError):  # the alternative is not defined here
            theirs = problem.under(other).residues
            shared = [name for name in problem.trace.results if name in given and name in theirs and name in own]
            found[str(other)] = sum(
                int((theirs[name].differs(given[name]) & own[name].equal(given[name])).sum()) for name in shared
            )
    return found


def describe_formula(problem: Problem, name: str, compared: Compared, explained: tuple[str, ...]) -> Finding:
    """Return the finding for a result that follows from another formula than the contract's."""
    what = f"{compared.differs:,} of {compared.numel:,} elements follow from another formula than that of"
    idle = problem.steps.idle
    sentence = f"{what} {told(str(problem.contract), idle)}, whatever the order of its sums"
    known = f"; all of them are those of {' or of '.join(told(c, idle) for c in explained)}" if explained else ""
    return Finding(OF_FORMULA, name, f"{sentence}{known}.")


def explaining(problem: Problem, given: Mapping[str, Residues]) -> tuple[str, ...]:
    """Return the contracts of the op from which every element of the results follows, by its residues."""
    found = []
    known: list[tuple[Steps, bool]] = []
    for other in problem.op.candidates(problem.contract):
        with suppress(UsageError):
            under = problem.under(other)
            explains = next((explains for steps, explains in known if under.takes(steps)), None)
            if explains is None:
                compared = compare_formulas(under, given).values()
                explains = all(c.equal == c.numel for c in compared) and any(c.numel for c in compared)
                known.append((under.steps, explains))
            if explains:
                found.append(str(other))
    return tuple(found)
