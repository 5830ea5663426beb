"""Choices of a design: what a group may declare, the cases made of what was chosen, and what a case line shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import strategies as st

from lastbit.case import Group, parse_case
from lastbit.errors import UsageError
from lastbit.inputs.choices import (
    DRAWN,
    Feature,
    Residue,
    all_features,
    check_choices,
    chosen_tensor,
    features,
    features_of,
    kind_of_regime,
    layouts_like,
    least_rows,
    residues,
    row_layouts,
    tensor_choices,
)

X = tensor_choices("x", ("bf16", "fp16", "bf16"), ("normal", "below_N"))


def group(choices: Mapping[str, Any], strategy: Any = None) -> Group:
    return Group("g", (lambda chosen: st.nothing()) if strategy is None else strategy, 1, choices=choices)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"other": (1,)}, "choice 'other' of group 'g': parameter 'other'"),
        ({"y dtype": ("bf16",)}, "choice 'y dtype' of group 'g': tensor 'y'"),
        ({"x": (1,)}, "parameter 'x'"),
        ({"x shape": (1,)}, "must be 'T dtype', 'T regime', 'T layout' or 'T columns % N' of a tensor T"),
        ({"x columns % 0": (1,)}, "must be 'T dtype'"),
        ({"x regime": ("normal",)}, "needs the choice 'x dtype': its options count by dtype"),
        ({"x layout": ("half",)}, "needs the choice 'x dtype'"),
        ({"eps": ()}, r"has the options \(\); give a tuple of one or more"),
        ({"eps": "word"}, "has the options 'word'; give a tuple"),
        ({"eps": (1e-6, {})}, r"option \{\} must be a number, True, False, a word or None"),
        ({"eps": (float("nan"),)}, "option nan must be a number"),
        ({"eps": (1, 2, 1)}, r"has options that are equal: \(1, 2, 1\)"),
        ({"x dtype": ("bf16",), "x layout": ("sideways",)}, "layout 'sideways'"),
    ],
)
def test_choices_that_are_none(choices: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_choices(group(choices), ["x"], ["eps"])


@pytest.mark.parametrize(
    "choices",
    [{}, X, {"eps": (1e-6, None, True, "word")}, {"eps": [1, 2]}, {"x columns % 64": (0, 1)}, {"x columns % 8": (0,)}],
)
def test_choices_of_an_op(choices: Mapping[str, Any]) -> None:
    check_choices(group(choices), ["x"], ["eps"])


def test_a_strategy_of_what_is_chosen_is_a_function() -> None:
    with pytest.raises(UsageError, match="group 'g' has choices, but its strategy is no function of what is chosen"):
        check_choices(group({"eps": (1,)}, st.nothing()), [], ["eps"])
    check_choices(group({}, st.nothing()), [], ["eps"])


def test_tensors_that_are_chosen() -> None:
    assert X == {"x dtype": ("bf16", "fp16"), "x regime": ("normal", "below_N"), "x layout": ("contiguous",)}
    chosen = {"x dtype": "bf16", "x regime": "below_N", "x layout": "transposed", "eps": 1}
    assert str(chosen_tensor("x", chosen, (3, 4, 8), 7)) == "x=bf16[3,4,8]@8,24,1:below_7"
    assert str(chosen_tensor("x", chosen, (4, 8), 7)) == "x=bf16[4,8]:below_7"  # no rows in two dimensions
    assert str(chosen_tensor("x", {**chosen, "x regime": "rows"}, (8,), 7)) == "x=bf16[8]:rows"
    with pytest.raises(UsageError, match="tensor of the choices: 'y'"):
        chosen_tensor("y", chosen, (8,))


@pytest.mark.parametrize(("most", "like"), [(0, (1,)), (1, (1,)), (2, (2,)), (3, (2,)), (4, (2, 2)), (99, (2, 2))])
def test_layouts_of_so_many_rows(most: int, like: tuple[int, ...]) -> None:
    assert row_layouts(most) == layouts_like(*like, 64)
    assert "contiguous" in row_layouts(most) and ("transposed" in row_layouts(most)) == (like == (2, 2))


@pytest.mark.parametrize(
    ("layouts", "rows"),
    [(("contiguous",), (1,)), (("expanded",), (2,)), (("transposed",), (2, 2)), (("expanded", "transposed"), (2, 2))],
)
def test_the_fewest_rows_that_all_layouts_take(layouts: tuple[str, ...], rows: tuple[int, ...]) -> None:
    chosen = {f"{name} layout": layout for name, layout in zip("xy", layouts, strict=False)} | {"x dtype": "bf16"}
    assert least_rows(chosen) == rows


def test_remainders_of_columns() -> None:
    assert residues(6, 9, modulus=8) == (0, 1, 6, 7)
    assert [list(each.sizes) for each in residues(6, 9, modulus=8)] == [[8], [9], [6], [7]]
    assert residues(1, 200, modulus=4) == (0, 1, 2, 3) and list(residues(1, 9, modulus=4)[1].sizes) == [1, 5, 9]
    assert len(residues(5, 1000)) == 64 and residues(7, 7) == (7,)
    one = Residue(1, range(1, 10, 4))
    assert one.among([5, 9, 2]) == 1 and (one.among([5, 9, 2]) or one).sizes == (5, 9) and one.among([2]) is None


def test_features_count_by_dtype() -> None:
    chosen = {"x dtype": "bf16", "x regime": "normal", "x layout": None, "eps": 1, "x columns % 64": 3}
    assert [*features(chosen)] == [
        Feature("x regime", "normal", "bf16"),
        Feature("x layout", None, ""),
        Feature("eps", 1),
        Feature("x columns % 64", 3),
    ]
    found = [*all_features({"x dtype": ("bf16", "fp16"), "x regime": ("normal", None), "eps": (1, 2)})]
    regime = [Feature("x regime", "normal", "bf16"), Feature("x regime", None, "")]
    more = [Feature("x regime", "normal", "fp16"), Feature("x regime", None, "")]
    assert found == [*regime, *more, Feature("eps", 1), Feature("eps", 2)]


CHOICES: Mapping[str, Any] = {
    "x dtype": ("bf16", "fp32"),
    "x regime": ("normal", "below_N", "one_sign"),
    "x layout": ("contiguous", "half"),
    "x columns % 8": (0, 1, 2),
    "z regime": ("normal", None),
    "w regime": ("normal",),
    "eps": (1e-6, DRAWN),
    "n": (1, 2),
    "mode": (None, "fast"),
}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "op x=bf16[4,9]:below_7 eps=1e-06 n=3 seed=0",
            [("below_N", "bf16"), ("contiguous", "bf16"), (1, ""), (None, ""), (1e-6, ""), (3, ""), (None, "")],
        ),
        (
            "op x=fp32[2,8]@16,1+8:one_sign(,k) z=bf16[2] eps=0.5 n=2 mode=fast seed=0",
            [("one_sign", "fp32"), ("half", "fp32"), (0, ""), ("normal", "bf16"), (DRAWN, ""), (2, ""), ("fast", "")],
        ),
    ],
)
def test_features_that_a_line_shows(line: str, shown: list[tuple[Any, str]]) -> None:
    choices = [c for c in CHOICES if c not in ("x dtype", "w regime")]
    expected = [Feature(choice, *each) for choice, each in zip(choices, shown, strict=True)]
    assert [*features_of(parse_case(line), CHOICES)] == expected


@pytest.mark.parametrize(
    ("regime", "kind"),
    [("below_128", "below_N"), ("one_sign(a,b)", "one_sign"), ("normal", "normal"), ("a_1_b", "a_1_b")],
)
def test_the_kind_of_a_regime(regime: str, kind: str) -> None:
    assert kind_of_regime(regime) == kind
