"""CUDA graphs: a call captured once and replayed, with other values in the same memory, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lastbit.calling.capture import captured, why_it_waits
from lastbit.calling.performing import named_results
from lastbit.errors import UnsupportedCase
from lastbit.inputs import Inputs, refilled
from lastbit.invariance.basis import Basis
from lastbit.invariance.direct import elsewhere, other_values, require_accelerator, require_direct, said
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import NotApplicable, Tensors, same

# The first replay shows what was captured, the second what the first left behind.
_REPLAYS = 2
# Arbitrary: what the memory of others holds changes with each; a replay takes no longer than a call.
_MANY_REPLAYS = 20
# Arbitrary: so that what is allocated next lies elsewhere; 16 of them are the GB at which it starts over.
_BLOCK = 64 << 20  # bytes that are in use elsewhere in later replays


@dataclass(frozen=True, eq=False)
class GraphReplay:
    """A captured call: the graph, what it was captured on, and the results that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    results: dict[str, Tensor]

    def on(self, values: Inputs) -> Tensors:
        """Replay the graph on values that belong in the memory of the inputs, and return copies of the results."""
        values.restore()
        self.graph.replay()
        torch.cuda.synchronize()
        copies = {name: tensor.detach().clone() for name, tensor in self.results.items()}
        values.restore()
        return copies


def show(basis: Basis, pairs: Pairs) -> None:
    """Compare replays of a graph that was captured at other addresses with calls."""
    require_direct(basis, "captured in a CUDA graph")
    require_accelerator(basis, "CUDA graphs", "cuda")
    replay = replay_of(basis, elsewhere(basis, steps=1))
    for number in range(1, 1 + (_MANY_REPLAYS if basis.thorough else _REPLAYS)):
        held = torch.zeros(number * _BLOCK % (1 << 30), dtype=torch.uint8, device=basis.device)
        results = replay.on(replay.inputs)
        del held
        what = f"replay {number} of a CUDA graph that was captured on inputs elsewhere in memory"
        pairs.compare(basis, what, same(basis.results, results), basis.inputs, results)
    with suppress(UnsupportedCase):
        _compare_on_other_values(basis, pairs, replay)


def _compare_on_other_values(basis: Basis, pairs: Pairs, replay: GraphReplay) -> None:
    """Replay the graph on other values, which shows values kept from the capture; then on the first ones again."""
    there = other_values(basis)
    eager = basis.call(there)
    results = replay.on(refilled(replay.inputs.guards, there.case))
    own, other = basis.case.seed, there.case.seed
    first = replace(basis, inputs=there, results=eager, line=f"{basis.case}, with the values of seed {other}")
    what = f"a CUDA graph replayed on the values of seed {other}, which was captured on those of seed {own}"
    pairs.compare(first, what, same(eager, results), there, results)
    results = replay.on(replay.inputs)
    what = "a CUDA graph replayed on the values that it was captured on, after others"
    pairs.compare(basis, what, same(basis.results, results), basis.inputs, results)


def replay_of(basis: Basis, inputs: Inputs) -> GraphReplay:
    """Capture the call in a CUDA graph; raise `NotApplicable` with the first line of the reason if that fails."""
    handed = inputs.hand_out()

    def call() -> dict[str, Tensor]:
        return named_results(basis.kernel.call(**handed, **basis.case.params), tuple(basis.results))

    _warm(inputs, call)
    if reason := why_it_waits(call):
        raise NotApplicable(f"the call cannot be captured: {reason}")
    inputs.restore()
    try:
        graph, results = captured(call)
    except Exception as error:  # a kernel may do anything that a capture forbids
        torch.cuda.synchronize()
        raise NotApplicable(f"the call cannot be captured: {said(error)}") from error
    return GraphReplay(graph, inputs, {name: results[name] for name in basis.results})


def _warm(inputs: Inputs, call: Callable[[], object]) -> None:
    """Let what is done once be done before the capture: compilation, handles, workspaces."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
            inputs.restore()
    torch.cuda.synchronize()


GRAPH = Property("graph", "a CUDA graph of a call gives the same bits as the call", show)
