"""Probes of the dots of a mixture of experts: one expert, one slot, no adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastbit import ProbedSum
from lastbit.numerics import Tensor

_TOKENS = 64
_OPEN = 64.0
"""A gate whose sigmoid is 1."""


def _of_one_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Mapping[str, Any]:
    ones = x.new_ones(len(x), 1).float()
    matrices = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    routing = {"expert_ids": (0 * ones).long(), "routing_weights": ones}
    return {"x": x, **routing, **{name: matrix[None] for name, matrix in matrices.items()}}


def _gate_and_up(terms: Tensor, tuning: float) -> Mapping[str, Any]:
    """Place terms as tokens, times weights of one."""
    ones = terms.new_ones(terms.shape[1], terms.shape[1])
    return _of_one_expert(terms, ones, ones, ones)


def _down(terms: Tensor, tuning: float) -> Mapping[str, Any]:
    """Place terms as rows of the weight, times an intermediate that is constant."""
    hidden, width = terms.shape
    first = terms.new_zeros(width, hidden)
    first[:, 0] = 1.0
    return _of_one_expert(terms.new_ones(_TOKENS, hidden), _OPEN * first, first, terms)


EXPERT_SUMS = {
    "gate": ProbedSum(
        _gate_and_up, {"saved_gate": 0, "output": 0}, dot=True, about="x · gate_proj over the hidden size"
    ),
    "up": ProbedSum(_gate_and_up, {"saved_up": 0, "output": 0}, dot=True, about="x · up_proj over the hidden size"),
    "down": ProbedSum(_down, {"output": 1}, dot=True, about="intermediate · down_proj over the intermediate size"),
}
