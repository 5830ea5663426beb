"""A kernel process that calls its kernel as lastbit calls kernels: amid guards, and watched by the interpreter."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastbit.calling.performing import CallRequest, attempted, perform, results_of
from lastbit.inputs.guards import Guarded, handed_out
from lastbit.inputs.of_case import rebound
from lastbit.inputs.written import violations
from lastbit.interpret import races
from lastbit.isolation.runner import Withheld, placed
from lastbit.kernel import Kernel, loaded_kernels
from lastbit.of_file import kernel_of_file, plain_name, role_of
from lastbit.placement import PlacementWarning
from lastbit.result import Finding
from lastbit.shadows.following import follow
from lastbit.takes import as_text
from lastbit.trees import imported, outermost

# Arbitrary: reports name a few, and what a foreign process answers must have a bound.
MOST_OPAQUE = 100
"""Operations without residues that are told."""

Message = Mapping[str, Any]


class KernelWork:
    """The requests of a judge that a kernel process serves: to load kernels, and to call one of them."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._held: Mapping[str, Tensor] = {}

    def load(self, message: Message) -> dict[str, Any]:
        """Load a folder or a file of one, or the kernel of a file that has a role; return their declarations."""
        Withheld.begin()
        if "role" in message:
            path = Path(message["path"])
            kernel = kernel_of_file(path, role_of(message["role"]))
            self._kernels = {kernel.name: kernel}
            return {"kernels": [{**_declared(kernel), "file": path.name}], "plain": plain_name(kernel)}
        before = set(sys.modules)
        loaded = loaded_kernels(Path(message["path"]))
        self._kernels = {one.kernel.name: one.kernel for one in loaded}
        kernels = [{**_declared(one.kernel), "file": one.file.name} for one in loaded]
        modules = outermost(imported(before))
        return {"kernels": kernels, "imported": {name: str(file) for name, file in modules.items()}}

    def run(self, message: Message) -> dict[str, Any]:
        """Call a function of a module of lastbit, and return its result, an object of JSON."""
        function: Callable[..., dict[str, Any]] = getattr(import_module(message["module"]), message["function"])
        return {"returned": [function(**message["arguments"])]}

    def depth(self, message: Message) -> dict[str, Any]:
        """Return the height of the summation tree of a kernel for a number of terms."""
        depth = self._kernels[message["kernel"]].depth
        return {"depth": None if depth is None else int(depth(message["terms"]))}

    def call(self, message: Message, tensors: Sequence[tuple[Message, Tensor]]) -> tuple[dict[str, Tensor], Message]:
        """Call a kernel; return its results, and everything else that is known of the call."""
        guards = _guards(tensors)
        call, later = self._kernels[message["kernel"]].call, bool(message["later"])
        self._held = self._held if later else {}
        with races() if message["races"] else nullcontext():
            performed = perform(call, guards, _asked(message), torch.device(message["device"]), self._held)
        said = {
            "results": performed.results,
            "shared": performed.shared,
            "poison": {name: [p.own, sorted(p.others)] for name, p in performed.poison.items()},
            "rebound": _sentences(performed.rebound),
            "violations": _sentences(violations(performed.checks)),
            "findings": _sentences(performed.findings),
            "reused": _sentences(performed.reused),
            "descended": performed.descended,
        }
        if not later:
            self._held = performed.own
        return performed.actual, said

    def follow(self, message: Message, tensors: Sequence[tuple[Message, Tensor]]) -> tuple[dict[str, Tensor], Message]:
        """Call a kernel once more on residues; return these by result, and the operations that have none."""
        guards = _guards(tensors)
        handed = handed_out(guards)
        kernel = self._kernels[message["kernel"]]
        followed = follow(kernel, handed, message["params"], message["results"], message["constants"])
        numbers = {name: residues.numbers.contiguous() for name, residues in followed.results.items()}
        return numbers, {"opaque": followed.opaque[:MOST_OPAQUE]}

    def attempt(self, message: Message, tensors: Sequence[tuple[Message, Tensor]]) -> tuple[dict[str, Tensor], Message]:
        """Call a kernel with tensors that may be on any device, or on one: see `lastbit.calling.performing`."""
        guards = _guards(tensors)
        call, device = self._kernels[message["kernel"]].call, torch.device(message["device"])
        handed = handed_out(guards)
        given = handed if message["to"] is None else {name: t.to(message["to"]) for name, t in handed.items()}
        attempt = attempted(partial(results_of, call, _asked(message), device), given)
        if attempt.error is not None:
            raise attempt.error
        changed = [rebound(handed[guarded.name], guarded) for guarded in guards]
        said = {
            "warnings": [
                [str(w), w.name, str(w.source), str(w.target)] if isinstance(w, PlacementWarning) else [str(w)]
                for w in attempt.warnings
            ],
            "rebound": _sentences([change for change in changed if change is not None]),
            "violations": _sentences(attempt.violations),
        }
        return dict(attempt.results), said


def _guards(tensors: Sequence[tuple[Message, Tensor]]) -> list[Guarded]:
    own = {tensor["memory"]: words for tensor, words in tensors}
    return [Guarded(t["name"], placed(own[t["memory"]], t), own[t["memory"]], t["start"]) for t, _ in tensors]


def _asked(message: Message) -> CallRequest:
    return CallRequest(
        params=message["params"],
        results=tuple(message["results"]),
        may_return=tuple(message["may_return"]),
        poison=message["poison"],
        stages=tuple(message["stages"]),
        descending=message["descending"],
    )


def _sentences(findings: Sequence[Finding]) -> list[list[str]]:
    return [[one.kind, one.stage, one.sentence] for one in findings]


_TOLD = (
    *("name", "op", "contract", "stages", "devices", "order", "placement"),
    *("unordered", "invariant", "source", "arithmetic"),
)
"""What a kernel declares that is told as it is."""


def _declared(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel's declaration as data; `parameters` are its own and which it needs, or why nobody knows."""
    told = {name: getattr(kernel, name) for name in _TOLD}
    held = {"mutates": list(kernel.mutates), "held": dict(kernel.held), "depth": kernel.depth is not None}
    parameters: list[list[Any]] | str
    try:
        own = inspect.signature(kernel.call).parameters.values()
        parameters = [[p.name, p.kind.name, p.default is p.empty] for p in own]
    except (TypeError, ValueError) as error:
        parameters = str(error)
    return {**told, **held, "takes": as_text(kernel.takes), "parameters": parameters}
