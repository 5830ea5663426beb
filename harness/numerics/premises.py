"""The premises of the error bounds: how accurate each primitive is, and how sums accumulate.

A reference never states a bound of its own. It calls `rsqrt`, `mean_of_squares` and so on, which take their bounds from
the premises in force (`with using(premises): ...`). The documented bounds of primitives hold for every NVIDIA GPU and
for the interpreter; `lastbit calibrate` measures them on the device at hand. How dots add depends on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from lastbit.errors import unknown
from lastbit.numerics.formats import FP32, PRECISE, Format
from lastbit.numerics.tensor_cores import LOOSEST, TensorCores

U = 2.0**-24
"""Unit roundoff of fp32: half the spacing of the numbers in [1, 2)."""


@dataclass(frozen=True)
class Bound:
    """Largest error of a primitive, and where the figure is from.

    Attributes:
        relative: largest error relative to the exact result.
        source: where the figure is from.
        absolute: further absolute error.
    """

    relative: float
    source: str
    absolute: float = 0.0


DOCUMENTED: Mapping[str, Bound] = {
    "rsqrt": Bound(2.0**-22, "CUDA math table: rsqrtf, 2 ulp over the full range; PTX rsqrt.approx: 2^-22.9"),
    "sqrt": Bound(2.0**-22, "PTX sqrt.approx.f32 and CUDA sqrtf without -prec-sqrt: at most 2 ulp"),
    "divide": Bound(2.0**-22, "PTX div.full.f32: 2 ulp"),
    "exp": Bound(2.0**-22, "PTX ex2.approx: 2^-22; the rounded argument adds 2u per unit of |x|"),
    "sigmoid": Bound(2.0**-22, "exp, an addition and a division"),
    "exp2": Bound(2.0**-22, "PTX ex2.approx: 2^-22, as exp2f; CUDA math table: 2 ulp"),
    "log": Bound(2.0**-22, "CUDA math table: logf, 1 ulp of the rounded result, 3u; MKL and SLEEF: 1 ulp, 2u"),
    "log2": Bound(2.0**-22, "CUDA math table: log2f, 1 ulp of the rounded result, 3u; MKL and SLEEF: 1 ulp, 2u"),
    "log1p": Bound(2.0**-22, "CUDA math table: log1pf, 1 ulp of the rounded result, 3u; MKL and SLEEF: 1 ulp, 2u"),
    "expm1": Bound(2.0**-22, "CUDA math table: expm1f, 1 ulp of the rounded result, 3u; MKL and SLEEF: 1 ulp, 2u"),
    "tanh": Bound(5 * U, "CUDA math table: tanhf, 2 ulp of the rounded result"),
    "erf": Bound(5 * U, "CUDA math table: erff, 2 ulp of the rounded result"),
    "sin": Bound(7 * U, "SLEEF sinf_u35: 3.5 ulp; CUDA math table: sinf, 2 ulp of the rounded result, 5u"),
    "cos": Bound(7 * U, "SLEEF cosf_u35: 3.5 ulp; CUDA math table: cosf, 2 ulp of the rounded result, 5u"),
}


@dataclass(frozen=True)
class Premises:
    """Error bounds on one device.

    Attributes:
        device: which device they are for, and where the figures are from; `unknown` is the loosest of all models here.
        bounds: primitive → relative error; a primitive that is missing has its documented bound.
        tensor_cores: what may compute dots besides rounded additions; None if nothing does.
        depth: number of terms → height of the summation tree, or None for any order.
        order: dots take their terms from first to last, and after every so many terms one fp32 number holds the sum of
            all of them so far; None for any order.
        flushes_subnormals: fp32 results below 2**-126 may become zero.
        atomic: stages that are sums by atomic additions, in which they may become zero in any case.
        exact_sums: every sum is correctly rounded, which no kernel promises: contracts that differ then differ by their
        rules and not by the order of a sum.
        arithmetic: the format of intermediate values: fp32, or `WIDE_FP32`, in which nothing overflows before it is
            stored, or `PRECISE`, in which nothing is rounded either.
        until: the stage after which intermediate values are of fp32 again; none for "".
        options: of several ways to compute that a reference leaves open, all count; else the first one alone.
        unit: largest relative error of a correctly rounded operation; bounds of primitives grow or shrink with it.
        numbers: the format that Python numbers become, such as eps.
    """

    device: str = "unknown"
    bounds: Mapping[str, Bound] = field(default_factory=dict, hash=False)
    tensor_cores: TensorCores | None = LOOSEST
    depth: Callable[[int], int] | None = None
    order: int | None = None
    flushes_subnormals: bool = False
    atomic: frozenset[str] = frozenset()
    exact_sums: bool = False
    arithmetic: Format = FP32
    until: str = ""
    options: bool = True
    unit: float = U
    numbers: Format = FP32

    def relative(self, primitive: str) -> float:
        """Return the largest relative error of `primitive` alone; a measured one covers every way to compute it."""
        return self.bound(primitive, DOCUMENTED.get(primitive)).relative

    def bound(self, primitive: str, documented: Bound | None) -> Bound:
        """Return the bound of a primitive in units of `unit`: the one measured, or else the documented one."""
        found = self.bounds.get(primitive, documented)
        if found is None:
            raise unknown("primitive", primitive, DOCUMENTED)
        return found if self.unit == U else replace(found, relative=found.relative * self.unit / U)

    @property
    def inverse_root(self) -> float:
        """Largest relative error of 1 / sqrt(x), by rsqrt or from a root and a division.

        The root is sqrt(x) (1 + a), its inverse (1 + b) / (1 + a) of what it should be. A measured figure of `rsqrt` is
        one of both ways.
        """
        if "rsqrt" in self.bounds:
            return self.relative("rsqrt")
        return max(self.relative("rsqrt"), (1 + self.relative("divide")) / (1 - self.relative("sqrt")) - 1)

    @property
    def quotient(self) -> float:
        """Largest relative error of a / b, by a division or as a · (1 / b) before that product is rounded to fp32.

        The rounding of the product needs no room of its own: it is monotone, and the ends are rounded likewise.
        """
        return max(self.relative("divide"), self.unit)

    def accumulation(self, terms: int) -> float:
        """Bound |computed sum - sum| / sum of |terms|, each term being a product that may be rounded itself.

        gamma_h = h u / (1 - h u) for a tree of height h over the rounded products (Higham, Accuracy and Stability of
        Numerical Algorithms, 2nd ed., section 4.2), so h = depth + 1; any order has h = `terms`.
        """
        return 0.0 if self.exact_sums else self._gamma(self.height(terms))

    def dot_accumulation(self, terms: int) -> float:
        """Bound the error of a dot of `terms` products as `accumulation` does; tensor cores, which cut off, may add."""
        if self.exact_sums:
            return 0.0
        cores = self.tensor_cores
        return self._gamma(max(self.height(terms), 0 if cores is None else cores.height(terms)))

    def height(self, terms: int) -> int:
        """Count the most roundings between a product, which is rounded itself, and the sum of `terms` of them."""
        return terms if self.depth is None else min(terms, self.depth(terms) + 1)

    def _gamma(self, height: int) -> float:
        lost = height * self.unit
        return lost / (1 - lost) if lost < 1 else float("inf")


REAL = Premises("real arithmetic, as closely as fp64 tells", tensor_cores=None, arithmetic=PRECISE, unit=2.0**-52)
"""Premises whose bounds shrink to the errors of fp64, so that the ends enclose the result in real arithmetic."""

AS_WRITTEN = replace(REAL, numbers=PRECISE)
"""Premises like `REAL` for a kernel that computes with 1e-05 as fp64 has it."""

EXACT = replace(REAL, options=False)
"""Premises like `REAL` under which the ends enclose the exact part, that of the first of several ways to compute."""

_current: ContextVar[Premises] = ContextVar("premises", default=Premises())  # noqa: B039 (frozen)


def current() -> Premises:
    """Return the premises in force."""
    return _current.get()


def put_in_force(premises: Premises) -> None:
    """Go on under other premises, until the end of the `using` around it."""
    _current.set(premises)


@contextmanager
def using(premises: Premises) -> Iterator[Premises]:
    """Evaluate references under `premises`."""
    token = _current.set(premises)
    try:
        yield premises
    finally:
        _current.reset(token)
