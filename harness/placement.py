"""Parameters on another device than the one that computes: move them with a warning, or find them in a module.

    def my_kernel(x, weight, *, eps):
        weight = moved({"weight": weight}, x.device)["weight"]

A kernel that does this is declared with `@kernel(..., placement="moves")`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lastbit.devices import indexed

_TO_THE_CALLER_OF_THE_KERNEL = 3


class PlacementWarning(UserWarning):
    """A tensor was on another device than the kernel that needs it, and was copied for one call.

    Attributes:
        name: the tensor, by the name of the kernel's parameter.
        source: the device that it is on.
        target: the device that it was copied to.
    """

    def __init__(self, name: str, source: torch.device, target: torch.device) -> None:
        super().__init__(name, source, target)
        self.name, self.source, self.target = name, source, target

    def __str__(self) -> str:
        return (
            f"{self.name} is on {self.source}, but the kernel runs on {self.target}; it was copied there for this "
            "call. This may be an upstream bug: a module that was moved in part, or a parameter that was created on "
            "the default device. lastbit.placement.check(module, device) finds such parameters."
        )


def moved(tensors: Mapping[str, Tensor | None], device: torch.device | str) -> dict[str, Tensor | None]:
    """Move tensors to `device`: each as it is if it is there, otherwise as a copy, with one `PlacementWarning`.

    To be called from the kernel itself: the warning points to the line that called the kernel.
    """
    if all(tensor is None or tensor.device == device for tensor in tensors.values()):
        return dict(tensors)  # as nearly always, and much cheaper than to name devices
    target = indexed(device)
    on_target: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        if tensor is None or indexed(tensor.device) == target:
            on_target[name] = tensor
        else:
            warning = PlacementWarning(name, indexed(tensor.device), target)
            warnings.warn(warning, stacklevel=_TO_THE_CALLER_OF_THE_KERNEL)
            on_target[name] = tensor.to(target)
    return on_target


@dataclass(frozen=True)
class Misplaced:
    """A parameter or buffer of a module that is on `device`, although the module should be on `expected`."""

    name: str
    kind: Literal["parameter", "buffer"]
    device: torch.device
    expected: torch.device

    def __str__(self) -> str:
        return f"{self.kind} {self.name} is on {self.device}, not on {self.expected}"


def check(module: torch.nn.Module, device: torch.device | str) -> tuple[Misplaced, ...]:
    """List the parameters and buffers of `module` and its submodules that are not on `device`, parameters first."""
    expected = indexed(device)
    parameters = [Misplaced(n, "parameter", indexed(p.device), expected) for n, p in module.named_parameters()]
    buffers = [Misplaced(n, "buffer", indexed(b.device), expected) for n, b in module.named_buffers()]
    return tuple(found for found in (*parameters, *buffers) if found.device != expected)
