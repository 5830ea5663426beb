"""One call of a kernel, and everything that the process in which it runs can see of it, wherever its tensors are.

Nothing here knows what the results must be: who asks for a call judges it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from lastbit.branches.taken import traced_call
from lastbit.calling.process_state import kept_process_state
from lastbit.errors import KernelError
from lastbit.inputs.allocations import guarded_allocations
from lastbit.inputs.guards import Guarded, extent, twin
from lastbit.inputs.of_case import rebound
from lastbit.inputs.overlap import is_folded, overlaps
from lastbit.inputs.poison import Poison
from lastbit.inputs.written import AllocationCheck
from lastbit.interpret import descending
from lastbit.interpret.faults import Blank, Fault, collected
from lastbit.result import Finding
from lastbit.timing import KERNEL, timed

INPUT = "input "
"""What stands before the name of an input where a result may have the same name."""


@dataclass(frozen=True)
class CallRequest:
    """A request for a call.

    Attributes:
        params: the parameters of the case.
        results: names of the results that the kernel must return.
        may_return: names of those that it may leave out; given by order, they follow the others.
        poison: what the memory that it allocates is filled with, 0 or 1; None for memory as it is without lastbit.
        stages: what it shall store besides.
        descending: interpreted programs run from the last to the first.
        replaced: an operator of torch that gives other values meanwhile, where processes of their own make such calls.
        threaded: it is made in a thread of its own, there too, where torch has two threads on the CPU.
        shapes: stage → its shape: of what the kernel may return, as far as somebody says.
    """

    params: Mapping[str, Any]
    results: tuple[str, ...]
    may_return: tuple[str, ...] = ()
    poison: int | None = None
    stages: tuple[str, ...] = ()
    descending: bool = False
    replaced: str = ""
    threaded: bool = False
    shapes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call other than tensors."""
        return {**self.params, "stages": self.stages} if self.stages else dict(self.params)


class Said(Protocol):
    """A misuse of a tensor by a kernel, as its process reports it."""

    @property
    def kind(self) -> str: ...
    @property
    def tensor(self) -> str: ...
    @property
    def sentence(self) -> str: ...


@dataclass(frozen=True)
class Performed:
    """The outcome of a call, as far as its process can see.

    Attributes:
        named: what the kernel returned, by name: other objects than its own, which it may hold on to.
        results: names of the results among these.
        own: the results that lie in no input.
        inside: names of what lies in the allocation of an input, all of which is restored.
        shared: pairs of a returned tensor and another one, an `input NAME`, or itself if its elements do, that share
            memory.
        poison: result → what its memory, and other memory of the kernel's, was filled with.
        rebound: what became of the tensors that the kernel was handed.
        checks: what must hold of the memory that it allocated; whoever is given these makes them.
        violations: what was found where they were made already.
        findings: what it did to the process, and in its programs.
        reused: results that lie in memory of an earlier call.
        descended: several programs of a launch ran in descending order.
        private: nobody but who is given this can write to `named`.
    """

    named: dict[str, Tensor]
    results: tuple[str, ...]
    own: dict[str, Tensor] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    shared: tuple[tuple[str, str], ...] = ()
    poison: Mapping[str, Poison] = field(default_factory=dict)
    rebound: tuple[Said, ...] = ()
    checks: tuple[AllocationCheck, ...] = ()
    violations: tuple[Said, ...] = ()
    findings: tuple[Finding, ...] = ()
    reused: tuple[Finding, ...] = ()
    descended: bool = False
    private: bool = False


