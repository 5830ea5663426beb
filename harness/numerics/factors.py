"""The two sides of a dot, with the figures of each that its error bound needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.fused import one_kernel_on_cuda
from lastbit.numerics.sums import units_of

QUANTUM, KIND, LARGEST = 0, 1, 2
"""Limits of a row or column: the largest power of two that divides all of it, its kind, and its largest magnitude,
negative: of each the least counts, for one limit of several."""

KNOWN, APART, NAN = 1.0, 0.0, -1.0
"""Kinds: every element is one number, the ends of some are apart, some must be NaN."""


@dataclass(frozen=True, eq=False)
class Factor:
    """One side of a dot, with the figures that its error bound needs, computed once for all dots it is in.

    Attributes:
        enclosure: the matrix.
        dim: its dimension that is summed over, -1 of a left factor and -2 of a right one; figures along it are kept
            with size 1.
        spans: see `spans`; of one part, the numbers, where every element is one.
    """

    enclosure: Enclosure
    dim: int
    spans: Tensor

    @classmethod
    def left(cls, x: Enclosure) -> Factor:
        """Make a left factor of `x` [..., M, K], to be multiplied with a right one [..., K, N]."""
        return cls(x, -1, _spans_of(x))

    @classmethod
    def right(cls, x: Enclosure) -> Factor:
        """Make a right factor of `x` [..., K, N], to be multiplied with a left one [..., M, K]."""
        return cls(x, -2, _spans_of(x))

    def columns(self, part: slice) -> Factor:
        """Keep only a part of the columns."""
        return Factor(self.enclosure[..., part], self.dim, self.spans[..., part])

    @property
    def terms(self) -> int:
        """Number of products that are added for an element of the dot."""
        return self.enclosure.shape[self.dim]

    @property
    def middle(self) -> Tensor:
        """The middle of every interval."""
        return self.spans[0]

    @cached_property
    def radius(self) -> Tensor | None:
        """Distance of every interval's ends from its middle; None if all are points, as far as the host can tell."""
        return None if len(self.spans) == 1 or _all_zero(self.spans[1]) else self.spans[1]

    @cached_property
    def size(self) -> Tensor:
        """Largest magnitude of every element."""
        return self.spans[2] if len(self.spans) == 4 else self.middle.abs()

    @cached_property
    def finite(self) -> Tensor:
        """`size`, with zeros for infinities and NaN."""
        return self.spans[3] if len(self.spans) == 4 else _finite(self.size)

    @cached_property
    def limits(self) -> Tensor:
        """QUANTUM, KIND and LARGEST of all elements along `dim`, the last one twice."""
        if not self.terms:
            empty = self.middle.sum(self.dim, keepdim=True)
            return torch.stack([empty + torch.inf, empty + KNOWN, empty, empty])
        radius = self.spans[1:2] if self.radius is not None else self.middle.new_zeros(1)
        return limiting(self.spans[:1], radius).amin(self.dim, keepdim=True)

    @cached_property
    def least_limits(self) -> Tensor:
        """`limits` of everything, one number each."""
        limits = self.limits.flatten(1)
        return limits.amin(1) if limits.shape[1] else limits.new_zeros(4)


def _spans_of(x: Enclosure) -> Tensor:
    """Return `spans`, laid out in memory like the elements; only the numbers where there are fewer than four parts."""
    if len(x.parts) < 4:
        return x.value[None]
    return spans(x.parts.mT).mT if x.parts.stride(-1) > x.parts.stride(-2) else spans(x.parts)


def _all_zero(radius: Tensor) -> bool:
    """Check for zeros, on the CPU only: an accelerator would have to finish everything before it could answer."""
    return radius.device.type == "cpu" and not bool(radius.any())


def _finite(size: Tensor) -> Tensor:
    return torch.nan_to_num(size, nan=0.0, posinf=0.0)


# The operations, as in `lastbit.numerics.parts`


@one_kernel_on_cuda
def spans(x: Tensor) -> Tensor:
    """Return four figures of intervals: middle, radius, largest magnitude, and that with 0 in place of inf and NaN."""
    lo, hi = x[2], x[3]
    middle = (lo + hi) / 2
    known = (lo == hi) | torch.isnan(lo)
    radius = torch.where(known, 0.0, torch.maximum(hi - middle, middle - lo))
    size = middle.abs() + radius
    return torch.stack([middle, radius, size, _finite(size)])


@one_kernel_on_cuda
def limiting(middle: Tensor, radius: Tensor) -> Tensor:
    """Return the limits of single elements."""
    known = torch.where(torch.isnan(middle[0]), NAN, KNOWN)
    kind = torch.where(radius[0] == 0, known, APART)
    largest = -_finite(middle[0].abs() + radius[0])
    return torch.stack([units_of(middle[0]), kind, largest, largest])
