"""Codes of 8 bits: what `quantize` and the FP8 output of a norm have in common."""

from __future__ import annotations

from collections.abc import Mapping

from lastbit.numerics import Enclosure, clamp

LARGEST: Mapping[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
"""Format of the codes → the code of the largest magnitude."""

_LOWEST: Mapping[str, float] = {"int8": -128.0}


def limited(values: Enclosure, dtype: str) -> Enclosure:
    """Limit scaled numbers to those that the format has; NaN stays NaN."""
    return clamp(values, _LOWEST.get(dtype, -LARGEST[dtype]), LARGEST[dtype])
