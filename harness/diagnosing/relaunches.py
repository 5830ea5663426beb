"""Mends of a launch: one thing that a Triton kernel was passed is changed, and the call done again from there on.

If the worst element is right then, the kernel with that change is judged as any other kernel.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import groupby
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.tools.tensor_descriptor import TensorDescriptor

from lastbit.calling.performing import CallRequest, results_of
from lastbit.diagnosing.responsible import HostFrame, Way, is_same, parts_of, passer
from lastbit.inputs import Inputs, guarded_allocations
from lastbit.interpret.places import Place, place_of
from lastbit.interpret.watching import Bound, Grid, Perform, launched_by
from lastbit.result import BAD, Worst
from lastbit.tracing.events import is_of_a_kernel
from lastbit.verify.check import Subject, examine
from lastbit.verify.formula_check import by_formula

SECONDS = 3.0
"""Of the processor, for which launches are done again; where that is not enough, no line is named."""
MOST_JUDGED = 4
"""Changes with which the kernel is judged anew, beside that time."""
SIZES = 6
"""The kind of changes of strides and sizes, of which there are most."""
MOST_NUMBERS = 12
"""Other numbers that are tried for one."""
MOST_BYTES = 256 << 20
"""Memory of all tensors that launches were passed, for them to be done again."""


@dataclass(frozen=True, eq=False)
class DoneLaunch:
    """A launch as it was done: its tensors `before`, and those that it changed `after` that."""

    function: Any
    bound: Bound
    grid: Grid
    frames: tuple[HostFrame, ...]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @property
    def launched(self) -> Place:
        """Where the launch stands."""
        return self.frames[0].place

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return _tensors_of(self.bound)


@dataclass(frozen=True)
class Instead:
    """Another thing to pass in launches: to a parameter, a field of one, or as grid if there is no name.

    Attributes:
        launches: their numbers; several are of one function and from one line, and were all passed the same.
        right: a number, flag or grid; of a tensor what it is called.
        way: to that tensor in the variables of the functions that led to the launch, the number of one first.
    """

    launches: tuple[int, ...]
    name: str
    now: Any
    right: Any
    way: Way = ()

    def passed(self, bound: Bound, frames: Sequence[HostFrame]) -> Any:
        """Return what is passed; raises KeyError where there is no such tensor this time."""
        name, _, part = self.name.partition(".")
        if not self.way:
            return bound[name]._replace(**{part: self.right}) if part else self.right
        right, now = self.tensor(frames), bound[name]
        before = _tensors_of({name: now}).get(name)
        if before is not None and _layout(right) == _layout(before):
            right = right.as_strided(before.shape, before.stride(), right.storage_offset())
        return replace(now, base=right) if isinstance(now, TensorDescriptor) else right

    def tensor(self, frames: Sequence[HostFrame]) -> Tensor:
        """Return the tensor at `way`."""
        return dict(parts_of(frames[int(self.way[0])].variables))[self.way[1:]]  # type: ignore[no-any-return]

    def now_in(self, bound: Bound) -> Any:
        """Return what a launch is passed now."""
        name, _, part = self.name.partition(".")
        return getattr(bound[name], part) if part else bound[name]


@dataclass(eq=False)
class _Relaunching:
    """One call of a kernel: launches on the same tensors as before leave what they left then; after `last`, nothing."""

    change: Instead | None = None
    done: Sequence[DoneLaunch] = ()
    last: int | None = None
    seen: list[DoneLaunch] = field(default_factory=list)
    count: int = 0
    bytes: int = 0

    def changed(self, subject: Subject) -> Subject:
        """Return a kernel with that change in every call."""
        kernel = subject.kernel

        @wraps(kernel.call)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.count = 0
            with launched_by(self.launch):
                return kernel.call(*args, **kwargs)

        return replace(subject, kernel=replace(kernel, call=called), performer=None)

    def launch(self, function: Any, bound: Bound, grid: Grid, perform: Perform) -> None:
        number, self.count = self.count, self.count + 1
        done = self.done[number] if number < len(self.done) else None
        change, tensors = self.change, _tensors_of(bound)
        if change is None:
            with _disable_current_modes():
                before = {name: own.clone() for name, own in tensors.items()}
            perform(bound, grid)
            with _disable_current_modes():
                after = {n: own.clone() for n, own in tensors.items() if not _is_equal(own, before[n])}
            self.bytes += sum(own.nbytes for own in (*before.values(), *after.values()))
            if (frames := _frames(sys._getframe(1))) and self.bytes <= MOST_BYTES:
                self.seen.append(DoneLaunch(function, dict(bound), grid, frames, before, after))
        elif number in change.launches:
            right = change.passed(bound, _frames(sys._getframe(1)) if change.way else ())
            changed = {change.name.partition(".")[0]: right} if change.name else {}
            perform({**bound, **changed}, grid if change.name else right)
            if done is not None and number == max(change.launches) and _are_as(done.after, tensors):
                raise Unchanged
        elif done is not None and done.function is function and _are_as(done.before, tensors):
            with _disable_current_modes():
                for name, left in done.after.items():
                    tensors[name].copy_(left)
        elif self.last is None or number <= self.last:
            perform(bound, grid)


class Unchanged(Exception):
    """A changed launch leaves what it left before."""


def mended_launches(
    subject: Subject,
    inputs: Inputs,
    asked: CallRequest,
    stage: str,
    worst: Worst,
    wanted: Collection[int],
    *,
    sizes: bool,
    few: bool,
) -> dict[str, tuple[Place, bool]]:
    """Map changes of launches that make every element right, in words, to where they were passed, and whether surely.

    `worst` is the worst element of `stage`, one of `few` or many. Strides and sizes are changed only if `sizes` is
    true. Nothing is found where the time was not enough for all of a kind, or where the element may be anything.
    """

    def result(call: _Relaunching) -> Tensor | None:
        """Call the kernel and return a copy of the stage; None if it raises."""
        try:
            handed, kernel = inputs.hand_out(), call.changed(subject).kernel
            with guarded_allocations(0):  # so that memory to which nothing was written is the same in each call
                return results_of(kernel.call, asked, subject.device, handed)[stage].detach().clone()
        except Exception:  # whatever a kernel makes of what it was never passed
            return None
        finally:
            inputs.restore()

    until, first = time.process_time() + SECONDS, _Relaunching()
    result(first)
    seen = first.seen
    if first.count != len(seen) or not wanted or not math.isfinite(worst.hi - worst.lo):
        return {}
    used = {tensor.data_ptr() for own in seen for tensor in own.tensors.values()}
    chosen = [(number, seen[number]) for number in sorted(wanted, reverse=True) if number < len(seen)]
    others = [pair for number, own in chosen for pair in _others(number, own, inputs.case.params, used)]
    found, judged, residues = dict[tuple[int, str], Instead](), 0, True
    for kind, several in groupby(sorted(others, key=operator.itemgetter(0)), key=operator.itemgetter(0)):
        changes = [change for _, change in several if sizes or kind < SIZES]
        for change in dict.fromkeys([*changes, *(_in_all(change, seen) for change in changes)]):
            if time.process_time() > until or judged == MOST_JUDGED:
                return {}
            ats = [(number, change.name) for number in change.launches]
            made = None if found.keys() & set(ats) else result(_Relaunching(change, seen, max(wanted)))
            if made is not None and worst.lo <= float(made[worst.index]) <= worst.hi:
                begin, judged, residues = time.process_time(), judged + 1, made.is_floating_point()
                changed = _Relaunching(change).changed(subject)
                verdict, followed = by_formula(
                    changed, inputs.case, examine(changed, inputs.case)[0], alternatives=False
                )
                if verdict.verdict not in BAD and not (few and followed is None):  # if few were wrong, by both
                    found |= dict.fromkeys(ats, change)
                until += time.process_time() - begin
        if found:
            break
    told = dict[str, tuple[Place, bool]]()
    for change in dict.fromkeys(found.values()):
        words, (place, sure) = _told(seen, change)
        told[words] = place, sure and (residues or not _is_of_case(change, inputs))
    return told


def _is_of_case(change: Instead, inputs: Inputs) -> bool:
    """Return whether a number that is passed now is one of the case's: another one can be right by chance."""
    tensors = inputs.tensors.values()
    if "stride" in change.name.lower():
        own = {n for t in tensors for n in t.stride()}
    else:
        own = {n for t in tensors for n in t.shape} | {v for v in inputs.case.params.values() if isinstance(v, int)}
    return isinstance(change.now, int) and change.now in own


