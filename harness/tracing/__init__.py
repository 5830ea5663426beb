"""Record of a kernel's operations: place in its text, values, and which elements of operands each element came from.

`traced` records the operations of interpreted Triton programs and of PyTorch. Every `Event` says for each element of
its result from which elements of its operands that came, and memory is looked up by address. So `follow` finds the
operations that led to an element, back to the tensors that the kernel was given.
"""

from __future__ import annotations

from lastbit.interpret.places import Place
from lastbit.tracing.events import Event, Operand, TracedLaunch
from lastbit.tracing.follow import Path, follow
from lastbit.tracing.log import Log, TraceLimit
from lastbit.tracing.record import traced

__all__ = ["Event", "Log", "Operand", "Path", "Place", "TraceLimit", "TracedLaunch", "follow", "traced"]
