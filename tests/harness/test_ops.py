"""Ops: what follows from the signature of a reference, and contracts from their text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit.errors import OpError, UsageError
from lastbit.ops import REQUIRED, Contract, Latent, Op, check_arguments, deviation, op
from lastbit.references.moe_lora import moe_lora
from lastbit.references.moe_lora_backward import moe_lora_backward
from lastbit.references.rms_norm import rms_norm


@op(
    rows=("x",),
    axes={
        "size": {"small": {}, "large": {"y": "fp16", "z": "x"}},
        "color": {"red": {"y": "bf16"}, "green": {}, "blue": {"y": "x"}},
    },
    rounds={"y": "fp32", "out": "x"},
    latent=Latent("y", through=("out",)),
)
def painted(x, w=None, *, eps, power: int = 2, contract, stage) -> None:
    """Round here and there."""


@op(rows=())
def plain(a, b, *, contract, stage) -> None:
    """Compute without freedom."""


@op(
    rows=("x",),
    axes={
        "size": {"small": {}, "large": {"y": "x"}},
        "color": {"red": {}, "blue": {"z": "x"}},
        "shape": {"round": {}, "square": {"u": "x"}, "flat": {"u": "bf16"}},
        "tone": {"light": {}, "dark": {"v": "x"}},
    },
    rounds={"out": "x"},
    plain=("w",),
    presets={"toy": "default", "tile": "large+blue+square+dark"},
)
def furnished(x, w, *, contract, stage) -> None:
    """Compute under more contracts than one cares to name."""


# Signatures


def test_inputs_and_parameters_follow_from_the_signature() -> None:
    assert isinstance(painted, Op)
    assert painted.name == "painted"
    assert painted.inputs == ("x", "w")
    assert painted.optional == {"w"}
    assert painted.params == {"eps": REQUIRED, "power": 2}
    assert painted.rows == {"x"}
    assert painted.latent == Latent("y", ("out",))


def test_an_op_without_parameters_or_axes() -> None:
    assert (plain.inputs, plain.optional, plain.params, plain.rows) == (("a", "b"), frozenset(), {}, frozenset())
    assert plain.contracts() == (plain.contract(),)
    assert plain.contract() == Contract((), {})
    assert list(plain.alternatives(plain.contract())) == []


def test_the_reference_itself_is_kept() -> None:
    assert painted.reference.__name__ == "painted"
    assert painted.reference(None, eps=1.0, contract=None, stage=None) is None


# Contracts


def test_an_axis_that_is_not_named_takes_its_first_option() -> None:
    assert painted.contract().options == ("small", "red")
    assert painted.contract("large").options == ("large", "red")
    assert painted.contract("blue").options == ("small", "blue")


def test_options_may_be_named_in_any_order() -> None:
    assert painted.contract("blue+large") == painted.contract("large+blue")
    assert str(painted.contract("blue+large")) == "large+blue"


def test_rounding_points_of_later_axes_replace_those_of_earlier_ones() -> None:
    assert painted.contract("large+green").rounds == {"y": "fp16", "z": "x", "out": "x"}
    assert painted.contract("large+red").rounds == {"y": "bf16", "z": "x", "out": "x"}
    assert painted.contract("small+green").rounds == {"y": "fp32", "out": "x"}
    assert painted.rounds == {"y": "fp32", "out": "x"}, "building a contract changes nothing"


def test_has() -> None:
    contract = painted.contract("blue")
    assert contract.has("blue")
    assert not contract.has("red")


@given(st.sampled_from(painted.contracts()))
def test_the_text_of_a_contract_names_it(contract: Contract) -> None:
    assert painted.contract(str(contract)) == contract


@pytest.mark.parametrize(
    "op_", [painted, plain, furnished, rms_norm, moe_lora, moe_lora_backward], ids=lambda o: o.name
)
def test_every_contract_can_be_named_by_its_text(op_: Op) -> None:
    for contract in op_.contracts():
        assert op_.contract(str(contract)) == contract


def test_contracts_are_all_combinations_and_the_default_comes_first() -> None:
    texts = [str(c) for c in painted.contracts()]
    assert texts == ["small+red", "small+green", "small+blue", "large+red", "large+green", "large+blue"]
    assert painted.contracts()[0] == painted.contract()


def test_alternatives_differ_in_one_axis() -> None:
    alternatives = [str(c) for c in painted.alternatives(painted.contract("blue"))]
    assert alternatives == ["large+blue", "small+red", "small+green"]


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown contract option of painted 'gren'; did you mean 'green'\?"):
        painted.contract("small+gren")


def test_an_unknown_option_that_is_like_none_lists_the_options() -> None:
    with pytest.raises(UsageError, match=r"'qqqqqq'[;.,] [Kk]nown: blue, green, large, red, small"):
        painted.contract("qqqqqq")


@pytest.mark.parametrize("text", ["red+blue", "red+red", "large+small", "small+green+blue"])
def test_two_options_of_one_axis(text: str) -> None:
    with pytest.raises(UsageError, match=r"contract '.*' names two options of the axis '(color|size)'"):
        painted.contract(text)


# Deviations


@op(
    rows=("x",),
    axes={
        "size": {"small": {}, "large": {"z": "x"}},
        "turn": {"": {}, "turned": {"y": "x"}},
        "edge": {"": {}, "cut": {}},
    },
    presets={"usual": "large"},
    latent=Latent("y", through=("z",), instead={"cut": "w"}),
)
def deviating(x, *, contract, stage) -> None:
    """Compute under two axes of which the usual option has no name."""


def test_an_option_without_a_name_is_not_in_the_name_of_a_contract() -> None:
    usual = replace(deviating, presets={})
    assert [str(c) for c in usual.contracts()][:4] == ["small", "small+cut", "small+turned", "small+turned+cut"]
    assert usual.contract("turned").options == ("small", "turned", "")
    assert usual.contract("").options == usual.contract("small").options == ("small", "", "")
    assert [*map(str, usual.alternatives(usual.contract("turned")))] == ["large+turned", "small", "small+turned+cut"]
    for own in (usual, deviating):
        every = own.contracts()
        assert [own.contract(str(contract)).options for contract in every] == [c.options for c in every]
    assert str(deviating.contract("large+cut")) == "usual+cut"
    assert [usual.deviations(c) for c in usual.contracts()[:4]] == [0, 1, 1, 2]


def test_all_options_without_a_name_are_the_default() -> None:
    only = replace(deviating, axes={"turn": {"": {}, "turned": {}}}, presets={})
    assert [str(c) for c in only.contracts()] == ["default", "turned"]
    assert only.contract("default") == only.contract("")


def test_an_option_without_a_name_is_no_suggestion() -> None:
    with pytest.raises(UsageError, match=r"'qqqqqq'[;.,] [Kk]nown: cut, large, small, turned, usual"):
        deviating.contract("qqqqqq")


def test_an_option_without_a_name_comes_first() -> None:
    with pytest.raises(OpError, match="the option '' of axis 'turn' must be a word"):
        op(rows=("x",), axes={"turn": {"turned": {}, "": {}}})(furnished.reference)


def test_an_option_with_a_latent_stage_of_its_own_must_exist() -> None:
    latent = Latent("y", through=("y",), instead={"turnd": "z"})
    with pytest.raises(OpError, match=r"unknown name in instead of its Latent .*'turnd'; did you mean 'turned'"):
        op(rows=("x",), axes={"turn": {"": {}, "turned": {}}}, latent=latent)(furnished.reference)


def test_an_option_may_have_its_own_latent_stage() -> None:
    assert deviating.latent is not None
    assert deviating.latent.under(deviating.contract("turned")) == "y"
    assert deviating.latent.under(deviating.contract("usual+cut")) == "w"


# Presets


def test_a_preset_stands_for_one_option_of_each_axis() -> None:
    assert furnished.contract("tile").options == ("large", "blue", "square", "dark")
    assert furnished.contract("tile").rounds == dict.fromkeys(("out", "y", "z", "u", "v"), "x")
    assert furnished.contract("toy") == furnished.contract()


def test_options_after_a_preset_replace_those_of_the_preset() -> None:
    assert furnished.contract("tile+red").options == ("large", "red", "square", "dark")
    assert furnished.contract("tile+flat+small").options == ("small", "blue", "flat", "dark")
    assert furnished.contract("blue").options == ("small", "blue", "round", "light"), (
        "without one, the first options stand"
    )


def test_a_contract_is_called_after_the_nearest_preset() -> None:
    assert str(furnished.contract()) == "toy"
    assert str(furnished.contract("large+blue+square+dark")) == "tile"
    assert str(furnished.contract("large+blue+round+dark")) == "tile+round"
    assert str(furnished.contract("flat")) == "toy+flat"
    assert str(furnished.contract("large+flat+blue+dark")) == "tile+flat"
    assert str(furnished.contract("large+blue")) == "toy+large+blue", "the first of two that are as near"


@pytest.mark.parametrize("text", ["toy+tile", "red+toy"])
def test_a_preset_comes_first_and_alone(text: str) -> None:
    with pytest.raises(UsageError, match="must come first"):
        furnished.contract(text)


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown contract option of furnished 'tille'; did you mean 'tile'"):
        furnished.contract("tille")
    with pytest.raises(UsageError, match=r"blue.*tile.*toy"):
        furnished.contract("qqqqqq")


def test_two_options_of_one_axis_after_a_preset() -> None:
    with pytest.raises(UsageError, match="names two options of the axis 'shape'"):
        furnished.contract("tile+round+flat")


def test_candidates_are_the_contract_the_presets_and_what_is_next_to_them() -> None:
    own = furnished.contract("toy+flat+dark")
    found = [str(c) for c in furnished.candidates(own)]
    assert found[:3] == ["toy+flat+dark", "toy", "tile"], "the contract itself and the presets first"
    centers = [own.options, *furnished.presets.values()]
    near = [
        str(c)
        for c in furnished.contracts()
        if any(sum(a != b for a, b in zip(c.options, center, strict=True)) <= 1 for center in centers)
    ]
    assert sorted(found) == sorted(near)
    assert len(found) < len(furnished.contracts())
    assert "tile+small+flat" in found, "next to the contract itself"
    assert "toy+large+blue" not in found, "two axes away from each"


def test_without_presets_every_contract_is_a_candidate() -> None:
    assert painted.candidates(painted.contract("blue")) == painted.contracts()


# Directions


def test_the_text_of_a_contract_says_in_which_direction_a_point_rounds() -> None:
    found = painted.contract("out:zero+large+y:either")
    assert found.options == ("large", "red") and found.rounds == {"y": "bf16:either", "out": "x:zero", "z": "x"}
    assert str(found) == "large+red+y:either+out:zero" and painted.contract(str(found)) == found
    assert painted.contract("out:nearest") == painted.contract() and str(plain.contract("default")) == "default"
    assert str(furnished.contract("tile+out:zero")) == "tile+out:zero"


def test_the_directions_that_an_op_says_have_no_name() -> None:
    @op(rows=(), axes={"how": {"whole": {"y": "x"}, "cut": {"y": "x:zero"}}})
    def bare(x, *, contract, stage) -> None:
        """One whose option cuts off."""
        stage("y", x)

    assert str(bare.contract("cut")) == "cut" and bare.contract("cut+y:zero") == bare.contract("cut")
    assert bare.contract("cut+y:nearest").rounds == {"y": "x:nearest"} and str(bare.contract("cut+y:nearest"))
    assert deviation(bare.contract("whole+y:zero"), bare.contract("whole")) == "rounded to nearest"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("outt:zero", r"unknown rounding point in the contract 'outt:zero', 'outt'; did you mean 'out'"),
        ("out:up", r"unknown direction in the contract 'out:up', 'up'.*either, nearest, ties_away, zero"),
        ("z:zero", r"unknown rounding point .* 'z'"),
        ("out:zero+out:either", "names two directions of 'out'"),
    ],
)
def test_a_direction_that_makes_no_sense(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        painted.contract(text)


def test_what_is_next_to_a_contract_with_directions_keeps_them_or_lacks_one() -> None:
    own = painted.contract("large+blue+y:zero+out:either")
    found = sorted(map(str, painted.alternatives(own)))
    assert found == [
        "large+blue+out:either",
        "large+blue+y:zero",
        "large+green+y:zero+out:either",
        "large+red+y:zero+out:either",
        "small+blue+y:zero+out:either",
    ]
    assert {*map(str, painted.contracts()), *found} <= {*map(str, painted.candidates(own))}
    assert "large+blue+y:zero+out:zero+z:zero" in map(str, painted.candidates(own))
    assert painted.deviations(own) == 2


# The ops that ship


@pytest.mark.parametrize(
    ("contract", "consulted", "stages", "idle"),
    [
        ("", {"divided"}, {"normalized", "output"}, ("rounded_sum",)),
        ("fp32_multiply+unrounded_sum", {"divided"}, {"normalized", "output"}, ("unrounded_sum",)),
        ("", {"unrounded_sum", "rounded_sum", "divided"}, {"residual_sum", "normalized", "output"}, ()),
        ("rounded_inverse", set(), {"inv_rms", "output"}, ("native_multiply", "rounded_sum")),
    ],
)
def test_options_of_an_axis_that_nothing_depends_on_are_idle(
    contract: str, consulted: set[str], stages: set[str], idle: tuple[str, ...]
) -> None:
    assert rms_norm.idle(rms_norm.contract(contract), consulted, stages) == idle


def test_rms_norm() -> None:
    assert rms_norm.inputs == ("x", "weight", "residual", "scale")
    assert rms_norm.optional == {"weight", "residual", "scale"}
    assert rms_norm.params == {
        "eps": REQUIRED,
        "variance_size": None,
        "weight_offset": 0.0,
        "quant": None,
    }
    assert len(rms_norm.contracts()) == 27
    assert str(rms_norm.contract("rounded_inverse")) == "native_multiply+rounded_sum+rounded_inverse"
    assert str(rms_norm.contract()) == "native_multiply+rounded_sum"
    assert rms_norm.contract("fp32_multiply").rounds == {"residual_sum": "x", "output": "x", "quantized": "e4m3"}
    assert rms_norm.contract().rounds["normalized"] == "weight"


@pytest.mark.parametrize("op_", [moe_lora, moe_lora_backward], ids=lambda o: o.name)
def test_moe_lora(op_: Op) -> None:
    assert str(op_.contract()) == "fused"
    assert [str(op_.contract(name)) for name in op_.presets] == list(op_.presets) == ["fused", "eager", "per_matrix"]
    assert len(op_.candidates(op_.contract("eager"))) < len(op_.contracts())
    assert op_.integers == {"expert_ids"}
    assert {"gate_proj", "down_lora_b", "up_scale", "down_zero"} <= op_.plain
    assert not op_.plain & {"x", "routing_weights", "grad_output", "old_up_lora_a"}
    assert op_.params == {"scaling": 1.0, "first_expert": 0, "shards": 1, "swiglu_limit": math.inf}
    assert not op_.rows, "rows of one expert are added up"


def test_the_default_contract_keeps_its_name_where_there_are_presets() -> None:
    assert str(moe_lora.contract("default")) == "fused"
    assert moe_lora.contract("default+rounded_gate") == moe_lora.contract("fused+rounded_gate")


def test_a_preset_is_the_text_of_a_contract() -> None:
    axes = {"size": {"small": {}}, "colour": {"red": {}, "blue": {"y": "x"}}, "turn": {"": {}, "turned": {}}}
    found = op(rows=("x",), axes=axes, presets={"usual": "default", "sky": "blue"})(bare)
    assert found.presets == {"usual": ("small", "red", ""), "sky": ("small", "blue", "")}
    assert str(found.contract("sky+turned")) == str(found.contract("blue+turned")) == "sky+turned"


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("mauve", "preset 'usual': unknown contract option of bare 'mauve'"),
        ("red+blue", "preset 'usual': contract 'red+blue' names two options of the axis 'colour'"),
        ("blue+turned", "preset 'usual' deviates, which leaves no name for what does not: 'blue+turned'"),
        ("blue+y:zero", "preset 'usual' deviates, which leaves no name for what does not: 'blue+y:zero'"),
        (("blue", ""), "preset 'usual' is ('blue', ''); join its options in one text: 'blue'"),
    ],
)
def test_a_preset_that_is_no_text_of_a_contract_is_refused(preset: Any, message: str) -> None:
    axes = {"colour": {"red": {}, "blue": {"y": "x"}}, "turn": {"": {}, "turned": {}}}
    with pytest.raises(OpError) as caught:
        op(rows=("x",), axes=axes, presets={"usual": preset})(bare)
    assert message in str(caught.value)


# What a declaration names must exist


def bare(x, weight=None, *, eps, contract, stage) -> None:
    """Compute nothing, and be declared."""


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"rows": ("X",)}, "unknown name in rows of op bare (FILE): 'X'"),
        ({"integers": ("wieght",)}, "'wieght'; did you mean 'weight'? Known: weight, x."),
        ({"plain": ("weigth",)}, "unknown name in plain of op bare (FILE): 'weigth'; did you mean 'weight'?"),
        ({"rows": ("eps",)}, "unknown name in rows of op bare (FILE): 'eps'"),
        ({"rows": "x"}, "op bare (FILE): rows='x' must be a tuple of names, such as ('x',)"),
        ({"latent": Latent("a", through="output")}, "through='output' of its Latent must be a tuple of names"),
        ({"rounds": {"y": "bf61"}}, "op bare (FILE): 'y' is rounded to 'bf61'; did you mean 'bf16'?"),
        ({"rounds": {"y": "bf16:zer0"}}, "direction of op bare (FILE): 'y' is rounded 'zer0'; did you mean 'zero'?"),
        ({"rounds": {"y": "wieght"}}, "'y' is rounded to 'wieght'; did you mean 'weight'?"),
        ({"axes": {"how": {"a": {}, "b": {"y": "fp61"}}}}, "'y' is rounded to 'fp61'; did you mean 'fp64'?"),
        ({"integers": ("weight",), "rounds": {"y": "weight"}}, "'y' is rounded to 'weight'"),
        ({"axes": {"how": {"a": {}}, "what": {"a": {}}}}, "the option 'a' is on two axes, 'how' and 'what'"),
        ({"axes": {"how": {"a+b": {}}}}, "the option 'a+b' of axis 'how' must be a word without + and spaces"),
        ({"axes": {"how": {"a b": {}}}}, "the option 'a b' of axis 'how' must be a word"),
        ({"axes": {"how": {"a": {}, "": {}}}}, "the option '' of axis 'how' must be a word"),
        ({"axes": {"how": {}}}, "the axis 'how' has no option"),
        (
            {"axes": {"how": {"a": {}}}, "presets": {"a": "default"}},
            "option 'a' of axis 'how' has the name of a preset",
        ),
    ],
)
def test_a_declaration_with_a_wrong_letter(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(OpError) as caught:
        op(**{"rows": ("x",), **declared})(bare)
    where = f"{__file__}:{bare.__code__.co_firstlineno}"
    assert message.replace("FILE", where) in str(caught.value)


def test_the_first_option_of_an_axis_may_be_nameless() -> None:
    nameless = op(rows=("x",), axes={"how": {"": {}, "other": {"y": "x"}}, "what": {"": {}, "more": {}}})(bare)
    assert nameless.contract("other").options == ("other", "")


def no_stage(x, *, contract) -> None: ...
def stage_by_position(x, stage, *, contract) -> None: ...
def everything(*tensors, contract, stage) -> None: ...
def anything(x, *, contract, stage, **options) -> None: ...
def by_position(x, /, y, *, contract, stage) -> None: ...
def with_a_default(x, scale=1.0, *, contract, stage) -> None: ...
def with_stages(x, *, stages=(), contract, stage) -> None: ...
def without_input(*, contract, stage) -> None: ...


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (no_stage, "must take 'stage' as a keyword-only parameter"),
        (stage_by_position, "must take 'stage' as a keyword-only parameter"),
        (everything, "the reference takes '*tensors'; name every input and parameter"),
        (anything, "the reference takes '**options'"),
        (by_position, "the reference takes 'x'"),
        (with_a_default, "the input 'scale' has the default 1.0; an optional one has None"),
        (with_stages, "'stages' cannot be an input or parameter"),
        (without_input, "the reference takes no input"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_reference_that_cannot_be_called(reference: Callable[..., None], message: str) -> None:
    with pytest.raises(OpError, match=re.escape(message)):
        op(rows=())(reference)


def test_op_without_parentheses_or_rows() -> None:
    with pytest.raises(OpError, match=r"write @op\(rows=\(…\)\) above 'bare'"):
        op(bare)  # type: ignore[call-overload]
    with pytest.raises(OpError, match=r"write @op\(rows=\(…\)\), or rows=\(\)"):
        op()


# What a kernel gives and is given


def test_results_stand_in_the_order_of_the_op_and_those_left_out_come_last() -> None:
    made = replace(plain, returns=("c", "a"), optional_results=frozenset({"a", "y"}))
    assert made.in_order(["x", "y", "a", "c"]) == ["c", "x", "a", "y"]
    assert plain.in_order(["b", "a"]) == ["b", "a"]  # as recorded


def test_a_latent_value_explains_what_comes_after_it() -> None:
    latent = Latent("mean", through=("out", "first", "last"), instead={"large": "wide_mean"})
    small, large = painted.contract("small"), painted.contract("large")
    stages = ["first", "wide_mean", "out", "mean", "last"]
    assert (latent.under(small), latent.under(large)) == ("mean", "wide_mean")
    assert latent.following(small, stages) == ["last"]
    assert latent.following(large, stages) == ["out", "last"]
    assert latent.following(small, ["first", "out"]) == []


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        ("small+red", "large+red", "under large in place of small"),
        ("large+blue", "large+green", "under green in place of blue"),
        ("small+red", "small+red+y:zero", "rounded toward zero"),
    ],
)
def test_a_deviation_in_words(own: str, other: str, words: str) -> None:
    assert deviation(painted.contract(own), painted.contract(other)) == words


def test_a_deviation_of_an_option_without_a_name() -> None:
    own = Contract(("fast", ""), {})
    assert deviation(own, Contract(("", ""), {})) == "without fast"
    assert deviation(Contract(("", ""), {}), own) == "under fast"


@pytest.mark.parametrize(
    ("tensors", "params", "message"),
    [
        (["x"], ["eps"], ""),
        (["x", "w"], ["eps", "power"], ""),
        (["x", "v"], ["eps"], "unknown tensor of painted 'v'"),
        (["x"], ["eps", "powr"], "unknown parameter of painted 'powr'; did you mean 'power'"),
        (["w"], ["power"], "painted was not given x, eps"),
        (["x"], [], "painted was not given eps"),
    ],
)
def test_arguments_are_those_of_the_op(tensors: list[str], params: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        check_arguments(painted, tensors, params)


def test_where_an_op_is_declared() -> None:
    assert painted.module == __name__
    assert re.fullmatch(r"op painted \(.*test_ops\.py:\d+\)", painted.where)
