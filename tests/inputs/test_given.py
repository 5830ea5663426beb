"""Values that stand in the case line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.dtypes import DTYPES
from lastbit.errors import UsageError
from lastbit.inputs import bits_of, build
from lastbit.inputs.given import MOST_GIVEN, given
from lastbit.run import Coverage
from lastbit.verify.assemble import covered
from lastbit.verify.plan import make_plan


def tensor_of(text: str) -> Tensor:
    return build(parse_case(f"op x={text} seed=3"), "cpu").tensors["x"]


@drawn(dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 2**31))
def test_every_bit_is_read_back(dtype: str, seed: int) -> None:
    """Of any dtype, wherever the elements lie in memory; numbers of every magnitude are among them."""
    size = DTYPES[dtype].itemsize
    noise = torch.randint(0, 256, (3, 4 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    x = (noise % 2).bool()[:, :4] if dtype == "bool" else noise.view(DTYPES[dtype])
    for memory in ("", "@9,2+1"):
        again = tensor_of(f"{dtype}[3,4]{memory}:{given(x)}")
        assert torch.equal(bits_of(again.contiguous()), bits_of(x.contiguous()))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_every_code_of_eight_bits_is_read_back(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    assert torch.equal(bits_of(tensor_of(f"{dtype}[256]:{given(codes.view(DTYPES[dtype]))}")), codes)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("bf16", "1.5,-2,0.0078125"),
        ("bf16", "inf,-inf,nan,0x7fc1,0,-0"),
        ("fp32", "0.10000000149011612,1.401298464324817e-45"),
        ("fp64", "0.1,5e-324,1.7976931348623157e+308"),
        ("e4m3", "448,-0.001953125,nan"),
        ("int64", "-9223372036854775808,7"),
        ("bool", "True,False"),
    ],
)
def test_values_are_written_as_they_are_read(dtype: str, values: str) -> None:
    line = f"op x={dtype}[{values.count(',') + 1}]:values({values}) seed=3"
    assert given(build(parse_case(line), "cpu").tensors["x"]) == f"values({values})"
    case = parse_case(line)
    assert str(case) == line
    assert {case: 1}[parse_case(line)]


def test_other_spellings() -> None:
    assert tensor_of("bf16[4]:values(+1.50,.5e1,0x3f80,0x8000)").tolist() == [1.5, 5, 1, 0]
    assert tensor_of("int8[3]:values(-1,0x80,0xff)").tolist() == [-1, -128, -1]
    assert tensor_of("fp32[]:values(3)").item() == 3
    assert tensor_of("fp32[2,0]:values()").numel() == 0


def test_what_is_one_in_memory_has_one_value() -> None:
    assert tensor_of("bf16[2,2]@0,1:values(1,2,1,2)").tolist() == [[1, 2], [1, 2]]
    with pytest.raises(UsageError, match="'x' has stride 0 in dimension 0, so the 2 values along it are one in memory"):
        tensor_of("bf16[2,2]@0,1:values(1,2,1,3)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16[1]:values(1.1)", r"'x': bf16 has no 1.1 \(value 1\); its neighbours are 1.09375 and 1.1015625"),
        ("bf16[2]:values(0,-1.1)", r"no -1.1 \(value 2\); its neighbours are -1.1015625 and -1.09375"),
        ("fp32[1]:values(0.1)", "its neighbours are 0.09999999403953552 and 0.10000000149011612"),
        ("fp16[1]:values(1e9)", "fp16 has no 1e9 .* neighbours are 65504 and inf"),
        ("fp64[1]:values(-1e400)", r"neighbours are -inf and -1.7976931348623157e\+308"),
        ("fp64[1]:values(1e-400)", "neighbours are 0 and 5e-324"),
        ("e4m3[1]:values(inf)", "e4m3 has no inf .*; its largest number is 448$"),
        ("e4m3[1]:values(-500)", r"e4m3 has no -500 \(value 1\); its least number is -448$"),
        ("e5m2[1]:values(-60000)", "its neighbours are -inf and -57344"),
        ("int8[1]:values(128)", r"int8 has no 128 \(value 1\); give an integer from -128 to 127"),
        ("int64[1]:values(1.5)", r"cannot read '1.5' \(value 1\): expected an integer"),
        ("bool[1]:values(1)", "cannot read '1' .* expected True or False"),
        ("bool[1]:values(0x2)", "0x2 .* has more bits than bool"),
        ("bf16[1]:values(0x10000)", "0x10000 .* has more bits than bf16"),
        ("bf16[1]:values(0x3f8)", r"0x3f8 \(value 1\) is too short: the bits of bf16 are 0x03f8, 4 digits"),
        ("int8[2]:values(0,0x1)", r"0x1 \(value 2\) is too short: the bits of int8 are 0x01, 2 digits"),
        ("bf16[1]:values(0x03f80)", "0x03f80 .* has more bits than bf16"),
        ("bf16[1]:values(1_0)", "cannot read '1_0' .* expected a decimal"),
        ("bf16[1]:values(one)", "cannot read 'one'"),
        ("bf16[2]:values(1,)", r"cannot read '' \(value 2\)"),
        ("bf16[1,3]:values(1,2)", r"'values\(1,2\)' lists 2 values for 3 elements"),
        ("bf16[1]:values(1,2)", "lists 2 values for 1 elements"),
        ("bf16[1]:values", r"cannot read regime 'values': expected values\(V,V,…\)"),
        ("bf16[1]:values(1)x", "cannot read regime"),
        (f"bf16[{MOST_GIVEN + 1}]:values(1)", r"lists 4,096 elements at most, and not 4,097: use captured\(PATH#KEY\)"),
    ],
)
def test_what_cannot_be_a_value(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tensor_of(text)


def test_a_blank_in_a_list_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot read '2\)' .* a regime with parentheses holds no blank"):
        parse_case("op x=bf16[2]:values(1, 2) seed=0")


def test_too_many_values_for_a_line() -> None:
    assert len(given(torch.zeros(MOST_GIVEN)).split(",")) == MOST_GIVEN
    with pytest.raises(UsageError, match="a case line holds 4,096 values of a tensor at most, and not 4,097"):
        given(torch.zeros(MOST_GIVEN + 1))


def test_a_line_that_a_reader_gave_is_looked_at_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"tensor 'x': bf16 has no 1\.1"):
        make_plan(Config(folder="", lines=("rms_norm x=bf16[1,1]:values(1.1) eps=1e-06 seed=0",)), "cpu")


def test_coverage_takes_no_notice_of_given_values() -> None:
    choices = {"x dtype": ("bf16",), "x regime": ("normal", "rows")}
    case = parse_case("op x=bf16[1,2]:values(1,2) seed=0")
    assert list(covered(("k", "cpu"), [choices], [case])) == [
        Coverage("k", "cpu", "x regime", "bf16", judged=(), declined=(), missing=("normal", "rows"))
    ]
