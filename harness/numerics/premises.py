"""What the error bounds rest on: how accurate each primitive is, and how sums accumulate.

A reference never states a bound of its own. It calls `rsqrt`, `mean_of_squares` and so on, which take their bounds from
the premises in force (`with using(premises): ...`). The documented bounds hold for every NVIDIA GPU and for the
interpreter; `lastbit calibrate` measures them on the device at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

U = 2.0**-24
"""Unit roundoff of fp32: half the spacing of the numbers in [1, 2)."""


@dataclass(frozen=True)
class Bound:
    """Largest relative error of a primitive, and where the figure is from."""

    relative: float
    source: str


DOCUMENTED: Mapping[str, Bound] = {
    "rsqrt": Bound(2.0**-22, "CUDA math table: rsqrtf, 2 ulp over the full range; PTX rsqrt.approx: 2^-22.9"),
    "sqrt": Bound(2.0**-22, "PTX sqrt.approx.f32 and CUDA sqrtf without -prec-sqrt: at most 2 ulp"),
    "divide": Bound(2.0**-22, "PTX div.full.f32: 2 ulp"),
    "exp": Bound(2.0**-22, "PTX ex2.approx: 2^-22; the rounded argument adds 2u per unit of |x|"),
    "sigmoid": Bound(2.0**-22, "exp, an addition and a division"),
}


@dataclass(frozen=True)
class Premises:
    """Error bounds on one device.

    Attributes:
        device: what the figures were measured on, or `documented`.
        bounds: primitive → relative error; a primitive that is missing has its documented bound.
        depth: number of terms → height of the summation tree, or None for any order.
        flushes_subnormals: fp32 results below 2**-126 may become zero.
        atomic: stages that are sums by atomic additions, in which they may become zero in any case.
        exact_sums: every sum is correctly rounded, which no kernel promises: what contracts differ in then, they differ
            in by what they say and not by the order of a sum.
    """

    device: str = "documented"
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    depth: Callable[[int], int] | None = None
    flushes_subnormals: bool = False
    atomic: frozenset[str] = frozenset()
    exact_sums: bool = False

    def relative(self, primitive: str) -> float:
        """Largest relative error of `primitive`."""
        return self.bounds.get(primitive, DOCUMENTED[primitive]).relative

    def accumulation(self, terms: int) -> float:
        """Bound on |computed sum - sum| / sum of |terms|, each term being a product that may be rounded itself.

        gamma_h = h u / (1 - h u) for a tree of height h over the rounded products (Higham, Accuracy and Stability of
        Numerical Algorithms, 2nd ed., section 4.2), so h = depth + 1; any order has h = `terms`.
        """
        return 0.0 if self.exact_sums else _gamma(self._height(terms))

    def dot_accumulation(self, terms: int) -> float:
        """`accumulation` of a dot of `terms` products, which tensor cores may compute, too: they truncate."""
        return 0.0 if self.exact_sums else _gamma(max(self._height(terms), truncating_height(terms)))

    def _height(self, terms: int) -> int:
        return terms if self.depth is None else min(terms, self.depth(terms) + 1)


def truncating_height(terms: int) -> int:
    """Height of the tree that stands for the error of a dot on tensor cores.

    They add 16 products and the sum so far at a time: each of the 17 numbers is cut off at 2**-25 of the largest, which
    errs by u / 2, and the new sum at 24 bits, which errs by 2u: measured on an H200, see docs/measurements.
    """
    steps = -(-terms // 16)
    return 1 if terms < 2 else -(-(terms + 5 * steps) // 2)


def _gamma(height: int) -> float:
    return height * U / (1 - height * U) if height * U < 1 else float("inf")


_current: ContextVar[Premises] = ContextVar("premises", default=Premises())  # noqa: B039 (frozen)


def current() -> Premises:
    """The premises in force."""
    return _current.get()


@contextmanager
def using(premises: Premises) -> Iterator[Premises]:
    """Evaluate references under `premises`."""
    token = _current.set(premises)
    try:
        yield premises
    finally:
        _current.reset(token)
