"""One call of a kernel: its arguments, its results, and its breaches of the rules, such as writes outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lastbit.calling.attempting import Attempt
from lastbit.calling.performing import INPUT, CallRequest, Performed, perform, results_of
from lastbit.calling.process_state import left_by_loading
from lastbit.inputs import Inputs, Poison, violations
from lastbit.kernel import Kernel
from lastbit.result import Finding
from lastbit.shadows.following import Followed, follow
from lastbit.verify import placed


@dataclass(frozen=True)
class Call:
    """The results of one call of a kernel, and the observations of the guards.

    Attributes:
        results: names of the results.
        actual: the tensors that it returned, by stage; copies of those in memory of an input.
        own: its results themselves, unless those of an earlier call are held; without those in memory of an input.
        findings: what it did that it must not do.
        poison: result → what its memory, and other memory of the kernel's, was filled with.
        descended: several programs of a launch ran in descending order.
        private: no later call can change what it returned.
    """

    results: tuple[str, ...]
    actual: dict[str, Tensor]
    own: dict[str, Tensor]
    findings: tuple[Finding, ...]
    poison: Mapping[str, Poison] = field(default_factory=dict)
    descended: bool = False
    private: bool = False

    def kept(self) -> Call:
        """Copy the results, which a later call could change even through an address it kept."""
        if self.private:
            return self
        return replace(self, actual={name: tensor.clone() for name, tensor in self.actual.items()})


class Performer(Protocol):
    """Performs the calls of a kernel, here or in another process; raises the kernel's exceptions and `KernelError`."""

    @property
    def parted(self) -> bool:
        """Whether calls without guards on allocations run in another process than those with guards."""

    @property
    def over(self) -> bool:
        """Whether no call can be performed any more."""

    def perform(self, inputs: Inputs, asked: CallRequest) -> Performed:
        """Call the kernel on inputs, whose memory it gets."""

    def attempt(self, inputs: Inputs, asked: CallRequest, device: torch.device | None) -> Attempt:
        """Call the kernel on inputs on any device, or on copies of all of them on one."""

    def follow(
        self,
        inputs: Inputs,
        params: Mapping[str, Any],
        results: Mapping[str, tuple[int, ...]],
        constants: Sequence[float],
    ) -> Followed:
        """Call the kernel once more and follow it on residues; `results` maps floating-point results to shapes."""

    def after(self, own: Mapping[str, Tensor]) -> Performer:
        """Return the performer of later calls of a case; `own` are the results of the first call, made just before."""


@dataclass(frozen=True)
class Here:
    """Performs the calls of a kernel in this process.

    Attributes:
        kernel, device: what is called, and where it runs.
        held: results of an earlier call, whose memory is not the kernel's any more.
    """

    kernel: Kernel
    device: torch.device
    held: Mapping[str, Tensor] = field(default_factory=dict)
    parted = over = False

    def perform(self, inputs: Inputs, asked: CallRequest) -> Performed:
        return perform(self.kernel.call, inputs.guards, asked, self.device, self.held)

    def attempt(self, inputs: Inputs, asked: CallRequest, device: torch.device | None) -> Attempt:
        return placed.in_this_process(partial(results_of, self.kernel.call, asked, self.device))(inputs, device)

    def follow(
        self,
        inputs: Inputs,
        params: Mapping[str, Any],
        results: Mapping[str, tuple[int, ...]],
        constants: Sequence[float],
    ) -> Followed:
        return follow(self.kernel, inputs.hand_out(), params, tuple(results), constants)

    def after(self, own: Mapping[str, Tensor]) -> Here:
        return replace(self, held=own)


@dataclass(frozen=True)
class Caller:
    """Calls a kernel; raises its exceptions, and `KernelError` if its results cannot be judged.

    Attributes:
        kernel, device: what is called, and where it runs.
        results: names of the results that it must return.
        may_return: names of those that it may leave out.
        performer: where it is called; in this process unless another one is given.
        shapes: stage → its shape, as far as somebody says.
        later: the first call of the case is over.
    """

    kernel: Kernel
    device: torch.device
    results: tuple[str, ...]
    may_return: tuple[str, ...] = ()
    performer: Performer | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    later: bool = False

    def guarded(self, inputs: Inputs) -> Call:
        """Call the kernel with guarded allocations, under the first poison."""
        return self._called(inputs, self._asked(inputs, poison=0))

    def unguarded(self, inputs: Inputs, replaced: str = "", threaded: bool = False) -> Call:
        """Call the kernel with allocations as without lastbit: writes outside may spoil the process.

        In a process of its own an operator of torch can be `replaced` meanwhile, and the call `threaded`: made in a
        thread of its own, while torch has two on the CPU.
        """
        return self._called(inputs, self._asked(inputs, replaced=replaced, threaded=threaded))

    @property
    def parted(self) -> bool:
        """Whether calls without guards on allocations run in another process than those with guards."""
        return self._performer.parted

    def last(self, inputs: Inputs) -> Call:
        """Call the kernel under the second poison, with its stages stored and its programs in descending order."""
        return self._called(inputs, self._asked(inputs, poison=1, stages=self.kernel.stages, descending=True))

    def attempt(self, inputs: Inputs, device: torch.device | None) -> Attempt:
        """Call the kernel on inputs on any device, or on copies of them on one: see `lastbit.verify.placed`."""
        return self._performer.attempt(inputs, self._asked(inputs), device)

    def after(self, first: Call) -> Caller:
        """Return the caller for later calls of the same case, which must return the same results in other memory."""
        performer = self._performer.after(first.own)
        return replace(self, results=first.results, may_return=(), performer=performer, later=True)

    @property
    def _performer(self) -> Performer:
        return Here(self.kernel, self.device) if self.performer is None else self.performer

    def _asked(self, inputs: Inputs, **how: Any) -> CallRequest:
        return CallRequest(inputs.case.params, self.results, self.may_return, shapes=self.shapes, **how)

    def _called(self, inputs: Inputs, asked: CallRequest) -> Call:
        performed = self._performer.perform(inputs, asked)
        named, mutates = performed.named, [guard.name for guard in inputs.guards if guard.name in self.kernel.mutates]
        seen = [*performed.rebound, *violations([*inputs.checks(mutates), *performed.checks]), *performed.violations]
        actual = {n: t.clone() if n in performed.inside else t for n, t in named.items()}
        if seen or mutates:
            inputs.restore()
        findings = [*left_by_loading(self.kernel.arithmetic, self.kernel.source)]
        findings += [Finding(s.kind, s.tensor, s.sentence) for s in seen] + list(performed.findings)
        findings += [*_overlaps(performed, mutates), *performed.reused]
        return Call(
            performed.results,
            actual,
            {} if self.later else performed.own,
            tuple(findings),
            performed.poison,
            performed.descended,
            performed.private,
        )


def _overlaps(performed: Performed, mutates: list[str]) -> Iterator[Finding]:
    """Yield results that share memory with another one, or with an input that the kernel does not overwrite."""
    overwritten = {f"{INPUT}{name}" for name in mutates}
    for a, b in performed.shared:
        other = b in performed.results or b.startswith(INPUT)
        if a in performed.results and other and b not in overwritten:
            sentence = f"result {a} shares memory with {b}; writing to one changes the other."
            yield Finding("overlap", a, sentence)
