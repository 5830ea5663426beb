"""Ways of calling a kernel: later calls, streams, CUDA graphs, `torch.compile`, grad, other devices.

All are made in the process of the kernel, but for a call in a new one, and those for which programs are compiled anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lastbit.calling.capture import captured, why_it_waits
from lastbit.calling.performing import CallRequest, named_results, results_of
from lastbit.calling.uses_compile import is_compiled
from lastbit.devices import machine, made_current
from lastbit.errors import UnsupportedCase
from lastbit.inputs import Inputs, build, holding, refilled
from lastbit.inputs.guards import ALIGNMENT
from lastbit.interpret import untraced
from lastbit.invariance.property import Basis, Pairs, Property, difference
from lastbit.relations import Matched, NotApplicable, Tensors, same
from lastbit.siblings import in_reach

# All twelve are of one kind by chance one time in 2,048.
_TRIES = 12


def require_direct(basis: Basis, how: str) -> None:
    """Raise `NotApplicable` for a kernel that only runs in processes of its own."""
    if not basis.direct:
        raise NotApplicable(f"kernels in processes of their own cannot be {how}")


def require_accelerator(basis: Basis, what: str, *kinds: str) -> None:
    """Raise `NotApplicable` on the CPU, and on other devices than those of `kinds` where some are named."""
    if basis.device.type == "cpu" or (kinds and basis.device.type not in kinds):
        raise NotApplicable(f"{basis.device} has no {what}")


def called(
    basis: Basis,
    inputs: Inputs,
    function: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> Tensors:
    """Call the kernel, or `function` in its place, and return copies of the results; the inputs are restored."""
    try:
        call, asked = function or basis.kernel.call, CallRequest(basis.case.params, tuple(basis.results))
        given = results_of(call, asked, device or basis.device, inputs.hand_out())
        return {name: given[name].detach().clone() for name in basis.results}
    finally:
        inputs.restore()


def elsewhere(basis: Basis, steps: int = 0) -> Inputs:
    """Copy the inputs to other memory, `steps` times 256 bytes beyond where an allocation would put them."""
    tensors = basis.case.tensors
    further = tuple(replace(s, offset=s.offset + steps * ALIGNMENT // s.torch_dtype.itemsize) for s in tensors)
    return holding(replace(basis.case, tensors=further), basis.inputs.tensors, basis.device)


def oddly_elsewhere(basis: Basis) -> Inputs:
    """Return the same in other memory, the first tensor an odd multiple of 256 bytes away if a few tries find that.

    Steps of 0, 1, 1, 2, 2 find it in the third try at most where each allocation lies as far behind the one before.
    """
    own = _place(basis.inputs)
    tried = [elsewhere(basis)]
    while (_place(tried[-1]) - own) % 2 == 0 and len(tried) < _TRIES:
        tried.append(elsewhere(basis, steps=(len(tried) + 1) // 2))
    return tried[-1]


def _place(inputs: Inputs) -> int:
    return inputs.guards[0].tensor.data_ptr() // ALIGNMENT


def _other_values(basis: Basis) -> Inputs:
    return build(replace(basis.case, seed=basis.case.seed + 1), basis.device)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")


# Run to run: later calls, elsewhere in memory, after other work

# `verify` asks for as little as can show something; `lastbit invariance` for what shows rare races as well.
_ROUNDS = 1  # of three calls each
_MANY_ROUNDS = {"cpu": 4}  # where an interpreter adds in one order
# 51 calls: bits that one call in twenty changes are seen with 93 of 100 (1 - 0.95^51).
_MOST_ROUNDS = 17
# An H200 has 50 MB, a B200 126 MB.
_CACHE = 128 << 20  # bytes, more than a level-2 cache holds
# Arbitrary: more than the private caches of a core; writing more takes longer than most calls.
_HOST_CACHE = 8 << 20
_BLOCKS = tuple(1 << power for power in range(9, 24))  # bytes, of every size that a kernel may ask for next


def _run_to_run(basis: Basis, pairs: Pairs) -> None:
    """Compare later calls; results that the kernel declares as unordered are looked at where all others agree."""
    rounds = _MANY_ROUNDS.get(basis.device.type, _MOST_ROUNDS) if basis.thorough else _ROUNDS
    told: tuple[str, Matched, Tensors] | None = None
    for what, results in _later_calls(basis, rounds):
        matched = same(basis.results, results)
        rest: Matched = {name: pair for name, pair in matched.items() if name in basis.kernel.unordered}
        ordered: Matched = {name: pair for name, pair in matched.items() if name not in rest}
        pairs.compare(basis, what, ordered or rest, basis.inputs, results)
        if ordered and told is None and difference(rest):
            told = what, rest, results
    if pairs.first is None and told is not None:
        what, unordered, results = told
        pairs.compare(basis, what, unordered, basis.inputs, results)


def _later_calls(basis: Basis, rounds: int) -> Iterator[tuple[str, Tensors]]:
    for number in range(2, 2 + 3 * rounds, 3):
        yield f"call {number} on the same inputs", basis.call(basis.inputs)
        held = [torch.empty(size, dtype=torch.uint8, device=basis.device) for size in _BLOCKS]
        moved = oddly_elsewhere(basis)
        yield f"call {number + 1} on the same inputs, elsewhere in memory", basis.call(moved)
        del held
        with suppress(UnsupportedCase):
            basis.call(_other_values(basis))
        size = _HOST_CACHE if basis.device.type == "cpu" else _CACHE
        torch.zeros(size, dtype=torch.uint8, device=basis.device).add_(1)  # in place of what caches hold
        yield f"call {number + 2} on the same inputs, after one on other values", basis.call(basis.inputs)
    if basis.thorough and basis.direct and basis.anew is not None:
        yield "a call in a new process", basis.anew({})


# Streams: a kernel on a side stream, and beside other work of the device

# Arbitrary: what depends on timing shows in some calls only; `verify` makes one.
_MANY = 10  # calls beside each kind of work where calls may cost seconds

BusyWork = tuple[Callable[[torch.device], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], object], int]
"""Work that keeps a device busy for milliseconds: what makes its tensors, one launch, and how many launches.