def perform(
    call: Callable[..., object],
    guards: Sequence[Guarded],
    asked: CallRequest,
    device: torch.device,
    held: Mapping[str, Tensor],
) -> Performed:
    """Call a kernel on guarded tensors; `held` are results of an earlier call, whose memory is not its any more.

    Raises what the kernel raises, or a `KernelError` where what it returned cannot be judged.
    """
    handed = {guarded.name: twin(guarded, guarded.words) for guarded in guards}
    with descending() if asked.descending else nullcontext() as descent:
        if asked.poison is None:
            allocations, returned = None, returned_by(call, handed, asked.arguments, device)
        else:
            with guarded_allocations(asked.poison) as allocations:
                returned = returned_by(call, handed, asked.arguments, device, allocations.blank)
    named = named_results(returned.value, asked.results, asked.may_return)
    results = (*asked.results, *(name for name in named if name in asked.may_return))
    shared = tuple(_shared(named, guards))
    borrowed = {a for a, b in shared if b.startswith(INPUT)}
    plain = {name: tensor.detach() for name, tensor in named.items()}
    own = {name: plain[name] for name in results if name not in borrowed}
    return Performed(
        named=plain,
        results=results,
        own=own,
        inside=frozenset(borrowed | {name for name, tensor in plain.items() if _within(guards, tensor)}),
        shared=shared,
        poison={} if allocations is None else {name: allocations.poison_of(named[name]) for name in results},
        rebound=tuple(filter(None, (rebound(handed[guarded.name], guarded) for guarded in guards))),
        checks=() if allocations is None else tuple(allocations.checks(named)),
        findings=tuple(returned.findings),
        reused=tuple(_reused(held, own)),
        descended=descent is not None and descent.seen,
    )


@dataclass(frozen=True)
class Returned:
    """The return value of a kernel, and its side effects on the process and in its programs."""

    value: object
    findings: list[Finding]


def returned_by(
    call: Callable[..., object],
    tensors: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    device: torch.device,
    blank: Blank = lambda tensor: None,
) -> Returned:
    """Call a kernel and wait for the device."""
    with kept_process_state() as changed, collected(blank) as seen, timed(KERNEL):
        with traced_call():
            value = call(**tensors, **arguments)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return Returned(value, changed + [_fault(fault, tensors) for fault in seen.faults.values()])


