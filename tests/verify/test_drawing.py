"""The design of cases: every option is chosen, with every dtype; the cases are what was chosen; ci leaves no hole."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import strategies as st

from lastbit.case import Case, Chosen, Group, TensorSpec, parse_case
from lastbit.config import PROFILES, Config
from lastbit.errors import UsageError
from lastbit.inputs import DRAWN, chosen_tensor, layouts_like, least_rows, residues, tensor_choices
from lastbit.inputs.choices import Feature, all_features, check_choices, features, features_of
from lastbit.inputs.layouts import LAYOUTS, layout_of
from lastbit.inputs.shapes import leading_dims
from lastbit.verify.assemble import covered
from lastbit.verify.drawing import designed, designed_cases, draw
from lastbit.verify.project import open_project

PROJECT = open_project(Config(folder=""))
CI = PROFILES["ci"]
KERNELS = PROJECT.kernels()
SIGNATURES = sorted({(kernel.op, tuple(sorted(kernel.accepts))) for kernel in KERNELS})


@st.composite
def _cases(draw: st.DrawFn, chosen: Chosen) -> Case:
    shape = (*draw(leading_dims(16, least_rows(chosen))), draw(st.integers(1, 9)))
    params = {} if chosen["k"] is None else {"k": draw(st.integers(2, 9)) if chosen["k"] == DRAWN else chosen["k"]}
    return Case("op", (chosen_tensor("x", chosen, shape),), params, draw(st.integers(0, 99)))


def group(name: str, *dtypes: str, regimes: tuple[str, ...] = ("normal", "rows", "tiny")) -> Group:
    choices = {**tensor_choices("x", dtypes, regimes, layouts_like(2, 2, 64)), "k": (None, 1, DRAWN)}
    return Group(name, _cases, choices=choices)


def test_every_option_is_chosen_with_every_dtype_and_no_more_cases_than_are_needed() -> None:
    groups = [group("a", "bf16"), group("b", "fp16", "fp32"), group("c", "bf16", regimes=("huge", "ones"))]
    made = designed(groups, CI)
    found = {feature for one in made for row in one.designed for feature in features(row)}
    assert found == {feature for one in groups for feature in all_features(one.choices)}
    assert min(len(one.designed) for one in made) >= CI // 2
    made = designed(groups, CI, whole=False)
    assert sum(len(one.designed) + one.left_to_draw(CI) for one in made) == CI * len(groups)


@pytest.mark.parametrize("cases", [10, 40])
def test_half_of_the_cases_of_each_group_are_designed_however_little_it_adds(cases: int) -> None:
    rich = Group("rich", lambda chosen: st.none(), choices={name: tuple(range(8)) for name in "abcdef"})
    poor = Group("poor", lambda chosen: st.none(), choices={name: tuple(range(6)) for name in "ab"})
    assert [len(made.designed) >= cases // 2 for made in designed([rich, poor], cases)] == [True, True]


def test_pairs_follow_where_there_is_room() -> None:
    [made] = designed([group("a", "bf16")], 200)
    pairs = {pair for row in made.designed for pair in combinations(row.items(), 2)}
    options = [[(name, option) for option in options] for name, options in made.choices.items()]
    assert pairs == {(a, b) for first, second in combinations(options, 2) for a in first for b in second}
    assert len(made.designed) < 40 and len(made.designed) + made.left_to_draw(200) == 200


def test_a_single_choice_is_taken_option_by_option() -> None:
    [made] = designed([Group("a", lambda chosen: st.none(), choices={"eps": (1, 2, 3)})], CI)
    assert [row["eps"] for row in made.designed] == [1, 2, 3]
    assert made.left_to_draw(CI) == CI - 3


def test_what_needs_no_design_is_left_alone() -> None:
    plain = Group("plain", strategy=st.just(parse_case("op x=bf16[2]")))
    examples = Group("examples", examples=(parse_case("op x=bf16[3]"),))
    assert designed([plain, examples], CI) == [plain, examples]
    assert (plain.left_to_draw(CI), examples.left_to_draw(CI)) == (CI, 0)
    assert designed([group("a", "bf16")], 0)[0].designed == ()


def test_cases_are_what_was_chosen() -> None:
    [made] = designed([group("a", "bf16", "fp32")], 40)
    cases = designed_cases(made, 0)
    assert len(cases) == len(made.designed) > 15
    for case, row in zip(cases, made.designed, strict=True):
        assert set(features_of(case, made.choices)) == set(features(row)), str(case)
        assert case["x"].dtype == row["x dtype"]
    assert cases != designed_cases(made, 1) and cases == designed_cases(replace(made), 0)
    assert draw(made, 40)[: len(cases)] == tuple(dict.fromkeys(cases))
    assert len({case["x"].shape for case in cases}) > 8


def test_features_are_read_off_lines() -> None:
    choices = {
        **tensor_choices("ids", ("int64",), ("below_N", "around_125"), ("contiguous", "half")),
        "y regime": (None, "rows"),
        "ids columns % 64": residues(1, 200),
        "k": (None, 1, DRAWN),
    }
    line = "op ids=int64[3,70]@140,1+70:below_12 k=7"
    expected = [
        Feature("ids regime", "below_N", "int64"),
        Feature("ids layout", "half", "int64"),
        Feature("y regime", None),
        Feature("ids columns % 64", 6),
        Feature("k", DRAWN),
    ]
    assert list(features_of(parse_case(line), choices)) == expected
    other = parse_case("op ids=int64[3,70]@141,1:around_125 y=bf16[2]:one_sign(a,b) k=1")
    options = {feature.choice: feature.option for feature in features_of(other, choices)}
    assert options == {
        "ids regime": "around_125",
        "ids layout": "other",
        "y regime": "one_sign",
        "ids columns % 64": 6,
        "k": 1,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_known_by_its_strides(layout: str) -> None:
    for shape in ((64,), (3, 64), (2, 3, 64), (2, 2, 3, 64)):
        placed = LAYOUTS[layout](shape, "bf16")
        if placed is not None:
            assert layout_of(TensorSpec("x", "bf16", shape, placed.strides, placed.offset)) == layout
    chosen = {"x dtype": "bf16", "x regime": "normal", "x layout": layout}
    assert chosen_tensor("x", chosen, ()).strides is None  # it means nothing there


@pytest.mark.parametrize(("op", "accepts"), SIGNATURES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_ci_profile_leaves_no_hole(op: str, accepts: tuple[str, ...]) -> None:
    groups = designed(PROJECT.groups(op, frozenset(accepts), small=True), CI)
    cases = [case for one in groups for case in (*one.examples, *designed_cases(one, 0))]
    holes = covered(("k", "cpu"), [one.choices for one in groups], cases)
    assert [(entry.choice, entry.dtype, entry.missing) for entry in holes if entry.missing] == []


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"alhpa": (1,)}, "'alpha'"),
        ({"y dtype": ("bf16",)}, "tensor 'y'"),
        ({"x shape": (1,)}, "must be 'T dtype'"),
        ({"x columns % 0": (1,)}, "must be 'T dtype'"),
        ({"x regime": ("rows",)}, "needs the choice 'x dtype'"),
        ({"alpha": ()}, "options \\(\\)"),
        ({"alpha": 0.5}, "options 0.5"),
        ({"alpha": ([1],)}, "option \\[1\\]"),
        ({"alpha": (float("nan"),)}, "option nan"),
        ({"alpha": (0.0, -0.0)}, "equal"),
        ({"x dtype": ("bf16",), "x layout": ("pading",)}, "'pading'"),
    ],
)
def test_choices_are_checked_where_they_are_declared(choices: dict[str, object], message: str) -> None:
    made = Group("g", lambda chosen: st.none(), choices=choices)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        check_choices(made, ("x",), ("alpha",))
    with pytest.raises(UsageError, match="no function"):
        check_choices(Group("g", choices={"alpha": (1,)}), ("x",), ("alpha",))


def test_a_tensor_without_choices_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"tensor of the choices: 'yy'.*Known: y"):
        chosen_tensor("yy", {"y dtype": "bf16", "y regime": "normal", "y layout": "contiguous"}, (2,))