They take longer than the host needs to call a kernel: about 5 ms each on an H200.
"""


def _square(size: int, dtype: torch.dtype) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    return lambda device: (torch.ones(size, size, dtype=dtype, device=device),) * 2


def _bytes(device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.zeros(2, 128 << 20, dtype=torch.uint8, device=device)
    return words[0], words[1]


_PRODUCTS: BusyWork = (_square(4096, torch.bfloat16), torch.mm, 25)
# A product of 1024 rows has 64 tiles or fewer, on 132 multiprocessors.
_WORK: Mapping[str, BusyWork] = {
    "matrix products on all multiprocessors": _PRODUCTS,
    "matrix products on some multiprocessors": (_square(1024, torch.float32), torch.mm, 80),
    "copies of memory": (_bytes, lambda a, b: a.copy_(b), 60),
}


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextmanager
def _busy(work: BusyWork, stream: torch.Stream) -> Iterator[None]:
    """Queue work on a stream, and wait for it at the end."""
    buffers, step, steps = work
    a, b = buffers(stream.device)
    torch.accelerator.synchronize(stream.device)
    with _on(stream):
        for _ in range(steps):
            step(a, b)
    try:
        yield
    finally:
        torch.accelerator.synchronize(stream.device)


def _stream(basis: Basis, pairs: Pairs) -> None:
    """Compare calls on a side stream, whose inputs are written there shortly before, or while the usual one is busy."""
    require_direct(basis, "called on another stream")
    require_accelerator(basis, "streams")
    usual, side, inputs = torch.accelerator.current_stream(basis.device), torch.Stream(basis.device), elsewhere(basis)
    torch.accelerator.synchronize(basis.device)
    with _on(side):
        pairs.again(basis, "a call on a side stream", called(basis, inputs))
        with _busy(_PRODUCTS, usual):
            pairs.again(basis, "a call on a side stream, with the default stream busy", called(basis, inputs))
        for guarded in inputs.guards:
            guarded.words.zero_()
        with _busy(_PRODUCTS, side):
            inputs.restore()  # after the work that is queued
            what = "a call on a side stream that has written the inputs just before"
            pairs.again(basis, what, called(basis, inputs))


def _contention(basis: Basis, pairs: Pairs) -> None:
    require_direct(basis, "called beside other work of the device")
    require_accelerator(basis, "other work beside a call")
    side, inputs = torch.Stream(basis.device), elsewhere(basis)
    for _ in range(_MANY if basis.thorough else 1):
        for what, work in _WORK.items():
            with _busy(work, side):
                pairs.again(basis, f"a call beside {what}", called(basis, inputs))


# CUDA graphs: a call captured once and replayed, with other values in the same memory, too

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


def _graph(basis: Basis, pairs: Pairs) -> None:
    """Compare replays of a graph that was captured at other addresses with calls.

    On other values, which shows values kept from the capture, and then on the first ones again.
    """
    require_direct(basis, "captured in a CUDA graph")
    require_accelerator(basis, "CUDA graphs", "cuda")
    replay = replay_of(basis, elsewhere(basis, steps=1))
    for number in range(1, 1 + (_MANY_REPLAYS if basis.thorough else _REPLAYS)):
        held = torch.zeros(number * _BLOCK % (1 << 30), dtype=torch.uint8, device=basis.device)
        results = replay.on(replay.inputs)
        del held
        what = f"replay {number} of a CUDA graph that was captured on inputs elsewhere in memory"
        pairs.again(basis, what, results)
    with suppress(UnsupportedCase):
        there = _other_values(basis)
        eager = basis.call(there)
        results = replay.on(refilled(replay.inputs.guards, there.case))
        own, other = basis.case.seed, there.case.seed
        first = replace(basis, inputs=there, results=eager, line=f"{basis.case}, with the values of seed {other}")
        what = f"a CUDA graph replayed on the values of seed {other}, which was captured on those of seed {own}"
        pairs.again(first, what, results)
        what = "a CUDA graph replayed on the values that it was captured on, after others"
        pairs.again(basis, what, replay.on(replay.inputs))


def replay_of(basis: Basis, inputs: Inputs) -> GraphReplay:
    """Capture the call in a CUDA graph; raise `NotApplicable` with the first line of the reason if that fails."""
    handed = inputs.hand_out()

    def call() -> dict[str, Tensor]:
        return named_results(basis.kernel.call(**handed, **basis.case.params), tuple(basis.results))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is done once is done before the capture: compilation, handles, workspaces
        for _ in range(2):
            call()
            inputs.restore()
    torch.cuda.synchronize()
    if reason := why_it_waits(call):
        raise NotApplicable(f"the call cannot be captured: {reason}")
    inputs.restore()
    try:
        graph, results = captured(call)
    except Exception as error:  # a kernel may do anything that a capture forbids
        torch.cuda.synchronize()
        raise NotApplicable(f"the call cannot be captured: {_said(error)}") from error
    return GraphReplay(graph, inputs, {name: results[name] for name in basis.results})


# torch.compile: a kernel whose launch is traced gives what it gives without

TRACED = "eager"
"""Dynamo traces the function, and what it traced runs as it was written: no arithmetic is another."""

GENERATED = "inductor"
"""Code is generated for PyTorch's operators, which may round less often; Triton kernels are launched as they are."""


