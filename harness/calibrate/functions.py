"""The functions of one argument: their errors for every number of fp32, or for a sample, in each way to compute them.

torch, `tl` and libdevice are measured; the last two run in the interpreter where Triton does not compile. A result that
is no normal number of fp32, and what a subnormal argument gives, must lie within the enclosure of the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lastbit import numerics
from lastbit.calibrate import kernels
from lastbit.calibrate.store import MeasuredPremise
from lastbit.numerics import DOCUMENTED, Enclosure
from lastbit.numerics.formats import FP32
from lastbit.numerics.premises import U

EVERY = 1 << 32
"""Numbers of fp32, NaN and infinities among them."""
# 128 MiB of fp64, of which several are held: fewer cost launches, more do not fit a small GPU.
_TOGETHER = 1 << 24
# A sample: an enclosure takes many operations, the function that it is compared with one.
_SPECIALS = 1 << 16  # of what is together, whose enclosures are compared
_NORMAL = 2.0**FP32.min_exponent
_LARGEST = FP32.max * (1 - 2.0**-20)  # beyond it a result may be rounded to infinity

BY_TL = frozenset(("exp", "exp2", "log", "log2", "sin", "cos", "erf", "sigmoid"))
BY_LIBDEVICE = frozenset(("exp", "exp2", "log", "log2", "log1p", "expm1", "tanh", "erf", "sin", "cos"))
GROWING = frozenset(("exp", "sigmoid"))
"""Primitives whose bound is beside 2u|x|."""
FUNCTIONS = tuple(sorted(BY_TL | BY_LIBDEVICE))

Way = Callable[[Tensor], Tensor]


@dataclass
class FunctionError:
    """The errors of one way: the largest relative one, and how many special values lie outside."""

    worst: float = 0.0
    at: float = 0.0
    outside: int = 0
    specials: int = field(default=0)


def functions(device: torch.device, size: int) -> Iterator[MeasuredPremise]:
    """Measure every function on `size` numbers, spread over all of them; from `EVERY` on on all."""
    for name in FUNCTIONS:
        beyond = ", beyond 2u|x|" if name in GROWING else ""
        for way, found in measured(name, ways(name), device, size).items():
            limit = DOCUMENTED[name].relative
            yield MeasuredPremise(f"{way}{beyond}", name, found.worst, limit, exhaustive=size >= EVERY)
            share = found.outside / max(found.specials, 1)
            yield MeasuredPremise(f"{way} of special values lies within the enclosure", "", share, 0.0)


def ways(name: str) -> dict[str, Way]:
    """Map names to the ways to compute a function: torch, `tl` and libdevice, as far as they have it."""
    own: Way = getattr(torch, name)
    found = {f"torch.{name}": own}
    if name in BY_TL:
        found[f"tl {name}"] = lambda x: kernels.apply(name, x)
    if name in BY_LIBDEVICE:
        found[f"libdevice {name}"] = lambda x: kernels.libdevice_function(name, x)
    return found


def measured(name: str, of: dict[str, Way], device: torch.device, size: int) -> dict[str, FunctionError]:
    """Measure the error of each way to compute a function."""
    exact: Way = getattr(torch, name)
    found = {way: FunctionError() for way in of}
    for x in arguments(device, size):
        wide = x.double()
        truth = exact(wide)
        normal = (truth.abs() >= _NORMAL) & (truth.abs() <= _LARGEST) & (x.abs() >= _NORMAL)
        special = (~normal).nonzero()[:, 0]
        special = special[:: -(-len(special) // _SPECIALS) or 1]
        allowed = getattr(numerics, name)(Enclosure.point(x[special]))
        growth = 2 * U * wide.abs() if name in GROWING else torch.zeros((), device=device)
        for way, function in of.items():
            actual = function(x).double()
            error = torch.where(normal, (actual - truth).abs() / truth.abs() - growth, 0.0)
            error = error.nan_to_num(nan=torch.inf)  # the result is NaN, where the exact one is a normal number
            at = int(error.argmax())
            if (worst := float(error[at])) > found[way].worst:
                found[way].worst, found[way].at = worst, float(x[at])
            given, lo, hi = actual[special], allowed.lo, allowed.hi
            unknown = torch.isneginf(lo) & torch.isposinf(hi)
            within = ((given >= lo) & (given <= hi)) | (given.isnan() & lo.isnan()) | unknown
            found[way].outside += int((~within).count_nonzero())
            found[way].specials += len(special)
    return found


def arguments(device: torch.device, size: int) -> Iterator[Tensor]:
    """Yield numbers of fp32 by their bits, in blocks: all of them, or `size` that are equally far apart."""
    step = max(1, EVERY // size) | 1  # odd, so that the last bits differ
    for first in range(0, EVERY, _TOGETHER * step):
        last = min(EVERY, first + _TOGETHER * step)
        bits = torch.arange(first, last, step, dtype=torch.int64, device=device)
        yield (bits - (1 << 31)).to(torch.int32).view(torch.float32)
