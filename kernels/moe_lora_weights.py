"""The tensors of a layer of experts that belong together, as the kernels of `moe_lora` and of its gradients take them.

Each stands for inputs of the ops by their own names (`lastbit.bundles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from quantized_weights import QuantizedWeight, base_weights
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights of E experts with a hidden dimension H and an intermediate one I; any strides.

    Attributes:
        gate_proj, up_proj: [E, I, H], of the dtype of the activations, or codes.
        down_proj: [E, H, I], as these.
        gate_lora_a, up_lora_a: [E, r, H]; all six adapters are of the dtype of the activations, or None.
        gate_lora_b, up_lora_b: [E, I, r].
        down_lora_a, down_lora_b: [E, r, I] and [E, H, r].
        gate_scale, …, gate_zero, …: of weights in codes; quantized_weights.py has the schemes.

    Raises:
        ValueError: some adapters are there, but not all.
    """

    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    gate_lora_a: Tensor | None = None
    gate_lora_b: Tensor | None = None
    up_lora_a: Tensor | None = None
    up_lora_b: Tensor | None = None
    down_lora_a: Tensor | None = None
    down_lora_b: Tensor | None = None
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_zero: Tensor | None = None
    up_zero: Tensor | None = None
    down_zero: Tensor | None = None

    def __post_init__(self) -> None:
        given = [name for name in ADAPTERS if getattr(self, name) is not None]
        missing = [name for name in ADAPTERS if name not in given]
        if given and missing:
            raise ValueError(f"{', '.join(given)} given, but not {', '.join(missing)}; give all adapters or none")

    def operands(self, x: Tensor) -> dict[str, Tensor | QuantizedWeight]:
        """Return base weights, as tensors or in codes, and adapters if there are any, by name.

        Raises:
            ValueError, TypeError: scales or zero points that do not go with the codes.
        """
        tensors = named(self)
        codes = tuple(tensors.pop(f"{side}_{part}", None) for part in ("scale", "zero") for side in SIDES)
        return base_weights(x, tensors, codes)


@dataclass(frozen=True, eq=False)
class OldGradients:
    """The gradients of all six adapters, of their shapes and dtype, to which those of a backward are added."""

    old_gate_lora_a: Tensor
    old_gate_lora_b: Tensor
    old_up_lora_a: Tensor
    old_up_lora_b: Tensor
    old_down_lora_a: Tensor
    old_down_lora_b: Tensor


SIDES = ("gate", "up", "down")
WEIGHTS = tuple(field.name for field in fields(LayerWeights))
ADAPTERS = tuple(name for name in WEIGHTS if "_lora_" in name)


def named(bundle: LayerWeights | OldGradients | None) -> dict[str, Tensor]:
    """Return the tensors that are there, by name."""
    tensors = {} if bundle is None else {field.name: getattr(bundle, field.name) for field in fields(bundle)}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def of_layer(tensors: Mapping[str, Tensor]) -> LayerWeights:
    """Return the weights among tensors by name."""
    return LayerWeights(**{name: tensor for name, tensor in tensors.items() if name in WEIGHTS})
