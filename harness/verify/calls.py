"""One call of a kernel: what it gets, what it returns, and what it did that it must not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from harness.errors import KernelError
from harness.inputs import Allocations, Inputs, Poison, Rebound, Violation, guarded_allocations, overlaps, violations
from harness.inputs.guards import extent
from harness.interpret import descending
from harness.interpret.faults import Blank, Fault, collected
from harness.kernel import Kernel
from harness.result import Finding
from harness.timing import KERNEL, timed
from harness.verify.process_state import kept_process_state


@dataclass(frozen=True)
class Call:
    """What one call of a kernel returned, and what the guards saw.

    Attributes:
        results: names of the results.
        actual: the tensors that it returned, by stage; copies of those in memory of an input.
        own: its results themselves, unless those of an earlier call are held; without those in memory of an input.
        findings: what it did that it must not do.
        poison: result → what its memory, and other memory of the kernel's, was filled with.
        descended: several programs of a launch ran in descending order.
    """

    results: tuple[str, ...]
    actual: dict[str, Tensor]
    own: dict[str, Tensor]
    findings: tuple[Finding, ...]
    poison: Mapping[str, Poison] = field(default_factory=dict)
    descended: bool = False

    def kept(self) -> Call:
        """The same with copies of what it returned: a later call could change that, be it through an address."""
        return replace(self, actual={name: tensor.clone() for name, tensor in self.actual.items()})


@dataclass(frozen=True)
class _Returned:
    """What a kernel returned, the tensors that it was handed, and what else it did: to the process, in its programs."""

    value: object
    handed: Mapping[str, Tensor]
    findings: list[Finding]


@dataclass(frozen=True)
class Caller:
    """Calls a kernel, and raises what it raises, or a `KernelError` where what it returned cannot be judged.

    Attributes:
        kernel, device: what is called, and where it runs.
        results: names of the results that it must return.
        may_return: names of those that it may leave out.
        held: results of an earlier call, whose memory is not the kernel's any more.
    """

    kernel: Kernel
    device: torch.device
    results: tuple[str, ...]
    may_return: frozenset[str] = frozenset()
    held: Mapping[str, Tensor] = field(default_factory=dict)

    def guarded(self, inputs: Inputs) -> Call:
        """A call under the first poison."""
        return self._guarded(inputs, 0, {})

    def unguarded(self, inputs: Inputs) -> Call:
        """A call in which the kernel allocates as it does without lastbit: writes outside may spoil the process."""
        return self._seen(inputs, self._returned(inputs.hand_out(), inputs.case.params))

    def last(self, inputs: Inputs) -> Call:
        """A call under the second poison that also stores the stages, with all programs in descending order."""
        with descending() as descent:
            stages = {"stages": self.kernel.stages} if self.kernel.stages else {}
            call = self._guarded(inputs, 1, stages)
        return replace(call, descended=descent.seen)

    def results_of(self, tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
        """The results for tensors that may be on any device."""
        named = _named(self._returned(tensors, params).value, self.results)
        return {name: named[name] for name in self._results(named)}

    def after(self, first: Call) -> Caller:
        """For later calls of the same case: they must return what the first one did, in other memory."""
        return replace(self, results=first.results, may_return=frozenset(), held=first.own)

    def _results(self, named: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The results among what the kernel returned."""
        return (*self.results, *(name for name in named if name in self.may_return))

    def _guarded(self, inputs: Inputs, poison: int, asked: Mapping[str, Any]) -> Call:
        handed = inputs.hand_out()
        with guarded_allocations(poison) as allocations:
            returned = self._returned(handed, {**inputs.case.params, **asked}, allocations.blank)
        return self._seen(inputs, returned, allocations)

    def _returned(
        self, tensors: Mapping[str, Tensor], arguments: Mapping[str, Any], blank: Blank = lambda tensor: None
    ) -> _Returned:
        with kept_process_state() as changed, collected(blank) as seen, timed(KERNEL):
            value = self.kernel.call(**tensors, **arguments)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
        return _Returned(value, tensors, changed + [_fault(fault, tensors) for fault in seen.faults.values()])

    def _seen(self, inputs: Inputs, returned: _Returned, allocations: Allocations | None = None) -> Call:
        named = _named(returned.value, self.results)
        results = self._results(named)
        mutates = [name for name in self.kernel.mutates if name in returned.handed]
        checks = [*inputs.checks(mutates), *(() if allocations is None else allocations.checks(named))]
        seen: list[Violation | Rebound] = [*inputs.rebound(returned.handed), *violations(checks)]
        poison = {} if allocations is None else {name: allocations.poison_of(named[name]) for name in results}
        shared = _shared(named, inputs)
        borrowed = {a for a, b in shared if b.startswith(_INPUT)}
        named = {n: t.detach() for n, t in named.items()}  # other objects than the kernel's, which it may hold on to
        actual = {n: t.clone() if n in borrowed or _within(inputs, t) else t for n, t in named.items()}
        if seen or mutates:
            inputs.restore()
        findings = [Finding(s.kind, s.tensor, s.sentence) for s in seen] + returned.findings
        shared = [(a, b) for a, b in shared if a in results and (b in results or b.startswith(_INPUT))]
        findings += [_overlap(a, b) for a, b in shared if b not in {f"{_INPUT}{name}" for name in mutates}]
        own = {name: named[name] for name in results if name not in borrowed}
        findings += _reused(self.held, own)
        return Call(results, actual, {} if self.held else own, tuple(findings), poison)


