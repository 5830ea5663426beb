"""What a run could have told apart."""

from __future__ import annotations

import pytest

from harness.config import Config
from harness.result import Agreement, CaseResult, Comparison, Run, StageResult, Verdict
from harness.verify.power import agreement_of, power_of
from harness.verify.project import open_project

FP32 = "fp32_multiply+rounded_sum"
CONFIG = Config(folder="")


def result(tensors: str, ruled_out: int = 0, **changes: object) -> CaseResult:
    fields = {"case": f"rms_norm {tensors} eps=1e-06 seed=1", "op": "rms_norm", "kernel": "k", "device": "cpu"}
    fields |= {"contract": "native_multiply+rounded_sum", "dtypes": "bf16", "verdict": Verdict.PASSED}
    return CaseResult(**{**fields, "ruled_out": {FP32: ruled_out}, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        ("x=bf16[4,64]:zeros weight=bf16[64]:ones", True),
        ("x=bf16[65536,1024] weight=bf16[1024]", True),
        ("x=bf16[4,8,64]@2048,128,1+3:zeros weight=bf16[64]", True),
        ("x=fp32[4,64] weight=fp32[64]", False),
        ("x=bf16[4,64] weight=fp32[64]", False),
    ],
)
def test_a_contract_that_was_never_ruled_out_is_missing_only_if_it_can_be(tensors: str, missing: bool) -> None:
    [power] = power_of([result(tensors)], open_project(CONFIG))
    assert power.missing is missing


def test_one_element_is_enough() -> None:
    weak, strong = result("x=bf16[4,64]:zeros weight=bf16[64]"), result("x=bf16[4,64] weight=bf16[64]", 1)
    [power] = power_of([weak, strong], open_project(CONFIG))
    assert (power.cases, power.ruled_out, power.missing) == (2, 1, False)
    assert Run((weak, strong), (power,)).verdict("k", "cpu") is Verdict.PASSED
    [power] = power_of([weak], open_project(CONFIG))
    assert Run((weak,), (power,)).verdict("k", "cpu") is Verdict.INCONCLUSIVE
    assert Run((weak,), (power,)).exit_code == 1


def test_devices_are_paired_in_one_order() -> None:
    stage = StageResult("output", "bf16", True, Comparison(), Comparison(), "bits")
    one = [result("x=bf16[4,64]", device=d, stages=(stage,), fingerprint="f") for d in ("cuda", "cpu")]
    other = [result("x=bf16[8,64]", device=d, stages=(stage,), fingerprint="g") for d in ("cpu", "cuda")]
    assert agreement_of([*one, *other]) == (Agreement("k", "output", ("cpu", "cuda"), 2, 2),)