def _compiled(basis: Basis, pairs: Pairs) -> None:
    """Compare calls under torch.compile, for fixed shapes and for any, with the call without.

    Code is generated on accelerators only, where it takes seconds.
    """
    require_direct(basis, "compiled")
    for backend in (TRACED, GENERATED) if basis.thorough and basis.device.type != "cpu" else (TRACED,):
        for dynamic in (False, True):
            what = f"torch.compile(backend={backend!r}, dynamic={dynamic})"
            try:
                from torch._dynamo.utils import counters

                with _traceable(basis):
                    function = torch.compile(basis.kernel.call, backend=backend, dynamic=dynamic)
                    results, traced = called(basis, basis.inputs, function), counters["frames"]["ok"] > 0
            except Exception as error:  # of a compiler that meets what it does not know
                pairs.untried.append(f"{what}: {_said(error)}")
                continue
            if traced:
                pairs.again(basis, what, results)
            else:
                pairs.untried.append(f"{what}: nothing of the kernel was traced")
    if pairs.untried and not pairs.tried:
        raise NotApplicable("; ".join(pairs.untried))


@contextmanager
def _traceable(basis: Basis) -> Iterator[None]:
    """Clear Dynamo's caches before and after, let it find a kernel's files, and keep it from tracing its programs."""
    import torch._dynamo
    from torch._dynamo import symbolic_convert
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    if cached := getattr(symbolic_convert, "_import_module", None):
        cached.cache_clear()  # files of the same names lie beside other kernels
    try:
        with warnings.catch_warnings(action="ignore"), in_reach(basis.kernel.call), untraced():
            yield
    finally:
        torch._dynamo.reset()
        scope = getattr(basis.kernel.call, "__globals__", {})
        for name in [name for name in scope if name.startswith("__import_")]:
            del scope[name]  # modules by name, which dynamo leaves there, and of which a later load has others


