"""What the wrong elements are: zeros, one number, NaN, what memory held before, neighbours of the right value."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.terms import numbers_of
from lastbit.diagnosing.patterns.words import all_of, number
from lastbit.diagnosing.patterns.wrong import NEARLY, Wrong
from lastbit.inputs.poison import held_before
from lastbit.numerics import FORMATS, Format, round_to
from lastbit.numerics.formats import ordinals
from lastbit.outcomes.explanation import NEARLY_RIGHT

_ALLOCATIONS = 32  # of which the filling is looked for
_SEVERAL = 3  # elements that are no chance


def values(wrong: Wrong) -> Iterator[str]:
    """Sentences about the wrong elements by themselves."""
    at = wrong.actual[wrong.mask]
    subject = all_of(wrong.count, "wrong element")
    if wrong.count >= _SEVERAL and _was_held_before(wrong):
        yield f"{subject} hold what memory was filled with before the kernel got it: they were never written."
    elif bool(torch.isnan(at).all()):
        yield f"{subject} {_be(wrong)} NaN{_overflow(wrong) or _where_from(wrong)}."
    elif bool(torch.isnan(wrong.value[wrong.mask]).all()):
        yield f"{subject} must be NaN and {_be(wrong)} not{_where_from(wrong)}."
    elif bool((at == 0).all()):
        yield f"{subject} {_be(wrong)} 0."
    elif wrong.count >= _SEVERAL and bool((at == at[0]).all()):
        yield f"{subject} are the same number, {number(float(at[0]))}{_limit(wrong, float(at[0]))}."
    elif bool(torch.isinf(at).all()):
        yield f"{subject} {_be(wrong)} infinite{_overflow(wrong)}."


def _was_held_before(wrong: Wrong) -> bool:
    """Whether the wrong elements hold what tells unwritten memory; elements of one byte do not."""
    stored = wrong.seen.actual[wrong.stage]
    return stored.element_size() > 1 and bool(held_before(stored, _ALLOCATIONS)[wrong.mask].all())


def _be(wrong: Wrong) -> str:
    return "is" if wrong.count == 1 else "are"


def _limit(wrong: Wrong, value: float) -> str:
    """That a number is the largest of a format, or near a parameter."""
    largest = next((name for name, fmt in FORMATS.items() if abs(value) == fmt.max), "")
    if largest:
        return f", the largest of {largest}"
    named = next((n for n, p in wrong.problem.params.items() if isinstance(p, float) and p == abs(value)), "")
    return f", which is {'-' * (value < 0)}{named}" if named else ""


def _overflow(wrong: Wrong) -> str:
    """The narrowest format in which just the wrong elements are too large."""
    exact, right = wrong.exact[wrong.mask].abs(), wrong.exact[~wrong.mask].abs()
    for name in ("e4m3", "e5m2", "fp16", "bf16"):
        largest = FORMATS[name].max
        if bool((exact > largest).all()) and not bool((right > largest).any()):
            return f": their exact values are beyond {number(largest)}, the largest of {name}, and no others are"
    return ""


def _where_from(wrong: Wrong) -> str:
    """In which input, or earlier stage, just these elements, rows or columns have a value that is not finite."""
    for name, tensor in numbers_of(wrong):
        bad = ~torch.isfinite(tensor)
        if not bool(bad.any()):
            continue
        for what, same in _shadows(wrong.mask, bad):
            if same:
                return f": {what} in which {name} has {_kinds(tensor)}"
    finite = all(bool(torch.isfinite(t).all()) for t in wrong.problem.tensors.values() if t.is_floating_point())
    return ", although every input is finite" if finite else ""


def _shadows(mask: Tensor, bad: Tensor) -> Iterator[tuple[str, bool]]:
    """Whether a mask is just the elements, rows or columns in which `bad` has any."""
    if bad.shape == mask.shape:
        yield "just the elements", torch.equal(bad, mask)
        yield "whole rows, those", torch.equal(bad.any(-1, keepdim=True).expand_as(mask), mask)
    elif bad.shape[:-1] == mask.shape[:-1] and bad.ndim == mask.ndim:
        yield "whole rows, those", torch.equal(bad.any(-1, keepdim=True).expand_as(mask), mask)
    if mask.ndim and bad.ndim and bad.shape[-1] == mask.shape[-1]:
        columns = bad.flatten(0, -2).any(0) if bad.ndim > 1 else bad
        yield "whole columns, those", torch.equal(columns.expand_as(mask), mask)


def _kinds(tensor: Tensor) -> str:
    nan, inf = bool(torch.isnan(tensor).any()), bool(torch.isinf(tensor).any())
    return "NaN or infinities" if nan and inf else "NaN" if nan else "infinities"


def neighbours(wrong: Wrong) -> Iterator[str]:
    """That the wrong elements are neighbours of the right value, and on which side."""
    fmt = wrong.format
    if fmt is None or not bool(torch.isfinite(wrong.actual[wrong.mask]).all()):
        return
    if not bool(torch.isfinite(wrong.value[wrong.mask]).all()):
        return
    apart = (ordinals(wrong.actual, fmt) - ordinals(round_to(wrong.value, fmt), fmt))[wrong.mask]
    farthest = int(apart.abs().max())
    if farthest > 2:
        return
    ulps = "1 ulp" if farthest == 1 else f"at most {farthest} ulp"
    magnitude = wrong.actual[wrong.mask].abs() - wrong.value[wrong.mask].abs()
    up, down = (int((magnitude * sign > 0).sum()) for sign in (1, -1))
    subject = all_of(wrong.count, "wrong element")
    if wrong.count >= 8 and max(up, down) >= NEARLY * wrong.count:
        side = "toward zero" if down > up else "away from zero"
        yield f"{subject} {_be(wrong)} off by {ulps} {side}{_cut_off(wrong, fmt) if down > up else ''}."
    else:
        sides = f", {up:,} away from zero and {down:,} toward it" if wrong.count > 1 else ""
        yield f"{subject} {_be(wrong)} off by {ulps}{sides}: {NEARLY_RIGHT}"


def _cut_off(wrong: Wrong, fmt: Format) -> str:
    cut = round_to(wrong.exact, fmt, mode="zero") == wrong.actual
    return ", as if they were cut off and not rounded" if float(cut.double().mean()) >= NEARLY else ""
