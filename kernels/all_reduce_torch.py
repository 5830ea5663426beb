"""All-reduce in PyTorch, of tensors that are all at hand, and with RMSNorm after it.

A process of a group sees the tensors of its peers after an all-gather, or through their memory; then it calls the
functions below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rms_norm_torch import add_residual, multiply_native, normalize
from torch import Tensor

from lastbit import kernel


@dataclass(frozen=True)
class PeerTensors:
    """The tensors of the other ranks."""

    peer_1: Tensor
    peer_2: Tensor | None = None
    peer_3: Tensor | None = None
    peer_4: Tensor | None = None
    peer_5: Tensor | None = None
    peer_6: Tensor | None = None
    peer_7: Tensor | None = None

    def with_own(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ranks where x is the tensor of the first."""
        return [x, *(tensor for tensor in vars(self).values() if tensor is not None)]


def fp32_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Add the tensors in the order of ranks, in fp32, so that every rank gets equal bits."""
    found = tensors[0].float()
    for tensor in tensors[1:]:
        found = found + tensor.float()
    return found


@kernel("all_reduce", contract="fp32_sum", name="eager[all_reduce]")
def one_shot(x: Tensor, peers: PeerTensors) -> Tensor:
    return fp32_sum(peers.with_own(x)).to(x.dtype)


@kernel("all_reduce", contract="rounded_hops", name="eager[all_reduce+rounded_hops]")
def ring(x: Tensor, peers: PeerTensors) -> Tensor:
    """Add in the order of ranks and round after each addition, as happens to a chunk that goes around a ring."""
    first, *others = peers.with_own(x)
    found = first.clone()
    for tensor in others:
        found = found + tensor
    return found


@kernel("all_reduce_rms_norm", contract="native_multiply", stages=("reduced",), name="eager[all_reduce_rms_norm]")
def unfused(
    x: Tensor,
    peers: PeerTensors,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float,
    stages: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Compute the chain as separate kernels do: the sum is stored in the dtype of x before the norm reads it."""
    reduced = fp32_sum(peers.with_own(x)).to(x.dtype)
    squared, value, results = add_residual(reduced, residual, "rounded_sum")
    output = multiply_native(normalize(squared, value, eps, None), weight, x.dtype)
    shown = {"reduced": reduced} if "reduced" in stages else {}
    return {"output": output, **results, **shown}
