"""A change with which a result is right by chance names no line, and a line that only stores is not the wrong one."""

from __future__ import annotations

import pytest
import torch
import triton

from lastbit.case import parse_case
from lastbit.diagnosing.trace import trace_case
from lastbit.interpret import install
from tests.diagnosing.test_mends_in_memory import traced
from tests.faults import hunt
from tests.faults.plant import Edit, Fault, planted

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

OF_ZEROS = (
    "layer_norm_gated_backward x=bf16[3,21,193]@8106,386,2:zero_rows dy=bf16[3,21,193]@8106,386,2:sparse "
    "weight=fp32[193]:small rstd=fp32[3,21,1]@21,1,63:ones mean=fp32[3,21,1]@21,1,63:zeros "
    "z=bf16[3,21,193]@4053,1,21:zeros norm_before_gate=False seed=24877"
)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        # Whatever keeps the largest score from moving leaves nothing to be rescaled.
        ("softmax: sum not rescaled", "softmax x=bf16[2,3,662]:subnormal mask=fp32[2,3,662] fp32_output=True seed=242"),
        (
            "attention: sum not rescaled",
            "attention q=bf16[2,7,4,25] k=bf16[2,40,2,25] v=bf16[2,40,2,30] scale=0.25 seed=1297796",
        ),
        # Of a total that is 0 and a factor that is 1 in later rounds, the larger is the sum that began with 1.
        (
            "attention: sink left out of the sum",
            "attention q=fp16[2,7,4,22]@616,88,1,4:tiny k=fp16[2,29,2,22]@1276,44,1,2:outlier_last "
            "v=fp16[2,29,2,20]@1160,40,1,2:lattice sinks=fp16[4]@0:outlier scale=1.0 cap=5.0 seed=0",
        ),
        # Of one row without numbers, and of masks that count nothing, much is right.
        ("softmax: -10000 for -inf", "softmax x=fp32[1,3225]:huge keep=bool[1,3225]+1:spans seed=83131708"),
        (
            "completion_mask: first eight end ids",
            "completion_mask ids=int64[40,70]:sequences_70 eos_ids=int64[70]:counting mask_truncated=True seed=4",
        ),
        (
            "layer_norm_gated_backward: sums of no rows",
            "layer_norm_gated_backward x=bf16[0,64] dy=bf16[0,64] weight=bf16[64] rstd=fp32[0,4] mean=fp32[0,4] "
            "bias=bf16[64] z=bf16[0,64] seed=4",
        ),
    ],
)
def test_a_change_that_is_right_by_chance_names_no_line(name: str, line: str) -> None:
    found = traced(name, line)
    assert found.wrong and found.blamed is None


def test_a_number_that_makes_all_elements_one_is_no_mend() -> None:
    """With 0 for alpha the sigmoid of e^x is 1/2 as well; the line of the exponential is the wrong one."""
    found = traced("swiglu: sigmoid of e^x", "swiglu x=bf16[2,6,116]@0,116,1:largest interleaved=True seed=138334")
    assert found.blamed is not None and found.blamed.text == "tl.exp(scaled)"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("layer_norm_gated_backward: dz from dx", "dz"), ("layer_norm_gated_backward: dx not gated", "dx")],
)
def test_what_is_stored_is_wrong_where_it_is_passed_and_not_in_the_function_that_stores(name: str, tensor: str) -> None:
    found = traced(name, OF_ZEROS)
    assert found.blamed is not None
    assert found.blamed.text == f"store({tensor}_ptr, out_row, lanes, {tensor}, mask, ALIGNED)"


INSIDE = "        inside = live & (columns < n)\n        ids ="
LAST = "    last = tl.where((eos_index == n) & (mask_truncated != 0), -1, eos_index)\n"
LOAD = "            is_eos = is_eos | (ids == tl.load(eos_ids_ptr + k * eos_stride))\n"
ODD = "completion_mask ids=int64[7,271]+1:sequences_3 eos_ids=int32[1]:below_3 mask_truncated=True seed=333108"
CUT = "completion_mask ids=int64[2,397]:sequences_1 eos_ids=int32[1]:counting mask_truncated=True seed=14779606"
STEPS = (
    "completion_mask ids=int64[13,259]@518,1+259:sequences_3 eos_ids=int32[4]@2:below_3 mask_truncated=True "
    "seed=4294967295"
)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        # `<=` for `<` is right where n is odd, the launch is right where no row was cut, and one of two ids is enough.
        (INSIDE, INSIDE.replace("inside", "width = n // 2 * 2\n        inside", 1).replace("< n", "< width"), ODD),
        (LAST, "    limit = n // 2 * 2\n" + LAST.replace("== n", ">= limit"), ODD),
        (LAST, "    limit = n // 2 * 2\n" + LAST.replace("== n", ">= limit"), CUT),
        (LAST, "    flag = 1 - mask_truncated\n" + LAST.replace("(mask_truncated", "(flag"), ODD),
        ("range(0, eos_count)", "range(0, eos_count - 1)", CUT),
        ("range(0, eos_count)", "range(0, eos_count, 2)", STEPS),
        ("        is_eos = ids != ids\n", "        ids = ids.to(tl.int16)\n        is_eos = ids != ids\n", ODD),
        (
            LOAD,
            "            low = ids.to(tl.int32)\n" + LOAD.replace("ids ==", "low ==").replace("))", ").to(low.dtype))"),
            ODD,
        ),
    ],
)
def test_integers_that_another_line_has_made_wrong_name_no_line_that_takes_them(old: str, new: str, line: str) -> None:
    edits = (Edit(old, new, "completion_mask.py"),)
    fault = Fault("by chance", "takes wrong integers", edits, "mask", "mask", "completion_mask", "completion_mask")
    with planted(fault) as kernel:
        subject = hunt.subject_of(hunt.without_stages(kernel), torch.device("cpu"))
        found = trace_case(subject, parse_case(line))
    assert found.wrong
    assert found.blamed is None
