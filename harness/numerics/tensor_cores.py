"""Models of the additions of tensor cores, as far as they are known, and the bound on a dot that follows from each.

They do not round. In a step they add some products and the sum so far, each of which is cut off below a unit that the
largest of them sets, and then cut the new sum off at 24 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorCores:
    """A model of tensor cores for operands of bf16 and fp16.

    Attributes:
        products: number of products that are added in a step, besides the sum so far.
        extra_bits: bits beyond those of fp32 that are kept of each number while they are added.
        devices: the devices that the model covers.
        source: the publication or measurement it is from.
    """

    products: int
    extra_bits: int
    devices: str
    source: str

    @property
    def cut(self) -> float:
        """Share of the largest number of a step below which each number is cut off."""
        return 2.0 ** -(23 + self.extra_bits)

    def height(self, terms: int) -> int:
        """Return the height h of a tree of rounded additions whose bound, gamma_h, covers a dot of `terms` products.

        In units of u = 2**-24, a step loses 2**(1 - extra_bits) of the largest number for each of its products and for
        the sum so far, and 2 of the new sum. With E the error so far and T the sum of all |products|, none of these
        numbers is larger than T + E, so that a step that loses c u at most takes T + E to (T + E) / (1 - c u) at most.
        All steps together: E <= T h u / (1 - h u) with h the sum of the c. A single product is never cut off.
        """
        return 1 if terms < 2 else math.ceil(self.lost(terms))

    def lost(self, terms: int) -> float:
        """Bound the loss of the steps of `terms` products, in units of u of the largest number in any of them."""
        steps = -(-terms // self.products)
        return (terms + steps) * 2.0 ** (1 - self.extra_bits) + 2 * steps

    def __str__(self) -> str:
        bits = f"{self.extra_bits} extra bit{'s' * (self.extra_bits != 1)}"
        return f"tensor cores of {self.devices} ({self.products} products at a time, {bits})"


_PUBLISHED = "Khattak and Mikaitis, Accurate Models of NVIDIA Tensor Cores, arXiv:2512.07004"

BY_CAPABILITY: Mapping[tuple[int, int], TensorCores] = {
    (7, 0): TensorCores(4, 0, "V100", _PUBLISHED),
    (8, 0): TensorCores(8, 1, "A100", _PUBLISHED),
    **dict.fromkeys(((8, 6), (8, 7), (8, 9)), TensorCores(8, 1, "A100, taken for all of Ampere and Ada", _PUBLISHED)),
    (9, 0): TensorCores(16, 2, "H100 and H200", "docs/measurements/tensor_cores.md, measured on an H200"),
}
"""Compute capability → model."""

LOOSEST = TensorCores(4, 0, "no particular NVIDIA GPU", "the model here whose bounds hold for all others")
