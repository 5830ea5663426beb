"""All-reduce: the elementwise sum of one tensor of each rank, which every rank receives.

`fp32_sum` adds in fp32 and rounds once: one-shot kernels that read the tensors of all peers, such as packed_reduce in
vLLM's csrc/custom_all_reduce.cuh and aiter's of the same name, and TensorRT-LLM with ALL_REDUCE_FUSION_KERNEL_ACC_FP32.
`rounded_hops` rounds each sum of two to the dtype of the tensors: NCCL's rings and trees, which add by __hadd2 from
sm_80 on (src/device/reduce_kernel.h), TensorRT-LLM's fused kernels before its pull request 16753, and vLLM's half
butterfly of four ranks. For two ranks both are one addition and one rounding. The order of the ranks is free in both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Enclosure, stack, sum_in_any_order, total
from lastbit.references._shapes import check_shapes

_FEW = 4
"""Ranks of which every order is tried where sums are fp32; with more, the bound of a sum in fp32 is sharp enough."""


@dataclass(frozen=True)
class Peers:
    """The tensors of the other ranks: up to 7, which makes a host of 8."""

    peer_1: Enclosure
    peer_2: Enclosure | None = None
    peer_3: Enclosure | None = None
    peer_4: Enclosure | None = None
    peer_5: Enclosure | None = None
    peer_6: Enclosure | None = None
    peer_7: Enclosure | None = None


PEERS = tuple(field.name for field in fields(Peers))


@op(
    rows=("x", *PEERS),
    returns=("reduced",),
    axes={"accumulation": {"fp32_sum": {}, "rounded_hops": {}}},
    rounds={"reduced": "x"},
)
def all_reduce(x: Enclosure, peers: Peers, *, contract: Contract, stage: StageRecorder) -> None:
    """x, peers: [..., N] each, of one dtype; x is the tensor of one rank.

    Raises:
        ValueError: the tensors are not of one shape and dtype.
    """
    others = {name: tensor for name in PEERS if (tensor := getattr(peers, name)) is not None}
    check_shapes({name: (tensor, tuple(x.shape)) for name, tensor in others.items()})
    own = stage.format_of("x")
    for name in others:
        if (fmt := stage.format_of(name)) != own:
            raise ValueError(f"{name} is of {fmt.name}; it must be of {own.name}, as x is")
    terms = [x, *others.values()]
    if contract.has("rounded_hops"):
        reduced = sum_in_any_order(terms, own)
    else:
        reduced = sum_in_any_order(terms) if len(terms) <= _FEW else total(stack(*terms))[..., 0]
    stage("reduced", reduced, result=True)
