"""Three kernels: one takes tanh, one the instruction that is off by 2^-11 and says so, one does not say so."""

from __future__ import annotations

import torch

from lastbit import kernel


def instruction(x):
    """Return what tanh.approx.f32 may give: tanh, cut off at eleven bits."""
    return (torch.tanh(x).view(torch.int32) & ~0xFFF).view(torch.float32)


def declare(name, tanh, *, contract=""):
    @kernel("soft_cap", contract=contract, name=name)
    def capped(scores, *, cap):
        return {"output": (tanh(scores.float() / cap) * cap).to(scores.dtype)}


declare("tanh", torch.tanh)
declare("instruction", instruction, contract="fast")
declare("instruction, undeclared", instruction)