# Fusion: multiplications and additions that Triton's compiler may fuse, or not

FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Triton reads it when it compiles, and it is part of the key of what is kept on disk."""


def _fp_fusion(basis: Basis, pairs: Pairs) -> None:
    """Compare a call where everything was compiled without fusion with one where it was compiled with it.

    Both are made in new processes, because a process keeps what it has compiled.
    """
    if basis.device.type == "cpu":
        raise NotApplicable("on the CPU programs are interpreted, and nothing is fused")
    require_direct(basis, "called in another one, where they are compiled anew")
    if basis.anew is None:
        raise NotApplicable("the kernel cannot be called in a new process, where it is compiled anew")
    fused, apart = (basis.anew({FUSION: value}) for value in "10")
    pairs.compare(basis, f"{FUSION}=0", same(fused, apart), basis.inputs, apart)


# Grad: inputs that require it, as those of a model in training do


def _grad(basis: Basis, pairs: Pairs) -> None:
    """Compare a call whose inputs require grad, those that are floating-point and not overwritten, with the usual."""
    require_direct(basis, "called on inputs that require grad")
    kernel = basis.kernel
    if not basis.thorough and is_compiled(kernel.call):
        raise NotApplicable("it would be compiled anew, which lastbit invariance has done")
    written = {*kernel.mutates, *kernel.held}
    if not any(g.tensor.is_floating_point() and g.name not in written for g in basis.inputs.guards):
        raise NotApplicable("no input can require grad: none is floating-point and not overwritten")

    @wraps(kernel.call)
    def requiring_grad(**arguments: Any) -> object:
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point() and name not in written:
                value.requires_grad_()
        with torch.enable_grad():
            return kernel.call(**arguments)

    pairs.again(basis, "inputs that require grad", called(basis, basis.inputs, requiring_grad))


# Another device of the same kind


def _device(basis: Basis, pairs: Pairs) -> None:
    require_direct(basis, "called on another device")
    require_accelerator(basis, "others of its kind beside it")
    peers = alike(basis.device)
    if not peers:
        raise NotApplicable(f"this machine has one {_kind(basis.device)}")
    for peer in peers if basis.thorough else peers[:1]:
        inputs = holding(basis.case, basis.inputs.tensors, peer)
        with made_current(peer):
            there = called(basis, inputs, device=peer)
        pairs.again(basis, f"a call on {peer}", {name: tensor.to(basis.device) for name, tensor in there.items()})


def alike(device: torch.device) -> tuple[torch.device, ...]:
    """Return the machine's other devices of the same kind, the next one first."""
    others = map(torch.device, machine().peers(str(device)))
    return tuple(other for other in others if _kind(other) == _kind(device))


def _kind(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name else device.type


WAYS: tuple[Property, ...] = (
    Property("run to run", "the same inputs give the same bits in every call", _run_to_run, unordered=True),
    Property("stream", "a call on another stream gives the same bits", _stream),
    Property("graph", "a CUDA graph of a call gives the same bits as the call", _graph),
    Property("compiled", "a call under torch.compile gives the same bits as one without", _compiled, quick=False),
    Property("grad", "inputs that require grad give the same bits as the same ones that do not", _grad),
    Property("contention", "a call beside other work of the device gives the same bits", _contention),
    Property("device", "another device of the same kind gives the same bits", _device),
    Property("fp fusion", "the bits are the same with and without fused multiply-add", _fp_fusion, quick=False),
)
