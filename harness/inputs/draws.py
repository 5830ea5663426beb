"""The part of a tensor that a regime fills at once, and the random numbers that belong to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lastbit.inputs.bits import hashed, key_of, shift_right
from lastbit.numerics.formats import Format

_LANES = 0x0000FFFF0000FFFF


@dataclass(frozen=True, slots=True)
class DrawnBlock:
    """A block of one tensor, and the random numbers that belong to it.

    A row is a line along the last dimension; a tensor with fewer dimensions is one row. Every method takes the index
    (int64) whose random number is wanted: `elements` for one per element, `rows` or `columns` for one that a line
    shares, `whole` for one per tensor. Different streams are independent.

    Attributes:
        seed: seed of the case.
        name: name of the tensor.
        fmt: format to which the values will be rounded.
        rows: logical row numbers of the block, int64 [R, 1].
        columns: column numbers of the block, int64 [1, C].
        height: number of rows of the tensor.
        width: number of columns of the tensor.
        matrix: number of rows of one of its matrices, the last two dimensions.
    """

    seed: int
    name: str
    fmt: Format
    rows: Tensor
    columns: Tensor
    height: int
    width: int
    matrix: int

    @property
    def rows_of_matrix(self) -> Tensor:
        """Row numbers within their matrix, int64 [R, 1]."""
        return self.rows % self.matrix

    @property
    def shared(self) -> Self:
        """The block as a part of no tensor: its random numbers are those of the case, which all tensors share."""
        return replace(self, name="")

    @property
    def elements(self) -> Tensor:
        """Logical index of each element, int64 [R, C]."""
        return self.rows * self.width + self.columns

    @property
    def whole(self) -> Tensor:
        """The one index of the tensor itself, int64 [1, 1]."""
        return torch.zeros_like(self.rows[:1])

    def words(self, index: Tensor, stream: str, *, lane: int = 0, lanes: int = 1) -> Tensor:
        """Return 64 random bits per index."""
        return hashed(index, key_of(self.seed, self.name, stream), lane=lane, lanes=lanes)

    def uniform(self, index: Tensor, stream: str = "uniform") -> Tensor:
        """Return uniform multiples of 2**-53 in [0, 1)."""
        return shift_right(self.words(index, stream), 11).to(torch.float64) * 2.0**-53

    def integers(self, index: Tensor, low: int, high: int, stream: str = "integers") -> Tensor:
        """Return uniform integers (int64) from `low` to `high`, both included, fewer than 2**31 of them."""
        return low + ((shift_right(self.words(index, stream), 32) * (high - low + 1)) >> 32)

    def column(self, index: Tensor, stream: str = "column") -> Tensor:
        """Return the number of a column; past 2**31 of them, of one of the first 2**31."""
        return self.integers(index, 0, min(self.width, 2**31) - 1, stream)

    def powers(self, index: Tensor, low: int, high: int, stream: str = "powers") -> Tensor:
        """Return powers of two with exponents from `low` to `high`, both included and normal in fp64."""
        return ((self.integers(index, low, high, stream) + 1023) << 52).view(torch.float64)

    def signs(self, index: Tensor, stream: str = "signs") -> Tensor:
        """Return 1.0 or -1.0 per index."""
        return (self.integers(index, 0, 1, stream) * 2 - 1).to(torch.float64)

    def normal(self, index: Tensor, stream: str = "normal") -> Tensor:
        """Return nearly normal numbers of mean 0 and variance 1, multiples of 2**-48 in (-6, 6).

        The sum of twelve 16-bit fields has variance 2**32 - 1; 32 further bits fill the significand. The kurtosis is
        2.9 instead of 3 and the tails are light: 6 is never reached, and P(|z| > 4) is 2.2e-5 instead of 6.3e-5.
        """
        fields = torch.zeros_like(index)
        for lane in range(3):
            words = self.words(index, stream, lane=lane, lanes=4)
            fields = fields + (words & _LANES) + ((words >> 16) & _LANES)
        total = (fields & 0xFFFFFFFF) + (fields >> 32)
        fill = shift_right(self.words(index, stream, lane=3, lanes=4), 32)
        centred = ((total - 12 * 0xFFFF // 2) << 32) + fill - (1 << 31)
        return centred.to(torch.float64) * 2.0**-48
