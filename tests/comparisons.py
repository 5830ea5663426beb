"""Hypothesis draws actual values and what is expected of them: special values, odd shapes, broadcasts and strides."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from lastbit.judging.fused_compare import corners
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import FORMATS, FP64, Format, cast

SHAPES = [(), (1,), (2,), (7,), (31,), (5, 9), (1, 6, 1, 5), (3, 4, 5), (33, 17)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
NARROW = [fmt for fmt in FORMATS.values() if fmt is not FP64]


@st.composite
def comparisons(draw: st.DrawFn, formats: list[Format] = NARROW) -> tuple[Tensor, Enclosure, Format]:
    """Actual values, an enclosure of 1, 2 or 4 parts that broadcasts to their shape, and a format."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape, parts, fmt = draw(st.sampled_from(SHAPES)), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(formats))
    pool = corners()
    if draw(st.booleans()):
        pool = torch.cat([pool[pool.abs() < 2.0**20], torch.arange(-9.0, 9.0, dtype=torch.float64) / 8])
    kept = draw(st.sampled_from([shape, shape, shape[1:], (1,) * len(shape)]))
    e = Enclosure(_drawn_parts(pool, parts, kept, generator))
    same = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.95, 2.0]))
    actual = torch.where(same, e.value.expand(shape), _pick(pool, shape, generator))
    actual = cast(actual, draw(st.sampled_from(DTYPES)))
    return _turned(actual, draw(st.booleans())), Enclosure(_turned(e.parts, draw(st.booleans()))), fmt


def _drawn_parts(pool: Tensor, parts: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    drawn = _pick(pool, (4, *shape), generator)
    ends = drawn[2:].sort(0).values
    ends = torch.where(torch.isnan(ends).any(0), math.nan, ends)
    kind = torch.randint(5, shape, generator=generator)
    ends = torch.where(kind < 2, drawn[1], ends)
    unknown = torch.tensor([-math.inf, math.inf], dtype=torch.float64).reshape(2, *[1] * len(shape))
    return torch.cat([drawn[:2], torch.where(kind == 2, unknown, ends)])[:parts]


def _pick(pool: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return pool[torch.randint(len(pool), shape, generator=generator)]


def _turned(x: Tensor, turned: bool) -> Tensor:
    """Exchange the last two dimensions in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if turned and x.ndim > 1 else x
