"""Room for the tiles of kt-kernel: dimensions of any size, filled up with zeros, which change no sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

DIMS = {
    **dict.fromkeys(("x", "output", "grad_output", "grad_input"), "tH"),
    **dict.fromkeys(("saved_gate", "saved_up", "intermediate"), "tkI"),
    **dict.fromkeys(("gate_proj", "up_proj"), "eIH"),
    "down_proj": "eHI",
    **dict.fromkeys(("gate_lora_a", "up_lora_a"), "erH"),
    **dict.fromkeys(("gate_lora_b", "up_lora_b"), "eIr"),
    "down_lora_a": "erI",
    "down_lora_b": "eHr",
}
"""Which dimensions of a tensor are the hidden one, H, and the intermediate one, I; a gradient is as its parameter."""


@dataclass(frozen=True)
class Room:
    """The dimensions of a layer, of which each shard gets a multiple of `step`."""

    hidden: int
    width: int
    shards: int
    step: int

    @property
    def wider(self) -> bool:
        """Return whether there is more room in the intermediate dimension than the layer takes."""
        return bool(self.width // self.shards % self.step)

    def filled(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fill the tensors up with zeros where there is more room; contiguous."""
        return {name: self._filled(tensor, _dims(name)).contiguous() for name, tensor in tensors.items()}

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut the tensors to the layer's dimensions."""
        return {name: self._cut(tensor, _dims(name)) for name, tensor in tensors.items()}

    def _filled(self, tensor: Tensor, dims: str) -> Tensor:
        for letter, (size, parts) in self._sizes.items():
            if letter in dims and size // parts % self.step:
                dim = dims.index(letter)
                apart = tensor.unflatten(dim, (parts, size // parts)).transpose(dim + 1, -1)
                tensor = pad(apart, (0, -(size // parts) % self.step)).transpose(dim + 1, -1).flatten(dim, dim + 1)
        return tensor

    def _cut(self, tensor: Tensor, dims: str) -> Tensor:
        for letter, (size, parts) in self._sizes.items():
            if letter in dims and size // parts % self.step:
                dim = dims.index(letter)
                apart = tensor.unflatten(dim, (parts, -1)).narrow(dim + 1, 0, size // parts)
                tensor = apart.flatten(dim, dim + 1).contiguous()
        return tensor

    @property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return for each dimension its size and the number of parts that it is cut into."""
        return {"H": (self.hidden, 1), "I": (self.width, self.shards)}


def _dims(name: str) -> str:
    return DIMS.get(name) or DIMS.get(name.removeprefix("grad_").removeprefix("old_"), "")
