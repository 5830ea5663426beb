"""Diagnoses beside a line: what the wrong elements have in common, products that torch gets wrong, branches.

The wrong elements of a stage have a value in common, and their places along each axis. torch may give a kernel on a CPU
a product of matrices that no order of its sum in fp32 can give. And a kernel that is wrong behind `if n > 8192` fails
only where that holds, and may pass even there, where the values hide it: which cases took a branch is a fact, whether
or not lines can be followed, and is told where no line is found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastbit.branches.branch_sites import Site, sites_of
from lastbit.branches.taken import watching
from lastbit.calling.performing import returned_by
from lastbit.calling.uses_compile import is_compiled
from lastbit.case import Case, parse_case
from lastbit.dtypes import DTYPE_NAMES
from lastbit.inputs import build
from lastbit.inputs.poison import held_before
from lastbit.interpret.decisions import ALL, MANY, NONE, SOME, Decision
from lastbit.judging.observation import Observation
from lastbit.judging.torch_compare import outside_mask
from lastbit.numerics import Enclosure, Premises, dot, format_of, remembering, using
from lastbit.result import CaseResult
from lastbit.shadows.aten import UncompiledMode
from lastbit.verify.check import Subject
from lastbit.verify.worker import Workplace

# Arbitrary: each one is a comparison with the elements, and later ones are seldom meant.
ALLOCATIONS = 32
"""Of a call, whose filling is looked for in elements that nothing wrote."""
SEVERAL = 3
"""Elements that have something in common; two have it too often."""

_DENSE = 0.75  # share of the indices of a pattern that have a wrong element: a right one among four is chance
# Arbitrary: a larger part is not worth a sentence, as the rest is as easy to name.
_PART = 0.9  # of an axis, the largest part that counts as one
# Up to two warps any period; larger ones are of tiles, which are powers of two.
_PERIODS = 65  # below, every period is tried, and from there on powers of two
_CHANCE = 1e-3  # that as many wrong elements, thrown at random, keep to a region as small, in one of _PATTERNS
# About how many patterns are tried of an axis, which makes chance likelier by that factor.
_PATTERNS = 100
# Arbitrary: some tenths of a second of one core in fp64.
_MOST = 1 << 28  # multiplications of a product up to which it is looked at
_PREMISES = Premises(flushes_subnormals=True)  # the loosest, as oneDNN's products by AMX are of numbers without these
# Arbitrary: each is one more call of the kernel; those still less like the failing one say little that is new.
_MOST_PASSED = 40
"""Cases that passed with which a failing one is compared."""
# Arbitrary: with fewer, a branch that only this case took may be taken by most others that nobody looked at.
_LEAST_PASSED = 5
_RARE = 0.1
"""Share of the cases that passed in which a branch may have been taken that is told."""
# Arbitrary: a reader who is told of more is told of another path through the kernel, not of a place in it.
_MOST_TOLD = 2

_LOOP = {0: "ran no round", 1: "ran", 2: "ran two rounds", MANY: "ran three rounds or more"}
_SAID = {
    "if": {0: "was false", 1: "was true"},
    "while": _LOOP,
    "for": _LOOP,
    "case": {0: "did not match", 1: "matched"},
    "except": {0: "caught nothing", 1: "caught it"},
    "mask": {NONE: "was true for no lane", SOME: "was true for some lanes", ALL: "was true for all lanes"},
}
"""Kind of a site → way → what is said where a call went it."""


@remembering()
def in_common(seen: Observation, result: CaseResult) -> tuple[str, ...]:
    """Say what the wrong elements of the first stage that fails have in common; nothing if only a formula fails."""
    failing = result.failing_stage
    if failing is None or failing.name not in seen.actual:
        return ()
    expected = seen.expected(seen.onward if failing.isolated.outside else seen.problem.trace)[failing.name]
    actual = seen.actual[failing.name]
    mask = expected.outside(actual)
    return (*_held(actual, expected.value, mask), *places(mask)) if bool(mask.any()) else ()


def _held(stored: Tensor, value: Tensor, mask: Tensor) -> Iterator[str]:
    """Say what all wrong elements are: unwritten memory, NaN, zero, infinite, or one number."""
    at, count = stored[mask].to(torch.float64), int(mask.sum())
    several = count >= SEVERAL
    all_are = "The one wrong element is" if count == 1 else f"All {count:,} wrong elements are"
    if several and stored.element_size() > 1 and bool(held_before(stored, ALLOCATIONS)[mask].all()):
        yield f"{all_are} what memory was filled with before the kernel got it: they were never written."
    elif bool(torch.isnan(at).all()):
        yield f"{all_are} NaN."
    elif bool(torch.isnan(value[mask].to(torch.float64)).all()):
        yield f"{all_are} finite or infinite, and must be NaN."
    elif bool((at == 0).all()):
        yield f"{all_are} 0."
    elif several and bool((at == at[0]).all()):
        yield f"{all_are} the same number, {float(at[0]):.9g}."
    elif bool(torch.isinf(at).all()):
        yield f"{all_are} infinite."


@dataclass(frozen=True)
class Unit:
    """Name of an index in singular and plural, and words that follow the numbers."""

    one: str
    several: str
    of: str = ""


def places(mask: Tensor) -> Iterator[str]:
    """Describe where the wrong elements are along each axis, if that is no chance."""
    count = int(mask.sum())
    for axis, size in enumerate(mask.shape) if count >= SEVERAL else ():
        others = [other for other in range(mask.ndim) if other != axis]
        at = (mask.any(others) if others else mask).nonzero().reshape(-1).tolist()
        unit = Unit("row", "rows") if mask.ndim == 2 else Unit("index", "indices", f" of dimension {axis}")
        if axis == mask.ndim - 1:
            unit = Unit("element", "elements") if mask.ndim == 1 else Unit("column", "columns")
        if len(at) == size or (pattern := pattern_of(at, size, unit)) is None:
            continue
        inside = len(pattern[1]) * mask.numel() // size
        chance = count * math.log(inside / mask.numel()) + math.log(_PATTERNS)
        if count >= _DENSE * inside or chance < math.log(_CHANCE):
            share = f"all of {inside:,}" if count == inside else f"{count:,} of {inside:,}"
            yield f"{pattern[0]}, in {share} elements."


def pattern_of(at: Sequence[int], size: int, unit: Unit) -> tuple[str, Sequence[int]] | None:
    """Describe the pattern of the indices `at` among `size`, with all indices that fit it; None if there is none."""
    first, last = at[0], at[-1]
    if len(at) == 1:
        end = ", the last," if first == size - 1 else ", the first," if first == 0 else ""
        return f"Only {unit.one} {first}{unit.of or f' of {size}'}{end} is wrong", at
    span = range(first, last + 1)
    if len(at) >= _DENSE * len(span) and len(span) <= _PART * size:
        which = "last " if last == size - 1 else "first " if first == 0 else ""
        edge = last + 1 if which == "first " else first
        power = edge & -edge
        multiple = f"up to a multiple of {power}" if which == "first " else f"from a multiple of {power} on"
        to = f", {multiple}" if power >= 4 else ""
        many = f"the {which}{len(span)}" if which else f"{len(span)} of {size}"
        return f"Only {unit.several} {first} to {last}{unit.of} are wrong: {many}{to}", span
    if len(at) <= SEVERAL:
        listed = f"{', '.join(map(str, at[:-1]))} and {last}"
        return f"Only {unit.several} {listed}{unit.of or f' of {size}'} are wrong", at
    powers = (1 << n for n in range(size.bit_length()))
    repeated = []
    for step in sorted({step for step in (*range(2, _PERIODS), *powers) if 1 < step <= size // 2}):
        start, stop = min(i % step for i in at), max(i % step for i in at) + 1
        if stop - start <= _DENSE * step:
            repeated.append(((stop - start) / step, step, start, stop))
    for _, step, start, stop in sorted(repeated):
        indices = [i for i in range(size) if start <= i % step < stop]
        if len(at) >= _DENSE * len(indices):
            which = "" if start == 0 or stop == step else f", from its {_ordinal(start + 1)} on,"
            part = f"last {step - start}" if stop == step else f"first {stop}" if start == 0 else ""
            where = f"the {part}" if part else f"{stop - start}"
            said = f"{where} of every {step} {unit.several}{unit.of}{which}"
            if stop - start == 1:
                said = f"{unit.several} {start}, {start + step}, {start + 2 * step} and so on{unit.of}"
                said += f", every {_ordinal(step)},"
            return f"Only {said} are wrong", indices
    return None


def _ordinal(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def wrong_product(subject: Subject, case: Case) -> str:
    """Return the first element of a product that lies outside, as a sentence; empty if there is none.

    The kernel is called once more, on the CPU. Its products by `mm` and `bmm` are looked at, each by its own operands.
    """
    watch = _Products()
    with suppress(Exception), watch:  # of the kernel, which may take another way under a mode of torch
        subject.kernel.call(**build(case.gathered(), subject.device).tensors, **case.params)
    return watch.found


class _Products(UncompiledMode):
    """Dispatch mode of torch that describes the first wrong product of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.found or func not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return made
        a, b = args[:2]
        if a.numel() * b.shape[-1] <= _MOST and all(t.device.type == "cpu" and _is_in_fp32(t) for t in (a, b, made)):
            with using(_PREMISES):
                allowed = dot(*(Enclosure.point(t.detach().double()) for t in (a, b))).rounded(format_of(made.dtype))
            for index in map(tuple, outside_mask(made.detach(), allowed).nonzero()[:1].tolist()):
                value, low, high = (float(t[index]) for t in (made, allowed.lo, allowed.hi))
                words = " and ".join(f"{DTYPE_NAMES[t.dtype]} {list(t.shape)}" for t in (a, b))
                self.found = (
                    f"torch.ops.{func.overloadpacket} gives {value:.9g} at {list(index)} of the product of {words}, "
                    f"where a sum in fp32 gives {low:.9g} to {high:.9g} in any order: that is torch, not the kernel."
                )
        return made


