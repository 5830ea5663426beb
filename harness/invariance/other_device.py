"""The property that another device of the same kind gives the same bits."""

from __future__ import annotations

import torch

from lastbit.devices import machine, made_current
from lastbit.inputs import holding
from lastbit.invariance.basis import Basis
from lastbit.invariance.direct import called, require_accelerator, require_direct
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import NotApplicable, same


def show(basis: Basis, pairs: Pairs) -> None:
    """Compare a call on the next device of the kind, or on each."""
    require_direct(basis, "called on another device")
    require_accelerator(basis, "others of its kind beside it")
    peers = alike(basis.device)
    if not peers:
        raise NotApplicable(f"this machine has one {_kind(basis.device)}")
    for peer in peers if basis.thorough else peers[:1]:
        inputs = holding(basis.case, basis.inputs.tensors, peer)
        with made_current(peer):
            there = called(basis, inputs, device=peer)
        results = {name: tensor.to(basis.device) for name, tensor in there.items()}
        pairs.compare(basis, f"a call on {peer}", same(basis.results, results), basis.inputs, results)


def alike(device: torch.device) -> tuple[torch.device, ...]:
    """Return the machine's other devices of the same kind, the next one first."""
    others = map(torch.device, machine().peers(str(device)))
    return tuple(other for other in others if _kind(other) == _kind(device))


def _kind(device: torch.device) -> str:
    """Return the maker's name of the device; its type where torch gives no name."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name else device.type


DEVICE = Property("device", "another device of the same kind gives the same bits", show)
