"""The weights of a layer of experts: three linear maps per expert, each with a low-rank adapter or without.

LoRA: Hu et al. 2021, arXiv 2106.09685.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from lastbit.numerics import Enclosure, Format, Tensor, dequantized, remembered
from lastbit.references._shapes import check_shapes

Kind = Literal["base", "a", "b"]
"""The matrices of a linear map with an adapter."""


@dataclass(frozen=True)
class Projection:
    """A linear map from K to N numbers per expert: base + scaling · b · a, or base alone.

    Attributes:
        base: [E, N, K], or codes of as many numbers with their `scale` and `zero`.
        columns: K.
        fmt: format of the operands that codes stand for.
        a, b: the adapter, [E, r, K] and [E, N, r].
    """

    base: Tensor
    columns: int
    fmt: Format
    a: Tensor | None = None
    b: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None

    @property
    def width(self) -> int:
        """N."""
        return self.base.shape[1]

    @property
    def rank(self) -> int:
        """r, or 0 without an adapter."""
        return 0 if self.a is None else self.a.shape[1]

    @remembered
    def matrices(self, kind: Kind, experts: Tensor) -> Enclosure:
        """Return one of the matrices of some experts [G, N, K]; the base is dequantized to the operands' format."""
        if kind != "base":
            adapter = self.a if kind == "a" else self.b
            assert adapter is not None
            return Enclosure.point(adapter[experts])
        scale, zero = (None if t is None else t[experts] for t in (self.scale, self.zero))
        return dequantized(self.base[experts], scale, zero, fmt=self.fmt, columns=self.columns)

    def check(self, name: str, experts: int, outputs: int) -> None:
        """Raise ValueError unless the map has `experts` matrices from `columns` to `outputs` numbers."""
        if self.a is not None:
            rank = self.rank if self.a.ndim == 3 else 0
            check_shapes({f"{name}_lora_a": (self.a, (experts, rank or -1, self.columns))})
            check_shapes({f"{name}_lora_b": (self.b, (experts, outputs, rank))})
        for part, tensor in {"scale": self.scale, "zero": self.zero}.items():
            if tensor is not None and tuple(tensor.shape[:1]) != (experts,):
                raise ValueError(f"{name}_{part} has shape {tuple(tensor.shape)}; it must be [{experts}, …]")
        if self.base.shape[:2] != (experts, outputs):
            raise ValueError(f"{name}_proj has shape {tuple(self.base.shape)}; it must be [{experts}, {outputs}, …]")
        if self.base.is_floating_point():
            check_shapes({f"{name}_proj": (self.base, (experts, outputs, self.columns))})
            if self.base.dtype != self.fmt.dtype:
                raise ValueError(f"{name}_proj is {self.base.dtype}, and x {self.fmt.dtype}; they must agree")


@dataclass(frozen=True)
class OpWeights:
    """Base weights, which may be codes with scales and zero points, and the adapters: six matrices or none.

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
        given = [*self.adapters]
        missing = [name for name in ADAPTERS if name not in given]
        if given and missing:
            raise ValueError(f"{', '.join(given)} given, but not {', '.join(missing)}; give all adapters or none")

    @property
    def adapters(self) -> dict[str, Tensor]:
        """The six matrices by name; nothing without adapters."""
        return {name: getattr(self, name) for name in ADAPTERS if getattr(self, name) is not None}

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of experts, and the intermediate dimension."""
        if self.down_lora_a is not None:
            return self.down_lora_a.shape[0], self.down_lora_a.shape[-1]
        return self.gate_proj.shape[0], self.gate_proj.shape[1]

    def projections(self, hidden: int, fmt: Format) -> tuple[Projection, Projection, Projection]:
        """Return gate, up and down, for activations of `hidden` numbers in a format."""
        _, width = self.sizes
        columns = {"gate": hidden, "up": hidden, "down": width}
        gate, up, down = (Projection(columns=k, fmt=fmt, **self._parts(name)) for name, k in columns.items())
        return gate, up, down

    def _parts(self, name: str) -> dict[str, Tensor]:
        names = {"base": "proj", "a": "lora_a", "b": "lora_b", "scale": "scale", "zero": "zero"}
        return {part: getattr(self, f"{name}_{suffix}") for part, suffix in names.items()}


WEIGHTS = tuple(field.name for field in fields(OpWeights))
ADAPTERS = tuple(name for name in WEIGHTS if "_lora_" in name)
