"""FLOP of a mixture of experts: two for each product of two numbers in a matrix product, of the pairs computed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastbit.numerics import Tensor


def forward_flops(tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> int:
    """Count the FLOP of three projections and their adapters."""
    pairs, hidden, width, rank = _sizes(tensors, params)
    return 2 * pairs * 3 * (hidden * width + rank * (hidden + width))


def backward_flops(tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> int:
    """Count FLOP: back through three projections, the experts' output once more, two gradients per adapter.

    The adapters are also passed through back, and their middles computed once more.
    """
    pairs, hidden, width, rank = _sizes(tensors, params)
    through = 4 * hidden * width + 4 * rank * (hidden + width)
    middles = 2 * rank * hidden
    gradients = 3 * rank * (hidden + width)
    return 2 * pairs * (through + middles + gradients)


def _sizes(tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the number of pairs whose expert is on this rank, H, I and r."""
    experts, width = tensors["gate_proj"].shape[:2]
    first, ids = params.get("first_expert", 0), tensors["expert_ids"]
    pairs = int(((ids >= first) & (ids < first + experts)).sum())
    rank = tensors["gate_lora_a"].shape[1] if "gate_lora_a" in tensors else 0
    return pairs, tensors["x"].shape[1], width, rank
