"""Premises that cover a device before anything has been measured on it."""

from __future__ import annotations

import torch

from lastbit.numerics import BY_CAPABILITY, LOOSEST, Premises, TensorCores


def documented_premises(device: torch.device) -> Premises:
    """Return the documented premises of `device`; if none covers it, the loosest ones that are here."""
    cores, dots = _dots(device)
    return Premises(device=f"documented primitives, {dots}", tensor_cores=cores)


def _dots(device: torch.device) -> tuple[TensorCores | None, str]:
    """Return the tensor cores whose bound holds for the device's dots, None on the CPU, and a description."""
    if device.type == "cpu":
        return None, "dots in any order, rounded"
    if device.type != "cuda" or torch.version.hip:
        vendor = "AMD" if device.type == "cuda" else device.type
        return LOOSEST, f"not covered: no premise is for {vendor} devices, these bounds are those of a V100"
    capability = torch.cuda.get_device_capability(device)
    if cores := BY_CAPABILITY.get(capability):
        return cores, str(cores)
    number = ".".join(map(str, capability))
    return LOOSEST, f"not covered: no model of compute capability {number} is here, these bounds are those of a V100"
