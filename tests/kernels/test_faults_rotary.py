"""Faults planted in the Triton kernels of rotary embeddings: a case shows each, on which the kernel itself passes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from lastbit.case import parse_case
from lastbit.kernel import Kernel
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from tests.faults.hunt import op_of
from tests.faults.plant import Edit, Fault, kernel_of, planted, without_faults
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")

CPU = torch.device("cpu")
FUSED, APART, MODEL = "qk_norm_rope,fused", "qk_norm_rope,two kernels", "qk_norm_rope"
TABLES = "cos=fp32[9,12]:uniform sin=fp32[9,12]:uniform positions=int64[3]:below_9"
CASES = {
    "plain": f"rotary q=bf16[3,3,24] {TABLES} seed=1",
    "k": f"rotary q=bf16[3,3,24] {TABLES} k=bf16[3,2,24]@96,24,1 seed=2",
    "partial": f"rotary q=bf16[3,3,40] {TABLES} seed=3",
    "interleaved": f"rotary q=bf16[3,3,24] {TABLES} interleaved=True seed=4",
    "apart": "rotary q=bf16[3,3,24] cos=fp32[9,12]:uniform sin=fp32[9,12]@24,1+12:uniform "
    "positions=int64[3]:below_9 seed=5",
    "many": "rotary q=bf16[30,3,24] cos=fp32[9,12]:uniform sin=fp32[9,12]:uniform positions=int64[30]:below_9 seed=6",
    "largest": f"rotary q=fp16[3,3,24]:largest {TABLES} seed=7",
    "one table": "rotary q=bf16[3,3,24] cos=fp32[9,12]@24,1:uniform sin=fp32[9,12]@24,1+12&cos:uniform "
    "positions=int64[3]:below_9 seed=10",
    "packed": f"rotary q=bf16[3,3,24]@120,24,1 {TABLES} k=bf16[3,2,24]@120,24,1+72&q seed=11",
    "heads, one table": "qk_norm_rope x=bf16[3,3,24] cos=fp32[9,12]@24,1:uniform sin=fp32[9,12]@24,1+12&cos:uniform "
    "positions=int64[3]:below_9 weight=bf16[24] eps=1e-06 seed=12",
    "heads": f"qk_norm_rope x=bf16[3,3,40] {TABLES} weight=bf16[40] eps=1e-06 seed=8",
    "tiny": f"qk_norm_rope x=bf16[3,3,24]:tiny {TABLES} weight=bf16[24] eps=1e-06 seed=9",
}
_MASKED_STORE = "        mask = live & (columns < half)\n        tl.store("
_ROTATED = "pair = tl.fma(first, cosine, -(second * sine)), tl.fma(second, cosine, first * sine)"
_PLAN = "    plan = _plan(\n        described("
_AFTER = (
    "    if {0} is not None and {0}.untyped_storage().data_ptr() == {1}.untyped_storage().data_ptr():\n"
    "        {0} = {0}.as_strided({0}.shape, {0}.contiguous().stride(), {1}.storage_offset() + {1}.numel())\n"
)
_SECOND_LOAD = "second = tl.load(address(ptr, start + half, columns, ALIGNED), mask=mask, other=0.0)"


class Planted(NamedTuple):
    """What a kernel does instead, and the case that shows it."""

    name: str
    case: str
    variant: str
    old: str
    new: str
    file: str = "rotary.py"


FAULTS = (
    Planted("rounds the products", "plain", "fp32_products", '"ROUND": rounded_products', '"ROUND": True'),
    Planted("rounds no products", "plain", "rounded_products", '"ROUND": rounded_products', '"ROUND": False'),
    Planted("products overflow", "largest", "fp32_products", '"ROUND": rounded_products', '"ROUND": True'),
    Planted(
        "rounds one product of two", "plain", "rounded_products",
        "(second * sine).to(X).to(tl.float32)", "second * sine",
    ),
    Planted("rounds the tables", "plain", "fp32_products", '"ROUND_TABLE": rounded_table', '"ROUND_TABLE": True'),
    Planted(
        "rounds no tables", "plain", "rounded_products+rounded_table",
        '"ROUND_TABLE": rounded_table', '"ROUND_TABLE": False',
    ),
    Planted(
        "cuts results off", "plain", "fp32_products", "tl.store(address(ptr, start, columns, ALIGNED), first.to(X)",
        'tl.store(address(ptr, start, columns, ALIGNED), first.to(X, fp_downcast_rounding="rtz")',
    ),
    Planted("turns the other way", "plain", "fp32_products", "-(second * sine)", "second * sine"),
    Planted(
        "uses the first number when it has been rotated", "plain", "fp32_products", _ROTATED,
        "turn = tl.fma(first, cosine, -(second * sine))\n        pair = turn, tl.fma(second, cosine, turn * sine)",
    ),
    Planted("takes pairs apart", "interleaved", "fp32_products", '"INTERLEAVED": interleaved', '"INTERLEAVED": False'),
    Planted("takes pairs together", "plain", "fp32_products", '"INTERLEAVED": interleaved', '"INTERLEAVED": True'),
    Planted("takes positions for 0", "plain", "fp32_products", "position_ptr + row // heads", "position_ptr + 0 * row"),
    Planted(
        "takes heads for tokens", "plain", "fp32_products",
        "position_ptr + row // heads", "position_ptr + row % heads",
    ),
    Planted("counts positions from 1", "plain", "fp32_products", "position * stride", "(position + 1) * stride"),
    Planted(
        "takes k's heads for q's", "k", "fp32_products",
        '"k_heads": k_described.shape[-2]', '"k_heads": q.shape[-2]',
    ),
    Planted("reads k with q's strides", "k", "fp32_products", '**sizes_of("k", k_rows)', '**sizes_of("k", q_rows)'),
    Planted("reads sin with cos's stride", "apart", "fp32_products", "table.strides[1]", "table.strides[0]"),
    Planted(
        "leaves the rest unwritten", "partial", "fp32_products",
        '"PARTIAL": width > 2 * table.half', '"PARTIAL": False',
    ),
    Planted(
        "halves the head, not what is rotated", "partial", "fp32_products", _SECOND_LOAD,
        _SECOND_LOAD.replace("start + half", "start + half + 8"),
    ),
    Planted("writes beyond pairs", "plain", "fp32_products", _MASKED_STORE, "        mask = live\n        tl.store("),
    Planted(
        "leaves the last program out", "many", "fp32_products", "q_programs = triton.cdiv(q_rows.rows, rows)",
        "q_programs = max(1, q_rows.rows // rows)",
    ),
    Planted("leaves the last head out", "plain", "fp32_products", "live = row < rows", "live = row < rows - 1"),
    Planted("rounds between", "heads", FUSED, '"ROUND": rounded_output', '"ROUND": True', "qk_norm_rope.py"),
    Planted("rounds nothing between", "heads", APART, '"ROUND": rounded_output', '"ROUND": False', "qk_norm_rope.py"),
    Planted("multiplies in fp32", "heads", MODEL, '"NATIVE": native_multiply', '"NATIVE": False', "qk_norm_rope.py"),
    Planted(
        "means over what is rotated", "heads", FUSED, "squares += tl.sum(rest * rest, axis=1, keep_dims=True)",
        "squares += 0.0", "qk_norm_rope.py",
    ),
    Planted(
        "divides by what is rotated", "heads", FUSED, "tl.div_rn(squares, width.to", "tl.div_rn(squares, (2 * half).to",
        "qk_norm_rope.py",
    ),
    Planted(
        "adds eps to the root", "tiny", FUSED, "tl.sqrt_rn(tl.div_rn(squares, width.to(tl.float32)) + eps)",
        "(tl.sqrt_rn(tl.div_rn(squares, width.to(tl.float32))) + eps)", "qk_norm_rope.py",
    ),
    Planted(
        "weighs both halves alike", "heads", FUSED, "second, inv_rms, second_gain", "second, inv_rms, first_gain",
        "qk_norm_rope.py",
    ),
    Planted(
        "weighs no rest", "heads", FUSED, "rest = _normalized(rest, inv_rms, gain,",
        "rest = _normalized(rest, inv_rms, None,", "qk_norm_rope.py",
    ),
    Planted(
        "rounds the inverse root", "heads", FUSED, "first = _normalized(first, inv_rms,",
        "first = _normalized(first, inv_rms.to(X).to(tl.float32),",
        "qk_norm_rope.py",
    ),
)  # fmt: skip

VIEWS = (
    Planted("takes sin to follow cos", "one table", "fp32_products", _PLAN, _AFTER.format("sin", "cos") + _PLAN),
    Planted("takes k to follow q", "packed", "fp32_products", _PLAN, _AFTER.format("k", "q") + _PLAN),
    Planted(
        "takes sin to follow cos", "heads, one table", FUSED, _PLAN, _AFTER.format("sin", "cos") + _PLAN,
        "qk_norm_rope.py",
    ),
)  # fmt: skip
"""Faults of kernels that go by the storage of their inputs."""


def judged(kernel: Kernel, case: str, *, apart: bool = False) -> CaseResult:
    subject, own = Subject(kernel, op_of(kernel.op), CPU), parse_case(CASES[case])
    return verify_case(subject, own.apart() if apart else own, repeat=False, settled=None)


@functools.cache
def without_fault(variant: str, case: str) -> Verdict:
    return judged(kernel_of(without_faults().kernels, variant), case).verdict


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_fails(fault: Planted) -> None:
    edit = Edit(fault.old, fault.new, fault.file)
    with planted(Fault(fault.name, "", (edit,), "", "", variant=fault.variant)) as kernel:
        result = judged(kernel, fault.case)
    assert result.verdict is Verdict.FAILED, result
    assert result.findings
    assert without_fault(fault.variant, fault.case) is Verdict.PASSED


@pytest.mark.parametrize("fault", VIEWS, ids=lambda fault: f"{fault.name}, {fault.case}")
def test_a_fault_of_views_fails_in_one_storage_alone(fault: Planted) -> None:
    edit = Edit(fault.old, fault.new, fault.file)
    with planted(Fault(fault.name, "", (edit,), "", "", variant=fault.variant)) as kernel:
        assert judged(kernel, fault.case).verdict is Verdict.FAILED
        assert judged(kernel, fault.case, apart=True).verdict is Verdict.PASSED
    assert without_fault(fault.variant, fault.case) is Verdict.PASSED
