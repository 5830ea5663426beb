"""Quantization to codes of 8 bits: one scale for a tensor, for each row, or for each group of columns of a row.

Rules as found in vLLM, SGLang, DeepGEMM, DeepSeek-V3 and TransformerEngine; docs/contracts/quantize.md lists who keeps
which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import (
    Enclosure,
    at_least,
    ceil,
    divide,
    divide_rn,
    largest_magnitude,
    log2,
    power_of_two_from,
    power_of_two_to,
    round_half_away,
    trunc,
    two_to_the,
    where,
)
from lastbit.references._codes import LARGEST, limited
from lastbit.references._shapes import check_shapes, width_of
from lastbit.relations import NotApplicable, Related, Tensors, at, relation, together

Quotient = Callable[[Enclosure | float, Enclosure | float], Enclosure]

_SMALLEST_POWER = 2.0**-126
_CODES = ("e4m3_codes", "e5m2_codes", "int8_codes")


@relation("shards", "some of the groups of columns alone have the bits that they have in whole rows")
def _shards(tensors: Tensors, params: Mapping[str, Any], random: Random) -> Iterator[Related]:
    x, size = tensors["x"], params.get("group_size")
    groups = 0 if size is None else x.shape[-1] // size
    if size is None or groups < 2:
        raise NotApplicable("the case has one group of columns; two are needed")
    for part in (slice(groups // 2), slice(groups // 2, groups)):
        start, end, _ = part.indices(groups)
        columns = ..., slice(start * size, end * size)
        same = together(at(_CODES, columns), at(("scale",), (..., part)))
        yield Related(f"groups {start} to {end - 1} of {groups} alone", {**tensors, "x": x[columns]}, same)


@op(
    rows=("x",),
    axes={
        "codes": {"quotient": {}, "reciprocal": {}, "inverted": {}},
        "scale_rule": {"": {}, "scaled_amax": {}, "reciprocal_scale": {}},
        "division": {"": {}, "approximate": {}},
        "exponent": {"": {}, "logarithm": {}},
        "integers": {"": {}, "half_away": {}, "truncated": {}},
    },
    rounds={"e4m3_codes": "e4m3", "e5m2_codes": "e5m2", "int8_codes": "int8"},
    returns=("e4m3_codes", "e5m2_codes", "int8_codes", "scale"),
    relations=(_shards,),
)
def quantize(
    x: Enclosure,
    scale: Enclosure | None = None,
    *,
    dtype: str,
    group_size: int | None = None,
    ue8m0: bool = False,
    least_amax: float = 0.0,
    least_scale: float = 0.0,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """Compute the codes of x / scale, limited to the largest number of `dtype` (`e4m3`, `e5m2` or `int8`).

    x: [..., N]; scale: [1], fp32, of the whole tensor. Without it there is one for each row, [..., 1], or for each
    group of `group_size` columns, [..., N / group_size]: amax / largest, where amax = max(max|x|, `least_amax`) and NaN
    is ignored, and `least_scale` at least; with `ue8m0` rounded up to a power of two, as a number of fp32. A NaN of x
    has a NaN code, and any code of int8.

    Raises:
        ValueError: parameters that have no meaning together, or tensors whose shapes do not fit.
    """
    _check(x, scale, dtype, group_size)
    over = divide if contract.has("approximate") else divide_rn
    if scale is not None:
        if ue8m0 or least_amax or least_scale:
            raise ValueError("ue8m0, least_amax and least_scale say how a scale is found, but one is given")
        values = _scaled(x, scale, None, contract, over)
    else:
        _check_found(dtype, least_amax, least_scale, ue8m0=ue8m0)
        groups = x if group_size is None else x.in_groups(group_size)
        amax = at_least(largest_magnitude(groups), least_amax)
        amax = stage("amax", amax if group_size is None else amax[..., 0])
        own, factor = _found(amax, dtype, least_scale, contract, over, ue8m0=ue8m0)
        own = stage("scale", own, result=True)
        if group_size is not None:
            own, factor = own[..., None], factor if factor is None else factor[..., None]
        values = _scaled(groups, own, factor, contract, over)
        values = values if group_size is None else values.joined()
    codes = limited(stage("scaled", values), dtype)
    if dtype == "int8" and contract.has("half_away"):
        codes = round_half_away(codes)
    if dtype == "int8" and contract.has("truncated"):
        codes = trunc(codes)
    stage(f"{dtype}_codes", codes, result=True)


def _found(
    amax: Enclosure, dtype: str, least: float, contract: Contract, over: Quotient, *, ue8m0: bool
) -> tuple[Enclosure, Enclosure | None]:
    """Compute the scale, and largest / amax; None for the latter if the multiplier follows from the scale."""
    factor = where(amax > 0.0, over(LARGEST[dtype], amax), 1.0)
    if contract.has("reciprocal_scale"):
        factor = power_of_two_to(factor) if ue8m0 else factor
        return at_least(over(1.0, factor), least), factor
    scale = at_least(
        amax * (1.0 / LARGEST[dtype]) if contract.has("scaled_amax") else over(amax, LARGEST[dtype]), least
    )
    if not ue8m0:
        return scale, factor
    return two_to_the(ceil(log2(scale))) if contract.has("logarithm") else power_of_two_from(scale), None


def _scaled(x: Enclosure, scale: Enclosure, factor: Enclosure | None, contract: Contract, over: Quotient) -> Enclosure:
    """Compute x / scale in the way of the contract."""
    if contract.has("quotient"):
        return over(x, scale)
    return x * (over(1.0, scale) if factor is None or contract.has("reciprocal") else factor)


def _check(x: Enclosure, scale: Enclosure | None, dtype: str, group_size: int | None) -> None:
    width = width_of("x", x)
    check_shapes({"scale": (scale, (1,))})
    if dtype not in LARGEST:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(map(repr, LARGEST))}")
    if group_size is not None and (group_size < 1 or width % group_size):
        raise ValueError(f"group_size={group_size} does not divide {width}, the width of x")
    if group_size is not None and scale is not None:
        raise ValueError(f"group_size={group_size}, but the scale that is given is one for the whole tensor")


def _check_found(dtype: str, least_amax: float, least_scale: float, *, ue8m0: bool) -> None:
    for name, value in {"least_amax": least_amax, "least_scale": least_scale}.items():
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name}={value} is no finite number from 0 on")
    if ue8m0 and max(least_amax / LARGEST[dtype], least_scale) < _SMALLEST_POWER:
        raise ValueError(
            f"ue8m0 with least_amax={least_amax} and least_scale={least_scale}: a scale of zero is no power of two; "
            "give one of them"
        )
