"""Rounding to integers, each an exact operation that rises with its argument, so that it keeps intervals.

A stage that is rounded to one of the formats `int8`, `int4` and `uint8` is converted to integers, to nearest with ties
to even; what a kernel rounds otherwise is rounded by one of these functions before. Conversions saturate on some
devices and wrap around on others, so that a reference clamps first: nothing is known of a number that is out of range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.numerics.algebraic import chosen_by_value
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.remembered import remembered


@chosen_by_value
@remembered
def round_half_even(x: Enclosure) -> Enclosure:
    """Round to the nearest integer, ties to even: `rint`, `torch.round`, `cvt.rni`.

    >>> round_half_even(Enclosure.point(torch.tensor([0.5, 1.5, 2.5]))).value.tolist()
    [0.0, 2.0, 2.0]
    """
    return Enclosure(x.parts.round())


@chosen_by_value
@remembered
def round_half_away(x: Enclosure) -> Enclosure:
    """Round to the nearest integer, ties away from zero: `roundf`, `libdevice.round`.

    >>> round_half_away(Enclosure.point(torch.tensor([0.5, 1.5, 2.5]))).value.tolist()
    [1.0, 2.0, 3.0]
    """
    return Enclosure(_away(x.parts))


@chosen_by_value
@remembered
def floor(x: Enclosure) -> Enclosure:
    """Round down to the largest integer that is not larger."""
    return Enclosure(x.parts.floor())


@chosen_by_value
@remembered
def ceil(x: Enclosure) -> Enclosure:
    """Round up to the smallest integer that is not smaller."""
    return Enclosure(x.parts.ceil())


@chosen_by_value
@remembered
def trunc(x: Enclosure) -> Enclosure:
    """Return the integer part, as a conversion to integers in C gives it: toward zero."""
    return Enclosure(x.parts.trunc())


def _away(x: Tensor) -> Tensor:
    """Round to nearest, ties away from zero; from 2**52 on every number of fp64 is an integer."""
    whole = (x.abs() + 0.5).floor()
    return torch.where(x.abs() < 2.0**52, torch.copysign(whole, x), x)
