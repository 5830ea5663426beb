"""The stages of a kernel that can be seen in it, without its help."""

from __future__ import annotations

import torch

from lastbit.case import parse_case
from lastbit.diagnosing.trace import stages_of_kernel
from lastbit.inputs import build
from lastbit.outcomes.trace import KernelTrace
from lastbit.verify.inprocess import Workplace


def stages_in_sight(place: Workplace, name: str, line: str) -> KernelTrace:
    """The stages of a kernel on a case line.

    Raises:
        RuntimeError: PyTorch compiles it. What is observed then is the text that was compiled, and not what runs.
    """
    kernel, device = place.subjects[name].kernel, place.subjects[name].device
    with place.watch(line), torch.compiler.set_stance("fail_on_recompile"):
        inputs = build(parse_case(line).gathered(), device)
        kernel.call(**inputs.hand_out(), **inputs.case.params)
    return stages_of_kernel(place, name, line)
