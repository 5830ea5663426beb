"""Shapes of inputs that must fit together: nothing is broadcast in silence."""

from __future__ import annotations

from collections.abc import Mapping

from lastbit.numerics import Enclosure, Tensor

Shapes = Mapping[str, tuple[Tensor | Enclosure | None, tuple[int, ...]]]
"""Name of a tensor → the tensor, if it is there, and the shape that it must have."""


def width_of(name: str, x: Tensor | Enclosure) -> int:
    """Return N of a tensor [..., N]; ValueError if it has no dimension."""
    if not x.shape:
        raise ValueError(f"{name} has no dimension; it must be [..., N]")
    return x.shape[-1]


def check_shapes(tensors: Shapes) -> None:
    """Raise ValueError unless every tensor that is there has the given shape."""
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with the other tensors it must be {shape}")
