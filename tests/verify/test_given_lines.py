"""Lines that a reader gives: what is no case of its op is an error of the line, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.kernel import Kernel
from lastbit.verify.check import check_line
from lastbit.verify.plan import make_plan
from lastbit.verify.project import open_project

PROJECT = open_project(Config(folder=""))
LEAST = "quantize x=bf16[2,8] dtype=e4m3 ue8m0=True"
NEEDED = "ue8m0 with least_amax=0.0 and least_scale=0.0: a scale of zero is no power of two; give one of them"


def check(line: str, *contracts: str) -> None:
    case = parse_case(line)
    op = PROJECT.op(case.op)
    check_line(op, case, [op.contract(contract) for contract in contracts or ("",)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LEAST, f"quantize: {NEEDED}"),
        ("rms_norm_quantize x=bf16[2,8] eps=1e-06 dtype=e4m3 ue8m0=True", f"rms_norm_quantize: {NEEDED}"),
        ("rms_norm x=bf16[2,8] eps=1e-06 quant=static", "rms_norm: a scale goes with quant=static, but"),
        ("swiglu x=bf16[2,8] up=bf16[2,8] interleaved=True", "swiglu: interleaved=True says how x holds gate and up"),
        ("softmax x=bf16[2,8] scale=word", "scale=word of softmax must be a number"),
        ("softmax x=bf16[2,8] scale=True", "scale=True of softmax must be a number"),
        ("rms_norm x=bf16[2,8]", "rms_norm was not given eps"),
        ("softmax x=bf16[2,8] size=3", "unknown parameter of softmax 'size'"),
        ("softmax x=bf16[2,8]:no_such_regime", "unknown regime of tensor 'x': 'no_such_regime'"),
        ("softmax x=bf16[2,8]@1,1", "strides [1, 1] of tensor 'x' with shape [2, 8] make its elements overlap"),
        ("swiglu x=bf16[2,8]@16,1 up=bf16[2,8]@16,1+7&x", "tensors 'x' and 'up' share elements of one storage"),
    ],
)
def test_a_line_that_is_no_case_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"case line '{line} seed=3': ") + ".*" + re.escape(message)):
        check(f"{line} seed=3")


@pytest.mark.parametrize(
    "line",
    [
        f"{LEAST} least_amax=1e-10",
        f"{LEAST} least_scale=1e-10",
        "softmax x=bf16[2,8]@1073741824,1",  # whose gap nobody allocates
        "softmax x=bf16[3,2]@0,1:values(1,2,1,2,1,2)",
        "softmax x=bf16[2,8]~peer scale=2",
        "rms_norm x=bf16[0,8] eps=1e-06",
    ],
)
def test_a_case_is_taken(line: str) -> None:
    check(line)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (float, False),
        ("float | None", False),
        ("float | str", True),
        ("Literal['auto'] | float", True),
        (Literal["auto"] | float, True),
        ("Scale | float", True),  # a name of the reference's own
    ],
)
def test_a_word_is_taken_unless_an_annotation_has_numbers_alone(annotation: Any, words: bool) -> None:
    def reference(x, *, scale): ...

    reference.__annotations__ = {"scale": annotation}
    op, case = replace(PROJECT.op("softmax"), reference=reference), parse_case("softmax x=bf16[2,8] scale=auto")
    if words:
        check_line(op, case)
    else:
        with pytest.raises(UsageError, match="scale=auto of softmax must be a number"):
            check_line(op, case)


def test_what_one_contract_is_defined_for_is_a_case() -> None:
    line = "rms_norm x=bf16[2,8] weight=bf16[8] eps=1e-06 weight_offset=1.0"
    check(line, "native_multiply", "fp32_multiply")
    with pytest.raises(UsageError, match="has a meaning under fp32_multiply only"):
        check(line, "native_multiply")


def test_large_lines_are_not_evaluated() -> None:
    check("quantize x=bf16[65537,1] dtype=e4m3 ue8m0=True")


def planned(lines: Sequence[str]) -> int:
    config = Config(folder="", lines=tuple(lines))
    kernel = Kernel(name="mine", op="quantize", contract="", call=lambda x, *, dtype, **options: x)
    return len(make_plan(config, "cpu", lambda folder: [kernel], dict).items)


def test_a_run_of_lines_does_not_begin_with_a_wrong_one() -> None:
    right = f"{LEAST} least_amax=1e-10 seed=1"
    assert planned([right]) == 1
    with pytest.raises(UsageError, match="give one of them"):
        planned([right, f"{LEAST} seed=1"])
