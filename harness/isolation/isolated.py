"""The judge's side of a call: inputs are copied to a kernel process, and results to memory of the judge alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lastbit.calling.performing import INPUT, Attempt, CallRequest, Performed
from lastbit.errors import KernelError, UnsupportedCase, no_stage, wrong_kind
from lastbit.inputs import Inputs, Poison
from lastbit.inputs.guards import ALIGNMENT
from lastbit.interpret.watching import watching_races
from lastbit.isolation import answers
from lastbit.isolation.answers import KernelProcessEnded, Raised, Result
from lastbit.isolation.process import KernelProcess
from lastbit.isolation.shared_memory import Blocks, SharedBlock, memory_of
from lastbit.numerics.residues import Residues
from lastbit.placement import PlacementWarning
from lastbit.shadows.following import Followed
from lastbit.timing import KERNEL, timed

_RESULTS = 0  # key of the block for results among blocks whose keys are addresses
# Arbitrary: 2³³ numbers of bf16; a process that nobody trusts could ask for all memory.
MOST_RESULTS = 1 << 34
"""Bytes that a call may return, where they are not more than an eighth of the memory that there is."""

# Arbitrary: more takes stack, and the limit of Python is 1,000.
FRAMES = 100
"""Below fewer frames than that a call without guards is made, drawn anew each time: a model may have as many."""

# Arbitrary: large enough for most cases; what does not fit is asked for again.
_FIRST_RESULTS = 1 << 20
# A call that has no time left is asked all the same, so that what it ends with is an answer of the kernel process.
_SHORTEST = 0.001  # seconds


@dataclass
class ProcessPair:
    """The kernel processes of an item: one that calls its kernel amid guards, and one with nothing of lastbit.

    Attributes:
        name: of the kernel, as its file declares it.
        timeout: seconds that a case may take.
        blocks: memory that both have.
        latest: when the case that is under way must be over.
    """

    guarded: KernelProcess
    bare: KernelProcess
    name: str
    timeout: float = 120.0
    blocks: Blocks = field(default_factory=Blocks)
    latest: float = 0.0

    def __post_init__(self) -> None:
        self.begin()

    @property
    def over(self) -> bool:
        """Return whether one of them has ended, so that nothing more can be asked."""
        return self.guarded.over or self.bare.over

    def begin(self) -> None:
        """Begin a case: free the blocks of the last one, and start its clock."""
        self.blocks.begin()
        self.latest = time.monotonic() + self.timeout

    def ask(
        self, process: KernelProcess, message: Mapping[str, Any], blocks: Sequence[SharedBlock]
    ) -> Mapping[str, Any]:
        """Send a message about memory in some blocks to a kernel process, and return its answer."""
        new = {b.number: b for b in blocks if b.number not in process.known}
        gone = process.known - self.blocks.numbers()
        process.known = (process.known - gone) | new.keys()
        shared = {"new": [block.as_json for block in new.values()], "gone": sorted(gone)}
        process.watched.shared = self.blocks.nbytes
        fds = [block.descriptor for block in new.values() if block.descriptor is not None]
        try:
            with timed(KERNEL):
                return process.ask({**message, **shared}, max(self.latest - time.monotonic(), _SHORTEST), fds)
        except KernelProcessEnded as ended:
            raise ended.within(self.timeout) from None

    def end(self) -> None:
        """End both processes."""
        self.guarded.end()
        self.bare.end()


@dataclass(frozen=True)
class Isolated:
    """Performs the calls of a kernel in its processes.

    Attributes:
        pair: these.
        device: where it runs.
        later: the first call of the case is over.
    """

    pair: ProcessPair
    device: torch.device
    later: bool = False
    parted = True

    @property
    def over(self) -> bool:
        return self.pair.over

    def perform(self, inputs: Inputs, asked: CallRequest) -> Performed:
        if not self.later:
            self.pair.begin()
        process = self.pair.bare if asked.poison is None else self.pair.guarded
        answer, named = self._called(process, inputs, {"do": "call", "later": self.later, **_how(asked)}, asked.shapes)
        return _performed(answer, named, inputs, asked)

    def attempt(self, inputs: Inputs, asked: CallRequest, device: torch.device | None) -> Attempt:
        to = None if device is None else str(device)
        try:
            message = {"do": "attempt", "to": to, **_how(asked)}
            answer, named = self._called(self.pair.guarded, inputs, message, asked.shapes)
        except (Raised, UnsupportedCase) as error:
            return Attempt(error=error)
        warned = list[Warning]()  # of the kernel's, as they would have been in this process
        for text, *placed in answers.warnings(answer.get("warnings", [])):
            if placed:
                source, target = map(answers.device_of, placed[1:])
                warned.append(PlacementWarning(answers.name_of(placed[0]), source, target))
            else:
                warned.append(UserWarning(answers.text_of(text)))
        rebound, violations = (answers.findings(answer.get(what, [])) for what in ("rebound", "violations"))
        return Attempt(named, None, tuple(warned), rebound, violations)

    def follow(
        self,
        inputs: Inputs,
        params: Mapping[str, Any],
        results: Mapping[str, tuple[int, ...]],
        constants: Sequence[float],
    ) -> Followed:
        """Return the residues that a kernel computes, as its process says, without those that are not sound.

        `results` are their shapes.
        """
        self.pair.begin()
        how = {"params": dict(params), "results": list(results), "constants": list(constants)}
        shapes = {name: (4, *shape) for name, shape in results.items()}
        try:
            answer, named = self._called(self.pair.guarded, inputs, {"do": "follow", **how}, shapes)
        except (Raised, KernelError, UnsupportedCase) as error:
            if self.over:
                raise
            return Followed({}, (f"following: its process says {error}",), told=True)
        found = {name: Residues(tensor) for name, tensor in named.items()}
        sound = {name: residues for name, residues in found.items() if residues.is_sound}
        return Followed(sound, answers.many(answer.get("opaque", []), answers.text_of), told=True)

    def after(self, own: Mapping[str, Tensor]) -> Isolated:
        return replace(self, later=True)

    def _called(
        self,
        process: KernelProcess,
        inputs: Inputs,
        message: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]] | None,
    ) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        """Return the answer of a process to a call, and its results; its changes of inputs are made to these `inputs`.

        Raises:
            KernelError: that has other `shapes`, where these are known.
        """
        blocks, there, tensors = list[SharedBlock](), list[Tensor](), list[dict[str, Any]]()
        for guarded in inputs.guards:  # of which those that share memory share the block
            block, tensor = self.pair.blocks.of(guarded.words), guarded.tensor
            offset = guarded.words.data_ptr() % ALIGNMENT  # as far from an aligned address as the judge's own
            words = block.words[offset // 8 : offset // 8 + guarded.words.numel()]
            words.copy_(guarded.words)
            described = {  # without where its values come from
                "name": guarded.name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "strides": list(tensor.stride()),
                "start": guarded.start,
                "memory": block.number,
                "offset": offset,
                "bytes": guarded.words.nbytes,
            }
            blocks.append(block)
            there.append(words)
            tensors.append(described)
        message = {**message, "kernel": self.pair.name, "device": str(self.device), "tensors": tensors}
        try:
            answer, into = self._answered(process, message, blocks, shapes)
        finally:
            for guarded, words in zip(inputs.guards, there, strict=True):
                guarded.words.copy_(words)
        results, _ = answers.results_of(answer)
        return answer, {result.name: _own(result, into) for result in results}

    def _answered(
        self,
        process: KernelProcess,
        message: Mapping[str, Any],
        blocks: Sequence[SharedBlock],
        shapes: Mapping[str, tuple[int, ...]] | None,
    ) -> tuple[Mapping[str, Any], SharedBlock]:
        into = self._results(_FIRST_RESULTS)
        if self.device.type != "cpu":  # copies must be complete before another process is told of them
            torch.accelerator.synchronize(self.device)
        try:
            answer = self.pair.ask(process, {**message, "into": into.number}, [*blocks, into])
            results, size = answers.results_of(answer)
            if shapes is not None:
                for result in results:
                    if result.name not in shapes:
                        raise no_stage(result.name, shapes)
                    if result.shape != shapes[result.name]:
                        raise wrong_kind(result.name, "shape", result.shape, shapes[result.name])
            if size > into.nbytes:
                if size > (most := min(MOST_RESULTS, memory_of(self.device) // 8)):
                    raise KernelError(f"the kernel returned {size:,} bytes, of which lastbit takes {most:,}")
                into = self._results(size)
                self.pair.ask(process, {"do": "copy", "into": into.number}, [into])
        except Raised as error:
            if "UnsupportedCase" in error.kinds:
                raise UnsupportedCase(str(error)) from None
            if error.lost:
                self.pair.end()
            raise
        return answer, into

    def _results(self, size: int) -> SharedBlock:
        return self.pair.blocks.sized(_RESULTS, self.device, size)


def _how(asked: CallRequest) -> dict[str, Any]:
    """Return the fields of a call that a kernel process needs."""
    return {
        "params": dict(asked.params),
        "results": list(asked.results),
        "may_return": list(asked.may_return),
        "poison": asked.poison,
        "stages": list(asked.stages),
        "descending": asked.descending,
        "replaced": asked.replaced,
        "threaded": asked.threaded,
        "frames": secrets.randbelow(FRAMES),
        "races": watching_races(),
    }


def _performed(answer: Mapping[str, Any], named: dict[str, Tensor], inputs: Inputs, asked: CallRequest) -> Performed:
    """Return what is known of a call: of its process's answer, only facts that this process can know."""
    if missing := [name for name in asked.results if name not in named]:
        raise KernelError(f"the kernel returned {sorted(named)}, which lacks the result {missing[0]!r}")
    results = (*asked.results, *(name for name in named if name in asked.may_return))
    known = {*named, *(f"{INPUT}{guarded.name}" for guarded in inputs.guards)}
    shared = answers.many(answer.get("shared", []), answers.pair)
    poison = answers.named(answer.get("poison", {}), answers.poison)
    return Performed(
        actual=named,
        results=results,
        shared=tuple(pair for pair in shared if pair[0] in named and pair[1] in known),
        poison={name: poison.get(name, Poison()) for name in results},
        rebound=answers.findings(answer.get("rebound", [])),
        violations=answers.findings(answer.get("violations", [])),
        findings=answers.findings(answer.get("findings", [])),
        reused=answers.findings(answer.get("reused", [])),
        descended=answers.flag(answer.get("descended", False)),
        private=True,
    )


def _own(result: Result, into: SharedBlock) -> Tensor:
    """Copy a result to memory of this process alone."""
    if result.at < 0:
        return _empty(result)
    there = torch.tensor([], dtype=result.dtype, device=into.words.device)
    there.set_(into.words.untyped_storage(), result.at // result.dtype.itemsize, result.shape, result.strides)
    return there.clone() if result.device.type == there.device.type else _empty(result).copy_(there)


def _empty(result: Result) -> Tensor:
    try:
        return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=result.device)
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch says to a device that is not there
        raise KernelError(f"the kernel returned {result.name!r} on {result.device}: {error}") from None
