"""Which operators of torch a function calls, those in which others are written included.

What `torch.compile` has compiled runs as it was written meanwhile, so that an operator of torch does not hide in it. A
function that knows of this can hide what it calls, by a thread of its own for one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch.autograd.profiler import profile


def operators_called(function: Callable[[], object]) -> frozenset[str]:
    """Names of the operators, such as `aten::add`; what the function raises is nobody's."""
    with profile(use_cpu=True) as seen, _as_written(), suppress(Exception):
        function()
    events = seen.kineto_results.events() if seen.kineto_results else ()
    return frozenset(event.name() for event in events if "::" in event.name())


def _as_written() -> AbstractContextManager[object]:
    """Compiled functions run as they are written; nothing to do, and nothing imported, where there are none."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
