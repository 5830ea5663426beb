"""The measurements: error of each primitive, casts, subnormals, and sums and dots on a lattice.

Of the functions of one argument, torch, `tl` and libdevice are measured for every number of fp32, or for a sample; the
last two run in the interpreter where Triton does not compile. A result that is no normal number of fp32, and what a
subnormal argument gives, must lie within the enclosure of the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lastbit import numerics
from lastbit.calibrate import kernels
from lastbit.calibrate.store import SUBNORMAL_PRODUCTS, MeasuredPremise, documented_premises
from lastbit.numerics import DOCUMENTED, Enclosure, Premises, cast, dot, using
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


# Arbitrary: more takes an interpreter longer, fewer meet fewer arguments that err much.
_SAMPLE = {"cpu": 1 << 16}
# Arbitrary: as many as torch holds some fp64 tensors of on any GPU.
_SAMPLE_ELSEWHERE = 1 << 24


def measure(device: torch.device) -> Iterator[MeasuredPremise]:
    """Measure every premise on `device`; kernels are compiled or interpreted as Triton was started."""
    size = _SAMPLE.get(device.type, _SAMPLE_ELSEWHERE)
    yield from _roots_and_quotients(device, size)
    yield from functions(device, size if size < _SAMPLE_ELSEWHERE else EVERY)
    yield from _saturation(device, size)
    yield from _casts(device, size)
    yield from _sums_and_dots(device)


def _roots_and_quotients(device: torch.device, size: int) -> Iterator[MeasuredPremise]:
    # Numbers of fp32 in [1, 4), all of them where `size` allows; 1/sqrt repeats from there on.
    step = max(1, (1 << 24) // size)
    x = (torch.arange(0, 1 << 24, step, device=device, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    every = step == 1
    root, inverse = x.double().sqrt(), 1.0 / x.double().sqrt()
    yield _relative("tl rsqrt", "rsqrt", kernels.apply("rsqrt", x), inverse, every)
    yield _relative("torch.rsqrt", "rsqrt", x.rsqrt(), inverse, every)
    for op in ("1/sqrt", "1/sqrt_rn", "div_rn(1, sqrt)", "div_rn(1, sqrt_rn)"):
        found = _relative(f"tl {op}", "rsqrt", kernels.apply(op, x), inverse, every)
        yield replace(found, limit=Premises().inverse_root)
    yield _relative("tl sqrt", "sqrt", kernels.apply("sqrt", x), root, every)
    for op, truth in (("1/x", 1.0 / x.double()), ("x/3", x.double() / 3.0), ("x/7168", x.double() / 7168.0)):
        yield _relative(f"tl {op}", "divide", kernels.apply(op, x), truth, exhaustive=False)
    for op, truth in (("sqrt_rn", x.double().sqrt()), ("div_rn", 1.0 / x.double()), ("x/4096", x.double() / 4096.0)):
        wrong = kernels.apply(op, x) != cast(truth, torch.float32)
        yield MeasuredPremise(f"tl {op} is correctly rounded", "", _share(wrong), 0.0, every)
    periodic = kernels.apply("rsqrt", x) * 2.0**-20 != kernels.apply("rsqrt", x * 2.0**40)
    yield MeasuredPremise("tl rsqrt(4^k x) = 2^-k rsqrt(x)", "", _share(periodic), 0.0, every)
    small = (x / 4)[: 1 << 16].contiguous()
    flushed = kernels.apply("x*2^-126", small) != cast(small.double() * 2.0**-126, torch.float32)
    yield MeasuredPremise(SUBNORMAL_PRODUCTS, "", _share(flushed), 0.0)


def _saturation(device: torch.device, size: int) -> Iterator[MeasuredPremise]:
    wrong = kernels.apply("sigmoid", torch.linspace(17.33, 1000.0, size, device=device)) != 1.0
    yield MeasuredPremise("tl sigmoid is 1 from 17.33 on", "", _share(wrong), 0.0)


def _casts(device: torch.device, size: int) -> Iterator[MeasuredPremise]:
    bits = torch.randint(0, 1 << 32, (size,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    x = (bits - (1 << 31)).to(torch.int32).view(torch.float32).to(device)
    for dtype in (torch.bfloat16, torch.float16):
        wrong = _differ(kernels.apply("cast", x, dtype), cast(x.double(), dtype))
        yield MeasuredPremise(f"cast fp32 to {dtype} rounds to nearest even", "", _share(wrong), 0.0)
    for dtype, limit in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        expected = cast(x.double().clamp(-limit, limit), dtype)
        wrong = _differ(kernels.apply("cast", x, dtype), expected)
        yield MeasuredPremise(f"cast fp32 to {dtype} saturates", "", _share(wrong), 0.0)


def _sums_and_dots(device: torch.device) -> Iterator[MeasuredPremise]:
    generator = torch.Generator().manual_seed(1)
    for n in (128, 4096) if device.type == "cpu" else (128, 7168, 16384):
        most = int((2**24 / n) ** 0.5) - 1
        x = torch.randint(-most, most + 1, (16, n), generator=generator).float().to(device)
        wrong = kernels.sums_of_squares(x).double() != x.double().square().sum(1)
        yield MeasuredPremise(f"sum of {n} squares on a lattice is exact", "", _share(wrong), 0.0)
    for dtype in (torch.bfloat16, torch.float16):
        for depth in (256, 2048):
            a, b = (torch.randint(-8, 9, s, generator=generator).to(device) for s in ((64, depth), (depth, 64)))
            wrong = kernels.dot(a.to(dtype), b.to(dtype)).double() != a.double() @ b.double()
            yield MeasuredPremise(f"dot of {depth} {dtype} products on a lattice is exact", "", _share(wrong), 0.0)
            yield _truncation(device, dtype, depth)
        for order in (16, 64):
            yield _walked(device, dtype, order)


def _truncation(device: torch.device, dtype: torch.dtype, depth: int) -> MeasuredPremise:
    """Measure the error of a dot of one product 1 and many so small that adding each to the sum loses it."""
    worst = 0.0
    for exponent in range(-13, -9):
        factor = torch.full((64, depth), 2.0**exponent * 1.875, dtype=dtype, device=device)
        factor[:, 0] = 1.0
        a, b = factor.double(), factor.double().T
        error = (kernels.dot(factor, factor.T.contiguous()).double() - a @ b) / (a @ b)
        worst = max(worst, float(error.abs().max()))
    return MeasuredPremise(
        f"dot of {depth} {dtype} products errs within its bound",
        "",
        worst,
        documented_premises(device).dot_accumulation(depth),
    )


def _walked(device: torch.device, dtype: torch.dtype, order: int) -> MeasuredPremise:
    """Measure the share of elements outside of the bound of an order and its depth."""
    generator, length, outside = torch.Generator().manual_seed(order), 2048, []
    sharp = replace(documented_premises(device), order=order, depth=lambda n: order + -(-n // order))
    for a, b in _losing(length, generator):
        a, b = a.to(device, dtype), b.to(device, dtype)
        with using(sharp):
            bound = dot(Enclosure.point(a), Enclosure.point(b))
        found = kernels.dot(a, b, order).double()
        outside.append((found < bound.lo) | (found > bound.hi))
    premise = f"dot of {length} {dtype} products, {order} after another, lies within the bound of that walk"
    return MeasuredPremise(premise, "", _share(torch.stack(outside)), 0.0)


def _losing(length: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random factors, of both signs and of one; with a large product first, last, or first and taken back."""
    a, b = torch.randn(64, length, generator=generator), torch.randn(length, 64, generator=generator)
    yield a, b
    yield a.abs(), b.abs()
    for first, last in ((1.0, 0.0), (0.0, 1.0), (1.0, -1.0)):
        small, others = a.abs() * 2.0**-12, b.abs() * 2.0**-12
        small[:, 0], small[:, -1] = abs(first), abs(last)
        others[0], others[-1] = first, last
        yield small, others


def _relative(premise: str, primitive: str, actual: Tensor, truth: Tensor, exhaustive: bool) -> MeasuredPremise:
    worst = float(((actual.double() - truth).abs() / truth).max())
    return MeasuredPremise(premise, primitive, worst, DOCUMENTED[primitive].relative, exhaustive)


def _differ(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.to(torch.float32), b.to(torch.float32)
    return (a != b) & ~(a.isnan() & b.isnan())


def _share(wrong: Tensor) -> float:
    return float(wrong.double().mean())
