"""Case lines: what is printed is read back, and what cannot be read says which word."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastbit.case import Case, Group, TensorSpec, contiguous_strides, parse_case
from lastbit.dtypes import DTYPE_NAMES, DTYPES
from lastbit.errors import UsageError

DISPLACED = "op x=fp32[4] weight=bf16[4]@2+1~cpu:near_one bias=fp32[4]~cuda:1 ids=int64[4,9]~peer seed=0"
LINE = "rms_norm x=bf16[2048,32,128]@6144,128,1+8:rows weight=bf16[128] eps=1e-06 seed=17"

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name != "seed")
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda word: word not in ("True", "False", "inf", "nan")
)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans()
devices = st.sampled_from(["", "cpu", "cuda:1", "npu", "peer"])
regimes = st.sampled_from(["normal", "rows", "captured", "lattice"])


@st.composite
def specs(draw: st.DrawFn, name: str) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(0, 10**4), max_size=4)))
    strides = draw(st.none() | st.tuples(*[st.integers(0, 10**9)] * len(shape)))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    return TensorSpec(name, dtype, shape, strides, draw(st.integers(0, 10**6)), draw(regimes), draw(devices))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    all_names = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    count = draw(st.integers(0, len(all_names)))
    tensors = tuple(draw(specs(name)) for name in all_names[:count])
    params = {name: draw(numbers | words) for name in all_names[count:]}
    return Case(draw(names), tensors, params, draw(st.integers(0, 2**63 - 1)))


# Round trip


@given(cases())
def test_a_printed_case_is_read_back(case: Case) -> None:
    line = str(case)
    again = parse_case(line)
    assert again == case
    assert str(again) == line
    assert hash(again) == hash(case)
    assert {n: type(v) for n, v in again.params.items()} == {n: type(v) for n, v in case.params.items()}


def test_a_line_in_full() -> None:
    case = parse_case(LINE)
    assert case == Case(
        "rms_norm",
        (
            TensorSpec("x", "bf16", (2048, 32, 128), (6144, 128, 1), 8, "rows"),
            TensorSpec("weight", "bf16", (128,)),
        ),
        {"eps": 1e-6},
        17,
    )
    assert str(case) == LINE


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), -0.0, 5e-324, 1e308, -3, 2**70, True, False])
def test_extreme_parameters_are_read_back(value: float) -> None:
    again = parse_case(str(Case("op", (), {"p": value}))).params["p"]
    assert (again, type(again), repr(again)) == (value, type(value), repr(value))


def test_nan_is_read_back_as_nan() -> None:
    value = parse_case(str(Case("op", (), {"p": float("nan")}))).params["p"]
    assert value != value


def test_words_may_be_spaced_and_ordered_freely() -> None:
    assert parse_case("  op   seed=3  eps=1.0   x=fp32[4]  ") == parse_case("op x=fp32[4] eps=1.0 seed=3")


def test_defaults() -> None:
    case = parse_case("op x=fp32[]")
    assert case.seed == 0
    assert (case["x"].shape, case["x"].strides, case["x"].offset, case["x"].regime) == ((), None, 0, "normal")
    assert str(case) == "op x=fp32[] seed=0"


def test_contiguous_strides_are_not_printed() -> None:
    spec = TensorSpec("x", "fp32", (3, 4), (4, 1))
    assert (spec.strides, spec.element_strides) == (None, (4, 1))
    assert spec == TensorSpec("x", "fp32", (3, 4))
    assert str(spec) == "x=fp32[3,4]"
    assert str(TensorSpec("x", "fp32", (3, 4), (5, 1))) == "x=fp32[3,4]@5,1"


def test_a_regime_may_hold_any_character_but_a_space() -> None:
    assert parse_case("op x=fp32[4]:captured/a=b@c:d+1").tensors[0].regime == "captured/a=b@c:d+1"


def test_a_tensor_may_list_its_values() -> None:
    line = "op x=bf16[1,3]@8,2+1~peer:values(1.5,-2,0.0078125) ids=int64[2]:values(0,-1) eps=1.0 seed=0"
    case = parse_case(line)
    assert str(case) == line
    assert (case["x"].device, case["x"].regime) == ("peer", "values(1.5,-2,0.0078125)")
    assert hash(parse_case(line)) == hash(case) and parse_case(line.replace("0.0078125", "1")) != case


def test_a_tensor_may_have_a_device_of_its_own() -> None:
    case = parse_case(DISPLACED)
    assert str(case) == DISPLACED
    assert [t.device for t in case.tensors] == ["", "cpu", "cuda:1", "peer"]
    assert case["weight"] == TensorSpec("weight", "bf16", (4,), (2,), 1, "near_one", "cpu")
    assert case.displaced == ("weight", "bias", "ids")
    gathered = "op x=fp32[4] weight=bf16[4]@2+1:near_one bias=fp32[4] ids=int64[4,9] seed=0"
    assert case.gathered() == parse_case(gathered)
    assert case.gathered().displaced == ()
    assert case.with_regime("lattice").displaced == case.displaced


def test_tensors_may_share_a_storage() -> None:
    line = "op x=bf16[4,8]@16,1 up=bf16[4,8]@16,1+8&x:gates bias=bf16[8] seed=3"
    case = parse_case(line)
    assert str(case) == line and case.shares_memory
    assert [(t.memory, t.owner) for t in case.tensors] == [("", "x"), ("x", "x"), ("", "bias")]
    assert str(case.apart()) == line.replace("&x", "") and not case.apart().shares_memory
    assert parse_case("op x=bf16[4]&x").tensors == parse_case("op x=bf16[4]").tensors
    displaced = "op x=bf16[4]~cpu y=bf16[4]+4&x~cpu:rows seed=0"
    assert str(parse_case(displaced)) == displaced


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ("x=bf16[4] y=bf16[4]+4&z", "unknown tensor 'z'"),
        ("x=bf16[4] y=fp16[4]+4&x", "tensors 'x' and 'y' share a storage, but their dtypes are bf16 and fp16"),
        ("x=bf16[4] y=bf16[4]+4&x~cpu", "but their devices are that of the run and cpu; they must be equal"),
        ("x=bf16[4] y=bf16[4]+4&x z=bf16[4]+8&y", "tensor 'z' lies in the storage of 'y', which lies in that of 'x'"),
    ],
)
def test_storages_that_cannot_be_shared(tensors: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_case(f"op {tensors}")


def test_what_is_no_device() -> None:
    with pytest.raises(UsageError, match="device 'cuda 1' of tensor 'x' must be peer or like cpu and cuda:1"):
        TensorSpec("x", "bf16", (4,), device="cuda 1")


# Malformed lines


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", "''"),
        ("   ", "must start with the name of an op"),
        ("x=bf16[4] seed=0", "'x=bf16[4] seed=0'"),
        ("op x", "'x'"),
        ("op x=", "'x='"),
        ("op =3", "'=3'"),
        ("op 3x=3", "'3x=3'"),
        ("op x-y=3", "'x-y=3'"),
        ("op x=bf16[4] x=bf16[5]", "'x' is given twice"),
        ("op eps=1 eps=2", "'eps' is given twice"),
        ("op x=1 x=bf16[5]", "'x' is given twice"),
        ("op x=bf61[4]", "'bf61'"),
        ("op x=bf16[4", "'bf16[4'"),
        ("op x=bf16[4,]", "'4,'"),
        ("op x=bf16[4,,8]", "'4,,8'"),
        ("op x=bf16[-4]", "'bf16[-4]'"),
        ("op x=bf16[a]", "'bf16[a]'"),
        ("op x=bf16[4]@", "'bf16[4]@'"),
        ("op x=bf16[4,8]@8", "2 dimensions (4, 8) but 1 strides (8,)"),
        ("op x=bf16[4]@1,1", "1 dimensions (4,) but 2 strides (1, 1)"),
        ("op x=bf16[4]@-1", "'bf16[4]@-1'"),
        ("op x=bf16[4]+", "'bf16[4]+'"),
        ("op x=bf16[4]+a", "'bf16[4]+a'"),
        ("op x=bf16[4]:", "'bf16[4]:'"),
        ("op x=bf16[4]~", "'bf16[4]~'"),
        ("op x=bf16[4]~1", "'bf16[4]~1'"),
        ("op x=bf16[4]~cuda:", "'bf16[4]~cuda:'"),
        ("op x=bf16[4]~cpu+8", "'bf16[4]~cpu+8'"),
        ("op x=bf16[4]~~cpu", "'bf16[4]~~cpu'"),
        ("op x=bf16[4]trailing", "'bf16[4]trailing'"),
        ("op eps=1e-", "'eps=1e-'"),
        ("op eps=1.2.3", "'eps=1.2.3'"),
        ("op eps=(1,2)", "'eps=(1,2)'"),
        ("op eps='text'", "\"eps='text'\""),
        ("op eps=1j", "'eps=1j'"),
        ("op eps=1+1", "'eps=1+1'"),
        ("op seed=fp32[2]", "seed"),
        ("op seed=-1", "seed=-1"),
        ("op seed=1.5", "seed=1.5"),
        ("op seed=True", "seed=True"),
        ("op seed=word", "seed='word'"),
        (f"op seed={2**63}", f"seed={2**63}"),
    ],
)
def test_malformed_lines_show_the_offending_word(line: str, shown: str) -> None:
    with pytest.raises(UsageError, match=re.escape(shown)):
        parse_case(line)


def test_an_unknown_dtype_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown dtype 'bf61'; did you mean 'bf16'\? Known: .*int64"):
        TensorSpec("x", "bf61", (4,))


@given(st.text(max_size=40))
def test_any_text_is_a_case_or_a_usage_error(text: str) -> None:
    try:
        case = parse_case("op " + text)
    except UsageError:
        return
    assert str(parse_case(str(case))) == str(case)


# Cases


def test_names_dtypes_and_sizes() -> None:
    case = parse_case("op x=bf16[3,4] residual=bf16[3,4] weight=fp32[4] eps=1e-6 quant=static")
    assert case.names == {"x", "residual", "weight", "eps", "quant"}
    assert case.dtypes == "bf16/fp32"
    assert case["x"].numel == 12
    assert case["weight"].torch_dtype is torch.float32
    with pytest.raises(UsageError, match="unknown tensor 'wieght'; did you mean 'weight'"):
        case["wieght"]


def test_another_regime_for_every_tensor() -> None:
    case = parse_case("op x=bf16[4]:rows y=fp32[4]@2 eps=1.0 seed=5").with_regime("lattice")
    assert str(case) == "op x=bf16[4]:lattice y=fp32[4]@2:lattice eps=1.0 seed=5"


def test_cases_are_keys() -> None:
    assert {parse_case(LINE): 1}[parse_case(LINE)] == 1
    assert parse_case(LINE) != parse_case(LINE.replace("seed=17", "seed=18"))


def test_equal_cases_have_equal_hashes() -> None:
    """A number is a number, however it is written."""
    one, other = parse_case("op p=1"), parse_case("op p=1.0")
    assert one != other or hash(one) == hash(other)


def test_dtype_names_are_one_to_one() -> None:
    assert {DTYPES[name] for name in DTYPE_NAMES.values()} == set(DTYPES.values())
    assert len(DTYPE_NAMES) == len(DTYPES)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 1, 4), (5, 0)])
def test_contiguous_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    ours = contiguous_strides(shape)
    if 0 not in shape:  # torch counts an empty dimension as one element
        assert ours == torch.empty(shape).stride()
    assert len(ours) == len(shape)


def test_a_group_has_no_cases_of_its_own() -> None:
    assert (Group("g").strategy, Group("g").examples) == (None, ())


def spec(**changes: Any) -> TensorSpec:
    return TensorSpec(**{"name": "x", "dtype": "bf16", "shape": (2, 3), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": (1,)}, r"tensor 'x' has 2 dimensions \(2, 3\) but 1 strides \(1,\)"),
        ({"shape": (1,) * 65}, "tensor 'x' has 65 dimensions; torch takes 64"),
        ({"shape": (2**61 + 1,)}, r"tensor 'x' would take more than 2\*\*62 bytes of memory"),
        ({"shape": (2,), "strides": (2**61,)}, "more than"),
        ({"shape": (2,), "offset": 2**61 - 1}, "more than"),
        ({"shape": (2**59 + 1,), "dtype": "fp64"}, "more than"),
        ({"device": "GPU"}, "device 'GPU' of tensor 'x' must be peer or like cpu and cuda:1"),
        ({"device": "cuda:"}, "must be peer"),
    ],
)
def test_tensors_that_no_device_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (1,) * 64},
        {"shape": (2**61,)},
        {"shape": (2,), "strides": (2**61 - 1,)},
        {"shape": (2,), "offset": 2**61 - 2},
        {"shape": (2**59,), "dtype": "fp64"},
        {"shape": (0, 2**63)},
        {"shape": (0, 5), "offset": 2**62},
        {"device": "cuda:1"},
        {"device": "peer"},
    ],
)
def test_the_largest_tensors_that_there_may_be(changes: dict[str, Any]) -> None:
    assert spec(**changes).shape == changes.get("shape", (2, 3))


@pytest.mark.parametrize(
    ("strides", "repeats", "element_strides"),
    [
        (None, False, (3, 1)), ((3, 1), False, (3, 1)), ((0, 1), True, (0, 1)), ((3, 0), True, (3, 0)),
        ((6, 2), False, (6, 2)),
    ],
)  # fmt: skip
def test_elements_that_share_memory(
    strides: tuple[int, ...] | None, repeats: bool, element_strides: tuple[int, ...]
) -> None:
    assert (spec(strides=strides).repeats, spec(strides=strides).element_strides) == (repeats, element_strides)
    assert not spec(shape=(1, 3), strides=(0, 1)).repeats and spec(strides=(3, 1)).strides is None
    assert spec().numel == 6 and spec(shape=()).numel == 1 and spec().torch_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("words", "dtypes"),
    [
        ("x=bf16[2,3] w=fp32[3]", "bf16/fp32"),
        ("x=bf16[2,3] w=fp32[1] i=int64[2]", "bf16"),
        ("x=bf16[2,3] w=fp32[1,1]", "bf16/fp32"),
        ("x=bf16[2,3] w=fp32[2]", "bf16/fp32"),
        ("x=fp32[2,3] w=bf16[2] v=fp32[2]", "fp32/bf16"),
        ("i=int64[2] b=bool[2]", "int64/bool"),
        ("x=fp32[1] i=int64[1]", "fp32"),
        ("x=fp32[] i=int64[2]", "int64"),
    ],
)
def test_dtypes_that_a_case_is_told_by(words: str, dtypes: str) -> None:
    assert parse_case(f"op {words} seed=0").dtypes == dtypes


def test_tensors_of_a_case_and_their_devices() -> None:
    case = parse_case("op x=bf16[2] y=int64[2]~peer z=fp32[2]~cpu:rows eps=0.5 seed=3")
    assert case["y"].dtype == "int64" and case.names == {"x", "y", "z", "eps"}
    assert case.displaced == ("y", "z") and case.gathered().displaced == ()
    assert str(case.gathered()) == "op x=bf16[2] y=int64[2] z=fp32[2]:rows eps=0.5 seed=3"
    assert str(case.with_regime("tiny")) == "op x=bf16[2]:tiny y=int64[2]~peer z=fp32[2]~cpu:tiny eps=0.5 seed=3"
    with pytest.raises(UsageError, match="tensor 'w'"):
        _ = case["w"]
    assert Case("op", (), {"a": None, "b": 1, "c": False}).params == {"b": 1, "c": False}  # type: ignore[dict-item]
    assert hash(case) != hash(parse_case("op x=bf16[2] y=int64[2]~peer z=fp32[2]~cpu:rows eps=0.5 seed=4"))


@pytest.mark.parametrize(
    ("strategy", "drawn", "left"), [(None, None, 0), (None, 5, 0), ("some", None, 7), ("some", 5, 5), ("some", 0, 0)]
)
def test_cases_that_are_left_to_draw(strategy: Any, drawn: int | None, left: int) -> None:
    assert Group("g", strategy, drawn=drawn).left_to_draw(7) == left


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "must start with the name of an op"),
        ("x=bf16[2]", "must start with the name of an op"),
        ("op x=bf16[2", r"cannot read tensor x='bf16\[2' .* as in bf16\[4,128\]@256,1\+8~cpu:rows"),
        ("op x=bf16[2,,3]", "cannot read the integers '2,,3'"),
        ("op x=bf16[1234567890123456789]", "1234567890123456789 in case line .* has 19 digits: no tensor is so large"),
        ("op a=1 a=2", "'a' is given twice"),
        ("op x=bf16[2] x=1", "'x' is given twice"),
        ("op a=1 x=bf16[2] a=bf16[2]", "'a' is given twice"),
        ("op a", r"cannot read 'a' in case line 'op a': expected name=value\Z"),
        ("op a=", r"cannot read 'a=' in case line 'op a=': expected name=value\Z"),
        ("op 1a=2", "cannot read '1a=2'"),
        ("op x=bf16[2]:f(a, b)", "expected name=value; a regime with parentheses holds no blank"),
        ("op a=None", "cannot read 'a=None' .*: expected a number, True, False or a word"),
        ("op a=(1,)", "expected a number"),
        ("op a=1j", "expected a number"),
        ("op seed=1.0", r"seed=1.0 in case line .* must be an integer from 0 to 2\*\*63 - 1"),
        ("op seed=True", "seed=True"),
        ("op seed=-1", "seed=-1"),
        (f"op seed={2**63}", f"seed={2**63}"),
        ("op seed=[1]", r"seed=\[1\]|cannot read"),
        ("op a\x07=1", "a character is no text"),
    ],
)
def test_what_is_said_of_a_line_that_cannot_be_read(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_case(words)


def test_the_largest_numbers_of_a_line() -> None:
    case = parse_case(f"op x=bf16[0,123456789012345678] a=nan b=-inf c=word d=-3 e=True seed={2**63 - 1}")
    assert case.seed == 2**63 - 1 and case["x"].shape == (0, 123456789012345678)
    assert [case.params[name] for name in "bcde"] == [-math.inf, "word", -3, True]


@pytest.mark.parametrize("length", [294, 295])
def test_long_lines_are_shortened(length: int) -> None:
    """A line of 300 characters is quoted in full; of a longer one the first and last 150."""
    line = "op a=" + "b" * length + "("
    with pytest.raises(UsageError) as caught:
        parse_case(line)
    shown = line if length == 294 else f"{line[:150]} … {line[-150:]}"
    assert f"in case line {shown!r}" in str(caught.value)
