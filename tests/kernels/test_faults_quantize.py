"""The harness sees every fault that has a case of its own and names the stage; the kernel without it passes there."""

from __future__ import annotations

import pytest
import torch

from lastbit.case import parse_case
from lastbit.result import BAD, Verdict
from lastbit.verify.check import verify_case
from tests.faults import combinations, hunt, quantize
from tests.faults.plant import Fault, kernel_of, planted
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the cases are for the interpreter")

FAULTS = (*quantize.FAULTS, *combinations.FAULTS)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("fault", "line"), FAULTS, ids=[str(fault) for fault, _ in FAULTS])
def test_fault_is_seen_and_named(fault: Fault, line: str) -> None:
    case = parse_case(line)
    with planted(fault) as kernel:
        exposed = hunt.hunt(kernel, [case], CPU)
        hidden = hunt.hunt(hunt.without_stages(kernel), [case], CPU)
    assert exposed is not None and hidden is not None
    assert (exposed.result.verdict, hidden.result.verdict) == (Verdict.FAILED, Verdict.FAILED)
    assert (exposed.named, hidden.named) == (fault.exposed, fault.hidden)
    clean = hunt.subject_of(kernel_of(hunt.clean_kernels(), fault.variant), CPU)
    assert verify_case(clean, case, repeat=False).verdict not in BAD  # little of fp32 is decided
