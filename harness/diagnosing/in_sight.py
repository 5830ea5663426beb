"""The stages of a kernel that can be seen in it, without its help."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness.diagnosing.trace import trace_kernel
from harness.outcomes.trace import KernelTrace
from harness.verify.inprocess import Workplace


def stages_in_sight(place: Workplace, name: str, line: str) -> KernelTrace:
    """The stages of a kernel on a case line; none of one that PyTorch compiles: under observation it would run another
    way, and it takes seconds.
    """
    with torch.compiler.set_stance("fail_on_recompile"):
        return replace(trace_kernel(place, name, line), steps=())