def _is_in_fp32(tensor: Tensor) -> bool:
    """Return whether torch multiplies these in fp32, without subnormal operands, which it may flush to zero."""
    if tensor.dtype is torch.float32:
        own = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        if torch.get_float32_matmul_precision() != "highest" or own not in ("none", "ieee"):
            return False
    elif tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not bool(((tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)).any())


def branches_alone(place: Workplace, kernel: str, line: str, passed: Sequence[str], *, seconds: float) -> list[str]:
    """Say which branches the kernel takes in the failing case `line`, and hardly ever in those that `passed`.

    The kernel is called once more in each of them, the most alike first, until `seconds` are over.
    """
    subject, failing, latest = place.subjects[kernel], parse_case(line), time.monotonic() + seconds

    def distance(case: Case) -> tuple[bool, float]:
        """Tell how unlike a case is: of other dtypes first, then by the number of elements and of columns."""
        own, its = ((t.numel, t.shape[-1] if t.shape else 1) for t in (case.tensors[0], failing.tensors[0]))
        sizes = sum(abs(math.log((a + 1) / (b + 1))) for a, b in zip(own, its, strict=True))
        return case.dtypes != failing.dtypes, sizes

    alike = sorted(map(parse_case, passed), key=distance)[:_MOST_PASSED]
    own, others = _taken(subject, failing), list[set[Decision]]()
    for case in alike:
        others.append(_taken(subject, case))
        if time.monotonic() > latest:
            break
    if len(others) < _LEAST_PASSED:
        return []
    counts = {one: sum(one in other for other in others) for one in own}
    rare = [one for one, count in counts.items() if count <= _RARE * len(others)]
    whole = f"of {len(others)} that passed."
    told = [f"{text} in this case, and in {counts[one] or 'none'} {whole}" for one, text in _told(rare)]
    more = [f"{len(told) - _MOST_TOLD} more branches were taken as rarely."] if len(told) > _MOST_TOLD else []
    return [*told[:_MOST_TOLD], *more]


def _taken(subject: Subject, case: Case) -> set[Decision]:
    """Call the kernel in a case; return the branches that it took, none if somebody else traces this process."""
    file, compiles = Path(subject.kernel.source.rpartition(":")[0]), is_compiled(subject.kernel.call)
    with watching(f"{subject.kernel.name} in {case}", file, compiles=compiles) as taken:
        with suppress(Exception):  # what it raises is told elsewhere
            given = build(case, subject.device).hand_out()
            returned_by(subject.kernel.call, given, case.params, subject.device)
        return taken.decisions() if taken.known else set()


def _told(decided: Sequence[Decision]) -> Iterator[tuple[Decision, str]]:
    """Yield each decision and what is said of it, conditions of statements before masks, in the order of lines."""
    known: dict[tuple[str, int, int], Site] = {
        (file, site.line, site.column): site for file in {one[0] for one in decided} for site in sites_of(file)
    }
    found = [(known[one[:3]], one) for one in decided if one[:3] in known]
    for site, one in sorted(found, key=lambda pair: (pair[0].kind == "mask", *pair[1])):
        yield one, f"{Path(one[0]).name}:{site.shown} `{site.text}` {_SAID[site.kind][one[3]]}"