def _in_all(change: Instead, seen: Sequence[DoneLaunch]) -> Instead:
    """Return the change of a number or flag in all launches from one line that were passed the same."""
    if change.way or not change.name:
        return change
    own = seen[change.launches[0]]
    alike = [n for n, s in enumerate(seen) if s.function is own.function and s.launched == own.launched]
    return replace(change, launches=tuple(n for n in alike if is_same(change.now_in(seen[n].bound), change.now)))


def _told(seen: Sequence[DoneLaunch], change: Instead) -> tuple[str, tuple[Place, bool]]:
    """Return a change in words, where it was passed, and whether the text tells that; else where the launch stands."""
    own = seen[change.launches[0]]

    def shown(value: Any) -> Any:
        """Return a tensor's name, of the outermost function of the host that has one for it, or a number."""
        ways = (way for f in reversed(own.frames) for way, part in parts_of(f.variables) if is_same(part, value))
        named = (way[-1] for way in ways if not way[-1].isdecimal())
        return next(named, "another tensor") if isinstance(value, Tensor) else value

    level = int(change.way[0]) if change.way else None
    arguments = change.name, change.now, change.right
    places = {passer(seen[n].frames, list(seen[n].bound), *arguments, level=level) for n in change.launches}
    right = change.right if level is None else shown(change.tensor(own.frames))
    words = f"{change.name or 'the grid'} = {right} in place of {shown(change.now)} in the launch"
    [place] = places if len(places) == 1 else [None]
    return f"with {words} of {own.function.__name__}", (place or own.launched, place is not None)


