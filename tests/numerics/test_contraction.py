"""The measurement of which product is contracted: what it takes for possible, against fractions, and what it finds."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from lastbit.kernel import load_file
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

contraction = load_file(Path(__file__).resolve().parents[2] / "docs" / "measurements" / "contraction.py")
DIGITS = {torch.float32: (24, -126), torch.float16: (11, -14), torch.bfloat16: (8, -126)}
"""Bits of a significand, and the exponent of the smallest normal number."""


def nearest(x: Fraction, dtype: torch.dtype) -> Fraction:
    if not x:
        return x
    digits, smallest = DIGITS[dtype]
    exponent = math.floor(math.log2(abs(x)))
    exponent += (abs(x) >= Fraction(2) ** (exponent + 1)) - (abs(x) < Fraction(2) ** exponent)
    unit = Fraction(2) ** (max(exponent, smallest) - digits + 1)
    return round(x / unit) * unit


@pytest.mark.parametrize("form", contraction.FORMS, ids=lambda form: form.text)
@pytest.mark.parametrize("dtype", DIGITS)
def test_what_is_possible_is_rounded_as_fractions_are(dtype: torch.dtype, form: contraction.Terms) -> None:
    given = {name: x[::64] for name, x in contraction.draw(dict.fromkeys("abcd", dtype)).items()}
    found = contraction.possible(form, given, dtype)
    assert len({tuple(values.tolist()) for values in found.values()}) == len(found) == 2 + form.two
    for i, numbers in enumerate(zip(*(given[name].tolist() for name in "abcd"), strict=True)):
        a, b, c, d = map(Fraction, numbers)
        first, second = form.signs[0] * a * b, form.signs[1] * (c * d if form.two else c)
        near_first, near_second = nearest(first, dtype), nearest(second, dtype)
        wanted = {contraction.NEITHER: near_first + near_second, contraction.FIRST: first + near_second}
        wanted |= {contraction.SECOND: near_first + second} if form.two else {}
        assert {name: values[i].item() for name, values in found.items()} == {
            name: nearest(total, dtype) for name, total in wanted.items()
        }


@pytest.mark.skipif(not INTERPRETED, reason="a compiler contracts")
def test_the_interpreter_contracts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contraction, "COUNT", 512)
    found = list(contraction.rows("cpu"))
    assert len(found) == 3 * (4 + 4 * 4) + 2 * 2 * 4
    assert {row[3] for row in found} == {contraction.NEITHER}
