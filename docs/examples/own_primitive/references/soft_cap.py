"""Attention scores limited by a tanh, as some models have them; fast kernels take one instruction for the tanh."""

from __future__ import annotations

import torch

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Bound, Enclosure, divide, primitive, tanh

fast_tanh = primitive(
    "tanh.approx", torch.tanh, shape="rising", bound=Bound(2.0**-11, "PTX ISA, tanh.approx.f32: 2^-11, relative")
)


@op(rows=("scores",), axes={"tanh": {"": {}, "fast": {}}}, rounds={"output": "scores"})
def soft_cap(scores: Enclosure, *, cap: float, contract: Contract, stage: StageRecorder) -> None:
    """output = cap · tanh(scores / cap); scores: [..., N]."""
    tangent = stage("tangent", (fast_tanh if contract.has("fast") else tanh)(divide(scores, cap)))
    stage("output", tangent * cap, result=True)
