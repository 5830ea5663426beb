"""One call of a kernel, and everything that the process in which it runs can see of it, wherever its tensors are.

Nothing here knows what the results must be: who asks for a call judges it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lastbit.branches.taken import traced_call
from lastbit.calling.process_state import kept_process_state
from lastbit.errors import KernelError
from lastbit.inputs.allocations import guarded_allocations
from lastbit.inputs.guards import Guarded, extent, handed_out, moving
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


@dataclass(frozen=True)
class Performed:
    """The outcome of a call, as far as its process can see.

    Attributes:
        actual: what the kernel returned, by name: other objects than its own, which it may hold on to; copies of what
            lies in memory of an input, where a judge asked for the call.
        results: names of the results among these.
        own: the results that lie in no input.
        inside: names of what lies in the allocation of an input, all of which is restored.
        shared: pairs of a returned tensor and another one, an `input NAME`, or itself if its elements do, that share
            memory.
        poison: result → what its memory, and other memory of the kernel's, was filled with.
        rebound: what became of the tensors that the kernel was handed.
        checks: what must hold of the memory that it allocated; whoever is given these makes them.
        violations: what was found where they were made already.
        findings: what it did to the process, and in its programs; all that it must not do, where a judge asked.
        reused: results that lie in memory of an earlier call.
        descended: several programs of a launch ran in descending order.
        private: nobody but who is given this can write to `actual`.
    """

    actual: dict[str, Tensor]
    results: tuple[str, ...]
    own: dict[str, Tensor] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    shared: tuple[tuple[str, str], ...] = ()
    poison: Mapping[str, Poison] = field(default_factory=dict)
    rebound: tuple[Finding, ...] = ()
    checks: tuple[AllocationCheck, ...] = ()
    violations: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    reused: tuple[Finding, ...] = ()
    descended: bool = False
    private: bool = False

    def kept(self) -> Performed:
        """Copy the results, which a later call could change even through an address it kept."""
        if self.private:
            return self
        return replace(self, actual={name: tensor.clone() for name, tensor in self.actual.items()})


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
    handed = handed_out(guards)
    with descending() if asked.descending else nullcontext() as descent:
        if asked.poison is None:
            allocations, (value, findings) = None, returned_by(call, handed, asked.arguments, device)
        else:
            with guarded_allocations(asked.poison) as allocations:
                value, findings = returned_by(call, handed, asked.arguments, device, allocations.blank)
    named = named_results(value, asked.results, asked.may_return)
    results = (*asked.results, *(name for name in named if name in asked.may_return))
    memory = {**named, **{f"{INPUT}{guarded.name}": guarded.tensor for guarded in guards}}
    folded = [(name, name) for name, tensor in named.items() if is_folded(tensor)]
    shared = (*folded, *((a, b) for a, b in overlaps(memory) if a in named))
    borrowed = {a for a, b in shared if b.startswith(INPUT)}
    plain = {name: tensor.detach() for name, tensor in named.items()}
    own = {name: plain[name] for name in results if name not in borrowed}
    inputs = {guarded.words.untyped_storage().data_ptr() for guarded in guards}
    inside = {name for name, tensor in plain.items() if tensor.untyped_storage().data_ptr() in inputs}
    reused = [
        Finding(
            "reused_memory",
            name,
            f"result {name} of a second call lies in the memory of the first call's {old}; whoever keeps a result sees "
            "it change.",
        )
        for (name, tensor), (old, kept) in product(own.items(), held.items())
        if overlaps({"held": kept, "own": tensor})
    ]
    return Performed(
        actual=plain,
        results=results,
        own=own,
        inside=frozenset(borrowed | inside),
        shared=shared,
        poison={} if allocations is None else {name: allocations.poison_of(named[name]) for name in results},
        rebound=tuple(filter(None, (rebound(handed[guarded.name], guarded) for guarded in guards))),
        checks=() if allocations is None else tuple(allocations.checks(named)),
        findings=tuple(findings),
        reused=tuple(reused),
        descended=descent is not None and descent.seen,
    )


def returned_by(
    call: Callable[..., object],
    tensors: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    device: torch.device,
    blank: Blank = lambda tensor: None,
) -> tuple[object, list[Finding]]:
    """Call a kernel and wait for the device; return its value, and findings about the process and its programs."""
    with kept_process_state() as changed, collected(blank) as seen, timed(KERNEL):
        with traced_call():
            value = call(**tensors, **arguments)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return value, changed + [_fault(fault, tensors) for fault in seen.faults.values()]


def results_of(
    call: Callable[..., object], asked: CallRequest, device: torch.device, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Call and return the named results, for tensors that may be on any device."""
    named = named_results(returned_by(call, tensors, asked.arguments, device)[0], asked.results, asked.may_return)
    return {name: named[name] for name in (*asked.results, *(n for n in named if n in asked.may_return))}


def _fault(fault: Fault, handed: Mapping[str, Tensor]) -> Finding:
    """Word a fault of an interpreted program with the case's names of tensors where they are known."""
    named = next((name for name, tensor in handed.items() if _holds(tensor, fault.start)), fault.tensor)
    other = next((name for name, tensor in handed.items() if _holds(tensor, fault.address)), named)
    there = "" if other == named else f", where input {other} is, which the launch was not given"
    return Finding(fault.kind, named, f"{fault.sentence}{there}.")


def _holds(tensor: Tensor, address: int) -> bool:
    """Return whether an element of a tensor is at an address: views of one storage lie in each other's gaps."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    left = (address - tensor.data_ptr()) // tensor.element_size()
    if tensor.device.type != "cpu" or not 0 <= left < extent(shape, strides):
        return False
    for _, stride, size in reversed(list(moving(shape, strides))):
        left -= min(left // stride, size - 1) * stride
    return left == 0


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
        kind = type(returned).__name__
        what = f"{kind} of {len(returned)}" if isinstance(returned, tuple | list) else kind
        raise KernelError(f"the kernel returned {what}, but must return {_expected(results)}")
    for name, value in returned.items():
        if not isinstance(value, Tensor):
            raise KernelError(f"the kernel returned {type(value).__name__} for {name!r}, but must return a tensor")
        # Its storage may have been resized: to read beyond it would be a crash.
        reach = (value.storage_offset() + extent(tuple(value.shape), value.stride())) * value.element_size()
        if value.numel() and reach > (size := value.untyped_storage().nbytes()):
            raise KernelError(f"the kernel returned {name!r} with a storage of {size:,} bytes, but it needs {reach:,}")
    missing = [name for name in results if name not in returned]
    if missing:
        raise KernelError(f"the kernel returned {sorted(returned)}, which lacks the result {missing[0]!r}")
    return dict(returned)


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
    rebound: tuple[Finding, ...] = ()
    violations: tuple[Finding, ...] = ()


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