def _fault(fault: Fault, handed: Mapping[str, Tensor]) -> Finding:
    """A fault of an interpreted program, with the case's names of tensors where they are known."""
    named = next((name for name, tensor in handed.items() if _covers(tensor, fault.start)), fault.tensor)
    other = next((name for name, tensor in handed.items() if _covers(tensor, fault.address)), named)
    there = "" if other == named else f", where input {other} is, which the launch was not given"
    return Finding(fault.kind, named, f"{fault.sentence}{there}.")


def _covers(tensor: Tensor, address: int) -> bool:
    reach = extent(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
    return tensor.device.type == "cpu" and 0 <= address - tensor.data_ptr() < reach


def _within(inputs: Inputs, tensor: Tensor) -> bool:
    """Whether a tensor lies in the allocation of an input, all of which is restored."""
    memory = tensor.untyped_storage().data_ptr()
    return any(memory == guarded.words.untyped_storage().data_ptr() for guarded in inputs.guards)


_INPUT = "input "


def _shared(named: Mapping[str, Tensor], inputs: Inputs) -> list[tuple[str, str]]:
    """Pairs of a returned tensor and another one, or an `input NAME`, that share memory."""
    guarded = {f"{_INPUT}{g.name}": g.tensor for g in inputs.guards}
    return [(a, b) for a, b in overlaps({**named, **guarded}) if a in named]


def _overlap(a: str, b: str) -> Finding:
    return Finding("overlap", a, f"result {a} shares memory with {b}; writing to one changes the other.")


def _reused(held: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[Finding]:
    for (name, tensor), (old, kept) in product(own.items(), held.items()):
        if overlaps({"held": kept, "own": tensor}):
            sentence = (
                f"result {name} of a second call lies in the memory of the first call's {old}; whoever keeps a result "
                "sees it change."
            )
            yield Finding("reused_memory", name, sentence)


def _named(returned: object, results: tuple[str, ...]) -> dict[str, Tensor]:
    """The kernel's return value as a mapping from stages to tensors; `results` are those that it must hold."""
    if isinstance(returned, Tensor) and len(results) == 1:
        returned = {results[0]: returned}
    if not isinstance(returned, Mapping):
        expected = f"a tensor or {{{results[0]!r}: tensor}}" if len(results) == 1 else f"a mapping with {list(results)}"
        raise KernelError(f"the kernel returned {type(returned).__name__}, but must return {expected}")
    for name, value in returned.items():
        if not isinstance(value, Tensor):
            raise KernelError(f"the kernel returned {type(value).__name__} for {name!r}, but must return a tensor")
        _check_memory(name, value)
    missing = [name for name in results if name not in returned]
    if missing:
        raise KernelError(f"the kernel returned {sorted(returned)}, which lacks the result {missing[0]!r}")
    return dict(returned)


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor lies within its storage, which may have been resized: reading it would be a crash."""
    reach = (tensor.storage_offset() + extent(tuple(tensor.shape), tensor.stride())) * tensor.element_size()
    if tensor.numel() and reach > (size := tensor.untyped_storage().nbytes()):
        raise KernelError(f"the kernel returned {name!r} with a storage of {size:,} bytes, but it needs {reach:,}")