def _others(
    number: int, own: DoneLaunch, params: Mapping[str, Any], used: Collection[int]
) -> Iterator[tuple[int, Instead]]:
    """Yield other things to pass in a launch, each with its kind: a later one is tried where none before mends.

    Of tensors those come first that no launch was passed (they are `used` nowhere), then others for one passed twice.
    """
    floats = sorted({float(v) for v in (*params.values(), *own.bound.values(), 1.0) if type(v) is float})
    sized = {v for name, v in own.bound.items() if type(v) is int and "stride" not in name.lower()}
    sized |= {n for t in own.tensors.values() for n in t.shape}
    strides = {n for t in own.tensors.values() for n in t.stride()}
    pool, met = list[tuple[Tensor, Any, Way]](), {own.tensors[name].data_ptr() for name in own.after}
    for level, frame in enumerate(own.frames):  # each tensor by its way in the innermost function that knew it
        for way, part in parts_of(frame.variables):
            if isinstance(part, Tensor) and part.data_ptr() not in met:
                met.add(part.data_ptr())
                pool.append((part, _layout(part), (str(level), *way)))
    found: list[tuple[int, str, Any, Any, Way]] = []
    found += ((0, "", own.grid, tuple(n + (i == dim) for i, n in enumerate(own.grid)), ()) for dim in range(3))
    for name, now in own.bound.items():
        constant = "constexpr" in str(inspect.get_annotations(own.function).get(name, ""))
        flags = now._asdict() if hasattr(now, "_asdict") else {"": now}
        parts = ((f"{name}.{part}" if part else name, v) for part, v in flags.items() if isinstance(v, bool))
        found += ((1, part, v, not v, ()) for part, v in parts)
        if isinstance(now, float):
            found += ((2, name, now, v, ()) for v in floats if v != now)
        elif type(now) is int and not constant:
            others = strides if "stride" in name.lower() else sized | {now + 1, now - 1}
            nearest = sorted(others - {now}, key=lambda v: abs(v - now))
            found += ((SIZES, name, now, v, ()) for v in nearest[:MOST_NUMBERS])
        elif (now is None or name in own.tensors) and name not in own.after:
            before = own.tensors.get(name)
            twice = before is not None and sum(is_same(before, t) for t in own.tensors.values()) > 1
            for part, layout, way in pool:
                known = part.data_ptr() in used
                alike = before is None or (layout[0] == before.dtype and not is_same(part, before))
                if alike and (not known or (before is not None and layout == _layout(before))):
                    found.append((4 if twice else 3 + 2 * known, name, before, way[-1], way))
    yield from ((kind, Instead((number,), *rest)) for kind, *rest in found)


def _tensors_of(bound: Bound) -> dict[str, Tensor]:
    plain = ((name, value.base if isinstance(value, TensorDescriptor) else value) for name, value in bound.items())
    return {name: value for name, value in plain if isinstance(value, Tensor)}


def _are_as(known: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    """Return whether tensors that a launch was passed hold what they held when it was recorded."""
    with _disable_current_modes():
        return all(name in own and _is_equal(own[name], tensor) for name, tensor in known.items())


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return dtype and dimensions, joined where nothing is between them: tensors with equal ones can be exchanged."""
    joined = list[tuple[int, int]]()
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            stride, size = joined[-1][0], joined.pop()[1] * size
        joined.append((stride, size))
    return tensor.dtype, *joined


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _frames(frame: FrameType | None) -> tuple[HostFrame, ...]:
    """Return the functions of the host that led to a launch, the innermost first, up to the call of the kernel."""
    found, end = list[HostFrame](), _Relaunching.changed.__code__.co_consts
    while frame is not None and frame.f_code not in end:
        if is_of_a_kernel(frame.f_code.co_filename):
            place = place_of(frame.f_code, frame.f_lasti)
            found.append(HostFrame(place, frame.f_code, dict(frame.f_locals)))
        frame = frame.f_back
    return tuple(found)