def results_of(
    call: Callable[..., object], asked: CallRequest, device: torch.device, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Call and return the named results, for tensors that may be on any device."""
    named = named_results(returned_by(call, tensors, asked.arguments, device).value, asked.results, asked.may_return)
    return {name: named[name] for name in (*asked.results, *(n for n in named if n in asked.may_return))}


def _fault(fault: Fault, handed: Mapping[str, Tensor]) -> Finding:
    """Word a fault of an interpreted program with the case's names of tensors where they are known."""
    named = next((name for name, tensor in handed.items() if _covers(tensor, fault.start)), fault.tensor)
    other = next((name for name, tensor in handed.items() if _covers(tensor, fault.address)), named)
    there = "" if other == named else f", where input {other} is, which the launch was not given"
    return Finding(fault.kind, named, f"{fault.sentence}{there}.")


def _covers(tensor: Tensor, address: int) -> bool:
    reach = extent(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
    return tensor.device.type == "cpu" and 0 <= address - tensor.data_ptr() < reach


def _within(guards: Sequence[Guarded], tensor: Tensor) -> bool:
    """Check whether a tensor lies in the allocation of an input."""
    memory = tensor.untyped_storage().data_ptr()
    return any(memory == guarded.words.untyped_storage().data_ptr() for guarded in guards)


def _shared(named: Mapping[str, Tensor], guards: Sequence[Guarded]) -> list[tuple[str, str]]:
    """List pairs of a returned tensor and another one, an `input NAME` or itself, that share memory."""
    guarded = {f"{INPUT}{g.name}": g.tensor for g in guards}
    own = [(name, name) for name, tensor in named.items() if is_folded(tensor)]
    return [*own, *((a, b) for a, b in overlaps({**named, **guarded}) if a in named)]


def _reused(held: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[Finding]:
    for (name, tensor), (old, kept) in product(own.items(), held.items()):
        if overlaps({"held": kept, "own": tensor}):
            sentence = (
                f"result {name} of a second call lies in the memory of the first call's {old}; whoever keeps a result "
                "sees it change."
            )
            yield Finding("reused_memory", name, sentence)


def in_order(required: Sequence[str], optional: Sequence[str], given: Sequence[Any]) -> dict[str, Any] | None:
    """Return results that were given by order under their names, or None if there are more or fewer.

    They are all that are `required`, or these and all that are `optional`.
    """
    fitting = (names for names in (required, (*required, *optional)) if len(names) == len(given))
    return next((dict(zip(names, given, strict=True)) for names in fitting), None)


def under_any_name(returned: Any) -> dict[str, Any]:
    """Return what a kernel returned as a mapping, with names that say nothing where it gives none."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list):
        return {f"result {number}": part for number, part in enumerate(returned, 1)}
    return {"the result": returned}


def named_results(returned: object, results: tuple[str, ...], may_return: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Map the kernel's return value from stages to tensors.

    Given by order, they are `results`, which it must hold, or these and `may_return`.
    """
    if isinstance(returned, Tensor | tuple | list):
        ordered = [returned] if isinstance(returned, Tensor) else returned
        returned = in_order(results, may_return, ordered) or returned
    if not isinstance(returned, Mapping):
        raise KernelError(f"the kernel returned {_described(returned)}, but must return {_expected(results)}")
    for name, value in returned.items():
        if not isinstance(value, Tensor):
            raise KernelError(f"the kernel returned {type(value).__name__} for {name!r}, but must return a tensor")
        _check_memory(name, value)
    missing = [name for name in results if name not in returned]
    if missing:
        raise KernelError(f"the kernel returned {sorted(returned)}, which lacks the result {missing[0]!r}")
    return dict(returned)


def _described(returned: object) -> str:
    kind = type(returned).__name__
    return f"{kind} of {len(returned)}" if isinstance(returned, tuple | list) else kind


def _expected(results: tuple[str, ...]) -> str:
    """Describe the return value that a kernel must give, and the declarations for one that only writes its results."""
    if len(results) == 1:
        returned, held = f"a tensor or {{{results[0]!r}: tensor}}", f"mutates={{'INPUT': {results[0]!r}}}"
    else:
        named = ", ".join(f"{name!r}: …" for name in results)
        inputs = ", ".join(f"'{'OTHER ' * number}INPUT': {name!r}" for number, name in enumerate(results))
        returned = f"all of {', '.join(results)}: a tuple in this order, or return {{{named}}}"
        held = f"mutates={{{inputs}}}"
    out = f"out={{'PARAMETER': {results[0]!r}}}"
    return f"{returned}; if it writes a result into a parameter, write @kernel(…, {out}), into an input, {held}"


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor lies within its storage, which may have been resized: reading it would be a crash."""
    reach = (tensor.storage_offset() + extent(tuple(tensor.shape), tensor.stride())) * tensor.element_size()
    if tensor.numel() and reach > (size := tensor.untyped_storage().nbytes()):
        raise KernelError(f"the kernel returned {name!r} with a storage of {size:,} bytes, but it needs {reach:,}")


Results = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Calls a kernel with tensors by name, waits for the device, and gives its results by name."""


@dataclass(frozen=True)
class Attempt:
    """One call: its results, its exception and its warnings.

    Attributes:
        results: copies of what it returned, by name; none where it raised.
        error: what it raised.
        warnings: what it warned of.
        rebound: what became of the tensors that it was handed.
        violations: what it wrote outside of memory that it allocated.
    """

    results: Mapping[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    warnings: tuple[Warning, ...] = ()
    rebound: tuple[Said, ...] = ()
    violations: tuple[Said, ...] = ()


def attempted(call: Results, tensors: Mapping[str, Tensor]) -> Attempt:
    """Call the kernel and record results, error and every warning."""
    with guarded_allocations(0) as allocations, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Copies, because a result may share memory with an input that is restored afterwards.
            results, error = {name: result.clone() for name, result in call(tensors).items()}, None
        except Exception as raised:  # the kernel's own code runs here
            results, error = {}, raised
    told = tuple(w.message for w in caught if isinstance(w.message, Warning))
    return Attempt(results, error, told, violations=tuple(allocations.violations()))
