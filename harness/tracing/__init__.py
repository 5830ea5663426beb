"""Record of a kernel's operations: place in its text, values, and which elements of operands each element came from.

`traced` records the operations of interpreted Triton programs and of PyTorch. Every `Event` says for each element of
its result from which elements of its operands that came, and memory is looked up by address. So `follow` finds the
operations that led to an element, back to the tensors that the kernel was given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

from torch import Tensor

from lastbit.interpret.watching import watched
from lastbit.shadows.aten import Following, as_written
from lastbit.shadows.programs import Shadowing
from lastbit.shadows.shadow_memory import ShadowMemory
from lastbit.tracing.ancestry import Path, follow
from lastbit.tracing.events import Event, Log, Operand, Program, TraceLimit
from lastbit.tracing.of_torch import TorchWatch, record_input
from lastbit.tracing.of_triton import LaunchWatch

__all__ = ["Event", "Log", "Operand", "Path", "TraceLimit", "follow", "traced"]


@contextmanager
def traced(
    inputs: Mapping[str, Tensor],
    wanted: Collection[Program] = (),
    *,
    only: bool = False,
    shadow: ShadowMemory | None = None,
    primitives: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Log]:
    """Record what happens to `inputs` and to what is made of them, in PyTorch and in interpreted Triton kernels.

    Of Triton programs all operations of those `wanted` are kept, and of the others what they write, unless `only` those
    run. Functions that `torch.compile` would compile run as they are written. With a `shadow`, events have residues;
    `primitives` are device functions that stand for one.

    Raises:
        TraceLimit: the values take more than `events.LIMIT` bytes.
    """
    log = Log(frozenset(wanted), only)
    for name, tensor in inputs.items():
        record_input(log, name, tensor, shadow)
    with ExitStack() as stack:
        if shadow is not None:
            operations = stack.enter_context(Following(shadow))
            shadow.unseen = operations.unseen
        beneath = None if shadow is None else Shadowing(shadow, primitives)
        stack.enter_context(watched(LaunchWatch(log, beneath)))
        stack.enter_context(as_written())
        stack.enter_context(TorchWatch(log, shadow))
        yield log
    log.check()
